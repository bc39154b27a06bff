"""The seam every model goes through that has no adapter of its own: mlx-lm's attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...cache.lazy_kv import lazy_kv_of
from ...kv.storage.scoring import Scoring


def adapt(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """From ``mlx_lm.models.base.scaled_dot_product_attention`` to one that attends over blocks if it is given the very
    keys and values that a paged cache has just fetched, and does what it did with any others."""

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
        if fetched is not None and fetched.serves(queries, mask):
            return fetched.attend(queries, keys, values, Scoring(scale, mask, None, None, sinks))
        return original(queries, keys, values, cache, scale, mask, sinks)

    return scaled_dot_product_attention
