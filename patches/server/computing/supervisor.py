"""Supervisor: has a server's requests computed, again and again if need be."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

import mlx.core as mx

from ....serve.health.restarts import Restarts
from ....serve.health.watchdog import Watchdog
from .computing_loop import ComputingLoop, Stuck, drop_pool
from .ranked_loop import RankedLoop

if TYPE_CHECKING:
    from ..response_generator import PagedResponseGenerator

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h
GRACE_SECONDS = 10.0  # for a thread that hangs in code of Python to end
WHY = "the generation thread has failed, and is started again: see the server's log"


class Supervisor:
    """Runs one :class:`ComputingLoop` after the other.

    A loop that fails is followed by another one in the same thread: streams of MLX belong to threads. Its pool and its
    prefixes are kept if they are in order. In a thread that hangs an exception is raised, which ends the loop where it
    next runs code of Python; then it has failed like any other. One that does not come back from elsewhere (a driver, a
    lock, a file system) is abandoned with its pool: nothing can end a thread. Back from there, it meets that exception.

    What fails too often ends the process, with :data:`EXIT_STATUS`, for whoever started it to start it again; so does a
    thread that hangs while it traces a model, whose weights are placeholders then. Where several ranks compute, one
    that fails or hangs ends all (:class:`mlx_paged.engine.ranks.watch.Watch`).

    Args:
        owner: of the requests and the model.
        timeout: seconds without progress that are a hang; 0: none are.

    Attributes:
        loop: the present one.
        restarts: how many there have been, and why.
    """

    def __init__(self, owner: PagedResponseGenerator, timeout: float) -> None:
        self.owner = owner
        self.loop = self._new_loop()
        self.restarts = Restarts()
        self.watchdog = Watchdog(self._watched, self._trouble, timeout)
        self._lock = threading.Lock()

    def _new_loop(self) -> ComputingLoop:
        ranks = self.owner.ranks
        return ComputingLoop(self.owner) if ranks is None else RankedLoop(self.owner, ranks)

    def run(self) -> None:
        """The function of a thread: returns when the server ends, or the thread has been abandoned."""
        loop: ComputingLoop | None = self.loop
        while loop is not None:
            loop = self._live(loop)

    def _live(self, loop: ComputingLoop) -> ComputingLoop | None:
        """One loop's life. Returns the next one's, if it is this thread's."""
        loop.thread = threading.current_thread()
        mx.default_stream(mx.default_device())
        try:
            loop.is_loading = True
            loop.prepare()
            loop.is_loading = False
            if self.owner.start_error is None:
                loop.run()
        except BaseException as error:
            logging.critical("the generation thread has failed", exc_info=error)
            if self.owner.ranks is not None:
                self.owner.ranks.fail(error)  # the others are where this one was
            reason = self._no_progress if isinstance(error, Stuck) else f"{type(error).__name__}: {error}"
        else:
            if not loop.is_abandoned:
                self.owner.end(loop)
                return None
            reason = ""
        loop.wreck()
        following = self._follow(loop, reason)
        if following is None:
            mx.clear_streams()  # a thread that ends with a stream of the CPU may end the process
        return following

    def _follow(self, loop: ComputingLoop, reason: str) -> ComputingLoop | None:
        """Put another loop in the place of one that has failed. None: somebody has."""
        with self._lock:
            if self.loop is not loop:
                return None
            if self.owner.is_stopping:
                reason = reason or "stopped"
            if not self.restarts.note(reason):
                self._leave(f"the generation thread fails again and again: {reason}")
            loop.is_abandoned = True
            self.loop = self._new_loop()
        self.owner.fail_taken(WHY)
        return self.loop

    # The watchdog's thread ------------------------------------------------------------------------------------

    def _watched(self) -> ComputingLoop | None:
        return None if self.owner.is_stopping else self.loop

    @property
    def _no_progress(self) -> str:
        return f"no progress for {self.watchdog.timeout:g} s"

    def _trouble(self, loop: ComputingLoop, trouble: str) -> None:
        where = loop.where
        logging.critical("the generation thread %s; it was at:\n%s", trouble, where)
        thread = loop.thread
        if trouble == "hangs" and thread is not None:
            raise_in(thread, Stuck)
            if self._is_followed(loop):
                return
            if "compiled_step.py" in where:
                self._leave("the generation thread hangs while it traces the model")
        reason = self._no_progress if trouble == "hangs" else "the thread has ended"
        if self._follow(loop, reason) is not None:
            drop_pool(self.owner)
            self.owner.restart()

    def _is_followed(self, loop: ComputingLoop) -> bool:
        """Whether the thread has come to an end by itself, after a little time."""
        waiting = threading.Event()
        for _ in range(int(min(GRACE_SECONDS, self.watchdog.timeout) / 0.05)):
            if self.loop is not loop:
                return True
            waiting.wait(0.05)
        return False

    def _leave(self, why: str) -> None:
        print(f"mlx_paged.server: {why}; the process ends", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(EXIT_STATUS)


def raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Have an exception raised in a thread, when it next runs code of Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))
