"""Layers with states: gated delta nets (Qwen3-Next, Qwen3.5, OLMo hybrid) and embeddings of n-grams (LongCat)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...kernels import delta_rule
from ..patch import replaces


@replaces("mlx_lm.models.gated_delta:gated_delta_ops", "dbaebb7ab54e37d2")
def adapt_gated_delta(original: delta_rule.DeltaRule) -> delta_rule.DeltaRule:
    """Make the replacement of mlx-lm's loop over tokens: prompts go by chunks of tokens. On Metal mlx-lm calls a kernel
    of its own instead."""

    def gated_delta_ops(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        if delta_rule.unsupported_reason(q, v, g, original) is not None:
            return original(q, k, v, g, beta, state, mask)
        return delta_rule.chunked(q, k, v, g, beta, state, mask)

    return gated_delta_ops


@replaces("mlx_lm.models.longcat_flash_ngram:NgramEmbedding.__call__", "062dbfc9a30b941b")
def adapt_ngrams(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Make a replacement that keeps tokens of one length, however short the prompt is: rows of other lengths cannot be
    one batch. Zeros are what the embedding takes for tokens before the first one."""

    def __call__(self: Any, input_ids: mx.array, cache: Any = None) -> mx.array:
        embedded = original(self, input_ids, cache)
        if cache is not None and (missing := self.n - 1 - cache[0].shape[-1]) > 0:
            cache[0] = mx.pad(cache[0], [(0, 0), (missing, 0)])
        return embedded

    return __call__
