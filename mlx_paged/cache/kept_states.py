"""KeptStates: copies of a sequence's states at the ends of prompts and answers, to which it can be trimmed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..kv.memory import StateSlot
from ..kv.owners import BlockHolder
from ..kv.pool import BlockPool

MOST_COPIES = 8
# Share of a pool's budget for the copies of one sequence. They are dropped before blocks run out.
COPIES_SHARE = 1 / 4


class KeptStates(BlockHolder):
    """Copies of a sequence's states, by the number of tokens before them.

    A state cannot be trimmed, so a prompt cache with states can only go back to where a copy was made: at the start of
    a prompt (the end of the answer before it) and at its end, without its last token. As a holder of the pool, this
    counts in its budget, and drops copies when blocks need their bytes.
    """

    evictions = hit_tokens = 0

    def __init__(self) -> None:
        self._slots: dict[int, StateSlot] = {}
        self._prompt_end: int | None = None
        self._pool: BlockPool | None = None  # where this is a holder

    def begin_prompt(self, pool: BlockPool, length: int, states: Sequence[Any]) -> None:
        """Copy the states after ``length`` tokens, before a chunk of a prompt is computed. If the chunk continues the
        last one, it is of the same prompt: the copy between them is dropped instead."""
        if self._prompt_end == length:
            self._slots.pop(length, None)
        else:
            self._keep(pool, length, states)

    def end_prompt(self, pool: BlockPool, length: int, states: Sequence[Any]) -> None:
        """Copy the states after a chunk of a prompt, which ends at ``length`` tokens."""
        self._prompt_end = length
        self._keep(pool, length, states)

    def go_back(self, length: int) -> list[Any] | None:
        """Return copies of the states after ``length`` tokens, and drop those after more. If there are none, return
        None and drop nothing."""
        slot = self._slots.get(length)
        if slot is None:
            return None
        self.forget_behind(length)
        return copy.deepcopy(slot.caches)  # type: ignore[no-any-return]

    def forget_behind(self, length: int) -> None:
        """Drop the states after more than ``length`` tokens, because other tokens may follow."""
        for each in [each for each in self._slots if each > length]:
            del self._slots[each]
        self._prompt_end = None

    def _keep(self, pool: BlockPool, length: int, states: Sequence[Any]) -> None:
        if pool is not self._pool:  # a sequence may change its pool until its first tokens are written
            self._pool = pool
            pool.add_holder(self)
        nbytes, most = sum(state.nbytes for state in states), int(pool.memory.budget * COPIES_SHARE)
        while self._slots and (len(self._slots) >= MOST_COPIES or self.state_nbytes + nbytes > most):
            del self._slots[next(iter(self._slots))]
        if nbytes <= most and pool.memory.make_room_for_state(nbytes):
            self._slots[length] = pool.memory.states.take(*copy_states(states))

    # BlockHolder ----------------------------------------------------------------------------------------------

    @property
    def state_nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(slot.nbytes for slot in self._slots.values())

    def evict_states(self, num_bytes: int) -> int:
        """Drop copies of at least ``num_bytes`` bytes, oldest first. Return how many bytes were freed."""
        freed = 0
        while self._slots and freed < num_bytes:
            freed += self._slots.pop(next(iter(self._slots))).nbytes
        return freed


def copy_states(states: Sequence[Any]) -> tuple[int, list[Any]]:
    """Return the bytes of caches with states, and copies of them. Arrays that are views are copied as well, because a
    view would keep the larger array alive."""
    copies = copy.deepcopy(list(states))
    for cache in copies:
        arrays = getattr(cache, "cache", None)
        if isinstance(arrays, list):
            cache.cache = [None if array is None else mx.contiguous(array) for array in arrays]
    mx.eval([array for cache in copies for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)])
    return sum(cache.nbytes for cache in copies), copies
