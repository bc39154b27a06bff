"""HeldBlocks: the references that a tree has taken on the blocks of its pool."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from ..errors import BlockStateError
from ..kv.allocator import NULL_BLOCK
from ..kv.pool import BlockPool


class HeldBlocks:
    """References by group and block, each of a node. Used under the pool's lock; given back when this is dropped.

    Null blocks among those given are skipped.

    Args:
        pool: kept weakly.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = weakref.ref(pool)
        self.block_size = pool.block_size
        self.windows = [group.spec.sees for group in pool.groups]
        self.counts: list[Counter[int]] = [Counter() for _ in pool.groups]  # by block
        weakref.finalize(self, _abandon, self._pool, self.counts).atexit = False

    @property
    def pool(self) -> BlockPool:
        """Raises BlockStateError if the pool is gone."""
        pool = self._pool()
        if pool is None:
            raise BlockStateError("the tree's pool is gone")
        return pool

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, each counted once."""
        groups = self.pool.groups
        return sum(len(count) * group.bytes_per_block for count, group in zip(self.counts, groups, strict=True))

    def hold(self, group: int, block_ids: Sequence[int]) -> None:
        """Take a reference on each block."""
        ids = [b for b in block_ids if b != NULL_BLOCK]
        self.pool.retain(group, ids)
        self.counts[group].update(ids)

    def drop(self, group: int, block_ids: Sequence[int]) -> int:
        """Give one reference of each block back. Returns how many blocks became free."""
        ids = [b for b in block_ids if b != NULL_BLOCK]
        held, freed = self.counts[group], self.num_unshared(group, ids)
        self.pool.release(group, ids)
        for block_id in ids:
            held[block_id] -= 1
            if not held[block_id]:
                del held[block_id]
        return freed

    def num_unshared(self, group: int, block_ids: Iterable[int]) -> int:
        """How many of these blocks would be free with one reference less."""
        refcount = self.pool.groups[group].allocator.refcount
        return sum(b != NULL_BLOCK and refcount(b) == 1 for b in block_ids)

    def num_cached(self, group: int, without: Iterable[int] = (), enough: int | None = None) -> int:
        """Return how many blocks nobody else holds, except those in ``without``; counting stops at ``enough``."""
        held, refcount = self.counts[group], self.pool.groups[group].allocator.refcount
        excluded = self.num_cached_of(group, set(without))
        # Asked for in many steps while the pool is full: no Python code for each block.
        cached = filter(None, map(operator.eq, map(refcount, held), held.values()))
        return sum(islice(cached, None if enough is None else enough + excluded)) - excluded

    def num_cached_of(self, group: int, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks, each given once, nobody else holds."""
        held, refcount = self.counts[group], self.pool.groups[group].allocator.refcount
        return sum(b != NULL_BLOCK and refcount(b) == held[b] for b in block_ids)

    def reset(self, group: int, block_ids: Iterable[int]) -> None:
        """Hold exactly one reference for each of these."""
        wanted, held = Counter(b for b in block_ids if b != NULL_BLOCK), self.counts[group]
        missing, surplus = wanted - held, held - wanted
        self.hold(group, list(missing.elements()))
        self.drop(group, list(surplus.elements()))

    def renumber(self, group: int, moves: Mapping[int, int]) -> None:
        """The pool's blocks have other ids now."""
        held = self.counts[group]  # changed in place: the finalizer has it, too
        counts = {moves.get(b, b): n for b, n in held.items()}
        held.clear()
        held.update(counts)


def _abandon(pool: weakref.ref[BlockPool], counts: list[Counter[int]]) -> None:
    """Give back what a tree held that its owner dropped."""
    if (alive := pool()) is not None:
        for group, blocks in enumerate(counts):
            alive.abandon(group, list(blocks.elements()))
