"""PrefixSharing: what requests of a batch take from the prefix cache and from each other, and what they leave there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..kv.pool import BlockPool
from ..prefix.store import PrefixStore
from .row import Row


class PrefixSharing:
    """Finds prefixes when a request starts: in the prefix cache, or in the blocks of a request that still runs.

    The blocks of a running request are put into the cache, by reference, when somebody needs them. Where a window
    moves on they would be gone by then, so there they are put in as they are computed.

    Args:
        prefixes: the prefix cache.
        pool: of the blocks.
        rows: the requests by uid, oldest first.
    """

    def __init__(self, prefixes: PrefixStore, pool: BlockPool, rows: Mapping[int, Row]) -> None:
        self.prefixes = prefixes
        self.pool = pool
        self.rows = rows
        self.has_windows = any(group.spec.window is not None for group in pool.groups)

    # Taking ---------------------------------------------------------------------------------------------------

    def available(self, row: Row) -> int:
        """Tokens that the request would not have to compute if it started now."""
        if row.given is not None:
            return 0
        longest = self._longest(row)
        return max(
            self.prefixes.held(row.source, row.salt), longest[0] if longest is not None and not self.has_windows else 0
        )

    def must_wait(self, row: Row) -> bool:
        """Whether a running request is about to compute a block or more of this one's tokens, beyond what is there."""
        if row.given is not None:
            return False
        known: int | None = None
        for other in self._running(row):
            goal = other.request.goal
            if other.request.length >= goal:
                continue
            common = min(_common(row, other), goal, len(row.source) - 1)
            if common - other.request.length < self.pool.block_size:
                continue
            known = self.available(row) if known is None else known
            if common - known >= self.pool.block_size:
                return True
        return False

    def adopt(self, row: Row) -> int:
        """Put the longest known prefix under the fresh caches of a request that is not computed yet, nor was given a
        cache. Returns its length."""
        longest = self._longest(row)
        if longest is not None:
            length, other = longest
            if length > self.prefixes.held(row.source, row.salt):
                self._donate(row.source[:length], other)
        # No more than can be used: behind a window, what was taken could not be cut.
        length, tables = self.prefixes.adopt(row.source[: row.request.goal + 1], row.salt)
        if not length or row.sequence is None:
            return 0
        row.sequence.tables[:] = tables
        for layer in row.sequence.offsets:
            row.sequence.offsets[layer] = length
        return length

    def _running(self, row: Row) -> list[Row]:
        """The others of the same salt whose caches hold their own source, from its first token on."""
        return [
            other
            for other in self.rows.values()
            if other is not row and other.base == 0 and other.caches and other.salt == row.salt
        ]

    def _longest(self, row: Row) -> tuple[int, Row] | None:
        """The longest prefix that a running request has computed, and that request."""
        best: tuple[int, Row] | None = None
        for other in self._running(row):
            length = min(_common(row, other), other.request.length, len(row.source) - 1)
            if length > (0 if best is None else best[0]):
                best = length, other
        return best

    # Leaving --------------------------------------------------------------------------------------------------

    def leave_chunk(self, row: Row) -> None:
        """A chunk of the request's prompt has been computed. Whole blocks only, except at the prompt's end: a request
        that goes on would have to copy the last one."""
        if self.has_windows and row.caches is not None:
            tokens = row.cached_tokens()
            at_end = row.request.length >= row.request.goal
            self._donate(tokens if at_end else tokens[: self._whole_blocks(len(tokens))], row)

    def leave(self, row: Row) -> None:
        """The request gives its blocks back before it has finished: whole blocks of what was delivered are kept."""
        if row.caches is not None:
            tokens = row.cached_tokens()
            self._donate(tokens[: self._whole_blocks(len(tokens))], row)

    def leave_all(self, row: Row, tokens: Sequence[int]) -> None:
        """The request has finished; ``tokens`` are in its cache."""
        if len(tokens) == row.request.length:
            self._donate(tokens, row)

    def forget(self, row: Row) -> None:
        """The request has failed; nothing is kept of it."""

    def give_up(self) -> bool:
        """Nothing is held here: the pool itself asks the cache for blocks."""
        return False

    def _donate(self, tokens: Sequence[int], row: Row) -> None:
        # Tokens that came with a cache may not have been told: then positions and tokens do not agree.
        if tokens and row.sequence is not None and len(row.history) == row.base:
            self.prefixes.donate(tokens, row.sequence.tables, row.salt)

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.pool.block_size


def _common(row: Row, other: Row) -> int:
    """:func:`common_length` of their tokens. Asked in every step: where they differ is found once."""
    known = row.common.get(other.uid)
    if known is None:
        known = common_length(row.source, other.source)
        if known < min(len(row.source), len(other.source)):
            row.common[other.uid] = known
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
