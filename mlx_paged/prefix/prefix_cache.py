"""DetachedPrefix: a sequence's blocks, parked without the sequence, for any number of others to go on from."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import BlockStateError, TrimError
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool


def table_over(pool: BlockPool, group: int, block_ids: Sequence[int], length: int) -> BlockTable:
    """A table over blocks that others hold too, with a reference of its own on each, as a prefill cut at ``length``
    would have left it.

    Args:
        pool: the blocks' pool.
        group: index of their group.
        block_ids: by absolute position, ``ceil(length / block_size)`` of them; null behind the group's window, but for
            pinned tokens. With a window of one token, only whole blocks.
        length: tokens they hold.
    """
    spec = pool.groups[group].spec
    with pool.lock:
        table = pool.new_table(group)
        pool.retain(group, block_ids)
        table.block_ids.extend(block_ids)
        table.length = length
        table.logical_start, table.ring_origin = spec.first_kept(length), spec.ring_origin(length)
        table.forget_indices()
        return table


class DetachedPrefix:
    """One sequence's blocks at one moment, a partly filled last block included.

    Holds references of its own, so it outlives the sequence, whose owner may go on, drop or release it. Counted in the
    pool as any sequence is. Adopting does not use it up.

    Args:
        pool: the tables' pool.
        tables: one per group, all of the same length; they are forked.

    Raises:
        BlockStateError: the tables differ in length (a step is under way) or were released.
    """

    def __init__(self, pool: BlockPool, tables: Sequence[BlockTable]) -> None:
        if len({table.length for table in tables}) != 1:
            raise BlockStateError(f"the tables end at {[table.length for table in tables]}: a step is under way")
        self.pool = pool
        self.length = tables[0].length
        self._tables: list[BlockTable] | None = [pool.fork(table) for table in tables]

    @property
    def tables(self) -> list[BlockTable]:
        """The parked tables, not to be written to. Raises BlockStateError after :meth:`discard`."""
        if self._tables is None:
            raise BlockStateError("the prefix was discarded")
        return self._tables

    def longest(self, length: int) -> int:
        """The most tokens, at most ``length``, that every group can still be cut to; 0 if there is no such cut.

        Behind a sliding window that has moved on, only the end itself and a little before it can be served.
        """
        length = min(length, self.length)
        try:
            for table in self.tables:
                self.pool.check_trim(table, length)
        except TrimError:
            return 0
        return length

    def adopt(self, length: int | None = None) -> list[BlockTable]:
        """Tables over the same blocks, for a new sequence: references, no bytes.

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
                table.ring_origin = self.pool.groups[table.group].spec.ring_origin(length)
        return tables

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
