"""PoolBudget: whether tokens yet to be appended fit a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import PoolExhaustedError
from .block_table import BlockTable
from .pool import BlockPool


class Append(NamedTuple):
    """Tokens to append to a sequence.

    Attributes:
        tables: one for each group; None: it holds nothing yet.
        num_tokens: to append.
        forked: the tables stay as they are, and a fork of them takes the tokens.
        held_alone: blocks of each group that only a prefix cache holds now, and that the sequence takes over; () if
            there are none.
        num_cached: tokens in those blocks, before those to append.
    """

    tables: Sequence[BlockTable] | None
    num_tokens: int
    forked: bool = False
    held_alone: Sequence[int] = ()
    num_cached: int = 0


Growth = Iterable[Append | tuple[Sequence[BlockTable] | None, int]]


class PoolBudget:
    """Counts blocks that appends need, and blocks that can be had for them: free in any group, since groups make room
    for each other, not made yet, or held by prefix caches alone.

    A sequence that :meth:`holds` accepts can always go on once it is alone: of what it takes nothing is left out there.

    Args:
        pool: of the sequences. Its geometry must be known, or everything fits.
        chunk: most tokens appended at a time to a sequence: a sliding window holds no more than itself and a chunk.
    """

    def __init__(self, pool: BlockPool, *, chunk: int) -> None:
        self.pool = pool
        self.chunk = chunk

    def holds(self, num_tokens: int, tables: Sequence[BlockTable] | None = None) -> bool:
        """Return whether a sequence of so many tokens fits the whole budget, with nothing else in the pool; with
        ``tables``, so many tokens behind those that these hold and go on holding."""
        return self.bytes_for(num_tokens, tables) <= self.pool.memory_budget

    def bytes_for(self, num_tokens: int, tables: Sequence[BlockTable] | None = None) -> int:
        """Return the least budget that :meth:`holds` so many tokens, in bytes."""
        needed = 0
        for index, group in enumerate(self.pool.groups):
            blocks = 1  # the null block is of no use to a sequence, but it takes its place
            if tables is not None:
                blocks += tables[index].num_blocks
            elif self.pool.holders():
                blocks += 1  # the last block of a prompt goes to the prefix cache, and the next token into a copy
            blocks += self._blocks(index, Append(tables, num_tokens, forked=True))
            needed += blocks * group.bytes_per_block
        return needed

    def fits_blocks(self, num_blocks: int) -> bool:
        """Return whether so many blocks of each group can be had without moving or evicting any: enough for a token of
        as many sequences."""
        self.pool.collect()
        missing = sum(group.bytes_to_free(num_blocks) for group in self.pool.groups)
        return missing <= self.pool.memory.unreserved_bytes

    def most_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of each group an append of so many tokens takes at most: behind a block that is full
        but for one token, or behind one that others hold, too, and that is copied."""
        return -(-(num_tokens - 1) // self.pool.block_size) + 1

    def has_blocks(self, num_blocks: int) -> bool:
        """Return whether so many blocks of each group can be had, evicting unused prefixes."""
        self.pool.collect()
        return self._has_bytes(num_blocks * sum(group.bytes_per_block for group in self.pool.groups))

    def fits(self, growth: Growth) -> bool:
        """Return whether all these appends fit together, in any order. If it comes to that, what they are going to
        release behind sliding windows is released."""
        listed = [Append(*each) for each in growth]
        self.pool.collect()
        return self._fits(listed) or (self._slide(listed) and self._fits(listed))

    def _fits(self, growth: Sequence[Append]) -> bool:
        groups = enumerate(self.pool.groups)
        needed = sum(self._blocks_of(index, growth) * group.bytes_per_block for index, group in groups)
        return self._has_bytes(needed)

    def _has_bytes(self, num_bytes: int) -> bool:
        unheld = self.pool.memory.unheld_bytes
        return num_bytes <= unheld or self.pool.memory.can_reclaim(num_bytes - unheld)

    def _slide(self, growth: Sequence[Append]) -> bool:
        return self.pool.slide(table for each in growth if each.tables and not each.forked for table in each.tables)

    def grow_for(self, soon: Growth, in_all: Callable[[], Growth]) -> None:
        """Grow the pool where what is appended soon needs it: once for what is going to be appended in all, if that
        fits, and by no more than that. ``in_all`` is asked only then; what is appended soon is part of it."""
        listed = [Append(*each) for each in soon]
        self._slide(listed)
        needed = self._blocks_of_all(listed)
        if any(count > group.allocator.num_free for count, group in zip(needed, self.pool.groups, strict=True)):
            everything = self._blocks_of_all([Append(*each) for each in in_all()])
            self.pool.memory.ensure_free(needed, [max(pair) for pair in zip(needed, everything, strict=True)])

    def bytes_to_append(self, append: Append) -> int:
        """Bytes of the blocks that an append takes."""
        return sum(
            blocks * g.bytes_per_block
            for blocks, g in zip(self._blocks_of_all([append]), self.pool.groups, strict=True)
        )

    def _blocks_of_all(self, growth: Sequence[Append]) -> list[int]:
        """Blocks of each group that all these appends take."""
        return [self._blocks_of(index, growth) for index in range(len(self.pool.groups))]

    def _blocks_of(self, index: int, growth: Iterable[Append]) -> int:
        """Blocks of a group that all these appends take."""
        return sum(self._blocks(index, each) for each in growth)

    def exhausted(self, tables: Sequence[BlockTable] | None, num_tokens: int) -> PoolExhaustedError:
        """Return the error for an append that does not fit."""
        groups = self.pool.groups
        needs = [self._blocks(index, Append(tables, num_tokens)) for index in range(len(groups))]
        num_bytes = sum(blocks * group.bytes_per_block for blocks, group in zip(needs, groups, strict=True))
        return self.pool.memory.exhausted(sum(needs), num_bytes)

    def _blocks(self, index: int, append: Append) -> int:
        table = append.tables[index] if append.tables else None
        group = self.pool.groups[index]
        blocks = group.blocks_to_append(table, append.num_tokens, chunk=self.chunk, forked=append.forked)
        if not append.held_alone:
            return blocks
        # A window leaves blocks that were taken over to the prefix cache again: never more than without a prefix, and
        # the copy of the last of them.
        in_all = group.blocks_to_append(None, append.num_cached + append.num_tokens, chunk=self.chunk)
        return min(append.held_alone[index] + blocks, in_all + 1)
