"""Multi-head latent attention (MLA) of DeepSeek V3 and its relatives, over pages of latents.

For each token the cache holds a latent and the rotated part of a key, both of one head. mlx-lm caches the latent as key
and the rotated part as value, fetches both, and computes attention itself. Where a kernel attends over the blocks, one
or a few new tokens per row are computed as in mlx-lm's code for one token (the absorbed form), but without the fetch.
Otherwise, as for prompts, mlx-lm's own code runs, for a pack sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import mlx.core as mx

from ...attention import dispatch
from ...attention.dispatch import Dispatch, record
from ...cache.batch import OWN_MASK, NotPackableError
from ...cache.batch_cache import PagedBatchKVCache
from ...cache.paged_kv_cache import PagedKVCache
from ...kernels.launch_shape import MAX_QUERY_LENGTH
from ...kv.geometry import AttentionParams, Window
from ..cache.layer_cache import PagedLayerCache
from ..cache.layout import ProbeLayer
from ..patch import replaces
from .attention import AttentionCall, stays_paged

# A pack with at most this many new tokens per sequence uses the kernel of decode steps, which attends over the latents
# directly: for a few tokens it would cost more to make the keys and values of a long context.
MOST_AS_ROWS = 32
# With at least this many rows, a head's matrix is multiplied with all rows at once instead of being read once per row.
LEAST_BY_HEAD = 4
BY_MLX_LM = Dispatch("gather", "latents are fetched by mlx-lm's code")
Finish = Callable[[Any, mx.array, mx.array], mx.array]


class Projected(NamedTuple):
    """Inputs of attention for one token of each row.

    Attributes:
        nope: part of the queries that is not rotated, ``[B, n_heads, 1, qk_nope_head_dim]``.
        rope: rotated part of the queries, ``[B, n_heads, 1, qk_rope_head_dim]``.
        latent: ``[B, 1, 1, kv_lora_rank]``.
        rotated: rotated part of the key, ``[B, 1, 1, qk_rope_head_dim]``.
    """

    nope: mx.array
    rope: mx.array
    latent: mx.array
    rotated: mx.array


def project(self: Any, x: mx.array, offset: Any) -> Projected:
    """Project x ``[B, 1, hidden]`` as mlx-lm's modules do."""
    batch, heads = x.shape[0], _heads_of(self)
    if getattr(self, "q_lora_rank", None) is None:
        q = self.q_proj(x)
    else:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
    q = q.reshape(batch, heads, 1, -1)
    if getattr(self, "mla_scale_q_lora", None) is not None:
        q = q * self.mla_scale_q_lora
    latent, rotated = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
    latent = self.kv_a_layernorm(latent)
    if getattr(self, "mla_scale_kv_lora", None) is not None:
        latent = latent * self.mla_scale_kv_lora
    nope, rope = mx.split(q, [self.qk_nope_head_dim], axis=-1)
    rotated = mx.expand_dims(rotated, axis=1)
    if "rope" in self:
        rope, rotated = self.rope(rope, offset), self.rope(rotated, offset)
    return Projected(nope, rope, mx.expand_dims(latent, axis=1), rotated)


def finish(self: Any, out: mx.array, x: mx.array) -> mx.array:
    """Project heads ``[B, n_heads, 1, v_head_dim]`` to ``[B, 1, hidden]``."""
    return (self.dense if "dense" in self else self.o_proj)(out.reshape(x.shape[0], 1, -1))


def finish_gated(self: Any, out: mx.array, x: mx.array) -> mx.array:
    """Like :func:`finish`, with an optional gate on each channel of the heads (Kimi K3)."""
    out = out.reshape(x.shape[0], 1, -1)
    return self.o_proj(out * mx.sigmoid(self.g_proj(x)) if self.use_gate else out)


def finish_heads_gated(self: Any, out: mx.array, x: mx.array) -> mx.array:
    """Like :func:`finish`, with a gate on each head (Bailing V3)."""
    gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(out.dtype)
    return self.dense((out.reshape(*gate.shape, -1) * gate[..., None]).reshape(x.shape[0], 1, -1))


def latent_call(finish: Finish) -> Callable[[AttentionCall], AttentionCall]:
    """Return the adapter of an attention module that projects with :func:`project`.

    Args:
        finish: function of the module, the heads' outputs and x. Returns the module's result.

    Returns:
        A function that takes upstream's ``__call__`` and returns its replacement.
    """

    def adapt(original: AttentionCall) -> AttentionCall:
        def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
            return _attention(self, x, None, mask, cache, finish, partial(original, self))

        return marked(__call__)

    return adapt


for _target, _fingerprint, _finish in (
    ("deepseek_v3:DeepseekV3Attention", "a81cbde5b662b1b7", finish),
    ("glm4_moe_lite:Glm4MoeLiteAttention", "a81cbde5b662b1b7", finish),
    ("longcat_flash:LongcatFlashMLA", "bcf7c12cb5cbfd04", finish),
    ("kimi_linear:KimiMLAAttention", "f90ce415739ceacc", finish),
    ("kimi_k3:KimiK3MLAAttention", "2a82ca8331e6a7cd", finish_gated),
    ("bailing_hybrid:MultiLatentAttention", "0b66107a9d9ceb5f", finish),
    ("bailing_moe_v3:BailingMLA", "df5523fbc5eee955", finish_heads_gated),
):
    replaces(f"mlx_lm.models.{_target}.__call__", _fingerprint)(latent_call(_finish))


@replaces("mlx_lm.models.mistral4:Mistral4Attention.__call__", "ae8ba5a34379792c")
def adapt_scaled(original: AttentionCall) -> AttentionCall:
    """Return the adapter of Mistral 4, whose queries are scaled by their positions."""

    def __call__(
        self: Any, x: mx.array, attn_scale: mx.array, mask: mx.array | str | None = None, cache: Any | None = None
    ) -> mx.array:
        def upstream_call(
            x: mx.array, mask: mx.array | str | None, cache: Any, tokens: slice | None = None
        ) -> mx.array:
            own = attn_scale if tokens is None else attn_scale[tokens].swapaxes(0, 2)
            return original(self, x, own, mask, cache)

        return _attention(self, x, attn_scale, mask, cache, finish, upstream_call)

    return marked(__call__)


def marked(call: AttentionCall, caches: int = 1) -> AttentionCall:
    """Mark the adapter with the number of caches it computes with, and return it."""
    call.latent_caches = caches  # type: ignore[attr-defined]
    return call


def _attention(
    self: Any,
    x: mx.array,
    scales: mx.array | None,
    mask: mx.array | str | None,
    cache: Any,
    finish: Finish,
    upstream_call: Callable[..., mx.array],
) -> mx.array:
    """Attend by a kernel if there is one, else by mlx-lm's code.

    Args:
        scales: factors of the queries by position: ``[L, 1]``, or ``[B, 1, L, 1]`` if rows have their own.
        upstream_call: upstream's code; takes x, a mask, a cache and, for a part of a pack with ``scales``, its tokens.
    """
    out = attend_in_kernel(self, x, scales, mask, cache, finish)
    if out is not None:
        return out
    if not _is_pack(cache):
        if isinstance(cache, (PagedLayerCache, PagedBatchKVCache)):
            record(BY_MLX_LM)
        return upstream_call(x, mask, cache)
    outputs = []
    for part in cache.apart():
        own = {} if scales is None else {"tokens": part.tokens}
        outputs.append(upstream_call(x[part.tokens].swapaxes(0, 1), part.mask, part, **own).swapaxes(0, 1))
    return mx.concatenate(outputs)


def attend_in_kernel(
    self: Any, x: mx.array, scales: mx.array | None, mask: mx.array | str | None, cache: Any, finish: Finish
) -> mx.array | None:
    """Attend by a kernel; if there is none, write nothing and return None. See :func:`_attention` for the arguments."""
    if _is_pack(cache):
        return _packed(self, x, scales, mask, cache, finish)
    if x.shape[1] == 1 and _has_kernel(cache, self, x.shape[0]):
        return finish(self, _absorbed(self, _projected(self, x, cache.offset, scales), mask, cache), x)
    if x.shape[1] > 1 and _is_causal(cache, x, mask):
        # Computed as rows of one token each, like a pack of one sequence.
        rows, count = x.swapaxes(0, 1), x.shape[1]
        if count <= MAX_QUERY_LENGTH and dispatch.supports_latents(_heads_of(self), cache.pool, cache.layer):
            positions = cache.offset + mx.arange(count, dtype=mx.int32)
            made = _projected(self, rows, positions, None if scales is None else scales[:, :, None, None])
            return finish(self, _absorbed_few(self, made, mask, cache), rows).swapaxes(0, 1)
    return None


def _is_pack(cache: Any) -> TypeGuard[PagedBatchKVCache]:
    return isinstance(cache, PagedBatchKVCache) and cache.batch.is_pack


def _packed(
    self: Any,
    x: mx.array,
    scales: mx.array | None,
    mask: mx.array | str | None,
    cache: PagedBatchKVCache,
    finish: Finish,
) -> mx.array | None:
    if mask is not None:
        raise NotPackableError(OWN_MASK)
    pool, layer, few = cache.pool, cache.layer, cache.batch.as_rows or max(cache.batch.counts) <= MOST_AS_ROWS
    if few and dispatch.supports_latents(_heads_of(self), pool, layer):
        made = _projected(self, x, cache.offset, scales)
        return finish(self, _absorbed(self, made, None, cache, as_rows=True), x)
    return None


def _projected(self: Any, x: mx.array, offset: Any, scales: mx.array | None) -> Projected:
    made = project(self, x, offset)
    return made if scales is None else made._replace(nope=made.nope * scales, rope=made.rope * scales)


def _absorbed(self: Any, made: Projected, mask: mx.array | str | None, cache: Any, **how: bool) -> mx.array:
    """Attend over the latents themselves. Returns ``[B, n_heads, 1, v_head_dim]``."""
    queries = _absorbed_queries(self, made)
    params = AttentionParams(self.scale, mask, latent=True)
    return _by_head(self.unembed_out, cache.attend(queries, made.latent, made.rotated, params, **how))


def _absorbed_few(self: Any, made: Projected, mask: mx.array | str | None, cache: PagedLayerCache) -> mx.array:
    """Like :func:`_absorbed`, for n tokens of one sequence. Returns ``[n, n_heads, 1, v_head_dim]``."""
    queries, latent, rotated = (x.swapaxes(0, 2) for x in (_absorbed_queries(self, made), made.latent, made.rotated))
    out = cache.attend(queries, latent, rotated, AttentionParams(self.scale, mask, latent=True))
    return _by_head(self.unembed_out, out.swapaxes(0, 2))


def _absorbed_queries(self: Any, made: Projected) -> mx.array:
    """Return queries that match a latent and its rotated part, ``[B, n_heads, 1, rank + rope]``."""
    return mx.concatenate([_by_head(self.embed_q, made.nope), made.rope], axis=-1)


def _by_head(layer: Any, x: mx.array) -> mx.array:
    """Apply a layer with one matrix per head to x ``[B, n_heads, 1, dim]``."""
    if x.shape[0] < LEAST_BY_HEAD:
        return layer(x)
    return layer(x.swapaxes(0, 2)).swapaxes(0, 2)


def _heads_of(self: Any) -> int:
    heads: int = self.num_attention_heads if hasattr(self, "num_attention_heads") else self.num_heads
    return heads


def _has_kernel(cache: Any, module: Any, batch: int) -> TypeGuard[PagedLayerCache | PagedBatchKVCache]:
    """Return whether a kernel attends over this cache's latents for ``batch`` rows of one new token."""
    is_paged = stays_paged(cache, batch) and not isinstance(cache, ProbeLayer)
    return is_paged and dispatch.supports_latents(_heads_of(module), cache.pool, cache.layer)


def _is_causal(cache: Any, x: mx.array, mask: mx.array | str | None) -> TypeGuard[PagedLayerCache]:
    """Return whether these are new tokens of one sequence under a plain causal mask."""
    if not isinstance(cache, PagedLayerCache) or x.shape[0] != 1 or mask is None:
        return False
    return isinstance(mask, str) or cache.sequence.masks.window_of(mask) == Window(cache.offset + x.shape[1])


# Attention to the tokens that an indexer chooses (DeepSeek V3.2, GLM DSA) -------------------------------------------

# Beside latents each layer keeps an index key for every token. By these keys an indexer scores all tokens that a
# query sees, and attention uses the ``index_topk`` best ones. mlx-lm keeps index keys in a second cache of each
# layer. Here it is paged too: its pages hold the two halves of a key as key and value.
#
# In a context of at most ``index_topk`` tokens nothing has to be chosen, and the kernel over latents is used where
# there is one. A longer context is gathered and goes through mlx-lm's own code, on any device.

CHOSEN = Dispatch("gather", "attention to the tokens that an indexer chooses")


class GatheredCache:
    """A paged cache for mlx-lm's code, with the attributes that it reads: the arrays that were fetched last.

    Attributes:
        keys, values: what the latest :meth:`update_and_fetch` returned. Setting them changes no page.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> Any:
        """Position of the next token."""
        return self._cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens and return all keys and values that they see."""
        self.keys, self.values = fetched = self._cache.update_and_fetch(keys, values)
        return fetched


class IndexKeys(GatheredCache):
    """A :class:`GatheredCache` for index keys ``[B, 1, n, dim]``, whose halves are stored as a page's keys and values.

    Args:
        cache: the paged cache.
        is_read: False if nothing has to be chosen: keys are only written, and the returned arrays are empty.
    """

    def __init__(self, cache: Any, is_read: bool = True) -> None:
        super().__init__(cache)
        self._is_read = is_read
        if isinstance(cache, ProbeLayer):
            cache.split_keys = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens' index keys and return all that they see, twice. ``values`` are ignored."""
        halves = mx.split(keys, [keys.shape[-1] // 2], axis=-1)
        if self._is_read:
            fetched = mx.concatenate(list(super().update_and_fetch(*halves)), axis=-1)
        else:
            self._cache.update(*halves)
            fetched = keys[:, :, :0]
        self.keys = self.values = fetched
        return fetched, fetched


@replaces("mlx_lm.models.deepseek_v32:DeepseekV32Attention.__call__", "b29a1627f43386fb")
def adapt_chosen(original: AttentionCall) -> AttentionCall:
    """Return the adapter of DeepSeek V3.2's attention, which GLM DSA uses too."""

    def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if cache is None:
            return original(self, x, mask, cache)
        latents, index = cache[0], cache[1]
        for part in (latents, index):
            if isinstance(part, PagedLayerCache):
                part.convert_if_batched(x.shape[0])
        if _is_stock(latents) or _is_stock(index):
            return original(self, x, mask, (_for_upstream(latents, GatheredCache), _for_upstream(index, IndexKeys)))
        chooses = _longest(latents, x.shape[1]) > self.indexer.index_topk
        if not chooses:
            out = attend_in_kernel(self, x, None, mask, latents, finish)
            if out is not None:
                # Nothing is chosen, so the indexer's queries are never computed: zeros do as their input.
                queries = mx.zeros((*x.shape[:2], self.q_lora_rank), x.dtype)
                self.indexer(x, queries, None, cache=IndexKeys(index, is_read=False))
                return out
        if chooses:
            record(CHOSEN)
        if not (isinstance(latents, PagedBatchKVCache) and latents.batch.is_pack):
            return original(self, x, mask, (GatheredCache(latents), IndexKeys(index)))
        if mask is not None:
            raise NotPackableError(OWN_MASK)
        outputs = []
        for part, keys in zip(latents.apart(), index.apart(), strict=True):
            own = x[part.tokens].swapaxes(0, 1)
            outputs.append(original(self, own, part.mask, (GatheredCache(part), IndexKeys(keys))).swapaxes(0, 1))
        return mx.concatenate(outputs)

    return marked(__call__, caches=2)


def _is_stock(cache: Any) -> bool:
    return not isinstance(cache, PagedKVCache | PagedBatchKVCache | ProbeLayer)


def _for_upstream(cache: Any, kind: type[GatheredCache]) -> Any:
    """Return the cache as mlx-lm's code can use it: its own unchanged, a paged one wrapped in ``kind``."""
    return cache if _is_stock(cache) else kind(cache)


def _longest(cache: Any, num_tokens: int) -> int:
    """Return the length of the longest sequence, including its new tokens."""
    if isinstance(cache, PagedBatchKVCache):
        return max(table.length for table in cache.batch.tables)
    return int(cache.offset) + num_tokens
