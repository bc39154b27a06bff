"""Prefill: the chunks of prompts of a step, in as few model calls as is good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from .decode_batch import batch_of
from .request import Request
from .scheduler import Chunk

# Short chunks share a call: on a GPU, calls and not their few tokens take the time. A longer one keeps it busy by
# itself, and others would have to be padded to it.
MOST_TOKENS = 64
# Prompt tokens a step on a GPU: less memory and shorter waits for decode than with longer chunks (docs/adr/0006).
IN_PLACE_STEP_TOKENS = 512


class Prefill:
    """Computes chunks. Long ones alone: nothing is padded, and the fused causal attention needs no mask.

    Args:
        model: whose forward pass takes ``cache``, a list.
        in_place: the caches write blocks in place.
        shares_calls: short chunks of several requests may go through the model together.
    """

    def __init__(self, model: Any, *, in_place: bool, shares_calls: bool) -> None:
        self.model = model
        self.in_place = in_place
        self.shares_calls = shares_calls

    def compute(
        self, chunks: Sequence[Chunk], on_failure: Callable[[Sequence[Chunk], Exception], None]
    ) -> list[Request]:
        """Compute the chunks of requests that run. Returns the requests for which that worked, which are longer now.

        Args:
            on_failure: told of the chunks of a model call, and what it raised, before the next call.
        """
        calls = calls_of(chunks, IN_PLACE_STEP_TOKENS) if self.shares_calls else [[chunk] for chunk in chunks]
        done: set[Request] = set()
        for call in calls:
            try:
                self._call(call)
            except Exception as error:
                on_failure(call, error)
                continue
            for request, num_tokens in call:
                request.length += num_tokens
                done.add(request)
        computed = [chunk for chunk in chunks if chunk.request in done]
        try:
            if self.in_place:
                mx.eval([cache.state for request, _ in computed for cache in request.caches or ()])
        except Exception as error:
            for chunk in computed:
                on_failure([chunk], error)
            return []
        return [request for request, _ in computed]

    def _call(self, call: Sequence[Chunk]) -> None:
        if len(call) > 1:
            compute_together(self.model, call)
            return
        request, num_tokens = call[0]
        self.model(mx.array(request.next_tokens(num_tokens), mx.uint32)[None], cache=request.caches)
        if not self.in_place:  # its reads must be over before the next one writes, or the pool is copied
            mx.eval([cache.state for cache in request.caches or ()])


def can_share_calls(caches: Sequence[Any]) -> bool:
    """Whether several new tokens of rows of different lengths can go through the model together: every layer masks
    them row by row itself, and leaves padding out."""
    return all(isinstance(cache, PagedKVCache) and not cache.masks_rows for cache in leaves(caches))


def calls_of(chunks: Sequence[Chunk], most_tokens: int) -> list[list[Chunk]]:
    """Which chunks are computed in one call: short ones, by length, of at most so many tokens with their padding."""
    alone: list[list[Chunk]] = []
    shared: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.num_tokens):
        if chunk.num_tokens > MOST_TOKENS or chunk.request.alone:
            alone.append([chunk])
        elif shared and (len(shared[-1]) + 1) * chunk.num_tokens <= most_tokens:
            shared[-1].append(chunk)
        else:
            shared.append([chunk])
    return alone + shared


def compute_together(model: Any, chunks: Sequence[Chunk]) -> None:
    """Build the call for all chunks, padded on the right to the longest; padding is neither written nor read.

    Raises:
        Exception: whatever the model or the pool raises. Some layers of some rows may have taken their tokens then.
    """
    caches = [leaves(chunk.request.caches or []) for chunk in chunks]
    batch, tables = batch_of(caches, [None] * len(caches[0]))
    assert tables is not None
    lengths = [chunk.num_tokens for chunk in chunks]
    width = max(lengths)
    if min(lengths) < width:
        for cache in batch:
            cache.prepare(lengths=lengths)
    tokens = [chunk.request.next_tokens(chunk.num_tokens) for chunk in chunks]
    inputs = mx.array([row + [0] * (width - len(row)) for row in tokens], mx.uint32)
    model(inputs, cache=with_leaves(chunks[0].request.caches or [], batch))
    tables.settle()
