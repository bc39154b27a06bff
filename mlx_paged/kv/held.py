"""HeldArrays: arrays read from a pool's blocks whose computation nothing orders before the next write."""

from __future__ import annotations

import threading
import weakref

import mlx.core as mx


class HeldArrays:
    """Pairs of keys and values that attention has not used, because it read the blocks instead. They are mostly dropped
    at once; pairs that a caller still holds are computed before the next write to the pool, and before the thread that
    has built them releases the pool's lock.

    Attributes:
        pairs: weak references to them.
        local: ``has_written`` if the thread has written to the pool before.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[weakref.ref[mx.array], weakref.ref[mx.array]]] = []
        self.local = threading.local()

    def add(self, keys: mx.array, values: mx.array) -> None:
        """Note a pair."""
        self.pairs.append((weakref.ref(keys), weakref.ref(values)))

    def compute(self) -> None:
        """Compute the pairs that are still held."""
        if self.pairs:
            pairs, self.pairs = self.pairs, []
            mx.eval([array for pair in pairs for ref in pair if (array := ref()) is not None])
