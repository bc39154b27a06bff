"""Prefixes that a batch's rows share: by the radix tree, or by snapshots where a model keeps states."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ..kv.pool import BlockPool
from ..prefix.store import PrefixStore
from .request import Request

MAX_SNAPSHOTS = 16
LEAST_SHARED = 32  # tokens; a state costs as much as many of them


class Snapshot(NamedTuple):
    """The caches of all layers at the end of a prefix: forks of block tables, copies of other states."""

    tokens: list[int]
    caches: list[Any]


_Key = tuple[Hashable, tuple[int, ...]]  # the requests' salt, and the tokens


class Snapshots:
    """Stands in for PrefixSharing where some layer's state cannot be cut: keeps the caches at the ends of chunks.

    Of the chunks a prompt is computed in, the end of the latest is kept, and besides it the ends that others can be
    expected to share: of the caller's segments (system prompts), of the whole prompt, of the answer, and of what the
    prompt has in common with requests that wait.

    Args:
        requests: the requests by uid, oldest first.
        max_snapshots: most kept; the least recently used go first.
    """

    has_windows = True  # prefixes are found at some ends only

    def __init__(self, requests: Mapping[int, Request], max_snapshots: int = MAX_SNAPSHOTS) -> None:
        self.requests = requests
        self.max_snapshots = max_snapshots
        self._snapshots: OrderedDict[_Key, Snapshot] = OrderedDict()
        self._latest: dict[int, _Key] = {}  # by uid: a chunk's end that the next one's replaces

    def __len__(self) -> int:
        return len(self._snapshots)

    # Matching -------------------------------------------------------------------------------------------------

    def available(self, request: Request) -> int:
        """Tokens that the request would not have to compute if it started now."""
        found = self._find(request)
        return 0 if found is None else len(found[1])

    def held_alone(self, request: Request) -> Sequence[int]:
        """Return no blocks: what a snapshot holds cannot be evicted block by block."""
        return ()

    def will_find(self, requests: Sequence[Request]) -> list[int]:
        """Return how many tokens each request finds, oldest first; what those before it will have left is not
        counted."""
        return [self.available(request) for request in requests]

    def must_wait(self, request: Request) -> bool:
        """Return whether a running request is about to come to an end that this one can go on from, beyond what is
        there."""
        if request.given is not None:
            return False
        expected = 0
        for other in self.requests.values():
            if other is request or other.caches is None or other.given is not None or other.is_prefilled:
                continue
            if other.options.salt != request.options.salt:
                continue
            common = min(common_length(request.source, other.source), len(request.source) - 1)
            ends = [*other.boundaries, other.prefill_end]
            expected = max([expected, *(end for end in ends if other.length < end <= common)])
        return expected >= LEAST_SHARED and expected > self.available(request)

    def match(self, request: Request) -> int:
        """Replace the request's fresh caches by copies of the longest snapshot's. Returns the tokens in them."""
        found = self._find(request)
        length = 0
        if found is not None:
            self._snapshots.move_to_end(found)
            request.caches = copy.deepcopy(self._snapshots[found].caches)
            length = len(found[1])
        self._add_ends(request, length)
        return length

    def _find(self, request: Request) -> _Key | None:
        """Return the longest snapshot of a prefix."""
        if request.given is not None:
            return None
        fitting = (
            key
            for key, snapshot in self._snapshots.items()
            if key[0] == request.options.salt
            and len(key[1]) < len(request.source)
            and request.source[: len(key[1])] == snapshot.tokens
        )
        return max(fitting, key=lambda key: len(key[1]), default=None)

    def _add_ends(self, request: Request, length: int) -> None:
        """Let a chunk end where the prompt parts from those of requests that wait."""
        ends = set(request.boundaries)
        for other in self.requests.values():
            if (
                other is not request
                and other.caches is None
                and other.given is None
                and other.options.salt == request.options.salt
            ):
                common = min(common_length(request.source, other.source), len(other.source) - 1)
                if common - length >= LEAST_SHARED and common < request.prefill_end:
                    ends.add(common)
        request.boundaries = deque(sorted(ends))

    # Inserting ------------------------------------------------------------------------------------------------

    def insert_chunk(self, request: Request) -> None:
        """A chunk of the request's prompt has been computed."""
        if request.caches is None or not request.knows_history:
            return
        at_end = request.is_prefilled or request.length in request.boundaries
        before = self._latest.pop(request.uid, None)
        if before is not None:
            self._snapshots.pop(before, None)
        key = self._keep(request.cached_tokens(), request)
        if not at_end:
            self._latest[request.uid] = key

    def insert_delivered(self, request: Request) -> None:
        """The request gives its caches back before it has finished."""
        self._latest.pop(request.uid, None)

    def forget(self, request: Request) -> None:
        """Forget a failed request."""
        self._latest.pop(request.uid, None)

    def insert_all(self, request: Request, tokens: list[int]) -> None:
        """Take what a finished request leaves; ``tokens`` are in its caches."""
        self._latest.pop(request.uid, None)
        if request.caches is not None and request.knows_history and len(tokens) == request.length:
            self._keep(tokens, request)

    def evict(self) -> bool:
        """Drop the least recently used snapshot. Returns whether there was one."""
        if not self._snapshots:
            return False
        self._snapshots.popitem(last=False)
        return True

    def _keep(self, tokens: list[int], request: Request) -> _Key:
        key = request.options.salt, tuple(tokens)
        self._snapshots.pop(key, None)
        self._snapshots[key] = Snapshot(list(tokens), copy.deepcopy(request.caches or []))
        while len(self._snapshots) > self.max_snapshots:
            self.evict()
        return key


_Start = tuple[Hashable, tuple[int, ...]]  # the salt, and the tokens of the first block


class PrefixSharing:
    """Finds prefixes when a request starts: in the prefix cache, or in the blocks of a request that still runs.

    The blocks of a running request are put into the cache, by reference, when somebody needs them. Where a window
    moves on they would be gone by then, so there they are put in as they are computed.

    Args:
        prefixes: the prefix cache.
        pool: of the blocks.
    """

    def __init__(self, prefixes: PrefixStore, pool: BlockPool) -> None:
        self.prefixes = prefixes
        self.pool = pool
        self._siblings: dict[_Start, dict[int, Request]] = {}  # that run, by how they begin, and by uid
        self._starts: dict[int, _Start] = {}  # by uid, as they were when it was admitted
        self.has_windows = any(group.spec.window is not None for group in pool.groups)

    # Matching -------------------------------------------------------------------------------------------------

    def available(self, request: Request) -> int:
        """Tokens that the request would not have to compute if it started now."""
        if request.given is not None:
            return 0
        longest = self._longest(request)
        return max(
            self.prefixes.held(request.source, request.options.salt),
            longest[0] if longest is not None and not self.has_windows else 0,
        )

    def held_alone(self, request: Request) -> Sequence[int]:
        """Blocks of each group that :meth:`match` would take and that only the prefix cache holds now: they can be
        evicted until the request has them, and no longer."""
        return () if request.given is not None else self.prefixes.held_alone(request.source, request.options.salt)

    def will_find(self, requests: Sequence[Request]) -> list[int]:
        """Return how many tokens each request is going to find, oldest first, when those before it have been computed:
        what is cached, or what it has in common with the oldest of them that begins with the same block."""
        oldest: dict[tuple[Hashable, tuple[int, ...]], Request] = {}
        found = []
        for request in requests:
            if request.given is not None:
                found.append(0)
                continue
            other = oldest.setdefault((request.options.salt, tuple(request.source[: self.pool.block_size])), request)
            common = 0 if other is request else min(_common(request, other), len(request.source) - 1)
            found.append(max(common, self.prefixes.held(request.source, request.options.salt)))
        return found

    def must_wait(self, request: Request) -> bool:
        """Return whether a running request is about to compute a block or more of this one's tokens, beyond what is
        there."""
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
        """Put the longest known prefix under the fresh caches of a request that is not computed yet, nor was given a
        cache. Returns its length."""
        longest = self._longest(request)
        start = self._starts[request.uid] = self._start(request)
        self._siblings.setdefault(start, {})[request.uid] = request
        if longest is not None:
            length, other = longest
            if length > self.prefixes.held(request.source, request.options.salt):
                self._insert(request.source[:length], other)
        # No more than can be used: behind a window, what was taken could not be cut.
        length, tables = self.prefixes.adopt(request.source[: request.prefill_end + 1], request.options.salt)
        if not length or request.sequence is None:
            return 0
        request.sequence.tables[:] = tables
        request.sequence.set_level()
        return length

    def _start(self, request: Request) -> _Start:
        return request.options.salt, tuple(request.source[: self.pool.block_size])

    def _running(self, request: Request) -> list[Request]:
        """Return the others that run and begin with the same block, under the same salt. None of them came with a
        cache: its tokens are not known for certain."""
        siblings = self._siblings.get(self._start(request), {})
        return [other for other in siblings.values() if other is not request and other.caches]

    def _leaves(self, request: Request) -> None:
        """The request gives its blocks back."""
        start = self._starts.pop(request.uid, None)
        if start is not None:
            del self._siblings[start][request.uid]
            if not self._siblings[start]:
                del self._siblings[start]

    def _longest(self, request: Request) -> tuple[int, Request] | None:
        """Return the longest prefix that a running request has computed, and that request."""
        best: tuple[int, Request] | None = None
        for other in self._running(request):
            length = min(_common(request, other), other.length, len(request.source) - 1)
            if length > (0 if best is None else best[0]):
                best = length, other
        return best

    # Inserting ------------------------------------------------------------------------------------------------

    def insert_chunk(self, request: Request) -> None:
        """A chunk of the request's prompt has been computed. Whole blocks only, except at the prompt's end: a request
        that goes on would have to copy the last one."""
        if self.has_windows and request.caches is not None:
            tokens = request.cached_tokens()
            at_end = request.is_prefilled
            self._insert(tokens if at_end else tokens[: self._whole_blocks(len(tokens))], request)

    def insert_delivered(self, request: Request) -> None:
        """The request gives its blocks back before it has finished: whole blocks of what was delivered are kept."""
        self._leaves(request)
        if request.caches is not None:
            tokens = request.cached_tokens()
            self._insert(tokens[: self._whole_blocks(len(tokens))], request)

    def insert_all(self, request: Request, tokens: Sequence[int]) -> None:
        """Take what a finished request leaves; ``tokens`` are in its cache."""
        self._leaves(request)
        if len(tokens) == request.length:
            self._insert(tokens, request)

    def forget(self, request: Request) -> None:
        """Forget a failed request; nothing is kept of it."""
        self._leaves(request)

    def evict(self) -> bool:
        """Nothing is held here: the pool itself asks the cache for blocks."""
        return False

    def _insert(self, tokens: Sequence[int], request: Request) -> None:
        # Without the tokens of a cache that came with it, positions and tokens do not agree.
        if tokens and request.sequence is not None and request.knows_history:
            self.prefixes.donate(tokens, request.sequence.tables, request.options.salt)

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.pool.block_size


def _common(request: Request, other: Request) -> int:
    """:func:`common_length` of their tokens. Asked in every step: where they differ is found once."""
    known = request.common.get(other.uid)
    if known is None:
        known = common_length(request.source, other.source)
        if known < min(len(request.source), len(other.source)):
            request.common[other.uid] = known
    return known


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two lists begin with alike; compares slices, not single tokens."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
