"""Prefixes that a batch's rows share through the radix tree, to the token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..kv.pool import BlockPool
from ..prefix.store import SharedPrefixes
from .request import Request

_Start = tuple[Hashable, tuple[int, ...]]  # the salt, and the tokens of the first block


class PrefixSharing:
    """Finds prefixes when a request starts: in the prefix cache, or in the blocks of a request that still runs.

    The blocks of a running request are put into the cache, by reference, when somebody needs them. Where a window
    moves on they would be gone by then, so there they are put in as they are computed.

    Args:
        prefixes: the prefix cache.
        pool: of the blocks.
    """

    def __init__(self, prefixes: SharedPrefixes, pool: BlockPool) -> None:
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
