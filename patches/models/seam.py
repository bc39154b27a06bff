"""The seam: mlx-lm's attention function, through which every model without an adapter is paged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...cache.layer_cache import lazy_kv_of
from ...kv.geometry import AttentionParams
from ..patch import replaces


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
