"""HeldArrays: arrays read from a pool's blocks whose computation nothing orders before the next write."""

from __future__ import annotations

import weakref
from threading import get_ident

import mlx.core as mx


class HeldArrays:
    """Pairs of keys and values that attention has not used, because it read the blocks instead. They are mostly dropped
    at once; pairs that a caller still holds are computed before the next write to the pool."""

    def __init__(self) -> None:
        self._pairs: list[tuple[weakref.ref[mx.array], weakref.ref[mx.array], int]] = []

    def add(self, keys: mx.array, values: mx.array) -> None:
        """Note a pair that the present thread has built."""
        self._pairs.append((weakref.ref(keys), weakref.ref(values), get_ident()))

    def compute(self) -> None:
        """Compute the pairs that are still held. Only the thread that built them can."""
        if self._pairs:
            pairs, self._pairs = self._pairs, []
            held = [
                array
                for *refs, thread in pairs
                if thread == get_ident()
                for ref in refs
                if (array := ref()) is not None
            ]
            mx.eval(held)
