"""PoolBudget: whether tokens yet to be appended fit a pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import PoolExhaustedError
from .block_table import BlockTable
from .memory import UNLIMITED
from .pool import BlockPool


class Append(NamedTuple):
    """Tokens to append to a sequence.

    Attributes:
        table: its table; None if the sequence holds nothing yet.
        num_tokens: tokens to append.
        forked: the table stays as it is, and a fork of it takes the tokens.
        held_alone: blocks of each group that only a prefix cache holds and that the sequence will adopt; () if none.
        num_cached: tokens in those blocks, which come before the tokens to append.
    """

    table: BlockTable | None
    num_tokens: int
    forked: bool = False
    held_alone: Sequence[int] = ()
    num_cached: int = 0


class PoolBudget:
    """The blocks that appends need, against those that each group can provide: free, not made yet, or held by prefix
    caches alone.

    A sequence that :meth:`holds` accepts can always continue once it runs alone: all that it takes is counted there.

    Args:
        pool: the pool of the sequences. Until its geometry is known, everything fits.
        chunk: most tokens appended to a sequence at a time: a sliding window holds no more than itself and a chunk.
    """

    def __init__(self, pool: BlockPool, *, chunk: int) -> None:
        self.pool = pool
        self.chunk = chunk

    def holds(self, num_tokens: int, table: BlockTable | None = None) -> bool:
        """Return whether a sequence of ``num_tokens`` tokens fits the whole budget, with nothing else in the pool; with
        ``table``, whether ``num_tokens`` tokens fit in addition to those that the table holds and keeps."""
        return self._are_held(self._blocks_alone(num_tokens, table), None)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the smallest budget, in bytes, for which :meth:`holds` is true."""
        counts = self._blocks_alone(num_tokens, None)
        return bisect_left(range(UNLIMITED), True, key=lambda budget: self._are_held(counts, budget))

    def _blocks_alone(self, num_tokens: int, table: BlockTable | None) -> list[int]:
        """Return the most blocks that a sequence takes in each group, null block included."""
        counts = []
        for index in range(len(self.pool.groups)):
            blocks = 1
            if table is not None:
                blocks += table.num_blocks(index)
            elif self.pool.holders():
                blocks += 1  # the last block of a prompt goes to the prefix cache, and the next token into a copy
            counts.append(blocks + self._blocks(index, Append(table, num_tokens, forked=True)))
        return counts

    def _are_held(self, counts: Sequence[int], budget: int | None) -> bool:
        most = self.pool.memory.capacities(budget)
        return all(count <= blocks for count, blocks in zip(counts, most, strict=True))

    def fits_blocks(self, num_blocks: int) -> bool:
        """Return whether each group can provide ``num_blocks`` blocks without evicting any. That is enough for one
        token each of as many sequences."""
        self.pool.collect()
        return num_blocks <= min(self.pool.memory.room(), default=num_blocks)

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks of each group that an append of ``num_tokens`` tokens takes: a copy of a shared last
        block that has room for one token, and blocks for the rest."""
        return -(-(num_tokens - 1) // self.pool.block_size) + 1

    def has_blocks(self, num_blocks: int) -> bool:
        """Return whether each group can provide ``num_blocks`` blocks if unused prefixes are evicted."""
        self.pool.collect()
        return self.pool.memory.can_provide([num_blocks] * len(self.pool.groups))

    def fits(self, growth: Sequence[Append]) -> bool:
        """Return whether all these appends fit together, in any order. If they do not at first, blocks that they would
        release behind sliding windows are released."""
        self.pool.collect()
        return self._fits(growth) or (self._slide(growth) and self._fits(growth))

    def _fits(self, growth: Sequence[Append]) -> bool:
        groups = range(len(self.pool.groups))
        return self.pool.memory.can_provide([sum(self._blocks(index, each) for each in growth) for index in groups])

    def _slide(self, growth: Sequence[Append]) -> bool:
        return self.pool.slide(each.table for each in growth if each.table is not None and not each.forked)

    def exhausted(self, table: BlockTable | None, num_tokens: int) -> PoolExhaustedError:
        """Return the error for an append that does not fit."""
        groups = range(len(self.pool.groups))
        return self.pool.memory.exhausted({index: self._blocks(index, Append(table, num_tokens)) for index in groups})

    def _blocks(self, index: int, append: Append) -> int:
        group = self.pool.groups[index]
        blocks = group.blocks_to_append(append.table, append.num_tokens, chunk=self.chunk, forked=append.forked)
        if not append.held_alone:
            return blocks
        # A sliding window returns adopted blocks to the prefix cache: at most the blocks needed without a prefix, and a
        # copy of the last adopted block.
        in_all = group.blocks_to_append(None, append.num_cached + append.num_tokens, chunk=self.chunk)
        return min(append.held_alone[index] + blocks, in_all + 1)
