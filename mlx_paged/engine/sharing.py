"""Prefixes shared by requests through the radix tree: of any length, or up to checkpoints if layers keep states."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..kv.pool import BlockPool
from ..prefix.spill_folder import SavedStates
from ..prefix.store import SharedPrefixes
from .request import Request

_Start = tuple[Hashable, tuple[int, ...]]  # the salt, and the tokens of the first block


class PrefixSharing:
    """Finds the prefix of a request that starts, in the prefix cache or in the blocks of a running request.

    The blocks of a running request are put into the cache, by reference, when another request needs them. With sliding
    windows they would be released by then, so they are put in as they are computed.

    Args:
        prefixes: the prefix cache.
        pool: the pool of the blocks.
    """

    def __init__(self, prefixes: SharedPrefixes, pool: BlockPool) -> None:
        self.prefixes = prefixes
        self.pool = pool
        self._siblings: dict[_Start, dict[int, Request]] = {}  # running requests by how they begin, and by uid
        self._starts: dict[int, _Start] = {}  # of running requests by uid, as of their admission
        # Whether prefixes are found only at the ends of chunks and segments, as with sliding windows.
        self.reuses_only_at_boundaries = any(group.spec.window is not None for group in pool.groups)

    # Matching -------------------------------------------------------------------------------------------------

    def available(self, request: Request) -> int:
        """Return how many tokens the request would find computed if it started now."""
        if request.given is not None:
            return 0
        longest = self._longest(request)
        return max(
            self.prefixes.held(request.source, request.options.salt),
            longest[0] if longest is not None and not self.reuses_only_at_boundaries else 0,
        )

    def held_alone(self, request: Request) -> Sequence[int]:
        """Return how many blocks of each group :meth:`match` would take that only the prefix cache holds now. They can
        be evicted until the request takes them."""
        return () if request.given is not None else self.prefixes.held_alone(request.source, request.options.salt)

    def must_wait(self, request: Request) -> bool:
        """Return whether a running request will compute at least one block more of this one's tokens than are
        available."""
        if request.given is not None:
            return False
        known: int | None = None
        for other in self._running(request):
            goal = other.prefill_end
            if other.length >= goal:
                continue
            common = min(_common(request, other), goal, len(request.source) - 1)
            if common - other.length < self.pool.block_size:
                continue
            known = self.available(request) if known is None else known
            if common - known >= self.pool.block_size:
                return True
        return False

    def match(self, request: Request) -> int:
        """Put the longest known prefix into the empty caches of a request that starts. Returns its length in tokens."""
        longest = self._longest(request)
        start = self._starts[request.uid] = self._start(request)
        self._siblings.setdefault(start, {})[request.uid] = request
        if longest is not None:
            length, other = longest
            if length > self.prefixes.held(request.source, request.options.salt):
                self._insert(request.source[:length], other)
        # No more than can be used: with a window, surplus tokens could not be cut off.
        length, tables = self.prefixes.adopt(request.source[: request.prefill_end + 1], request.options.salt)
        if not length or request.sequence is None:
            return 0
        request.sequence.take_over(tables)
        return length

    def _start(self, request: Request) -> _Start:
        return request.options.salt, tuple(request.source[: self.pool.block_size])

    def _running(self, request: Request) -> list[Request]:
        """Return the other running requests with the same salt and first block. None of them came with a cache, whose
        tokens are not known for certain."""
        siblings = self._siblings.get(self._start(request), {})
        return [other for other in siblings.values() if other is not request and other.caches]

    def forget(self, request: Request) -> None:
        """Forget a request that releases its blocks."""
        start = self._starts.pop(request.uid, None)
        if start is not None:
            del self._siblings[start][request.uid]
            if not self._siblings[start]:
                del self._siblings[start]

    def _longest(self, request: Request) -> tuple[int, Request] | None:
        """Return the length of the longest prefix that a running request has computed, and that request."""
        best: tuple[int, Request] | None = None
        for other in self._running(request):
            length = min(_common(request, other), other.length, len(request.source) - 1)
            if length > (0 if best is None else best[0]):
                best = length, other
        return best

    # Inserting ------------------------------------------------------------------------------------------------

    def insert_chunk(self, request: Request) -> None:
        """Keep what a chunk of a prompt has computed, if there are windows. Whole blocks only, except at the prompt's
        end: the request would have to copy a partial block before it writes on."""
        if self.reuses_only_at_boundaries and request.caches is not None:
            tokens = request.cached_tokens()
            at_end = request.is_prefilled
            self._insert(tokens if at_end else tokens[: self._whole_blocks(len(tokens))], request)

    def insert_delivered(self, request: Request) -> None:
        """Keep the whole blocks of a request that releases its blocks before it has finished, as far as they are known
        to have been computed."""
        self.forget(request)
        if request.caches is not None:
            tokens = request.cached_tokens()[: request.confirmed]
            self._insert(tokens[: self._whole_blocks(len(tokens))], request)

    def insert_all(self, request: Request, tokens: Sequence[int]) -> None:
        """Keep all ``tokens`` of a finished request, which are in its cache."""
        self.forget(request)
        if len(tokens) == request.length:
            self._insert(tokens, request)

    def _insert(self, tokens: Sequence[int], request: Request) -> None:
        # If tokens of the cache that came with it are unknown, positions and tokens do not agree.
        if tokens and request.sequence is not None and request.knows_history:
            self.prefixes.donate(tokens, request.sequence.tables, request.options.salt, request.options.keep)

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.pool.block_size


def _common(request: Request, other: Request) -> int:
    """Return :func:`common_length` of their tokens. Called in every step, so the place where they differ is cached."""
    known = request.common.get(other.uid)
    if known is None:
        known = common_length(request.source, other.source)
        if known < min(len(request.source), len(other.source)):
            request.common[other.uid] = known
    return known


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of two lists' common prefix. Compares slices, not single tokens."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


LEAST_SHARED = 32  # tokens; shorter prefixes are not worth a state, which costs as much as many tokens
# By default a prompt's checkpoints take up to 16 KiB per token, about as much as keys and values of a dense 1B model.
BYTES_PER_TOKEN = 16 << 10
LEAST_INTERVAL, MOST_INTERVAL = 64, 4096


class CheckpointSharing:
    """Finds the prefix of a request that starts, and keeps checkpoints as prompts are computed.

    A state cannot be cut to an earlier token: it serves only requests that begin with all of its tokens. So checkpoints
    are kept every ``interval`` tokens of a prompt, at the ends of the caller's segments (system prompts, turns), where
    a prompt diverges from a waiting or an earlier one, and at the ends of the prompt and of the answer.

    Args:
        prefixes: the prefix cache.
        requests: the requests by uid, oldest first.
        interval: tokens between checkpoints of a prompt; 0: only the other ones; None: by the size of the states.
    """

    reuses_only_at_boundaries = True  # at checkpoints

    def __init__(self, prefixes: SharedPrefixes, requests: Mapping[int, Request], interval: int | None = None) -> None:
        self.prefixes, self.pool = prefixes, prefixes.pool  # the tree does not keep the pool alive
        self.requests = requests
        self.interval = interval

    # Matching -------------------------------------------------------------------------------------------------

    def available(self, request: Request) -> int:
        """Return how many tokens the request would find computed if it started now."""
        return 0 if request.given is not None else self._held(request)[0]

    def held_alone(self, request: Request) -> Sequence[int]:
        """Return how many blocks of each group :meth:`match` would take that only the prefix cache holds now."""
        return () if request.given is not None else self._held(request)[1]

    def _held(self, request: Request) -> tuple[int, Sequence[int]]:
        return self.prefixes.held_checkpoint(request.source, request.options.salt)

    def must_wait(self, request: Request) -> bool:
        """Return whether a running request will keep a checkpoint that this one can start from, longer than any it
        finds now."""
        if request.given is not None:
            return False
        expected = 0
        for other in self._alike(request, running=True):
            if other.is_prefilled:
                continue
            common = min(common_length(request.source, other.source), len(request.source) - 1)
            ends = [*other.boundaries, other.prefill_end]
            expected = max([expected, *(end for end in ends if other.length < end <= common)])
        return expected >= LEAST_SHARED and expected > self.available(request)

    def match(self, request: Request) -> int:
        """Give the request the longest prefix that ends at a checkpoint. Returns its length."""
        length = 0
        if request.given is None:
            length = self._adopt(request)
        self._add_ends(request, length)
        return length

    def _adopt(self, request: Request) -> int:
        tokens = request.source[: request.prefill_end + 1]
        length, tables, states = self.prefixes.adopt_checkpoint(tokens, request.options.salt)
        if not length or states is None or request.caches is None:
            return 0
        sequence, fresh = request.sequence, leaves(request.caches)
        if isinstance(states, SavedStates):
            filled = states.fill([cache for cache in fresh if not _is_paged(cache)])
        else:
            filled = copy.deepcopy(states)
        parts = iter(filled)
        request.caches = with_leaves(request.caches, [each if _is_paged(each) else next(parts) for each in fresh])
        if sequence is not None:
            sequence.take_over(tables)
        return length

    def _add_ends(self, request: Request, length: int) -> None:
        """Make chunks of a request end where checkpoints are to be kept."""
        ends = set(request.boundaries)
        for other in self._alike(request, running=False):
            common = min(common_length(request.source, other.source), len(other.source) - 1)
            if common - length >= LEAST_SHARED and common < request.prefill_end:
                ends.add(common)
        if request.given is None:
            # Earlier requests began with this prefix; later ones probably will.
            known = self.prefixes.known_length(request.source, request.options.salt)
            if known - length >= LEAST_SHARED and known < request.prefill_end:
                ends.add(known)
        ends.update(self._interval_ends(request, length))
        request.boundaries = deque(sorted(ends))

    def _alike(self, request: Request, *, running: bool) -> list[Request]:
        """Return the other running (or waiting) requests with the same salt and first :data:`LEAST_SHARED` tokens. Only
        these are compared further, which takes long: thousands may wait."""
        start, salt = request.source[:LEAST_SHARED], request.options.salt
        return [
            other
            for other in self.requests.values()
            if (other.caches is not None) == running
            and other.source[:LEAST_SHARED] == start
            and other is not request
            and other.given is None
            and other.options.salt == salt
        ]

    def _interval_ends(self, request: Request, length: int) -> range:
        """Return the multiples of the interval that are still to be computed. Until the interval is known, only the
        first multiple of :data:`LEAST_INTERVAL`: the state there gives the interval for the rest of the prompt."""
        if self.interval == 0:
            return range(0)
        interval = self.interval or LEAST_INTERVAL
        first = (length // interval + 1) * interval
        return range(first, request.prefill_end if self.interval else min(first + 1, request.prefill_end), interval)

    # Inserting ------------------------------------------------------------------------------------------------

    def insert_chunk(self, request: Request) -> None:
        """Keep a checkpoint at the end of a chunk, if this is a boundary or the prompt's end."""
        if request.caches is None or not request.knows_history:
            return
        if self.interval is None:
            self._choose_interval(request)
        if request.is_prefilled or request.length in request.boundaries:
            self._keep(request.cached_tokens(), request)

    def insert_delivered(self, request: Request) -> None:
        """Do nothing: a request's checkpoints are kept as they are computed."""

    def forget(self, request: Request) -> None:
        """Do nothing: no request is remembered here."""

    def insert_all(self, request: Request, tokens: list[int]) -> None:
        """Keep a checkpoint at the end of a finished request, whose ``tokens`` are in its caches."""
        if request.caches is not None and request.knows_history and len(tokens) == request.length:
            self._keep(tokens, request)

    def _choose_interval(self, request: Request) -> None:
        """Choose the interval from the size of a computed state, and add its multiples to running requests."""
        nbytes = sum(cache.nbytes for cache in leaves(request.caches or []) if not _is_paged(cache))
        self.interval = interval_of(nbytes)
        for other in self.requests.values():
            if other.caches is not None:
                other.boundaries = deque(sorted({*other.boundaries, *self._interval_ends(other, other.length)}))

    def _keep(self, tokens: list[int], request: Request) -> None:
        tables = request.tables or []
        options = request.options
        self.prefixes.donate_checkpoint(tokens, tables, lambda: _states_of(request), options.salt, options.keep)


def interval_of(nbytes: int) -> int:
    """Return the interval in tokens between checkpoints of ``nbytes`` bytes: a power of two."""
    interval = LEAST_INTERVAL
    while interval < MOST_INTERVAL and interval * BYTES_PER_TOKEN < nbytes:
        interval *= 2
    return interval


def _is_paged(cache: Any) -> bool:
    return isinstance(cache, PagedKVCache)


def _states_of(request: Request) -> tuple[int, list[Any]]:
    """Return copies of the request's caches that are not paged, and their bytes. Arrays that are views are copied as
    well, because a view would keep the larger array alive."""
    copies = copy.deepcopy([cache for cache in leaves(request.caches or []) if not _is_paged(cache)])
    for cache in copies:
        arrays = getattr(cache, "cache", None)
        if isinstance(arrays, list):
            cache.cache = [None if array is None else mx.contiguous(array) for array in arrays]
    mx.eval([array for cache in copies for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)])
    return sum(cache.nbytes for cache in copies), copies
