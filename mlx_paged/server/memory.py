"""MemoryWatch: how full the memory is, and what makes room above the watermark."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ..kv.pool import BlockPool


@cache
def _trim() -> Any:
    """glibc's ``malloc_trim``; None: this C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def trim_heap() -> None:
    """MLX's buffers on a CPU come from there, and a freed one stays resident between others that are in use. For times
    without work, or with too little memory: it looks through the whole heap, and what comes next faults pages in."""
    trim = _trim()
    if trim is not None:
        trim(0)


UNLIMITED = 1 << 60  # cgroups of version 1 say so much, and a little less, for none


class MemoryReading(NamedTuple):
    """Bytes in use, and the most there can be.

    Attributes:
        used: what could not be had by asking for it. Files that the system may forget are not part of it.
        limit: see :func:`read_memory`.
        source: ``metal``, ``cuda``, ``cgroup`` or ``system``.
    """

    used: int
    limit: int
    source: str

    @property
    def share(self) -> float:
        return self.used / self.limit


def read_memory() -> MemoryReading | None:
    """Read the default device's memory now. Costs some files or a call: use it a few times a second, not for every
    step.

    Metal: what MLX holds, of the recommended working set. CUDA: what of the device's memory is not free. CPU: the
    control group's limit or the machine's memory, whichever is nearer. None: the system does not say.
    """
    if mx.default_device() == mx.Device(mx.gpu):
        info = mx.device_info()
        if limit := int(info.get("max_recommended_working_set_size") or 0):
            return MemoryReading(mx.get_active_memory() + mx.get_cache_memory(), limit, "metal")
        total = int(info.get("total_memory") or 0)
        if total and "free_memory" in info:
            return MemoryReading(total - int(info["free_memory"]), total, "cuda")
        return None
    return nearest([*control_group_readings(), *system_readings()])


def nearest(readings: list[MemoryReading]) -> MemoryReading | None:
    """Return the one of which the largest share is used."""
    return max(readings, key=lambda reading: reading.share, default=None)


def system_readings(meminfo: Path = Path("/proc/meminfo")) -> Iterator[MemoryReading]:
    """Yield the machine's memory, and what of it is not available."""
    lines = _read(meminfo).splitlines()
    values = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    try:
        total, available = (int(values[name][0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (KeyError, IndexError, ValueError):
        return
    if total:
        yield MemoryReading(total - available, total, "system")


def control_group_readings(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> Iterator[MemoryReading]:
    """Return readings of this process's control groups that have a limit, the inner ones and those around them, of both
    versions."""
    for line in _read(groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _readings_up(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _readings_up(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _readings_up(mount: Path, path: str, limit_name: str, used_name: str, prefix: str) -> Iterator[MemoryReading]:
    """Yield readings up the path. In a container the path is often the host's, and not to be found: then its root is
    the group."""
    inner = mount / path.strip("/")
    folder = inner if inner.is_dir() else mount
    while True:
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit and limit < UNLIMITED and used is not None:
            yield MemoryReading(max(0, used - _forgettable(folder / "memory.stat", prefix)), limit, "cgroup")
        if folder == mount or mount not in folder.parents:
            return
        folder = folder.parent


def _forgettable(stat: Path, prefix: str) -> int:
    """Bytes of files that a group's processes have read, and the system drops before it says no to anybody."""
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    pairs = (line.split() for line in _read(stat).splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names and pair[1].isdigit())


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


WATERMARK = 0.95  # of the limit
SLACK = 0.02  # of the limit, below the watermark, before everything is as it was
EVERY_SECONDS = 0.5


class Pressure(IntEnum):
    """What is done, each with all before it."""

    NONE = 0
    EVICTING = 1  # cached prefixes go
    HOLDING = 2  # no request starts beside one that runs
    PREEMPTING = 3  # the youngest running request makes room


class MemoryWatch:
    """Goes a level up with each reading above the watermark: what the level before gave up was not enough. Below it by
    some slack, everything is as it was. Between the two, requests that wait go on waiting.

    Args:
        watermark: share of the limit; 0: nothing is watched.
        read: reads memory in use and the limit.
        clock: seconds.
    """

    def __init__(
        self,
        watermark: float = WATERMARK,
        read: Callable[[], MemoryReading | None] = read_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watermark = watermark
        self.pressure = Pressure.NONE
        self.last: MemoryReading | None = None
        self._read, self._clock = read, clock
        self._next = clock()

    def look(self) -> int | None:
        """Read the memory and set the pressure. Return the bytes above the watermark, negative below it; None until it
        is time for another reading; may be called often."""
        now = self._clock()
        if not self.watermark or now < self._next:
            return None
        self.last, before = self._read(), self.pressure
        self._next = now + EVERY_SECONDS
        if self.last is None:
            self._next = now + 60 * EVERY_SECONDS  # a system that does not say will not say soon
            return None
        used, limit, source = self.last
        mark = self.watermark * limit
        if int(used - mark) > 0:
            self.pressure = Pressure(min(before + 1, Pressure.PREEMPTING))
        else:
            self.pressure = Pressure.NONE if used < mark - SLACK * limit else min(before, Pressure.HOLDING)
        if self.pressure > before:
            logging.warning("memory (%s): %s of %s bytes in use: %s", source, used, limit, self.pressure.name.lower())
        elif self.pressure == Pressure.NONE != before:
            logging.info("memory is below its watermark again")
        return int(used - mark)

    def keep(self, batch: Any, pool: BlockPool | None, prompt_cache: Any) -> None:
        """Make room between two steps; only a look at the clock unless a reading is due. For the engine's thread.

        Args:
            batch: of the requests that run; None: none do.
            pool: of the present model.
            prompt_cache: of all models; what is copied there goes, too.
        """
        excess = self.look()
        if excess is None:
            return
        if batch is not None:
            batch.admits = self.pressure < Pressure.HOLDING
        if pool is not None:
            pool.memory.spare = max(0, -excess)
        if excess <= 0:
            return
        mx.clear_cache()
        trim_heap()
        if batch is not None and self.pressure >= Pressure.PREEMPTING:
            batch.preempt_youngest()
        if pool is not None:
            pool.memory.give_back(excess)
        others = getattr(prompt_cache, "others", None)
        if others is not None:
            others.trim_to(n_bytes=max(0, int(others.nbytes) - excess))

    def as_dict(self) -> dict[str, Any] | None:
        """Return what ``/health`` shows; None where nothing is watched or known."""
        if self.last is None:
            return None
        shown = {"used_bytes": self.last.used, "limit_bytes": self.last.limit, "source": self.last.source}
        return {**shown, "watermark": self.watermark, "pressure": self.pressure.name.lower()}
