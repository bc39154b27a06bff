"""Watchdog: notices a thread that makes no progress although there may be work."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

import mlx.core as mx

# Seconds. A step may compile kernels, and on a CPU its two thousand tokens of a prompt take minutes.
GPU_TIMEOUT, CPU_TIMEOUT = 300.0, 3600.0


def default_timeout() -> float:
    """Return the timeout for the default device."""
    return GPU_TIMEOUT if mx.default_device() == mx.Device(mx.gpu) else CPU_TIMEOUT


class Watchdog:
    """Looks at a thread now and then.

    Args:
        progress: a value that changes with all work; None: the thread is at something without bounds, such as loading a
            model.
        on_hang: called once, from the watchdog's thread.
        timeout: seconds without progress that are a hang; 0: none are.
        clock: seconds.
    """

    def __init__(
        self,
        progress: Callable[[], object],
        on_hang: Callable[[], None],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout = timeout
        self._progress, self._on_hang, self._clock = progress, on_hang, clock
        self._seen: object = None
        self._since = clock()
        self._stopped = threading.Event()

    def check(self) -> bool:
        """Look once. Return whether the thread hangs."""
        now, seen = self._clock(), self._progress()
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        return bool(self.timeout) and seen is not None and now - self._since >= self.timeout

    def start(self) -> None:
        """Look several times in each timeout, from a thread of its own, until :meth:`stop`."""
        if not self.timeout:
            return
        every = min(1.0, self.timeout / 8)

        def look() -> None:
            while not self._stopped.wait(every):
                if self.check():
                    self._on_hang()
                    return

        threading.Thread(target=look, daemon=True, name="watchdog").start()

    def stop(self) -> None:
        self._stopped.set()


def stack_of(thread: threading.Thread) -> str:
    """Return what a thread is at, for the log."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))
