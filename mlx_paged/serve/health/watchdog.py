"""Watchdog: notices a thread that has ended, or that makes no progress although there is work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import mlx.core as mx

# Seconds. A step may compile kernels, and on a CPU its two thousand tokens of a prompt take minutes.
GPU_TIMEOUT, CPU_TIMEOUT = 300.0, 3600.0


def default_timeout() -> float:
    """Of the default device."""
    return GPU_TIMEOUT if mx.default_device() == mx.Device(mx.gpu) else CPU_TIMEOUT


class Watched(Protocol):
    """What a watchdog looks at. Called by its thread; nothing here may wait for the one that is watched."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def may_take_long(self) -> bool:
        """Whether it is at something without bounds, such as loading a model."""

    def progress(self) -> object:
        """Another value than before, once something has been done."""


W = TypeVar("W", bound=Watched)


class Watchdog(Generic[W]):
    """Looks at a thread now and then.

    Args:
        watched: the present one; None: there is nothing to look at.
        on_trouble: what to do when it has ended (``ended``) or hangs (``hangs``). Called once for each that is watched.
        timeout: seconds without progress that are a hang; 0: none are.
        clock: seconds.
    """

    def __init__(
        self,
        watched: Callable[[], W | None],
        on_trouble: Callable[[W, str], None],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout = timeout
        self._watched, self._on_trouble, self._clock = watched, on_trouble, clock
        self._seen: tuple[W, object] | None = None
        self._since = clock()
        self._reported: W | None = None
        self._stopped = threading.Event()

    def check(self) -> None:
        """Look once."""
        now, watched = self._clock(), self._watched()
        if watched is None or watched is self._reported:
            return
        if not watched.is_alive:
            self._report(watched, "ended")
            return
        seen = (watched, watched.progress())
        if watched.may_take_long or self._seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        elif self.timeout and now - self._since >= self.timeout:
            self._report(watched, "hangs")

    def _report(self, watched: W, trouble: str) -> None:
        self._reported, self._seen = watched, None
        self._on_trouble(watched, trouble)

    def start(self) -> None:
        """Look several times in each timeout, from a thread of its own, until :meth:`stop`."""
        every = min(1.0, self.timeout / 8) if self.timeout else 1.0

        def look() -> None:
            while not self._stopped.wait(every):
                self.check()

        threading.Thread(target=look, daemon=True, name="watchdog").start()

    def stop(self) -> None:
        self._stopped.set()
