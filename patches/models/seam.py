"""The seam: mlx-lm's attention function, through which every model without an adapter is paged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import base

from ...cache.batch_cache import PagedBatchKVCache
from ...cache.lazy_kv import lazy_kv_of
from ...cache.paged_kv_cache import PagedKVCache
from ...engine.compiled_step import StepLayer
from ...kv.attention_params import AttentionParams
from ..cache.layout import ProbeLayer
from ..patch import replaces
from .attention import AttentionCall, heads_last, rotated


@replaces("mlx_lm.models.base:scaled_dot_product_attention", "a13838be6e6c5293")
def adapt(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replace ``mlx_lm.models.base.scaled_dot_product_attention`` by one that attends over blocks if it is given the
    very keys and values that a paged cache has just fetched. Any others go to the original."""

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        fetched = lazy_kv_of(keys, values)
        if fetched is not None and fetched.can_attend(queries, mask):
            return fetched.attend(queries, keys, values, AttentionParams(scale, mask, None, None, sinks))
        return original(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention


@replaces("mlx_lm.models.stablelm:Attention.__call__", "cd350373ffb9d079")
def adapt_stablelm(original: AttentionCall) -> AttentionCall:
    """Replace StableLM's attention, which casts queries and keys to f32. Attention over blocks accumulates in f32 by
    itself, and takes keys as they are stored."""

    def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if not _is_paged(cache):
            return original(self, x, mask, cache)
        batch, length, _ = x.shape
        queries = self.q_proj(x).reshape(batch, length, self.num_heads, -1)
        keys, values = (
            layer(x).reshape(batch, length, self.num_key_value_heads, -1) for layer in (self.k_proj, self.v_proj)
        )
        if self.qk_layernorm:
            queries, keys = self.q_layernorm(queries), self.k_layernorm(keys)
        queries, keys, values = (heads.transpose(0, 2, 1, 3) for heads in (queries, keys, values))
        out = _rotated_attention(self.rope, queries, keys, values, cache, queries.shape[-1] ** -0.5, mask)
        return self.o_proj(heads_last(out))

    return __call__


@replaces("mlx_lm.models.plamo:Attention.__call__", "d419e2fb5c647aae")
def adapt_plamo(original: AttentionCall) -> AttentionCall:
    """Replace PLaMo's attention, which tiles the heads of keys: query head ``h`` uses key head ``h % n``. With the
    queries reordered no keys are repeated."""

    def __call__(
        self: Any, hidden_states: mx.array, attention_mask: mx.array | str | None = None, cache: Any | None = None
    ) -> mx.array:
        if not _is_paged(cache):
            return original(self, hidden_states, attention_mask, cache)
        batch, length, _ = hidden_states.shape
        n_kv, shared = self.k_num_heads, self.config.n_shared_head
        queries, keys, values = (
            layer(hidden_states).reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for layer, heads in ((self.q_proj, self.q_num_heads), (self.k_proj, n_kv), (self.v_proj, n_kv))
        )
        queries = _heads_exchanged(queries, shared, n_kv)
        out = _rotated_attention(self.rotary_emb, queries, keys, values, cache, self.scale, attention_mask)
        return self.o_proj(heads_last(_heads_exchanged(out, n_kv, shared)))

    return __call__


@replaces("mlx_lm.models.phi:PhiAttention.__call__", "2eac47853096f4d3")
def adapt_phi(original: AttentionCall) -> AttentionCall:
    """Replace Phi's attention, which casts rotated queries to f32; see :func:`adapt_stablelm`."""

    def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if not _is_paged(cache):
            return original(self, x, mask, cache)
        heads = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        return _phi(self, (self.q_proj(x), self.k_proj(x), self.v_proj(x)), heads, self.dense, cache, mask)

    return __call__


@replaces("mlx_lm.models.phixtral:RoPEAttention.__call__", "7515a9221787da81")
def adapt_phixtral(original: AttentionCall) -> AttentionCall:
    """Like :func:`adapt_phi`, with one projection for queries, keys and values."""

    def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if not _is_paged(cache):
            return original(self, x, mask, cache)
        projected = cast(Sequence[mx.array], mx.split(self.Wqkv(x), 3, axis=-1))
        return _phi(self, projected, (self.num_heads,) * 3, self.out_proj, cache, mask)

    return __call__


def _phi(
    self: Any,
    projected: Sequence[mx.array],
    heads: tuple[int, int, int],
    project: Callable[[mx.array], mx.array],
    cache: Any,
    mask: mx.array | str | None,
) -> mx.array:
    batch, length, _ = projected[0].shape
    queries, keys, values = (
        part.reshape(batch, length, n, -1).transpose(0, 2, 1, 3) for part, n in zip(projected, heads, strict=True)
    )
    scale = math.sqrt(1 / queries.shape[-1])
    return project(heads_last(_rotated_attention(self.rope, queries, keys, values, cache, scale, mask)))


@replaces("mlx_lm.models.plamo2:Attention.__call__", "07f12104004abcf5")
def adapt_plamo2(original: AttentionCall) -> AttentionCall:
    """Replace PLaMo 2's attention, which calls MLX's attention and not mlx-lm's function."""

    def __call__(
        self: Any, hidden_states: mx.array, mask: mx.array | str | None = None, cache: Any | None = None
    ) -> mx.array:
        if not _is_paged(cache):
            return original(self, hidden_states, mask, cache)
        batch, length, _ = hidden_states.shape
        parts = mx.split(self.qkv_proj(hidden_states), [self.q_proj_dim, self.q_proj_dim + self.k_proj_dim], axis=-1)
        counts = (self.q_num_heads, self.k_num_heads, self.v_num_heads)
        queries, keys, values = (
            part.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for part, heads in zip(parts, counts, strict=True)
        )
        queries = mx.fast.rms_norm(queries, weight=None, eps=1e-6) * self.q_weight[:, None]
        keys = mx.fast.rms_norm(keys, weight=None, eps=1e-6) * self.k_weight[:, None]
        return self.o_proj(heads_last(_rotated_attention(self.rope, queries, keys, values, cache, self.scale, mask)))

    return __call__


@replaces("mlx_lm.models.gpt_bigcode:GPTBigCodeModel.__call__", "d5a8f0bf92fed57f")
def adapt_bigcode(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replace GPT BigCode's body, which supports only one offset for all rows; rows of a batch have one each."""

    def __call__(self: Any, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        if not cache or not isinstance(offsets := cache[0].offset, mx.array):
            return original(self, inputs, cache)
        positions = offsets[:, None] + mx.arange(inputs.shape[1])
        h = self.wte(inputs)
        mask = base.create_attention_mask(h, cache[0])
        h = h + self.wpe(positions)
        for layer, own in zip(self.h, cache, strict=True):
            h = layer(h, mask, cache=own)
        return self.ln_f(h)

    return __call__


@replaces("mlx_lm.models.afm7:AFMModel.__call__", "465229dcd50f6525")
def adapt_afm7(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replace AFM's body, whose layers that reuse keys take their position from the number of keys, padding included.
    The replacement uses each row's own offset."""

    def __call__(self: Any, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        if not cache or not isinstance(offsets := cache[-1].offset, mx.array):
            return original(self, inputs, cache)
        h = self.embedding(inputs)
        mask = base.create_attention_mask(h, cache[0])
        for layer, own in zip(self.layers, cache, strict=True):
            h = layer(h, mask, cache=own)
        keys, values = cache[-1].keys_and_values()
        for layer in self.kv_reuse_layers:
            h = h + _reusing(layer.self_attn, layer.input_layernorm(h), keys, values, offsets, mask)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return self.output_norm(h)

    __call__.supports_ragged_rows = True  # type: ignore[attr-defined]
    return __call__


def _reusing(
    self: Any, x: mx.array, keys: mx.array, values: mx.array, offsets: mx.array, mask: mx.array | str | None
) -> mx.array:
    batch, length, _ = x.shape
    queries = self.q_proj(x).reshape(batch, length, self.n_heads, -1).transpose(0, 2, 1, 3)
    queries = self.q_norm(self.rope(queries, offset=offsets))
    attend = base.scaled_dot_product_attention
    return self.out_proj(heads_last(attend(queries, keys, values, cache=None, scale=self.scale, mask=mask)))


def _is_paged(cache: Any) -> bool:
    return isinstance(cache, PagedKVCache | PagedBatchKVCache | StepLayer | ProbeLayer)


def _rotated_attention(
    rope: Any,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Rotate queries and keys, write keys and values to the cache, and attend."""
    queries, keys = rotated(rope, queries, keys, cache.offset)
    keys, values = cache.update_and_fetch(keys, values)
    attend = base.scaled_dot_product_attention  # looked up here: it is replaced
    out: mx.array = attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
    return out


def _heads_exchanged(x: mx.array, outer: int, inner: int) -> mx.array:
    """Reorder the heads of x ``[B, outer * inner, L, head_dim]`` from ``[outer, inner]`` to ``[inner, outer]``."""
    batch, heads, length, _ = x.shape
    return x.reshape(batch, outer, inner, length, -1).swapaxes(1, 2).reshape(batch, heads, length, -1)
