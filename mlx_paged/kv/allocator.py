"""BlockAllocator: which block ids are free, and how often the others are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import BlockStateError

NULL_BLOCK = 0  # never handed out: padding rows and released positions point at it
# Free blocks left on either side of a sequence's first blocks on a CPU, for this sequence and the one before to grow
# into: 64 tokens in blocks of 8, a CPU's default.
SPACING = 8


class BlockAllocator:
    """Free blocks and reference counts of one group of layers.

    Ids run from 1 to ``num_blocks - 1``; block 0 is the null block. The lowest free ids are handed out first, or, on
    request, consecutive ones. Either is deterministic.

    Attributes:
        num_blocks: blocks that exist, the null block included.
        num_free, num_live: blocks without a reference, and the others.
        num_shared: blocks with a reference count above one.
        peak_live: most live blocks so far.
    """

    def __init__(self) -> None:
        self.num_blocks = 1
        self.num_free = self.num_live = self.num_shared = self.peak_live = 0
        self._refcounts: list[int] = [0]  # never replaced: `refcount` is bound to it
        # Returns a block's reference count, 0 if it is free. A bound method, as each row calls it in each step.
        self.refcount: Callable[[int], int] = self._refcounts.__getitem__
        self._held = bytearray(b"\1")  # of each block 1 if it has a reference; else 0. The null block counts as held
        self._lowest = 1  # no lower block is free

    def grow(self, num_blocks: int) -> None:
        """Add ids up to ``num_blocks - 1``, as free blocks."""
        more = num_blocks - self.num_blocks
        self._refcounts.extend([0] * more)
        self._held.extend(bytes(more))
        self.num_blocks += more
        self.num_free += more

    def clear(self) -> None:
        """Drop all ids but the null block's. Raises BlockStateError if a block is held."""
        if self.num_live:
            raise BlockStateError(f"cannot drop the ids of {self.num_live} blocks that are held")
        del self._refcounts[1:], self._held[1:]
        self.num_blocks, self.num_free, self._lowest = 1, 0, 1

    def allocate(self, count: int, first: int | None = None) -> list[int]:
        """Take ``count`` free blocks, each with one reference: those from ``first`` on, as :meth:`find` has returned
        it, or the lowest. Raises before taking any if too few are free."""
        if count > self.num_free:
            raise BlockStateError(f"cannot allocate {count} blocks: {self.num_free} are free")
        ids: list[int] = []
        block_id = self._lowest - 1
        for _ in range(count):
            block_id = self._held.find(0, block_id + 1) if first is None else first + len(ids)
            ids.append(block_id)
            self._refcounts[block_id] = self._held[block_id] = 1
        if first is None:
            self._lowest = block_id + 1
        self.num_free -= count
        self.num_live += count
        self.peak_live = max(self.peak_live, self.num_live)
        return ids

    def find(self, count: int, after: int, spacing: int = SPACING) -> int | None:
        """Return the first of ``count`` consecutive free blocks: those that follow ``after``, a sequence's last block,
        or for a sequence without blocks (NULL_BLOCK) some with ``spacing`` free ones before and after them. None if
        there are none."""
        if after != NULL_BLOCK or not self.num_live:
            return after + 1 if self._held.startswith(bytes(count), after + 1) else None
        found = self._held.find(bytes(count + 2 * spacing))
        return None if found < 0 else found + spacing

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block; null blocks are skipped. Raises before any change if one is free."""
        ids = self._checked(block_ids, "retained")
        for block_id in ids:
            self._refcounts[block_id] += 1
            if self._refcounts[block_id] == 2:
                self.num_shared += 1

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
                self.num_shared -= 1
            elif self._refcounts[block_id] == 0:
                self._held[block_id] = 0
                self.num_free += 1
                self.num_live -= 1
                self._lowest = min(self._lowest, block_id)

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
        held = bytes([1, *(count > 0 for count in self._refcounts[1:])])
        if self._held != held or self.num_free != held.count(0) or 0 in held[: self._lowest]:
            raise BlockStateError("the free blocks are not those without references")
        if self.num_shared != sum(count > 1 for count in self._refcounts):
            raise BlockStateError(f"the count of shared blocks is wrong: {self.num_shared}")
