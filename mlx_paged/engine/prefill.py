"""Prefill: the chunks of prompts of a step, in as few model calls as is good."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..by_model import ByModel
from ..cache.composites import leaves, with_leaves
from ..cache.pack import NotPackableError, Pack
from ..cache.packed_cache import PackedKVCache
from ..cache.paged_kv_cache import PagedKVCache
from ..kernels.availability import on_metal
from ..warn import warn_once
from .decode_batch import batch_of
from .request import Request
from .scheduler import Chunk

# Short chunks share a call: on a GPU, calls and not their few tokens take the time. A longer one keeps it busy by
# itself, and others would have to be padded to it.
MOST_TOKENS = 64
# Prompt tokens a step on a GPU without packs: less memory and shorter waits for decode than with longer chunks
# (docs/adr/0006). Prompts are cut at its multiples.
IN_PLACE_STEP_TOKENS = 512
# On Metal they are cut at multiples of this, so that a step takes no longer than others may wait (docs/adr/0063).
METAL_GRID = 128
# The same with packs (docs/adr/0023).
STEP_TOKENS = 4096
# A chunk alone goes as a pack up to this context: MLX's attention would prepare a plan of some 30 ms for its length.
# Of longer ones attention is so much of the work that MLX's, which is faster once it has its plan, pays.
MOST_ALONE = 4096
# What mlx-lm has where nobody has chosen a step size: most of one prompt in a step.
UPSTREAM_STEP_TOKENS = 2048
UPSTREAM_PREFILLING = 8  # the same for prompts that are computed at a time


def most_step_tokens() -> int:
    """Prompt tokens a step with packs, and on a Mac without: what time allows there is often less."""
    return UPSTREAM_STEP_TOKENS if on_metal() else STEP_TOKENS


def grid_tokens() -> int:
    """Return what multiples of tokens prompts are cut at where blocks are in place."""
    return METAL_GRID if on_metal() else IN_PLACE_STEP_TOKENS


_not_packed: ByModel[str] = ByModel("why not packed")  # why not, of models that packs turned out to be nothing for


class Prefill:
    """Computes chunks. As packs where several share a call, which suits MLX on CUDA; a chunk alone, with nothing padded
    and MLX's fused causal attention, else.

    Args:
        model: whose forward pass takes ``cache``, a list.
        in_place: the caches write blocks in place.
        shares_calls: short chunks of several requests may go through the model together, padded.
        packs: all chunks of a step go through the model together, as a pack.
        call: calls the model; None: it is called itself.
    """

    def __init__(
        self,
        model: Any,
        *,
        in_place: bool,
        shares_calls: bool,
        packs: bool = False,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.call = model if call is None else call
        self.in_place = in_place
        self.shares_calls = shares_calls
        self.packs = packs and _not_packed.get(model) is None
        self._under_way: list[mx.array] = []  # ready when the chunks are that were computed last
        self._launched = (0, 0.0)  # their tokens, and when that began
        self.took: list[tuple[int, float]] = []  # tokens and seconds of those waited for, until read

    def compute(
        self, chunks: Sequence[Chunk], on_failure: Callable[[Sequence[Chunk], Exception], None]
    ) -> list[Request]:
        """Compute the chunks of requests that run. Returns the requests for which that worked, which are longer now.
        Where blocks are written in place, the device may still be at it: see :meth:`wait`.

        Args:
            on_failure: told of the chunks of a model call, and what it raised, before the next call.
        """
        self.wait()
        if self.packs and on_metal() and _attend_apart(chunks):
            self.packs = False  # as without a kernel for packs: MLX's attention has no plans to prepare there
        begin = time.perf_counter()
        done: set[Request] = set()
        for call in self._calls(chunks):
            try:
                if self._is_pack(call):
                    call = self._reserved(call, on_failure)
                self._call(call)
            except Exception as error:
                on_failure(call, error)
                continue
            for request, num_tokens in call:
                request.length += num_tokens
                done.add(request)
        computed = [chunk for chunk in chunks if chunk.request in done]
        try:
            if self.in_place:  # the host goes on with what comes next, such as a decode step
                fences = _fences([request for request, _ in computed])
                mx.async_eval(fences)
                self._under_way = fences
                self._launched = sum(chunk.num_tokens for chunk in computed), begin
        except Exception as error:
            for chunk in computed:
                on_failure([chunk], error)
            return []
        return [request for request, _ in computed]

    def wait(self) -> None:
        """Return when the chunks are there that were computed last, so that no more than one step is under way."""
        under_way, self._under_way = self._under_way, []
        mx.eval(under_way)
        if under_way:
            num_tokens, begin = self._launched
            self.took.append((num_tokens, time.perf_counter() - begin))

    def _calls(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        if self.packs:
            return packs_of(chunks)
        if self.shares_calls:
            return calls_of(chunks, IN_PLACE_STEP_TOKENS)
        return [[chunk] for chunk in chunks]

    def _is_pack(self, call: Sequence[Chunk]) -> bool:
        if not self.packs or len(call) > 1:
            return self.packs
        request, num_tokens = call[0]
        if on_metal():  # MLX's attention takes a chunk without a prefix as it is, and for others a copy of the prefix
            return not request.alone and request.length > 0
        return not request.alone and request.length + num_tokens <= MOST_ALONE

    def _reserved(self, call: Sequence[Chunk], on_failure: Callable[[Sequence[Chunk], Exception], None]) -> list[Chunk]:
        """Those of the chunks for which there is room, which is reserved."""
        ready = []
        for chunk in call:
            sequence = chunk.request.sequence
            assert sequence is not None
            try:
                sequence.reserve_all(chunk.num_tokens)
            except Exception as error:
                on_failure([chunk], error)
            else:
                ready.append(chunk)
        return ready

    def _call(self, call: Sequence[Chunk]) -> None:
        is_packed = bool(call) and self._is_pack(call) and self._packed(call)
        if not is_packed and len(call) > 1:
            compute_together(self.call, call)
        elif not is_packed:
            for request, num_tokens in call:
                self.call(mx.array(request.next_tokens(num_tokens), mx.uint32)[None], cache=request.caches)
        if not self.in_place:  # its reads must be over before the next one writes, or the pool is copied
            mx.eval([cache.state for request, _ in call for cache in request.caches or ()])

    def _packed(self, chunks: Sequence[Chunk]) -> bool:
        """Compute the chunks as a pack; False if the model does not pack, as it turns out, and a chunk that is alone is
        to be computed otherwise, at the positions it has. Several are for whoever catches the NotPackableError."""
        try:
            compute_pack(self.call, chunks)
        except NotPackableError as error:
            self.packs = False
            _not_packed.put(self.model, str(error))
            warn_once(f"prompts go one by one through models of {type(self.model).__module__}: {error}")
            if len(chunks) > 1:
                raise
            return False
        return True


def _attend_apart(chunks: Sequence[Chunk]) -> bool:
    """Return whether a kernel for packs turned out not to serve some layers of these requests."""
    pools = [request.sequence.pool for request, _ in chunks if request.sequence is not None]
    return any(why for pool in pools for group in pool.groups for why in group.packs_unsupported.values())


def _fences(requests: Sequence[Request]) -> list[mx.array]:
    """Return what is ready when all that these requests have written is, where every layer writes in place: requests of
    one pool have the same."""
    pools = {id(request.sequence.pool): request.sequence.pool for request in requests if request.sequence is not None}
    return [array for pool in pools.values() for group in pool.groups for array in group.latest()]


def packs_of(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return which chunks are computed in one call: all but those that have failed with others."""
    pack = [chunk for chunk in chunks if not chunk.request.alone]
    alone = [[chunk] for chunk in chunks if chunk.request.alone]
    return [pack, *alone] if pack else alone


def can_pack(caches: Sequence[Any]) -> bool:
    """Return whether new tokens of several sequences can go through the model as rows of one token each, as far as its
    caches tell: every layer must be paged, and see a sequence as one range of tokens."""
    parts = leaves(caches)
    return all(isinstance(cache, PagedKVCache) and not cache.pinned for cache in parts)


def compute_pack(model: Any, chunks: Sequence[Chunk]) -> None:
    """Build the call for all chunks, whose positions are reserved, as a pack.

    Raises:
        NotPackableError: the model cannot be called so.
        Exception: whatever the model or the pool raises. Some layers may have written their tokens then.
    """
    sequences = [chunk.request.sequence for chunk in chunks]
    pack = Pack([sequence for sequence in sequences if sequence is not None], [chunk.num_tokens for chunk in chunks])
    tokens = [token for chunk in chunks for token in chunk.request.next_tokens(chunk.num_tokens)]
    caches = chunks[0].request.caches or []
    layers = [PackedKVCache(pack, cache.layer) for cache in leaves(caches)]
    model(mx.array(tokens, mx.uint32)[:, None], cache=with_leaves(caches, layers))
    pack.commit()


def can_share_calls(caches: Sequence[Any]) -> bool:
    """Return whether several new tokens of rows of different lengths can go through the model together: every layer
    masks them row by row itself, and leaves padding out."""
    return all(isinstance(cache, PagedKVCache) and not cache.masks_rows for cache in leaves(caches))


def calls_of(chunks: Sequence[Chunk], most_tokens: int) -> list[list[Chunk]]:
    """Return which chunks are computed in one call: short ones, by length, of at most so many tokens with their
    padding."""
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
    requests = [chunk.request for chunk in chunks]
    batch, tables = batch_of(requests, [None] * len(leaves(requests[0].caches or [])))
    assert tables is not None
    lengths = [chunk.num_tokens for chunk in chunks]
    width = max(lengths)
    if min(lengths) < width:
        for cache in batch:
            cache.prepare(lengths=lengths)
    tokens = [chunk.request.next_tokens(chunk.num_tokens) for chunk in chunks]
    inputs = mx.array([row + [0] * (width - len(row)) for row in tokens], mx.uint32)
    model(inputs, cache=with_leaves(chunks[0].request.caches or [], batch))
    tables.commit()
