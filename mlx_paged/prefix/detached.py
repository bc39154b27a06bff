"""DetachedPrefix: a sequence's blocks, parked without it, for others to go on from; and prefixes of whole sequences,
SequenceTables in and out: park one and go on from it, or find one in a RadixTree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ..cache.sequence import SequenceTables
from ..errors import BlockStateError, TrimError
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from .radix import InsertResult, RadixTree
from .store import salted


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


def sequence_over(pool: BlockPool, tables: Sequence[BlockTable]) -> SequenceTables:
    """Return a sequence on these tables, which become its own; every layer is at their end."""
    sequence = SequenceTables(pool)
    sequence.tables = list(tables)
    return sequence


def detach(sequence: SequenceTables) -> DetachedPrefix:
    """Park the sequence's blocks as they are now. The sequence itself may go on, be dropped or be released.

    Raises:
        BlockStateError: a step is under way: some layers have taken tokens that others have not.
    """
    if not sequence.is_level():
        raise BlockStateError("the layers are not at the same token: a step is under way")
    return DetachedPrefix(sequence.pool, sequence.tables)


def adopt(detached: DetachedPrefix, length: int | None = None) -> SequenceTables:
    """Return a new sequence that goes on from a parked one, every layer at its end; no copy, any number of times.

    Args:
        detached: what :func:`detach` gave.
        length: cut to so many tokens; see :meth:`DetachedPrefix.longest`.

    Raises:
        TrimError: a group no longer holds the window before the cut, or there are fewer tokens.
        BlockStateError: it was discarded.
    """
    return sequence_over(detached.pool, detached.adopt(length))


def adopt_longest(tree: RadixTree, tokens: Sequence[int], salt: Hashable = None) -> SequenceTables | None:
    """Return a new sequence on the longest prefix of ``tokens`` the tree can serve, or None if it has none.

    At least the last token is left to compute: go on with ``tokens[sequence.tables[0].length:]``.
    """
    length, tables = tree.adopt(tokens, salt)
    return sequence_over(tree.pool, tables) if length else None


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
            are not told here (sampled, but cut off by a stop word). None is returned if nothing is left.
        sequence: not in the middle of a step.
        salt, label: see :meth:`RadixTree.insert`.
        whole_blocks: leave a partly filled last block out, for a sequence that goes on at once: it would have to copy
            that block.
    """
    length = min(len(tokens), *sequence.offsets.values(), *(table.length for table in sequence.tables))
    if whole_blocks:
        length -= length % sequence.pool.block_size
    return tree.insert(tokens[:length], sequence.tables, salt, label=label) if length else None


class SharedPrefixes:
    """A RadixTree as the PrefixStore of a batch.

    Args:
        tree: of the batch's pool.
        salt: see :meth:`RadixTree.insert`.
        restore: called with tokens that are about to be looked up, and the salt they are looked up under, to bring
            back what is kept elsewhere.
        restore_checkpoint: likewise, where checkpoints are looked up.
    """

    def __init__(
        self,
        tree: RadixTree,
        salt: Hashable = None,
        restore: Callable[[Sequence[int], Hashable], None] | None = None,
        restore_checkpoint: Callable[[Sequence[int], Hashable], None] | None = None,
    ) -> None:
        self.tree = tree
        self.salt = salt
        self.restore, self.restore_checkpoint = restore, restore_checkpoint

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable]]:
        if self.restore is not None:
            self.restore(tokens, salt)
        return self.tree.adopt(tokens, salted(self.salt, salt))

    def held(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        return self.tree.match(tokens, salted(self.salt, salt)).length

    def held_alone(self, tokens: Sequence[int], salt: Hashable = None) -> Sequence[int]:
        return self.tree.held_alone(tokens, salted(self.salt, salt))

    def donate(self, tokens: Sequence[int], tables: Sequence[BlockTable], salt: Hashable = None) -> None:
        length = min(len(tokens), *(table.length for table in tables))
        if length:
            self.tree.insert(tokens[:length], tables, salted(self.salt, salt), label="assistant")

    @property
    def pool(self) -> BlockPool:
        return self.tree.pool

    def adopt_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable], Any]:
        if self.restore_checkpoint is not None:
            self.restore_checkpoint(tokens, salt)
        return self.tree.adopt_checkpoint(tokens, salted(self.salt, salt))

    def held_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, Sequence[int]]:
        return self.tree.held_checkpoint(tokens, salted(self.salt, salt))

    def known_length(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        return self.tree.known_length(tokens, salted(self.salt, salt))

    def donate_checkpoint(
        self,
        tokens: Sequence[int],
        tables: Sequence[BlockTable],
        states: Callable[[], tuple[int, Any]],
        salt: Hashable = None,
    ) -> bool:
        return self.tree.insert_checkpoint(tokens, tables, states, salted(self.salt, salt), label="assistant")
