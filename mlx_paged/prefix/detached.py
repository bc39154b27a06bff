"""DetachedPrefix: a sequence's blocks, parked without it; and sequences as what goes into and comes out of the radix
tree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..cache.rows import SequenceTables
from ..errors import BlockStateError, TrimError
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from .radix import InsertResult, RadixTree


class DetachedPrefix:
    """One sequence's blocks at one moment, a partly filled last block included.

    Holds references of its own, so it outlives the sequence, whose owner may extend, drop or release it. Counted in the
    pool as any sequence is. Adopting does not use it up.

    Args:
        sequence: whose tables are forked.

    Raises:
        BlockStateError: a step is under way: some layers or groups have tokens that others do not have. Or the
            sequence was released.
    """

    def __init__(self, sequence: SequenceTables) -> None:
        tables = sequence.tables
        if not sequence.is_level() or len({table.length for table in tables}) != 1:
            raise BlockStateError("the layers are not at the same token: a step is under way")
        self.pool = sequence.pool
        self.length = tables[0].length
        self._tables: list[BlockTable] | None = [self.pool.fork(table) for table in tables]

    @property
    def tables(self) -> list[BlockTable]:
        """The parked tables, not to be written to. Raises BlockStateError after :meth:`discard`."""
        if self._tables is None:
            raise BlockStateError("the prefix was discarded")
        return self._tables

    def longest(self, length: int) -> int:
        """Return the most tokens, at most ``length``, that every group can still be cut to; 0 if there is no such cut.

        Behind a sliding window that has moved on, only the end itself and a little before it can be served.
        """
        length = min(length, self.length)
        try:
            for table in self.tables:
                self.pool.check_trim(table, length)
        except TrimError:
            return 0
        return length

    def adopt(self, length: int | None = None) -> SequenceTables:
        """Return a new sequence over the same blocks, every layer at its end: references, no bytes.

        Args:
            length: cut to so many tokens (default: all).

        Raises:
            TrimError: more tokens than there are, or a group no longer holds the window before the cut.
            BlockStateError: the prefix was discarded.
        """
        if length is not None:
            for table in self.tables:
                self.pool.check_trim(table, length)
        tables = [self.pool.fork(table) for table in self.tables]
        if length is not None and length < self.length:
            for table in tables:
                self.pool.trim(table, self.length - length)
        return sequence_over(self.pool, tables)

    def discard(self) -> None:
        """Give back exactly what is held; sequences that adopted it keep theirs.

        Raises:
            BlockStateError: it was discarded before.
        """
        for table in self.tables:
            self.pool.release_table(table)
        self._tables = None

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held; blocks shared with others count here too."""
        return sum(table.num_blocks * self.pool.groups[table.group].bytes_per_block for table in self.tables)

    def __repr__(self) -> str:
        return f"DetachedPrefix({'discarded' if self._tables is None else f'{self.length} tokens'})"


def sequence_over(pool: BlockPool, tables: Sequence[BlockTable]) -> SequenceTables:
    """Return a sequence on these tables, which become its own; every layer is at their end."""
    sequence = SequenceTables(pool)
    sequence.tables = list(tables)
    return sequence


def donate(
    tree: RadixTree,
    tokens: Sequence[int],
    sequence: SequenceTables,
    salt: Hashable = None,
    *,
    label: Hashable = None,
    whole_blocks: bool = False,
) -> InsertResult | None:
    """Put what the sequence has computed into the tree, by reference; the sequence may go on.

    Args:
        tree: of the sequence's pool.
        tokens: the sequence's tokens; those beyond what it has computed are left out, and so are computed ones that
            are not given (sampled, but cut off by a stop string). None is returned if nothing is left.
        sequence: not in the middle of a step.
        salt, label: see :meth:`RadixTree.insert`.
        whole_blocks: leave a partly filled last block out, for a sequence that goes on at once: it would have to copy
            that block.
    """
    length = min(len(tokens), sequence.length)
    if whole_blocks:
        length -= length % sequence.pool.block_size
    return tree.insert(tokens[:length], sequence.tables, salt, label=label) if length else None
