"""Attention masks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..errors import GeometryError
from ..kv.group import LayerGroup
from ..kv.storage.scoring import Window


def causal_mask(num_tokens: int, offset: int = 0, window: Window | None = None) -> mx.array:
    """Boolean mask ``[num_tokens, offset + num_tokens]``: query i, at position ``offset + i``, sees positions up to
    its own, with a window from the first one on that this shows it. Positions count from what is visible."""
    keys = mx.arange(offset + num_tokens)[None]
    queries = mx.arange(offset, offset + num_tokens)[:, None]
    mask = queries >= keys
    if window is not None:
        mask = mask & (keys >= mx.array(window.first_seen_by(np.arange(offset, offset + num_tokens)))[:, None])
    return mask


def window_under(group: LayerGroup, size: int | None) -> Window | None:
    """What a token sees under a mask that slides over ``size`` tokens; None: under the group's own.

    Raises:
        GeometryError: tokens see chunks, and the mask is of another size.
    """
    if size is None or size == group.window:
        return group.sees
    if group.stride > 1:
        raise GeometryError(f"a mask of a window of {size} tokens over chunks of {group.window}")
    return Window(size)
