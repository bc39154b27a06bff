"""Attention adapters: one for each way in which models compute queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from ...cache.batch_cache import PagedBatchKVCache
from ...kernels.availability import backend
from ...kernels.build import constant_rows
from ...kernels.nvidia import projected
from ...kv.geometry import AttentionParams
from ..cache.layer_cache import PagedLayerCache
from ..cache.layout import ProbeLayer
from ..patch import replaces

AttentionCall = Callable[..., mx.array]
Norm = Callable[[mx.array], mx.array]


def paged_call(
    project: Callable[[Any, mx.array, int | mx.array], Sequence[mx.array]],
    softcap: Callable[[Any], float] | None = None,
) -> Callable[..., AttentionCall]:
    """Return the adapter of an attention module that projects with ``project``.

    Args:
        project: function of the module, x ``[B, L, hidden]`` and each row's position. Returns rotated queries
            ``[B, n_q_heads, L, head_dim]``, keys and values ``[B, n_kv_heads, L, head_dim]``.
        softcap: function of the module. Returns its cap on the scores. None: there is no cap.

    Returns:
        A function that takes upstream's ``__call__`` and returns its replacement: the paged path for a paged cache,
        upstream's code for any other.
    """

    def adapt(original: AttentionCall) -> AttentionCall:
        def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
            # Batches first: a decode step's time on the host counts.
            if not isinstance(cache, PagedBatchKVCache) and not stays_paged(cache, x.shape[0]):
                return original(self, x, mask, cache)
            queries, keys, values = project(self, x, cache.offset)
            cap = None if softcap is None else softcap(self)
            return self.o_proj(
                heads_last(cache.attend(queries, keys, values, AttentionParams(self.scale, mask, None, cap)))
            )

        return __call__

    return adapt


def stays_paged(cache: Any, batch: int) -> TypeGuard[PagedLayerCache | PagedBatchKVCache | ProbeLayer]:
    """Return whether a cache attends itself: a paged one, or a probe's. An empty cache of one sequence that is given
    several rows is first converted to mlx-lm's own one."""
    if isinstance(cache, PagedLayerCache):
        return not cache.convert_if_batched(batch)
    return isinstance(cache, PagedBatchKVCache | ProbeLayer)


def project_heads(self: Any, x: mx.array, norms: Sequence[Norm | None] = ()) -> list[mx.array]:
    """Return an attention module's queries, keys and values of x ``[B, L, hidden]`` before rotation, each head
    normalised: ``[B, n_heads, L, head_dim]``.

    One token needs no transposition, as the order of elements is the same; that saves host time in a decode step.
    """
    batch, length = x.shape[:2]
    layers, heads = (self.q_proj, self.k_proj, self.v_proj), (self.n_heads, self.n_kv_heads, self.n_kv_heads)
    if length == 1:
        parts = projected(layers, x, heads)
    else:
        parts = [layer(x).reshape(batch, length, n, -1) for layer, n in zip(layers, heads, strict=True)]
    if norms:
        parts = [part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True)]
    return parts if length == 1 else [part.transpose(0, 2, 1, 3) for part in parts]


def rotated(
    rope: Callable[..., mx.array], queries: mx.array, keys: mx.array, offset: int | mx.array
) -> Sequence[mx.array]:
    """Return queries and keys ``[B, n_heads, L, head_dim]``, rotated.

    Args:
        rope: the module's rotation.
        offset: position of the first token; in a batch an array, one per row.

    On a CPU one token's queries and keys are rotated together, because MLX computes the angles in each call, with as
    many operations as the rotation itself: 92 us a layer instead of 157, with the same bits.
    """
    is_prompt = queries.shape[2] > 1
    if is_prompt or mx.default_device().type != mx.DeviceType.cpu or queries.dtype != keys.dtype:
        if is_prompt and isinstance(offset, int) and backend() == "cuda":
            # All layers share one. Given a number, MLX makes an array in each call, in memory shared with the host,
            # whose pages migrate there and back.
            offset = constant_rows(offset, (1,))
        return rope(queries, offset=offset), rope(keys, offset=offset)
    both: mx.array = rope(mx.concatenate([queries, keys], axis=1), offset=offset)
    return mx.split(both, [queries.shape[1]], axis=1)  # type: ignore[return-value]


def heads_last(x: mx.array) -> mx.array:
    """Return ``[B, n_heads, L, head_dim]`` as ``[B, L, n_heads * head_dim]``."""
    batch, _, length, _ = x.shape
    return (x if length == 1 else x.transpose(0, 2, 1, 3)).reshape(batch, length, -1)


# Llama (also Mistral and others that mlx-lm builds with its module), Qwen3, Gemma 2 and Gemma 3 -----------------------


def _rotate_llama(self: Any, x: mx.array, offset: int | mx.array) -> Sequence[mx.array]:
    """Return Llama's queries, keys and values, rotated."""
    queries, keys, values = project_heads(self, x)
    return *rotated(self.rope, queries, keys, offset), values


def _rotate_qwen3(self: Any, x: mx.array, offset: int | mx.array) -> Sequence[mx.array]:
    """Return rotated queries, keys and values; queries and keys are normalised per head before."""
    queries, keys, values = project_heads(self, x, (self.q_norm, self.k_norm, None))
    return *rotated(self.rope, queries, keys, offset), values


def _rotate_gemma3(self: Any, x: mx.array, offset: int | mx.array) -> Sequence[mx.array]:
    """Like :func:`_rotate_qwen3`, but normalises queries and keys after the heads are moved first."""
    queries, keys, values = project_heads(self, x)
    return *rotated(self.rope, self.q_norm(queries), self.k_norm(keys), offset), values


def _register(model: str, fingerprint: str, adapt: Callable[[AttentionCall], AttentionCall]) -> None:
    replaces(f"mlx_lm.models.{model}:Attention.__call__", fingerprint)(adapt)


_register("llama", "75a76f7de7eb3586", paged_call(_rotate_llama))
_register("qwen3", "f4d9ba397a109135", paged_call(_rotate_qwen3))
_register("gemma2", "4adbbc3cde1384bc", paged_call(_rotate_llama, lambda module: float(module.attn_logit_softcapping)))
_register("gemma3_text", "e9ebcce92c86c40c", paged_call(_rotate_gemma3))


@replaces("mlx_lm.models.llama4:Attention.__call__", "ec00d284640b9a07")
def adapt_llama4(original: AttentionCall) -> AttentionCall:
    """Replace Llama 4's ``Attention.__call__``. Some layers see only the chunk that a token is in; the others see all
    tokens and are not rotated."""

    def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if not stays_paged(cache, x.shape[0]):
            return original(self, x, mask, cache)
        queries, keys, values = project_heads(self, x)
        offset = cache.offset  # in a batch an array, one offset per row
        if self.use_rope:
            queries, keys = rotated(self.rope, queries, keys, offset)
        if self.use_qk_norm:
            queries, keys = (mx.fast.rms_norm(heads, weight=None, eps=1e-6) for heads in (queries, keys))
        if self.attn_temperature_tuning and not self.use_rope:
            queries = (queries * _temperatures(self, offset, x.shape[1])).astype(queries.dtype)
        return self.o_proj(heads_last(cache.attend(queries, keys, values, AttentionParams(self.scale, mask))))

    return __call__


def _temperatures(self: Any, offset: int | mx.array, num_tokens: int) -> mx.array:
    """Return factors of queries in layers without rotation, which grow with the position: ``[B or 1, 1, L, 1]``."""
    if isinstance(offset, int):
        positions = mx.arange(offset + 1, offset + num_tokens + 1)[None]
    else:
        positions = offset[:, None] + mx.arange(1, num_tokens + 1)
    factors = mx.log(mx.floor(positions / self.floor_scale) + 1.0) * self.attn_scale + 1.0
    return factors[:, None, :, None]


@replaces("mlx_lm.models.llama4:LlamaModel.__call__", "4c6a95216c9a7968")
def adapt_llama4_model(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replace Llama 4's ``LlamaModel.__call__``, which makes masks of chunks from internals of mlx-lm's cache. The
    replacement lets each paged cache make its mask, for one sequence or many."""

    def __call__(self: Any, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        # A list, not a generator: `stays_paged` converts empty caches if there are several rows, and must reach all.
        if not cache or not all([stays_paged(own, inputs.shape[0]) for own in cache]):
            return original(self, inputs, cache)
        h = self.embed_tokens(inputs)
        masks: dict[int | None, mx.array | str | None] = {}  # by size of the chunk; None: all tokens
        for layer, own in zip(self.layers, cache, strict=True):
            if own.window not in masks:
                masks[own.window] = create_attention_mask(h, own)
            h = layer(h, masks[own.window], cache=own)
        return self.norm(h)

    return __call__
