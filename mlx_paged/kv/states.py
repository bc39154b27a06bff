"""StateSlots: bytes that states beside keys and values take of a pool's budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import BlockStateError


class StateSlot:
    """Bytes of one sequence's states: convolution tails and recurrent states of all its layers without blocks.

    It counts in the pool's budget from the moment it is taken until it is dropped.

    Attributes:
        nbytes: size of the states.
        caches: the states, never written to, or what they can be made of; None: they are in a batch, or in a request's
            own caches.
    """

    __slots__ = ("__weakref__", "caches", "nbytes")

    def __init__(self, nbytes: int, caches: Any = None) -> None:
        self.nbytes = nbytes
        self.caches = caches


class StateSlots:
    """All slots of one pool. Any thread may take and drop them."""

    def __init__(self) -> None:
        # By number, bytes of the slots that somebody holds. Finalizers of other threads remove entries, so it is copied
        # in one operation before it is summed.
        self._held: dict[int, int] = {}
        self._taken = 0

    def take(self, nbytes: int, caches: Any = None) -> StateSlot:
        """Return a slot that counts until it is dropped. The caller has seen to it that there is room."""
        slot = StateSlot(nbytes, caches)
        self._taken += 1
        self._held[self._taken] = nbytes
        release: Callable[..., Any] = self._held.pop
        weakref.finalize(slot, release, self._taken, None).atexit = False
        return slot

    @property
    def nbytes(self) -> int:
        """Bytes of all slots held."""
        return sum(list(self._held.values())) if self._held else 0

    def __len__(self) -> int:
        return len(self._held)

    def check_integrity(self, known: int) -> None:
        """Raise BlockStateError if prefix caches hold more bytes than there are slots for."""
        if known > self.nbytes:
            raise BlockStateError(f"prefix caches hold {known} bytes of states, and slots count {self.nbytes}")
