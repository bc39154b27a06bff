"""IdleWatch: idle pools release their tensors, by one thread for all pools of a process.

Finalizers call :meth:`IdleWatch.put` and :meth:`IdleWatch.note` from anywhere, so these call nothing that raises.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import Protocol

IDLE_SECONDS = 5.0  # after the last table has gone: the next sequence mostly comes sooner, and reuses the tensors
LOOK_SECONDS = 1.0  # between looks at a pool that is not idle yet


class _Droppable(Protocol):
    """A pool whose tensors can be dropped (see BlockPool.drop_if_idle)."""

    def drop_if_idle(self) -> bool: ...


class IdleWatch:
    """A record of when tables of a pool were last released; holds the pool weakly.

    An idle pool drops its tensors without a call: one thread watches all pools of a process.
    """

    def __init__(self, pool: _Droppable) -> None:
        self.pool = weakref.ref(pool)
        self.released_at = 0.0  # seconds of the monotonic clock
        self.is_listed = False
        _start()

    def put(self, abandoned: deque[tuple[int, list[int]]], blocks: tuple[int, list[int]]) -> None:
        """Queue the blocks of a dropped table for release; called by finalizers."""
        abandoned.append(blocks)
        self.note()

    def note(self) -> None:
        """Note that a table has gone. Takes no lock: finalizers call it, which run anywhere."""
        self.released_at = time.monotonic()
        if not self.is_listed:
            self.is_listed = True
            _released.put(self)


_released: SimpleQueue[IdleWatch] = SimpleQueue()  # its put() is reentrant, unlike a Queue's
_thread: threading.Thread | None = None
_lock = threading.Lock()


def _start() -> None:
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():  # a forked process has no threads
            _thread = threading.Thread(target=_run, name="mlx_paged idle pools", daemon=True)
            _thread.start()


def _run() -> None:
    watched: list[IdleWatch] = []
    while True:
        try:
            watched.append(_released.get(timeout=LOOK_SECONDS if watched else None))
        except Empty:
            watched = [watch for watch in watched if not _look(watch)]


def _look(watch: IdleWatch) -> bool:
    """Drop the tensors of a pool that has been idle long enough. Returns whether to stop watching it for now."""
    pool = watch.pool()
    if pool is None:
        return True
    if time.monotonic() - watch.released_at < IDLE_SECONDS:
        return False
    watch.is_listed = False  # from now on, a table that is released lists the pool again
    if pool.drop_if_idle():
        return True
    watch.is_listed = True
    return False
