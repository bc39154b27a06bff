"""PoolBudget: whether tokens yet to be appended fit a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import PoolExhaustedError
from .block_table import BlockTable
from .group import BlockGroup
from .pool import BlockPool

# A sequence's tables, one for each group (none: it holds nothing yet), and the tokens to append to it.
Growth = Iterable[tuple[Sequence[BlockTable] | None, int]]


class PoolBudget:
    """Counts blocks that appends need, and blocks that are free, can be made, or can be had from prefix caches.

    Args:
        pool: of the sequences. Its geometry must be known, or everything fits.
        chunk: most tokens appended at a time to a sequence: a sliding window holds no more than itself and a chunk.
    """

    def __init__(self, pool: BlockPool, *, chunk: int) -> None:
        self.pool = pool
        self.chunk = chunk

    def holds(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits the whole budget, with nothing else in the pool."""
        # The null block is of no use to a sequence, but it takes its place.
        needed = sum((self._blocks(g, None, num_tokens) + 1) * g.bytes_per_block for g in self.pool.groups)
        return needed <= self.pool.memory_budget

    def fits_blocks(self, num_blocks: int) -> bool:
        """Whether so many blocks of each group can be had without giving up any: enough for a token of as many
        sequences."""
        self.pool.collect()
        groups = self.pool.groups
        missing = sum(max(0, num_blocks - group.allocator.num_free) * group.bytes_per_block for group in groups)
        return missing <= self._growable()

    def _growable(self) -> int:
        """Bytes by which the pool may still grow."""
        return self.pool.memory_budget - sum(group.bytes_reserved for group in self.pool.groups)

    def fits(self, growth: Growth) -> bool:
        """Whether all these appends fit together as things stand."""
        listed = list(growth)
        self.pool.collect()
        growable = self._growable()
        holders = self.pool.holders()
        for index, group in enumerate(self.pool.groups):
            needed = self._blocks_of(index, listed)
            growable -= max(0, needed - group.allocator.num_free) * group.bytes_per_block
            if growable < 0:
                growable += sum(holder.reclaimable(index) for holder in holders) * group.bytes_per_block
            if growable < 0:
                return False
        return True

    def make_room(self, soon: Growth, in_all: Callable[[], Growth]) -> None:
        """Grow the pool where what is appended soon needs it, and by no more than is going to be appended in all."""
        soon = list(soon)
        for index, group in enumerate(self.pool.groups):
            needed = self._blocks_of(index, soon)
            if needed > group.allocator.num_free:
                self.pool.make_free(index, needed, self._blocks_of(index, in_all()))

    def _blocks_of(self, index: int, growth: Growth) -> int:
        """Blocks of a group that all these appends take."""
        group = self.pool.groups[index]
        return sum(self._blocks(group, tables[index] if tables else None, n) for tables, n in growth)

    def exhausted(self, tables: Sequence[BlockTable] | None, num_tokens: int) -> PoolExhaustedError:
        """The error for an append that does not fit."""
        needs = [
            (group, self._blocks(group, tables[index] if tables else None, num_tokens))
            for index, group in enumerate(self.pool.groups)
        ]
        return PoolExhaustedError(
            blocks_needed=sum(blocks for _, blocks in needs),
            bytes_needed=sum(blocks * group.bytes_per_block for group, blocks in needs),
            budget_bytes=self.pool.memory_budget,
            bytes_reserved=sum(group.bytes_reserved for group in self.pool.groups),
        )

    def _blocks(self, group: BlockGroup, table: BlockTable | None, num_tokens: int) -> int:
        """Blocks of a group that appending so many tokens to a table takes, beyond those the table has."""
        size, spec = self.pool.block_size, group.spec
        length = table.length if table is not None else 0
        end = -(-(length + num_tokens) // size)
        if spec.window is None:
            held = len(table.block_ids) if table is not None else 0
            return max(0, end - held) + self._copies_tail(group, table)
        start = spec.first_kept(length) // size
        widest = min(end - start, -(-(spec.window - 1 + min(num_tokens, self.chunk)) // size) + 1)
        widest = min(end, widest + -(-spec.pinned // size))
        held = table.num_blocks - _behind(table, start) if table is not None else 0
        return max(0, widest - held) + self._copies_tail(group, table)

    def _copies_tail(self, group: BlockGroup, table: BlockTable | None) -> int:
        """1 if the next token goes into a block that is shared, which is copied first."""
        if table is None:
            return 0
        tail = table.length // self.pool.block_size
        return int(tail < len(table.block_ids) and group.allocator.refcount(table.block_ids[tail]) > 1)


def _behind(table: BlockTable, start: int) -> int:
    """Blocks held before index ``start``: the next append gives them back."""
    first = max(table.logical_start // table.block_size, table.num_pinned_blocks)
    return sum(block_id != 0 for block_id in table.block_ids[first:start])
