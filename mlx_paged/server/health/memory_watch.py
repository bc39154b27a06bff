"""MemoryWatch: what a server gives up so that its memory stays below a watermark."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from .memory_reading import MemoryReading, ReadMemory, read_memory

WATERMARK = 0.95  # of the limit
SLACK = 0.02  # of the limit, below the watermark, before everything is as it was
EVERY_SECONDS = 0.5


class Pressure(IntEnum):
    """What is done, each with all before it."""

    NONE = 0
    EVICTING = 1  # cached prefixes go
    HOLDING = 2  # no request starts beside one that runs
    PREEMPTING = 3  # the youngest running request makes room


class Measures(NamedTuple):
    """What is to be done after a reading.

    Attributes:
        pressure: the level.
        excess: bytes above the watermark; if negative, bytes below it.
    """

    pressure: Pressure
    excess: int


class MemoryWatch:
    """Goes a level up with each reading above the watermark: what the level before gave up was not enough. Below it by
    some slack, everything is as it was. Between the two, requests that wait go on waiting.

    Args:
        watermark: share of the limit; 0: nothing is watched.
        read: reads memory in use and the limit.
        clock: seconds.
        every: seconds between readings.
    """

    def __init__(
        self,
        watermark: float = WATERMARK,
        read: ReadMemory = read_memory,
        clock: Callable[[], float] = time.monotonic,
        every: float = EVERY_SECONDS,
    ) -> None:
        self.watermark = watermark
        self.pressure = Pressure.NONE
        self.last: MemoryReading | None = None
        self._read, self._clock, self._every = read, clock, every
        self._next = clock()

    def look(self) -> Measures | None:
        """To be asked as often as one likes: None until it is time for another reading."""
        now = self._clock()
        if not self.watermark or now < self._next:
            return None
        self.last = self._read()
        self._next = now + self._every
        if self.last is None:
            self._next = now + 60 * self._every  # a system that does not say will not say soon
            return None
        mark = self.watermark * self.last.limit
        excess = int(self.last.used - mark)
        if excess > 0:
            self.pressure = Pressure(min(self.pressure + 1, Pressure.PREEMPTING))
        elif self.last.used < mark - SLACK * self.last.limit:
            self.pressure = Pressure.NONE
        else:
            self.pressure = min(self.pressure, Pressure.HOLDING)
        return Measures(self.pressure, excess)

    def as_dict(self) -> dict[str, Any] | None:
        """For ``/health``: None where nothing is watched or known."""
        reading = self.last
        if reading is None:
            return None
        return {
            "used_bytes": reading.used,
            "limit_bytes": reading.limit,
            "source": reading.source,
            "watermark": self.watermark,
            "pressure": self.pressure.name.lower(),
        }
