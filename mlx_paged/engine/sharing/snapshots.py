"""Snapshots: prefixes of models that keep other states than keys and values. They can be gone on from where they were
taken, and nowhere else."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ..request import Request
from .prefix_sharing import common_length

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
        """Of requests, oldest first, the tokens that each finds; what those before it will have left is not counted."""
        return [self.available(request) for request in requests]

    def must_wait(self, request: Request) -> bool:
        """Whether a running request is about to come to an end that this one can go on from, beyond what is there."""
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
        """The longest snapshot of a prefix."""
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
        """The request has failed."""
        self._latest.pop(request.uid, None)

    def insert_all(self, request: Request, tokens: list[int]) -> None:
        """The request has finished; ``tokens`` are in its caches."""
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
