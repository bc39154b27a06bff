"""Snapshots: prefixes of models that keep other states than keys and values. They can be gone on from where they were
taken, and nowhere else."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from .row import Row
from .sharing import common_length

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
        rows: the requests by uid, oldest first.
        max_snapshots: most kept; the least recently used go first.
    """

    has_windows = True  # prefixes are found at some ends only

    def __init__(self, rows: Mapping[int, Row], max_snapshots: int = MAX_SNAPSHOTS) -> None:
        self.rows = rows
        self.max_snapshots = max_snapshots
        self._snapshots: OrderedDict[_Key, Snapshot] = OrderedDict()
        self._latest: dict[int, _Key] = {}  # by uid: a chunk's end that the next one's replaces

    def __len__(self) -> int:
        return len(self._snapshots)

    # Taking ---------------------------------------------------------------------------------------------------

    def available(self, row: Row) -> int:
        """Tokens that the request would not have to compute if it started now."""
        found = self._find(row)
        return 0 if found is None else len(found[1])

    def must_wait(self, row: Row) -> bool:
        """Whether a running request is about to come to an end that this one can go on from, beyond what is there."""
        if row.given is not None:
            return False
        expected = 0
        for other in self.rows.values():
            if other is row or other.caches is None or other.base or other.request.length >= other.request.goal:
                continue
            if other.salt != row.salt:
                continue
            common = min(common_length(row.source, other.source), len(row.source) - 1)
            ends = [*other.request.boundaries, other.request.goal]
            expected = max([expected, *(end for end in ends if other.request.length < end <= common)])
        return expected >= LEAST_SHARED and expected > self.available(row)

    def adopt(self, row: Row) -> int:
        """Replace the request's fresh caches by copies of the longest snapshot's. Returns the tokens in them."""
        found = self._find(row)
        length = 0
        if found is not None:
            self._snapshots.move_to_end(found)
            row.caches = copy.deepcopy(self._snapshots[found].caches)
            length = len(found[1])
        self._add_ends(row, length)
        return length

    def _find(self, row: Row) -> _Key | None:
        """The longest snapshot of a prefix."""
        if row.given is not None:
            return None
        fitting = (
            key
            for key, snapshot in self._snapshots.items()
            if key[0] == row.salt and len(key[1]) < len(row.source) and row.source[: len(key[1])] == snapshot.tokens
        )
        return max(fitting, key=lambda key: len(key[1]), default=None)

    def _add_ends(self, row: Row, length: int) -> None:
        """Let a chunk end where the prompt parts from those of requests that wait."""
        request = row.request
        ends = set(request.boundaries)
        for other in self.rows.values():
            if other is not row and other.caches is None and other.given is None and other.salt == row.salt:
                common = min(common_length(row.source, other.source), len(other.source) - 1)
                if common - length >= LEAST_SHARED and common < request.goal:
                    ends.add(common)
        request.boundaries = deque(sorted(ends))

    # Leaving --------------------------------------------------------------------------------------------------

    def leave_chunk(self, row: Row) -> None:
        """A chunk of the request's prompt has been computed."""
        if row.caches is None or len(row.history) != row.base:
            return
        request = row.request
        at_end = request.length >= request.goal or request.length in request.boundaries
        before = self._latest.pop(row.uid, None)
        if before is not None:
            self._snapshots.pop(before, None)
        key = self._keep(row.cached_tokens(), row)
        if not at_end:
            self._latest[row.uid] = key

    def leave(self, row: Row) -> None:
        """The request gives its caches back before it has finished."""
        self._latest.pop(row.uid, None)

    def forget(self, row: Row) -> None:
        """The request has failed."""
        self._latest.pop(row.uid, None)

    def leave_all(self, row: Row, tokens: list[int]) -> None:
        """The request has finished; ``tokens`` are in its caches."""
        self._latest.pop(row.uid, None)
        if row.caches is not None and len(tokens) == row.request.length:
            self._keep(tokens, row)

    def give_up(self) -> bool:
        """Give the least recently used snapshot up. Returns whether there was one."""
        if not self._snapshots:
            return False
        self._snapshots.popitem(last=False)
        return True

    def _keep(self, tokens: list[int], row: Row) -> _Key:
        key = row.salt, tuple(tokens)
        self._snapshots.pop(key, None)
        self._snapshots[key] = Snapshot(list(tokens), copy.deepcopy(row.caches or []))
        while len(self._snapshots) > self.max_snapshots:
            self.give_up()
        return key
