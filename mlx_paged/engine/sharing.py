"""Sharing: prefixes shared by requests, in whole blocks; if layers keep states, up to checkpoints."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..prefix.entry import Checkpoint, Entry, Match
from ..prefix.prefix_cache import SharedPrefixes
from ..warn import warn_once
from .request import Request

_Start = tuple[Hashable, tuple[int, ...]]  # the salt, and the tokens of the first block
# By default a prompt's checkpoints take up to 16 KiB per token, about as much as keys and values of a dense 1B model.
BYTES_PER_TOKEN = 16 << 10
LEAST_INTERVAL, MOST_INTERVAL = 64, 4096


class Sharing:
    """Finds the prefix of a request that starts, in the prefix cache or in the blocks of a running request, and inserts
    what requests have computed.

    The blocks of a running request are inserted, by reference, when another request needs them. With sliding windows
    they would be released by then, so they are inserted after each chunk.

    A state cannot be cut to an earlier token: it serves only requests that begin with all of its tokens. So checkpoints
    are kept every ``interval`` tokens of a prompt, at the ends of the caller's segments (system prompts, turns), where
    a prompt diverges from a waiting or an earlier one, and at the ends of the prompt and of the answer.

    Args:
        prefixes: the prefix cache.
        requests: the requests by uid, oldest first.
        has_states: not all layers are paged: prefixes end at checkpoints.
        interval: tokens between checkpoints of a prompt; 0: only the other ones; None: by the size of the states.

    Attributes:
        running: the scheduler's list of running requests.
    """

    def __init__(
        self,
        prefixes: SharedPrefixes,
        requests: Mapping[int, Request],
        *,
        has_states: bool = False,
        interval: int | None = None,
    ) -> None:
        self.prefixes, self.pool = prefixes, prefixes.pool  # the cache does not keep the pool alive
        self.requests = requests
        self.running: Sequence[Request] = ()
        self.has_states, self.interval = has_states, interval
        self._has_windows = any(group.spec.window is not None for group in self.pool.groups)
        # Whether prefixes are found only at the ends of chunks and segments.
        self.reuses_only_at_boundaries = has_states or self._has_windows
        # What requests have found, with the version of the cache.
        self._found: weakref.WeakKeyDictionary[Request, tuple[int, Match]] = weakref.WeakKeyDictionary()

    # Matching -------------------------------------------------------------------------------------------------

    def _match(self, request: Request) -> Match:
        """Return what the prefix cache has of a request's tokens. Asked for in every step while the request waits."""
        version, known = self.prefixes.cache.version, self._found.get(request)
        if known is None or known[0] != version:
            salt, after = request.options.salt, self._path_of(request)
            found = self.prefixes.match(request.source, salt, to_state=self.has_states, after=after)
            known = self._found[request] = version, found
        return known[1]

    def _path_of(self, request: Request) -> Sequence[Entry]:
        """Return the path that a request's tokens were last found by, so that it is not looked up again."""
        known = self._found.get(request)
        return () if known is None else known[1].path

    def available(self, request: Request) -> int:
        """Return how many tokens the request would find computed if it started now."""
        if request.given is not None:
            return 0
        longest = None if self.reuses_only_at_boundaries else self._longest(request)
        return max(self._match(request).length, 0 if longest is None else self._whole_blocks(longest[0]))

    def held_alone(self, request: Request) -> Sequence[int]:
        """Return how many blocks of each group :meth:`match` would take that only the prefix cache holds now. They can
        be evicted until the request takes them."""
        return () if request.given is not None else self.prefixes.cache.num_alone(self._match(request))

    def must_wait(self, request: Request) -> bool:
        """Return whether a running request will compute at least one block more of this one's tokens than are
        available."""
        if request.given is not None:
            return False
        reach = 0
        for other in self._running(request):
            common = min(_common(request, other), len(request.source) - 1)
            ends = [*other.boundaries, other.prefill_end] if self.has_states else [min(common, other.prefill_end)]
            reach = max([reach, *(end for end in ends if other.length < end <= common and not other.is_prefilled)])
        return reach >= self.pool.block_size and reach - self.available(request) >= self.pool.block_size

    def match(self, request: Request) -> int:
        """Give the longest known prefix to a request that starts, whose caches are empty. Returns its length."""
        longest = None if self.has_states else self._longest(request)
        if longest is not None:
            length, other = longest
            if self._whole_blocks(length) > self._match(request).length:
                self._insert(request.source[:length], other)
        length = self._adopt(request)
        if self.has_states:
            self._add_ends(request, length)
        return length

    def _adopt(self, request: Request) -> int:
        # No more than can be used: with a window, surplus tokens could not be cut off.
        tokens = request.source[: request.prefill_end + 1]
        salt, after = request.options.salt, self._path_of(request)
        found, table = self.prefixes.adopt(tokens, salt, to_state=self.has_states, after=after)
        self._found[request] = self.prefixes.cache.version, found
        if not found.length or request.caches is None:
            return 0
        if self.has_states:
            checkpoint = found.path[-1].checkpoint
            assert checkpoint is not None
            fresh = leaves(request.caches)
            own = [cache for cache in fresh if not _is_paged(cache)]
            parts = iter(checkpoint.fill(own))
            request.caches = with_leaves(request.caches, [c if _is_paged(c) else next(parts) for c in fresh])
        if request.sequence is not None:
            request.sequence.take_over(table)
        return found.length

    def _start(self, request: Request) -> _Start:
        return request.options.salt, tuple(request.source[: self.pool.block_size])

    def _running(self, request: Request) -> list[Request]:
        """Return the other running requests with the same salt and first block. None of them came with a cache, whose
        tokens are not known for certain."""
        start = self._start(request)
        others = [each for each in self.running if each is not request and each.caches and each.given is None]
        return [each for each in others if self._start(each) == start]

    def _longest(self, request: Request) -> tuple[int, Request] | None:
        """Return the length of the longest prefix that a running request has computed, and that request."""
        best: tuple[int, Request] | None = None
        for other in self._running(request):
            length = min(_common(request, other), other.length, len(request.source) - 1)
            if length > (0 if best is None else best[0]):
                best = length, other
        return best

    # Checkpoints ----------------------------------------------------------------------------------------------

    def _add_ends(self, request: Request, length: int) -> None:
        """Make chunks of a request end where checkpoints are to be kept."""
        start = self._start(request)
        # Earlier requests began with these tokens, or waiting ones do; later ones probably will.
        shared = [self.prefixes.known_length(request.source, request.options.salt)]
        for other in self.requests.values():  # thousands may wait: most differ in the first block
            if other.caches is None and other.given is None and self._start(other) == start:
                shared.append(min(common_length(request.source, other.source), len(other.source) - 1))
        ends = {end for each in shared if length < (end := self._whole_blocks(each)) < request.prefill_end}
        ends.update(request.boundaries, self._interval_ends(request, length))
        request.boundaries = deque(sorted(ends))

    def _interval_ends(self, request: Request, length: int) -> range:
        """Return the multiples of the interval that are still to be computed. Until the interval is known, only the
        first multiple of the least one: the state there gives the interval for the rest of the prompt."""
        if self.interval == 0:
            return range(0)
        interval = self.interval or max(LEAST_INTERVAL, self.pool.block_size)
        first = (length // interval + 1) * interval
        return range(first, request.prefill_end if self.interval else min(first + 1, request.prefill_end), interval)

    def _choose_interval(self, request: Request) -> None:
        """Choose the interval from the size of a computed state, and add its multiples to running requests."""
        nbytes = sum(cache.nbytes for cache in leaves(request.caches or []) if not _is_paged(cache))
        self.interval = max(interval_of(nbytes), self.pool.block_size)
        for other in self.requests.values():
            if other.caches is not None:
                other.boundaries = deque(sorted({*other.boundaries, *self._interval_ends(other, other.length)}))

    # Inserting ------------------------------------------------------------------------------------------------

    def insert_chunk(self, request: Request) -> None:
        """Keep what a chunk of a prompt has computed, if there are windows; with states, if it ends where a checkpoint
        is to be kept."""
        if request.caches is None or not self.reuses_only_at_boundaries:
            return
        if self.has_states and self.interval is None:
            self._choose_interval(request)
        if not self.has_states or request.is_prefilled or request.length in request.boundaries:
            self._insert(request.cached_tokens(), request)

    def insert(self, request: Request, *, finished: bool) -> None:
        """Keep what a request that releases its blocks has computed: whole blocks, and with states, of a finished one,
        a checkpoint at its end."""
        if request.caches is not None and (finished or not self.has_states):
            self._insert(request.cached_tokens(), request)

    def _insert(self, tokens: Sequence[int], request: Request) -> None:
        # If tokens of the cache that came with it are unknown, positions and tokens do not agree. A cache from a file
        # may begin inside a block of a window.
        if tokens and request.knows_history and not (self._has_windows and request.given is not None):
            options, states = request.options, partial(_checkpoint_of, request) if self.has_states else None
            table = request.table or self.pool.table_over((), len(tokens))  # no layer is paged
            after = self._path_of(request)
            self.prefixes.insert(tokens, table, options.salt, states=states, keep=options.keep, after=after)

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


def interval_of(nbytes: int) -> int:
    """Return the interval in tokens between checkpoints of ``nbytes`` bytes: a power of two."""
    interval = LEAST_INTERVAL
    while interval < MOST_INTERVAL and interval * BYTES_PER_TOKEN < nbytes:
        interval *= 2
    return interval


def _is_paged(cache: Any) -> bool:
    return isinstance(cache, PagedKVCache)


def _checkpoint_of(request: Request) -> Checkpoint | None:
    """Return a checkpoint of the request's caches that are not paged, or None if their states cannot be kept."""
    try:
        return Checkpoint.of([cache for cache in leaves(request.caches or []) if not _is_paged(cache)])
    except ValueError as error:
        warn_once(f"prefixes are not shared: {error}")
        return None
