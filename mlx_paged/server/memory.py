"""MemoryWatch: frees memory above the watermark, and when macOS runs short of it."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import mlx.core as mx

from ..kv.pool import BlockPool
from ..machine import MemoryReading, memory_readings
from ..patches.cache.lru_prompt_cache import PagedPromptCache


def trim_heap() -> None:
    """Return freed heap memory to the system, with glibc: MLX's buffers on a CPU come from the heap, and stay resident
    when freed between others. Call it only when idle or short of memory: it walks the heap, and later buffers fault
    pages in."""
    with suppress(AttributeError, OSError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def nearest(readings: Sequence[MemoryReading]) -> MemoryReading | None:
    """Return the reading with the largest share in use, with the system's warning if there is one in any."""
    if not readings:
        return None
    fullest = max(readings, key=lambda reading: reading.share)
    return fullest._replace(warns=any(reading.warns for reading in readings))


WATERMARK = 0.95  # of the limit
SLACK = 0.02  # of the limit: pressure ends when use is this far below the watermark
WARNED_SHARE = 0.05  # of MLX's memory, which prefixes give up at each reading while the system warns
EVERY_SECONDS = 0.5


class Pressure(IntEnum):
    """Level of memory pressure; the second also does what the first does."""

    NONE = 0
    EVICTING = 1  # evict cached prefixes
    PREEMPTING = 2  # preempt the youngest running request, and start none while another runs


class MemoryWatch:
    """The memory pressure. Each reading above the watermark raises it by a level, because the last one did not free
    enough. It ends :data:`SLACK` below the watermark. A warning of the system raises it to the first level only:
    another process may be the cause, and requests are not computed twice for that.

    Args:
        watermark: share of the limit; 0 disables the watch.
        read: reads memory in use and the limit.
        clock: returns seconds.
    """

    def __init__(
        self,
        watermark: float = WATERMARK,
        read: Callable[[], MemoryReading | None] = lambda: nearest(memory_readings()),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watermark = watermark
        self.pressure = Pressure.NONE
        self.last: MemoryReading | None = None
        self._read, self._clock = read, clock
        self._next = clock()

    def look(self) -> int | None:
        """Read the memory and set the pressure, if a reading is due. Return the bytes to free, negative below the
        watermark; None if there was no reading. May be called often."""
        now = self._clock()
        if not self.watermark or now < self._next:
            return None
        self.last, before = self._read(), self.pressure
        self._next = now + EVERY_SECONDS
        if self.last is None:
            self._next = now + 60 * EVERY_SECONDS  # a system that reports nothing will not soon
            return None
        used, limit, source, warns = self.last
        excess = int(used - self.watermark * limit)
        if excess > 0:
            self.pressure = Pressure(min(before + 1, Pressure.PREEMPTING))
        elif warns:
            self.pressure, excess = Pressure.EVICTING, int(used * WARNED_SHARE)
        elif excess < -SLACK * limit:
            self.pressure = Pressure.NONE
        if self.pressure > before:
            logging.warning("memory (%s): %s of %s bytes in use: %s", source, used, limit, self.pressure.name.lower())
        elif self.pressure == Pressure.NONE != before:
            logging.info("memory is below its watermark again")
        return excess

    def relieve(self, batch: Any, pool: BlockPool | None, prompt_cache: PagedPromptCache) -> None:
        """Free memory between two steps, if a reading is due and says so. For the engine thread.

        Args:
            batch: the running batch, or None.
            pool: the present model's pool, or None.
            prompt_cache: the prompt cache of all models; cached copies in it are dropped, too.
        """
        excess = self.look()
        if excess is None:
            return
        if batch is not None:
            batch.admits = self.pressure < Pressure.PREEMPTING
        if pool is not None:
            pool.memory.spare = max(0, -excess)
        if excess <= 0:
            return
        mx.clear_cache()
        trim_heap()
        if batch is not None and self.pressure == Pressure.PREEMPTING:
            batch.preempt_last()
        if pool is not None:
            pool.memory.evict(excess)
        unpaged = prompt_cache.unpaged
        unpaged.trim_to(n_bytes=max(0, int(unpaged.nbytes) - excess))

    def as_dict(self) -> dict[str, Any] | None:
        """Return what ``/health`` shows; None if there has been no reading."""
        if self.last is None:
            return None
        shown = {"used_bytes": self.last.used, "limit_bytes": self.last.limit, "source": self.last.source}
        return {**shown, "watermark": self.watermark, "pressure": self.pressure.name.lower()}
