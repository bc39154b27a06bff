"""Prefill: the chunks of prompts of a step, in as few model calls as is good."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..by_model import ByModel
from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.packed_states import PackedStates
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.rows import NotPackableError, Rows
from ..kernels.availability import on_metal, packs_prompts
from ..kv.pool import BlockPool
from ..warn import warn_once
from .request import Request
from .scheduler import Chunk

LATENCY_MS = 500  # default for the prompts of a step beside requests that decode or wait
ALONE_SECONDS = 5.0  # for a prompt with nobody beside it: until then it cannot be cancelled
LEAST_TOKENS = 32  # fewer take hardly less time: the weights are read once for all of them
GRID = 32  # tokens; shapes that are multiples of it recur
# Operations a second until a step has shown how many there are: of some CPU cores, in float32; with quantised weights.
ASSUMED_SPEED, ASSUMED_QUANTIZED_SPEED = 1e11, 3e9
ASSUMED_METAL_SPEED = 5e12  # of an Apple GPU, with any weights
WEIGHTS_PER_WORD = 8  # of quantised weights in 4 bits


class PrefillPace:
    """Learns how long prompt tokens take, and bounds a step by time: on a CPU, and on Metal (docs/adr/0063).

    There a chunk of 2,048 tokens can take seconds or minutes. Where it takes less than the bound, nothing changes.

    Args:
        model: whose parameters give the first estimate.
        latency_ms: for the prompts of a step beside requests that decode or wait.
        least_alone: tokens of a step without such requests, however long they take.
    """

    def __init__(self, model: Any, latency_ms: int = LATENCY_MS, least_alone: int = 0) -> None:
        self.latency = latency_ms / 1000
        self.least_alone = max(least_alone, LEAST_TOKENS)
        parameters: Any = getattr(model, "parameters", dict)()
        arrays = [array for _, array in tree_flatten(parameters) if isinstance(array, mx.array)]
        quantized = sum(array.size for array in arrays if array.dtype == mx.uint32) * WEIGHTS_PER_WORD
        others = sum(array.nbytes for array in arrays if array.dtype != mx.uint32) / 4
        speeds = (ASSUMED_METAL_SPEED,) * 2 if on_metal() else (ASSUMED_SPEED, ASSUMED_QUANTIZED_SPEED)
        self.seconds_per_token = 2 * others / speeds[0] + 2 * quantized / speeds[1]

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step's chunks: their tokens, and how long they took."""
        if num_tokens >= LEAST_TOKENS:  # fewer cost more each
            self.seconds_per_token += (seconds / num_tokens - self.seconds_per_token) / 2

    def most_tokens(self, is_alone: bool) -> int | None:
        """Return the prompt tokens of the next step, a multiple of :data:`GRID`; None if there is no bound.

        Args:
            is_alone: there is one request in all.
        """
        if not self.seconds_per_token:
            return None
        seconds, least = (ALONE_SECONDS, self.least_alone) if is_alone else (self.latency, LEAST_TOKENS)
        return max(least, int(seconds / self.seconds_per_token) // GRID * GRID)


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
        packs: all chunks of a step go through the model together, as a pack.
        call: calls the model; None: it is called itself.
    """

    def __init__(
        self,
        model: Any,
        *,
        in_place: bool,
        packs: bool = False,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.call = model if call is None else call
        self.in_place = in_place
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
        for call in packs_of(chunks) if self.packs else [[chunk] for chunk in chunks]:
            try:
                call = list(self._call(call, on_failure))
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

    def _is_pack(self, call: Sequence[Chunk]) -> bool:
        if not self.packs or len(call) > 1:
            return self.packs
        request, num_tokens = call[0]
        if on_metal():  # MLX's attention takes a chunk without a prefix as it is, and for others a copy of the prefix
            return not request.alone and request.length > 0
        return not request.alone and request.length + num_tokens <= MOST_ALONE

    def _call(self, call: Sequence[Chunk], on_failure: Callable[[Sequence[Chunk], Exception], None]) -> Sequence[Chunk]:
        """Compute the chunks of a call. Returns those for which there was room."""
        packed = self._packed(call, on_failure) if self._is_pack(call) else None
        if packed is None:
            for request, num_tokens in call:
                self.call(mx.array(request.next_tokens(num_tokens), mx.uint32)[None], cache=request.caches)
        if not self.in_place:  # its reads must be over before the next one writes, or the pool is copied
            mx.eval([cache.state for request, _ in call for cache in request.caches or ()])
        return call if packed is None else packed

    def _packed(
        self, chunks: Sequence[Chunk], on_failure: Callable[[Sequence[Chunk], Exception], None]
    ) -> Sequence[Chunk] | None:
        """Compute the chunks as a pack. Returns those for which there was room; None if the model does not pack, as it
        turns out, and a chunk that is alone is to be computed otherwise. Several are for whoever catches the
        NotPackableError."""
        try:
            return compute_pack(self.call, chunks, on_failure)
        except NotPackableError as error:
            self.packs = False
            _not_packed.put(self.model, str(error))
            warn_once(f"prompts go one by one through models of {type(self.model).__module__}: {error}")
            if len(chunks) > 1:
                raise
            return None


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


def can_pack(
    caches: Sequence[Any], state_cache: type[Any], *, reads_blocks_only: bool, takes_rows: bool = True
) -> bool:
    """Return whether new tokens of several sequences can go through the model as rows of one token each: every layer
    must be paged, or keep a state.

    Args:
        caches: of a sequence.
        state_cache: class of the caches that hold states.
        reads_blocks_only: the model's attention hands keys and values to attention functions, and does nothing else. A
            model without a paged layer attends to nothing.
        takes_rows: the model computes several rows in one call.
    """
    of_layers = leaves(caches)
    attends_so = reads_blocks_only or not any(isinstance(cache, PagedKVCache) for cache in of_layers)
    return takes_rows and attends_so and all(isinstance(cache, PagedKVCache | state_cache) for cache in of_layers)


def packs_by_default(pool: BlockPool | None, *, over_ranks: bool) -> bool:
    """Return whether prompts go through the model as packs where nobody has chosen: blocks are in place, and a GPU has
    a kernel for packs. A Mac that finds its kernel wrong packs no more; ranks would have to do the same."""
    in_place = pool is None or all(group.in_place for group in pool.groups)
    return in_place and packs_prompts() and not (on_metal() and over_ranks)


def pack_layers(rows: Rows | None, caches: Sequence[Sequence[Any]], counts: Sequence[int]) -> list[Any]:
    """Return what the layers see of a pack.

    Args:
        rows: of the sequences; None: no layer is paged.
        caches: leaves of each sequence's caches.
        counts: new tokens of each.
    """
    return [
        PagedBatchKVCache(rows, layer[0].layer, type(layer[0]))
        if rows is not None and isinstance(layer[0], PagedKVCache)
        else PackedStates.of(layer, counts)
        for layer in zip(*caches, strict=True)
    ]


def compute_pack(
    model: Any, chunks: Sequence[Chunk], on_failure: Callable[[Sequence[Chunk], Exception], None]
) -> list[Chunk]:
    """Build the call for all chunks as a pack.

    Args:
        on_failure: told of a chunk for which there is no room.

    Returns:
        The chunks for which there was.

    Raises:
        NotPackableError: the model cannot be called so.
        Exception: whatever the model or the pool raises. Nothing is reserved then, and no state has changed.
    """
    ready = [chunk for chunk in chunks if chunk.request.caches is not None]
    rows: Rows | None = None
    while ready:
        sequences = [sequence for chunk in ready if (sequence := chunk.request.sequence) is not None]
        if not sequences:
            break
        rows = Rows(sequences[0].pool, sequences, [chunk.num_tokens for chunk in ready])
        failed = rows.reserve()
        if failed is None:
            break
        on_failure([ready.pop(failed.row)], failed.error)
    if not ready:
        return []
    try:
        tokens = [token for chunk in ready for token in chunk.request.next_tokens(chunk.num_tokens)]
        caches = [leaves(chunk.request.caches or []) for chunk in ready]
        layers = pack_layers(rows, caches, [chunk.num_tokens for chunk in ready])
        model(mx.array(tokens, mx.uint32)[:, None], cache=with_leaves(ready[0].request.caches or [], layers))
        if rows is not None:
            rows.commit()
    except Exception:
        if rows is not None:
            rows.take_back()
        raise
    for layer, own in zip(layers, zip(*caches, strict=True), strict=True):
        if isinstance(layer, PackedStates):
            for cache, arrays in zip(own, layer.of_each(), strict=True):
                cache.cache = arrays
    return ready
