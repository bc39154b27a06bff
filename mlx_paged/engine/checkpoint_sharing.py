"""Prefixes that requests share where layers keep states beside keys and values: they end at checkpoints."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..prefix.spill_folder import SavedStates
from ..prefix.store import SharedPrefixes
from .request import Request
from .sharing import common_length

LEAST_SHARED = 32  # tokens; a state costs as much as many of them
# By default checkpoints of a prompt take up to 16 KiB a token, about what keys and values of a dense model of 1B take.
BYTES_PER_TOKEN = 16 << 10
LEAST_INTERVAL, MOST_INTERVAL = 64, 4096


class CheckpointSharing:
    """Finds prefixes when a request starts, and keeps checkpoints as prompts are computed.

    A state cannot be cut: it belongs to all the tokens that made it, and serves those that begin with all of them. So
    checkpoints are kept every ``interval`` tokens of a prompt, at the ends of the caller's segments (system prompts,
    turns), where a prompt parts from one that waits or was there before, at the prompt's end and at the answer's.

    Args:
        prefixes: the prefix cache.
        requests: the requests by uid, oldest first.
        interval: tokens between checkpoints of a prompt; 0: none but at the ends; None: by the size of the states.
    """

    has_windows = True  # prefixes are found at some ends only

    def __init__(self, prefixes: SharedPrefixes, requests: Mapping[int, Request], interval: int | None = None) -> None:
        self.prefixes, self.pool = prefixes, prefixes.pool  # which a tree does not keep alive
        self.requests = requests
        self.interval = interval

    # Matching -------------------------------------------------------------------------------------------------

    def available(self, request: Request) -> int:
        """Tokens that the request would not have to compute if it started now."""
        return 0 if request.given is not None else self._held(request)[0]

    def held_alone(self, request: Request) -> Sequence[int]:
        """Return how many blocks of each group :meth:`match` would take and that only the prefix cache holds now."""
        return () if request.given is not None else self._held(request)[1]

    def _held(self, request: Request) -> tuple[int, Sequence[int]]:
        return self.prefixes.held_checkpoint(request.source, request.options.salt)

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
            sequence.tables[:] = tables
            sequence.set_level()
        return length

    def _add_ends(self, request: Request, length: int) -> None:
        """Let chunks end where checkpoints are to be kept."""
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
        if request.given is None:
            # Others began like this before: more are going to.
            known = self.prefixes.known_length(request.source, request.options.salt)
            if known - length >= LEAST_SHARED and known < request.prefill_end:
                ends.add(known)
        ends.update(self._interval_ends(request, length))
        request.boundaries = deque(sorted(ends))

    def _interval_ends(self, request: Request, length: int) -> range:
        if not self.interval:
            return range(0)
        return range((length // self.interval + 1) * self.interval, request.prefill_end, self.interval)

    # Inserting ------------------------------------------------------------------------------------------------

    def insert_chunk(self, request: Request) -> None:
        """A chunk of the request's prompt has been computed."""
        if request.caches is None or not request.knows_history:
            return
        if self.interval is None:
            self._choose_interval(request)
        if request.is_prefilled or request.length in request.boundaries:
            self._keep(request.cached_tokens(), request)

    def insert_delivered(self, request: Request) -> None:
        """The request gives its caches back before it has finished: what it has left at its checkpoints stays."""

    def forget(self, request: Request) -> None:
        """Forget a failed request."""

    def insert_all(self, request: Request, tokens: list[int]) -> None:
        """Take what a finished request leaves; ``tokens`` are in its caches."""
        if request.caches is not None and request.knows_history and len(tokens) == request.length:
            self._keep(tokens, request)

    def evict(self) -> bool:
        """Nothing is held here: the pool itself asks the prefix cache for blocks and states."""
        return False

    def _choose_interval(self, request: Request) -> None:
        """The size of a state is known once one was computed."""
        nbytes = sum(cache.nbytes for cache in leaves(request.caches or []) if not _is_paged(cache))
        self.interval = interval_of(nbytes)
        for other in self.requests.values():
            if other.caches is not None:
                other.boundaries = deque(sorted({*other.boundaries, *self._interval_ends(other, other.length)}))

    def _keep(self, tokens: list[int], request: Request) -> None:
        tables = request.tables or []
        self.prefixes.donate_checkpoint(tokens, tables, lambda: _states_of(request), request.options.salt)


def interval_of(nbytes: int) -> int:
    """Return the tokens between checkpoints whose states have so many bytes: a power of two."""
    interval = LEAST_INTERVAL
    while interval < MOST_INTERVAL and interval * BYTES_PER_TOKEN < nbytes:
        interval *= 2
    return interval


def _is_paged(cache: Any) -> bool:
    return isinstance(cache, PagedKVCache)


def _states_of(request: Request) -> tuple[int, list[Any]]:
    """Return copies of the request's caches that are not paged, and their bytes. Arrays that are views are copied, so
    that a checkpoint does not keep what they were cut from."""
    copies = copy.deepcopy([cache for cache in leaves(request.caches or []) if not _is_paged(cache)])
    for cache in copies:
        arrays = getattr(cache, "cache", None)
        if isinstance(arrays, list):
            cache.cache = [None if array is None else mx.contiguous(array) for array in arrays]
    mx.eval([array for cache in copies for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)])
    return sum(cache.nbytes for cache in copies), copies
