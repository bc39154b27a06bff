"""PoolLock: one thread at a time works on a pool, and leaves nothing there that others cannot compute."""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import mlx.core as mx

from ..errors import DeviceWatch, check_device
from .block_table import BlockTable
from .group import Group

P = ParamSpec("P")
R = TypeVar("R")
GLANCE_SECONDS = 0.02  # to wait for the lock; a thread that holds it longer is computing, and changes little
GLANCES = 5
# Tensors of so many bytes go back to the system when they are dropped; smaller ones stay in MLX's cache, where the next
# sequence finds them.
RETURNED_BYTES = 256 << 20

_numbers = itertools.count()


class _ThreadState(threading.local):
    """The present state of a thread.

    Attributes:
        steps: number of :class:`HeldLocks` sections it is in.
        held: locks that it keeps until the end of the outermost section.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.held: list[PoolLock] = []


_thread = _ThreadState()


class PoolLock:
    """A re-entrant lock, as a context manager (docs/adr/0093). It is held through a generator's step, an engine's step
    (both are :class:`HeldLocks`), or a bare call.

    MLX computes what a thread has built in that thread only: lazy writes left in a pool could not be computed by the
    next thread, nor by any once their own has ended. So at the outermost exit everything in the pool is computed or
    being computed; blocks of tables that were dropped meanwhile are released; and if nothing in the pool is held any
    more, its tensors are dropped.

    A thread that waits gets the lock before the thread that releases it can take it again. Several pools are taken in
    the order of their numbers, so that threads never wait for each other in a circle.

    Args:
        groups: the groups whose tensors are worked on.

    Attributes:
        number: its place in the order of locks.
        owner: the thread that holds it, or 0.
        is_dirty: whether tensors have been read or written since it was taken; see :meth:`use`.
        abandoned: block ids, by group, of dropped tables, to be released by the next thread that holds the lock.
        held: pairs of arrays that a caller may still hold; see :meth:`hold`.
        device: tells whether the device has failed since the pool was made.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.number = next(_numbers)
        self.owner = 0
        self.is_dirty = False
        self.device = DeviceWatch()
        self._groups = groups
        self.held: list[tuple[weakref.ref[mx.array], weakref.ref[mx.array]]] = []
        self.abandoned: deque[Sequence[Sequence[int]]] = deque()
        # Block ids of all tables that have not been released, by identity of the list, with the table. Includes those
        # of tables that some thread is just dropping. Other threads add tables without the lock, so it is copied before
        # it is iterated.
        self._tables: dict[int, tuple[list[list[int]], weakref.ref[BlockTable]]] = {}
        self._lock, self._gate = threading.RLock(), threading.RLock()
        self._depth = 0

    def __enter__(self) -> bool:
        """Take the lock, even if the device has failed: tables can still be released."""
        if self.owner == get_ident():
            self._depth += 1
            return True
        if not self._acquire(timeout=0):
            if any(lock.number > self.number for lock in _thread.held):
                _give_way(self.number)
            self._acquire()
        if _thread.steps:
            self._depth += 1  # until the section ends
            _thread.held.append(self)
        return True

    def _acquire(self, timeout: float = -1) -> bool:
        """Take the lock, which the thread does not hold. Waiting threads queue at the gate: who has just released the
        lock cannot take it again before the one that waits for it."""
        options: dict[str, Any] = {"blocking": False} if timeout == 0 else {"timeout": timeout}
        if not self._gate.acquire(**options):
            return False
        try:
            if not self._lock.acquire(**options):
                return False
        finally:
            self._gate.release()
        self.owner, self._depth = get_ident(), 1
        return True

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        # A thread that ends while its work is computed would end the process.
        self._leave(wait=threading.current_thread() is not threading.main_thread())

    def _leave(self, *, wait: bool) -> None:
        """Start computing what is still lazy, wait for it if asked, and release the lock."""
        try:
            if self.is_dirty:
                self._compute(wait=wait)
        finally:
            self._depth = 1  # it is taken again meanwhile
            try:
                if self.abandoned:
                    self.collect()
                for group in self._groups:
                    if group.allocator.num_live:
                        break
                else:
                    self._drop_tensors()
            finally:
                self.is_dirty, self.owner, self._depth = False, 0, 0
                self._lock.release()
            if self.abandoned:  # by a finalizer in between, which could not take the lock
                self.visit()

    def _compute(self, *, wait: bool) -> None:
        arrays = []
        for group in self._groups:
            for blocks in group.blocks:
                arrays += blocks.pending
        try:
            mx.async_eval(arrays)  # does nothing if they are already being computed
            if self.held:
                self.compute_held()
            if wait:
                mx.eval(arrays)
        except Exception as error:
            for group in self._groups:
                for blocks in group.blocks:
                    blocks.forget_failed_work()
            if self.device.is_lost:
                return  # the device has failed before, which was raised then
            check_device(error)
            raise

    # Tensors --------------------------------------------------------------------------------------------------

    def use(self) -> None:
        """Note that the thread, which holds the lock, reads or writes tensors. Raises DeviceError if what is in them is
        lost."""
        self.device.check()
        self.is_dirty = True

    def hold(self, keys: mx.array, values: mx.array) -> None:
        """Note a pair of arrays that was handed out, and that attention has not used, because it read the blocks. It is
        mostly dropped at once. If not, it is computed before the next write to the pool, and before the thread that has
        built it releases the lock."""
        self.held.append((weakref.ref(keys), weakref.ref(values)))

    def compute_held(self) -> None:
        """Compute the noted pairs that are still held."""
        pairs, self.held = self.held, []
        mx.eval([array for pair in pairs for ref in pair if (array := ref()) is not None])

    # Tables ---------------------------------------------------------------------------------------------------

    def add_table(self, table: BlockTable) -> None:
        """Register a table until it is removed; if it is dropped instead, a finalizer returns its blocks. Does not need
        the lock."""
        self._tables[id(table.block_ids)] = (table.block_ids, weakref.ref(table))
        weakref.finalize(table, _abandon, weakref.ref(self), table.block_ids).atexit = False

    def remove_table(self, table: BlockTable) -> None:
        """Unregister a table that was released."""
        self._tables.pop(id(table.block_ids), None)

    def tables(self) -> list[BlockTable]:
        """Return the tables that are alive."""
        return [table for _, ref in list(self._tables.values()) if (table := ref()) is not None]

    def lists(self, group: int) -> list[list[int]]:
        """Return the block ids of all tables of a group that have not been released, those being dropped included."""
        return [block_ids[group] for block_ids, _ in list(self._tables.values())]

    def abandon(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Release these blocks, listed by group. For finalizers, which run at any point of any thread, so it never
        waits: a thread that holds the lock does it instead."""
        self.abandoned.append(block_ids)
        self.visit()

    def collect(self) -> None:
        """Release the blocks of dropped tables; call it before counting free blocks."""
        if self.abandoned:
            with self:
                while self.abandoned:
                    for group, block_ids in zip(self._groups, self.abandoned[0], strict=True):
                        group.allocator.release(block_ids)
                    self._tables.pop(id(self.abandoned.popleft()), None)

    def _drop_tensors(self) -> None:
        """Drop all tensors, as no block is held. Computes nothing."""
        num_bytes = sum(group.bytes_reserved for group in self._groups)
        for group in self._groups:
            if group.allocator.num_blocks > 1 or group.has_tensors:
                group.drop()
        if num_bytes >= RETURNED_BYTES:
            mx.clear_cache()

    def visit(self) -> None:
        """Take and release the lock, unless a thread holds it, so that abandoned blocks are released. Never waits, not
        even at the gate."""
        if self.owner != get_ident() and self._lock.acquire(blocking=False):
            self.owner, self._depth = get_ident(), 1
            self._leave(wait=False)

    def glance(self, read: Callable[[bool], R]) -> R:
        """Call ``read`` without waiting for the lock, and return its result.

        A thread holds the lock while it computes, for seconds with a long prompt on a CPU. So ``read`` gets the lock if
        it is free within GLANCE_SECONDS; otherwise it reads without it, and its figures may rarely mix two moments.

        Args:
            read: called with whether it has the lock, possibly several times. Must not change anything.

        Raises:
            RuntimeError, LookupError: what was read changed each time.
        """
        if self.owner == get_ident():
            return read(True)
        if self._acquire(timeout=GLANCE_SECONDS):
            try:
                return read(True)
            finally:
                self._leave(wait=False)
        for _ in range(GLANCES - 1):
            try:
                return read(False)
            except (RuntimeError, LookupError):  # something has changed its size
                time.sleep(0.001)
        return read(False)


def _abandon(lock: weakref.ref[PoolLock], block_ids: Sequence[Sequence[int]]) -> None:
    """Release the blocks of a table that was dropped, unless the pool is gone."""
    if (alive := lock()) is not None:
        alive.abandon(block_ids)


def _give_way(number: int) -> None:
    """Release the locks of pools with larger numbers that the thread holds only until its section ends."""
    for lock in list(_thread.held):
        if lock.number > number and lock._depth == 1:
            _thread.held.remove(lock)
            lock._leave(wait=False)


class HeldLocks:
    """A section in which the thread keeps the lock of each pool from its first use on. At the end its work on all of
    them starts being computed; after an exception it is completed.

    For one step of an engine, or of a generator that computes each step before it yields, as mlx-lm's do: their step
    then costs one submission, and by its end mlx-lm has computed nearly everything.
    """

    def __enter__(self) -> None:
        _thread.steps += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _thread.steps -= 1
        if _thread.steps or not _thread.held:
            return
        held, _thread.held = _thread.held, []
        failed: Exception | None = None
        for lock in reversed(held):  # if the work on one cannot be computed, the others are still released
            lock._depth -= 1
            if lock._depth:  # a call is still under way: its own exit releases the lock
                continue
            try:
                lock._leave(wait=kind is not None)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


class _HasPool(Protocol):
    @property
    def pool(self) -> Any: ...


S = TypeVar("S", bound=_HasPool)


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wrap a method that works on tensors so that it holds the lock of ``self.pool``."""

    @functools.wraps(method)
    def whole(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        lock: PoolLock = self.pool.lock
        if lock.owner == get_ident():
            lock.is_dirty = True
            return method(self, *args, **kwargs)
        with lock:
            lock.use()
            return method(self, *args, **kwargs)

    return whole
