"""Llama 4: layers that see the chunk of a token's position and layers that see everything, which are not rotated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from ...kv.storage.attention_params import AttentionParams
from ..patch import replaces
from .attention import AttentionCall, heads_last, project_llama, rotated, takes


@replaces("mlx_lm.models.llama4:Attention.__call__", "ec00d284640b9a07", adapts_attention=True)
def adapt(original: AttentionCall) -> AttentionCall:
    """Replace upstream's ``Attention.__call__`` by one that takes the paged path for a paged cache."""

    def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if not takes(cache, x.shape[0]):
            return original(self, x, mask, cache)
        queries, keys, values = project_llama(self, x)
        offset = cache.offset  # of a batch: an array, one offset per row
        if self.use_rope:
            queries, keys = rotated(self.rope, queries, keys, offset)
        if self.use_qk_norm:
            queries, keys = (mx.fast.rms_norm(heads, weight=None, eps=1e-6) for heads in (queries, keys))
        if self.attn_temperature_tuning and not self.use_rope:
            queries = (queries * _temperatures(self, offset, x.shape[1])).astype(queries.dtype)
        return self.o_proj(heads_last(cache.attend(queries, keys, values, AttentionParams(self.scale, mask))))

    return __call__


def _temperatures(self: Any, offset: int | mx.array, num_tokens: int) -> mx.array:
    """Factors on the queries of layers without rotation, which grow with the position: ``[B or 1, 1, L, 1]``."""
    if isinstance(offset, int):
        positions = mx.arange(offset + 1, offset + num_tokens + 1)[None]
    else:
        positions = offset[:, None] + mx.arange(1, num_tokens + 1)
    factors = mx.log(mx.floor(positions / self.floor_scale) + 1.0) * self.attn_scale + 1.0
    return factors[:, None, :, None]


@replaces("mlx_lm.models.llama4:LlamaModel.__call__", "4c6a95216c9a7968")
def adapt_model(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replace upstream's ``LlamaModel.__call__``, which masks chunks by what it knows of mlx-lm's cache, by one that
    has each paged cache make its mask, of one sequence or of many."""

    def __call__(self: Any, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        # Not a generator: an empty cache that meets several rows turns into mlx-lm's own, and all must.
        if not cache or not all([takes(own, inputs.shape[0]) for own in cache]):
            return original(self, inputs, cache)
        h = self.embed_tokens(inputs)
        masks: dict[int | None, mx.array | str | None] = {}  # by the size of the chunk
        for layer, own in zip(self.layers, cache, strict=True):
            if own.window not in masks:
                masks[own.window] = create_attention_mask(h, own)
            h = layer(h, masks[own.window], cache=own)
        return self.norm(h)

    return __call__
