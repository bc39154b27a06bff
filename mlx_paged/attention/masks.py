"""Attention masks."""

from __future__ import annotations

import mlx.core as mx


def causal_mask(num_tokens: int, offset: int = 0, window: int | None = None) -> mx.array:
    """Boolean mask ``[num_tokens, offset + num_tokens]``: query i, at position ``offset + i``, sees positions up to
    its own and, with a window, not further back than ``window - 1`` before it."""
    keys = mx.arange(offset + num_tokens)[None]
    queries = mx.arange(offset, offset + num_tokens)[:, None]
    mask = queries >= keys
    if window is not None:
        mask = mask & (queries < keys + window)
    return mask
