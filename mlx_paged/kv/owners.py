"""BlockOwners: who holds a pool's blocks: tables, tables that were just dropped, and prefix caches."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..errors import BlockStateError
from .block_table import BlockTable
from .group import Group

# Tensors of so many bytes go back to the system when they are dropped; smaller ones stay in MLX's cache, where the next
# sequence finds them.
RETURNED_BYTES = 64 << 20


class BlockHolder(Protocol):
    """A cache that counts in a pool's budget and frees blocks on request (see BlockPool.add_holder). The defaults are
    those of a cache without blocks. Called under the pool's lock.

    Attributes:
        evictions: blocks this holder has freed so far, to make room, by age or by a limit.
        hit_tokens: tokens that sequences took from it instead of computing them.
    """

    evictions: int
    hit_tokens: int

    def held(self, group: int) -> Iterable[Sequence[int]]:
        """Return the blocks of the group that it holds, each once per reference."""
        return ()

    def reclaimable(self, group: int, enough: int | None = None) -> int:
        """Return how many blocks of the group :meth:`evict` could free now; counting may stop at ``enough``."""
        return 0

    def evict(self, group: int, num_blocks: int) -> int:
        """Drop references so that ``num_blocks`` blocks of the group become free. Returns how many did."""
        return 0

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states that it holds and :meth:`evict_states` could free."""
        ...

    def evict_states(self, num_bytes: int) -> int:
        """Drop states of at least ``num_bytes`` bytes. Returns how many bytes were freed."""
        ...


class TableLock:
    """A pool's lock for changes of tables, which are possible after an error of the device, too. Keeps no pool alive.

    Args:
        lock: the pool's :class:`.lock.PoolLock`. It calls :meth:`BlockOwners.settle` before it is released.

    Attributes:
        abandoned: block ids, by group, of dropped tables, to be released by the next thread that holds the lock.
    """

    def __init__(self, lock: Any) -> None:
        self._lock: weakref.ref[Any] = weakref.ref(lock)
        self.abandoned: deque[Sequence[Sequence[int]]] = deque()

    def __enter__(self) -> bool:
        lock = self._lock()
        return lock is not None and lock.enter()

    def __exit__(self, *given: object) -> None:
        if (lock := self._lock()) is not None:
            lock.__exit__(*given)

    def abandon(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Release these blocks, listed by group. For finalizers, which run at any point of any thread, so it never
        waits: a thread that holds the lock does it instead."""
        self.abandoned.append(block_ids)
        if (lock := self._lock()) is not None:
            lock.visit()


class BlockOwners:
    """The tables and prefix caches that hold blocks of a pool's groups. Keeps none of them alive.

    Changes need the pool's lock, except :meth:`add_table` and :meth:`collect`.
    """

    def __init__(self, groups: Sequence[Group], lock: TableLock) -> None:
        self.owner = object()  # identifies the pool's tables
        self._groups = groups
        self._lock = lock
        # Block ids of all tables that have not been released, by identity of the list, with the table. Includes those
        # of tables that some thread is just dropping. Other threads add tables without the lock, so it is copied before
        # it is iterated.
        self._lists: dict[int, tuple[list[list[int]], weakref.ref[BlockTable]]] = {}
        self._caches: list[weakref.ref[BlockHolder]] = []

    # Tables ---------------------------------------------------------------------------------------------------

    def add_table(self, table: BlockTable) -> BlockTable:
        """Register a table until it is removed; if it is dropped instead, a finalizer returns its blocks."""
        table.owner = self.owner
        self._lists[id(table.block_ids)] = (table.block_ids, weakref.ref(table))
        abandon: Any = self._lock.abandon
        weakref.finalize(table, abandon, table.block_ids).atexit = False
        return table

    def remove_table(self, table: BlockTable) -> None:
        """Unregister a table that was released."""
        self._lists.pop(id(table.block_ids), None)

    def check(self, table: BlockTable) -> None:
        """Raise BlockStateError unless the table belongs to this pool and is in use."""
        if table.released or table.owner is not self.owner:
            raise BlockStateError("the table was released, or belongs to another pool")

    def tables(self) -> list[BlockTable]:
        """Return the tables that are alive."""
        return [table for _, ref in list(self._lists.values()) if (table := ref()) is not None]

    def lists(self, group: int) -> list[list[int]]:
        """Return the block ids of all tables of a group that have not been released, those being dropped included."""
        return [block_ids[group] for block_ids, _ in list(self._lists.values())]

    @property
    def has_abandoned(self) -> bool:
        """Whether dropped tables still hold blocks."""
        return bool(self._lock.abandoned)

    def collect(self) -> None:
        """Release abandoned blocks; call it before counting free blocks."""
        queue = self._lock.abandoned
        if not queue:
            return
        with self._lock:
            while queue:
                for group, block_ids in zip(self._groups, queue[0], strict=True):
                    group.allocator.release(block_ids)
                self._lists.pop(id(queue.popleft()), None)

    def settle(self) -> None:
        """Release abandoned blocks. If no block is held any more, drop all tensors. Computes nothing."""
        self.collect()
        if any(group.allocator.num_live for group in self._groups):
            return
        num_bytes = sum(group.bytes_reserved for group in self._groups)
        for group in self._groups:
            if group.allocator.num_blocks > 1 or group.has_tensors:
                group.drop()
        if num_bytes >= RETURNED_BYTES:
            mx.clear_cache()

    # Prefix caches --------------------------------------------------------------------------------------------

    def add_cache(self, cache: BlockHolder) -> None:
        """Register a prefix cache that is asked to free blocks; held weakly."""
        self._caches = [*(ref for ref in self._caches if ref() is not None), weakref.ref(cache)]

    def caches(self) -> list[BlockHolder]:
        """Return the prefix caches that are alive."""
        return [cache for ref in self._caches if (cache := ref()) is not None]

    def reclaimable(self, group: int, enough: int | None = None) -> int:
        """Return how many blocks of the group prefix caches could free now; counting may stop at ``enough``."""
        count = 0
        for cache in self.caches():
            if enough is not None and count >= enough:
                break
            count += cache.reclaimable(group, None if enough is None else enough - count)
        return count

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states that prefix caches hold."""
        return sum(cache.state_nbytes for cache in self.caches())

    def evict_states(self, num_bytes: int) -> None:
        """Make the prefix caches drop states of ``num_bytes`` bytes, or as many as they can."""
        for cache in self.caches():
            if num_bytes > 0:
                num_bytes -= cache.evict_states(num_bytes)

    def evict(self, group: int, num_blocks: int) -> None:
        """Make the prefix caches free ``num_blocks`` blocks of the group, or as many as they can."""
        for cache in self.caches():
            if num_blocks > 0:
                num_blocks -= cache.evict(group, num_blocks)
