"""Turn: one thread at a time works on a pool's tensors, and leaves nothing there that others cannot compute."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import mlx.core as mx

from ..errors import DeviceWatch, check_device
from .group import BlockGroup

P = ParamSpec("P")
R = TypeVar("R")
GLANCE_SECONDS = 0.02  # to wait for the lock; a thread that holds it longer is computing, and changes nothing
GLANCES = 5


class _ThreadState(threading.local):
    """The present state of a thread.

    Attributes:
        steps: number of :class:`Stepwise` sections it is in.
        pending: turns whose work it will start computing at the end of the outermost section.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.pending: list[Turn] = []


_thread = _ThreadState()


class Turn:
    """A reentrant lock, as a context manager (docs/adr/0013).

    MLX computes what a thread has built in that thread only: lazy writes left in a pool could not be computed by the
    next thread, nor by any once their own has ended. So at the end of a turn everything in the pool is computed or
    being computed. Inside :class:`Stepwise` the end of the step is early enough, which costs nothing: mlx-lm has
    computed it by then. A thread that comes in between waits for it. No turn begins after an error of the device: what
    is in the tensors is lost.

    Args:
        lock: the pool's lock.
        groups: the groups whose tensors are worked on.
    """

    def __init__(self, lock: threading.RLock, groups: Sequence[BlockGroup]) -> None:
        self.owner = 0  # the thread in the turn
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._groups = groups
        self.is_dirty = False  # whether tensors have been read or written in this turn
        self._depth = 0
        self._pending = 0  # the thread whose work here may still be lazy
        self._num_waiting = 0
        self._local = threading.local()  # has_worked: the thread has worked on the tensors
        self._local.has_worked = True
        self.device = DeviceWatch()

    def __enter__(self) -> bool:
        self.device.check()
        self._lock.acquire()
        if self._depth == 0:
            me = get_ident()
            if self._pending not in (0, me):
                self._wait(me)
            self.owner = me
        self._depth += 1
        return True

    def _wait(self, me: int) -> None:
        self._num_waiting += 1
        try:
            while self._pending not in (0, me):
                self._changed.wait()
        except BaseException:
            self._num_waiting -= 1  # under the lock: other threads change it, too
            self._lock.release()
            raise
        self._num_waiting -= 1

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                self.owner = 0
                if not self.is_dirty:
                    return
                self._local.has_worked = True
                if _thread.steps and not self._num_waiting:
                    if self._pending == 0:
                        self._pending = get_ident()
                        _thread.pending.append(self)
                else:
                    # A thread that ends while its work is computed would end the process. And MLX keeps arrays alive
                    # until they are computed: the next write would copy functional blocks.
                    is_main = threading.current_thread() is threading.main_thread()
                    self._compute(wait=not is_main or not all(group.in_place for group in self._groups))
        finally:
            self._depth -= 1
            self._lock.release()

    def glance(self, read: Callable[[bool], R]) -> R:
        """Call ``read`` without waiting for a turn, and return its result.

        A thread has its turn while it computes, for seconds with a long prompt on a CPU. So ``read`` gets the lock if
        it is free within GLANCE_SECONDS; otherwise it reads without it, and its figures may rarely mix two moments.

        Args:
            read: called with whether it has the lock, possibly several times. Must not change anything.

        Raises:
            RuntimeError, LookupError: what was read changed each time.
        """
        if self._lock.acquire(timeout=GLANCE_SECONDS):
            try:
                return read(True)
            finally:
                self._lock.release()
        for _ in range(GLANCES - 1):
            try:
                return read(False)
            except (RuntimeError, LookupError):  # something has changed its size
                time.sleep(0.001)
        return read(False)

    @property
    def is_first_turn(self) -> bool:
        """Whether the calling thread has never worked on this pool's tensors."""
        return not hasattr(self._local, "has_worked")

    @property
    def is_pending(self) -> bool:
        """Whether a thread is in a turn, or its work here may still be lazy."""
        return self._depth > 0 or self._pending != 0

    def compute(self, *, wait: bool) -> None:
        """Start computing what the calling thread left here; with ``wait`` it is done on return."""
        with self._lock:
            if self._pending == get_ident():
                self._compute(wait=wait)

    def _compute(self, *, wait: bool) -> None:
        arrays = [array for group in self._groups for array in group.latest()]
        try:
            mx.async_eval(arrays)  # does nothing if they are already being computed
            for group in self._groups:
                group.note_reads_started()
            if wait:
                mx.eval(arrays)
        except Exception as error:
            for group in self._groups:
                group.forget_failed_writes()
            if self.device.is_lost:
                return  # the device has failed before, which was raised then
            check_device(error)
            raise
        finally:
            self.is_dirty = False
            self._pending = 0
            if self._num_waiting:
                self._changed.notify_all()


class Stepwise:
    """A section at whose end the thread's work on all pools starts being computed; after an exception it is completed.

    For one step of a generator that computes each step before it yields, as mlx-lm's do.
    """

    def __enter__(self) -> None:
        _thread.steps += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _thread.steps -= 1
        if _thread.steps == 0 and _thread.pending:
            pending, _thread.pending = _thread.pending, []
            with ExitStack() as all_turns:  # if one cannot be computed, the others still end
                for turn in reversed(pending):
                    all_turns.callback(turn.compute, wait=kind is not None)


class _HasPool(Protocol):
    @property
    def pool(self) -> Any: ...


class MovedError(Exception):
    """``self.pool`` was replaced before anything was written; :func:`in_turn` calls the method again."""


S = TypeVar("S", bound=_HasPool)


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wrap a method that works on ``self.pool`` in a turn, or in the turn that the thread is already in."""

    @functools.wraps(method)
    def whole(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        turn: Turn = self.pool.turn
        try:
            if turn.owner == get_ident():
                return method(self, *args, **kwargs)
            with turn:
                return method(self, *args, **kwargs)
        except MovedError:
            return whole(self, *args, **kwargs)

    return whole
