"""Turn: one thread at a time works on a pool's tensors, and leaves nothing there that another could not go on from."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import mlx.core as mx

from .group import BlockGroup

P = ParamSpec("P")
R = TypeVar("R")
GLANCE_SECONDS = 0.02  # for the lock: a thread that holds it longer computes, and changes nothing meanwhile
GLANCES = 5


class _ThreadState(threading.local):
    """What a thread does at present.

    Attributes:
        steps: how many :class:`Stepwise` sections it is in.
        pending: turns whose work it is going to have computed at the end of the outermost one.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.pending: list[Turn] = []


_thread = _ThreadState()


class Turn:
    """A lock, as a context manager that may be entered again by the thread in it (docs/adr/0013).

    MLX computes what a thread has built in that thread only: lazy writes left in a pool could not be computed by the
    next thread, nor by anybody once theirs has ended. So at the end of a turn what is in the pool is computed or being
    computed. Inside :class:`Stepwise` the end of the step is early enough, which costs nothing: mlx-lm has had it
    computed by then. Who comes between waits for it.

    Args:
        lock: of the pool.
        groups: whose tensors are worked on.
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
        self._known = threading.local()
        self._known.here = True

    def __enter__(self) -> bool:
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
            self._num_waiting -= 1  # with the lock: others count here, too
            self._lock.release()
            raise
        self._num_waiting -= 1

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                self.owner = 0
                if not self.is_dirty:
                    return
                self._known.here = True
                if _thread.steps and not self._num_waiting:
                    if self._pending == 0:
                        self._pending = get_ident()
                        _thread.pending.append(self)
                else:
                    # A thread that ends while its work is computed would end the process. And MLX holds on to what it
                    # is asked for until that is computed: the next write would copy functional blocks.
                    is_main = threading.current_thread() is threading.main_thread()
                    self._compute(wait=not is_main or not all(group.in_place for group in self._groups))
        finally:
            self._depth -= 1
            self._lock.release()

    def glance(self, read: Callable[[bool], R]) -> R:
        """Return what ``read`` returns, without waiting for a turn. It may be called several times, and only reads.

        A thread has its turn while it computes, for seconds where that is a long prompt on a CPU. So who only wants to
        look takes the lock if it is free soon; otherwise figures are those of the moment, and seldom of two.

        Args:
            read: called with whether it has the lock.

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
    def is_newcomer(self) -> bool:
        """Return whether the thread in the turn has not been here before."""
        return not hasattr(self._known, "here")

    @property
    def is_pending(self) -> bool:
        """Return whether some thread's work here may still be lazy."""
        return self._depth > 0 or self._pending != 0

    def compute(self, *, wait: bool) -> None:
        """Have what the thread left here computed; with ``wait`` it is done on return."""
        with self._lock:
            if self._pending == get_ident():
                self._compute(wait=wait)

    def _compute(self, *, wait: bool) -> None:
        arrays = [array for group in self._groups for array in group.latest()]
        try:
            mx.async_eval(arrays)  # finds nothing to do if they are being computed
            for group in self._groups:
                group.note_begun()
            if wait:
                mx.eval(arrays)
        except Exception:
            for group in self._groups:
                group.forget_failed_writes()
            raise
        finally:
            self.is_dirty = False
            self._pending = 0
            if self._num_waiting:
                self._changed.notify_all()


class Stepwise:
    """A section at whose end the thread's work on all pools is computed or, if it ends with an exception, done.

    For one step of a generator that looks after itself: mlx-lm's have each step computed before they yield.
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
    """``self.pool`` is another one from now on, nothing has been written, and the method is to begin anew."""


S = TypeVar("S", bound=_HasPool)


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return a method that works on ``self.pool``, as a turn; part of the turn that the thread is in, if it is in
    one."""

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
