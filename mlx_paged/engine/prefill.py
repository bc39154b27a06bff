"""Short prompt chunks of several requests in one model call: on a GPU, calls and not their few tokens take the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from .decode_batch import batch_of
from .row import Row

# A longer chunk keeps a GPU busy by itself, and others would have to be padded to it.
MOST_TOKENS = 64


class RowChunk(NamedTuple):
    """The next tokens of a row to compute."""

    row: Row
    num_tokens: int


def can_share_calls(caches: Sequence[Any]) -> bool:
    """Whether several new tokens of rows of different lengths can go through the model together: every layer masks
    them row by row itself, and leaves padding out."""
    return all(isinstance(cache, PagedKVCache) and not cache.masks_rows for cache in leaves(caches))


def calls_of(chunks: Sequence[RowChunk], most_tokens: int) -> list[list[RowChunk]]:
    """Which chunks are computed in one call: short ones, by length, of at most so many tokens with their padding."""
    alone: list[list[RowChunk]] = []
    shared: list[list[RowChunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.num_tokens):
        if chunk.num_tokens > MOST_TOKENS or chunk.row.alone:
            alone.append([chunk])
        elif shared and (len(shared[-1]) + 1) * chunk.num_tokens <= most_tokens:
            shared[-1].append(chunk)
        else:
            shared.append([chunk])
    return alone + shared


def compute_together(model: Any, chunks: Sequence[RowChunk]) -> None:
    """Build the call for all chunks, padded on the right to the longest; padding is neither written nor read.

    Raises:
        Exception: whatever the model or the pool raises. Some layers of some rows may have taken their tokens then.
    """
    caches = [leaves(chunk.row.caches or []) for chunk in chunks]
    batch, tables = batch_of(caches, [None] * len(caches[0]))
    assert tables is not None
    lengths = [chunk.num_tokens for chunk in chunks]
    width = max(lengths)
    if min(lengths) < width:
        for cache in batch:
            cache.prepare(lengths=lengths)
    tokens = [chunk.row.chunk(chunk.num_tokens) for chunk in chunks]
    inputs = mx.array([row + [0] * (width - len(row)) for row in tokens], mx.uint32)
    model(inputs, cache=with_leaves(chunks[0].row.caches or [], batch))
    tables.settle()
