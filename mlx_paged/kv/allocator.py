"""BlockAllocator: which block ids are free, and how often the others are held."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from ..errors import BlockStateError

NULL_BLOCK = 0  # never handed out: padding rows and released positions point at it


class BlockAllocator:
    """Free list and reference counts of one group of layers.

    Ids run from 1 to ``num_blocks - 1``; block 0 is the null block. The lowest free id is handed out first, so
    that a fresh sequence gets consecutive blocks (one copy instead of many) and decisions are deterministic.
    """

    def __init__(self) -> None:
        self._refcounts: list[int] = [0]  # never replaced: `refcount` is bound to it
        # Returns a block's reference count, 0 if it is free. A bound method, as each row calls it in each step.
        self.refcount: Callable[[int], int] = self._refcounts.__getitem__
        self._free: list[int] = []
        self._num_shared = 0
        self.peak_live = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that exist, the null block included."""
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Blocks with at least one reference."""
        return len(self._refcounts) - 1 - len(self._free)

    @property
    def num_shared(self) -> int:
        """Blocks with a reference count above one."""
        return self._num_shared

    def grow(self, num_blocks: int) -> None:
        """Add ids up to ``num_blocks - 1``, as free blocks."""
        first = len(self._refcounts)
        self._refcounts.extend([0] * (num_blocks - first))
        for block_id in range(first, num_blocks):
            heapq.heappush(self._free, block_id)

    def clear(self) -> None:
        """Drop all ids but the null block's. Raises BlockStateError if a block is held."""
        if self.num_live:
            raise BlockStateError(f"cannot drop the ids of {self.num_live} blocks that are held")
        del self._refcounts[1:]
        self._free.clear()

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference. Raises before taking any if too few are free."""
        if count > len(self._free):
            raise BlockStateError(f"cannot allocate {count} blocks: {len(self._free)} are free")
        self.peak_live = max(self.peak_live, self.num_live + count)
        ids = [heapq.heappop(self._free) for _ in range(count)]
        for block_id in ids:
            self._refcounts[block_id] = 1
        return ids

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block; null blocks are skipped. Raises before any change if one is free."""
        ids = self._checked(block_ids, "retained")
        for block_id in ids:
            self._refcounts[block_id] += 1
            if self._refcounts[block_id] == 2:
                self._num_shared += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block; at zero it is free again. Raises before any change if one is free."""
        ids = self._checked(block_ids, "released")
        if len(set(ids)) != len(ids):
            for block_id in set(ids):
                if ids.count(block_id) > self._refcounts[block_id]:
                    raise BlockStateError(f"block {block_id} cannot be released more often than it is held")
        for block_id in ids:
            self._refcounts[block_id] -= 1
            if self._refcounts[block_id] == 1:
                self._num_shared -= 1
            elif self._refcounts[block_id] == 0:
                heapq.heappush(self._free, block_id)

    def _checked(self, block_ids: Sequence[int], verb: str) -> list[int]:
        ids = [block_id for block_id in block_ids if block_id != NULL_BLOCK]
        for block_id in ids:
            if not 0 < block_id < len(self._refcounts) or self._refcounts[block_id] == 0:
                raise BlockStateError(f"block {block_id} cannot be {verb}: it is free")
        return ids

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare the reference counts with the block ids that ``holders`` really hold.

        Raises:
            BlockStateError: a count differs, a free block is held, or the free list is not exactly the zero counts.
        """
        expected = [0] * len(self._refcounts)
        for block_ids in holders:
            for block_id in block_ids:
                expected[block_id] += 1
        expected[NULL_BLOCK] = 0
        if expected != self._refcounts:
            wrong = [b for b in range(len(expected)) if expected[b] != self._refcounts[b]]
            raise BlockStateError(
                f"reference counts differ from holders: "
                f"{[(b, self._refcounts[b], expected[b]) for b in wrong[:8]]} (block, count, holders)"
            )
        zero = [b for b in range(1, len(expected)) if self._refcounts[b] == 0]
        if sorted(self._free) != zero:
            raise BlockStateError(f"free list {sorted(self._free)[:8]}... is not the set of unreferenced blocks")
        if self._num_shared != sum(count > 1 for count in self._refcounts):
            raise BlockStateError(f"the count of shared blocks is wrong: {self._num_shared}")
