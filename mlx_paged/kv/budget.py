"""PoolBudget: whether tokens yet to be appended fit a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import PoolExhaustedError
from .block_table import BlockTable
from .pool import BlockPool


class Append(NamedTuple):
    """Tokens to append to a sequence.

    Attributes:
        tables: one per group; None if the sequence holds nothing yet.
        num_tokens: tokens to append.
        forked: the tables stay as they are, and a fork of them takes the tokens.
        held_alone: blocks of each group that only a prefix cache holds and that the sequence will adopt; () if none.
        num_cached: tokens in those blocks, which come before the tokens to append.
    """

    tables: Sequence[BlockTable] | None
    num_tokens: int
    forked: bool = False
    held_alone: Sequence[int] = ()
    num_cached: int = 0


Growth = Iterable[Append | tuple[Sequence[BlockTable] | None, int]]


class PoolBudget:
    """The blocks that appends need, against those available: free in any group (groups make room for each other), not
    allocated yet, or held by prefix caches alone.

    A sequence that :meth:`holds` accepts can always continue once it runs alone: all that it takes is counted there.

    Args:
        pool: the pool of the sequences. Until its geometry is known, everything fits.
        chunk: most tokens appended to a sequence at a time: a sliding window holds no more than itself and a chunk.
    """

    def __init__(self, pool: BlockPool, *, chunk: int) -> None:
        self.pool = pool
        self.chunk = chunk

    def holds(self, num_tokens: int, tables: Sequence[BlockTable] | None = None) -> bool:
        """Return whether a sequence of ``num_tokens`` tokens fits the whole budget, with nothing else in the pool; with
        ``tables``, whether ``num_tokens`` tokens fit in addition to those that the tables hold and keep."""
        return self.bytes_for(num_tokens, tables) <= self.pool.memory_budget

    def bytes_for(self, num_tokens: int, tables: Sequence[BlockTable] | None = None) -> int:
        """Return the smallest budget, in bytes, for which :meth:`holds` is true."""
        needed = 0
        for index, group in enumerate(self.pool.groups):
            blocks = 1  # the null block takes memory, too
            if tables is not None:
                blocks += tables[index].num_blocks
            elif self.pool.holders():
                blocks += 1  # the last block of a prompt goes to the prefix cache, and the next token into a copy
            blocks += self._blocks(index, Append(tables, num_tokens, forked=True))
            needed += blocks * group.bytes_per_block
        return needed

    def fits_blocks(self, num_blocks: int) -> bool:
        """Return whether each group can provide ``num_blocks`` blocks without moving or evicting any. That is enough
        for one token each of as many sequences."""
        self.pool.collect()
        missing = sum(group.bytes_to_free(num_blocks) for group in self.pool.groups)
        return missing <= self.pool.memory.unreserved_bytes

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks of each group that an append of ``num_tokens`` tokens takes: a copy of a shared last
        block that has room for one token, and blocks for the rest."""
        return -(-(num_tokens - 1) // self.pool.block_size) + 1

    def has_blocks(self, num_blocks: int) -> bool:
        """Return whether each group can provide ``num_blocks`` blocks if unused prefixes are evicted."""
        self.pool.collect()
        return self._has_bytes(num_blocks * sum(group.bytes_per_block for group in self.pool.groups))

    def fits(self, growth: Growth) -> bool:
        """Return whether all these appends fit together, in any order. If they do not at first, blocks that they would
        release behind sliding windows are released."""
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

    def _blocks_of(self, index: int, growth: Iterable[Append]) -> int:
        """Return how many blocks of a group all these appends take."""
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
        # A sliding window returns adopted blocks to the prefix cache: at most the blocks needed without a prefix, and a
        # copy of the last adopted block.
        in_all = group.blocks_to_append(None, append.num_cached + append.num_tokens, chunk=self.chunk)
        return min(append.held_alone[index] + blocks, in_all + 1)
