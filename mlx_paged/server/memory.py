"""MemoryWatch: reads how much memory is in use, and frees some above the watermark."""

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
    """Return glibc's ``malloc_trim``; None if the C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def trim_heap() -> None:
    """Return freed heap memory to the system: MLX's buffers on a CPU come from the heap, and stay resident when freed
    between others. Call it only when idle or short of memory: it walks the heap, and later buffers fault pages in."""
    trim = _trim()
    if trim is not None:
        trim(0)


UNLIMITED = 1 << 60  # cgroup v1 reports nearly 1 << 63 if there is no limit


class MemoryReading(NamedTuple):
    """Memory in use and its limit, in bytes.

    Attributes:
        used: memory in use, without cached files, which the system can drop.
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
    """Return the memory in use on the default device; None if the system does not report it. It reads files or calls
    the driver: use it a few times a second, not in every step.

    Metal: MLX's memory against the recommended working set. CUDA: the device's memory that is not free. CPU: a control
    group's memory or the machine's, whichever has the largest share in use.
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
    """Return the reading with the largest share in use."""
    return max(readings, key=lambda reading: reading.share, default=None)


def system_readings(meminfo: Path = Path("/proc/meminfo")) -> Iterator[MemoryReading]:
    """Yield the machine's memory, as ``/proc/meminfo`` reports it."""
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
    """Yield readings of the control groups with a limit that this process is in, parents included; cgroup v1 and v2."""
    for line in _read(groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _readings_up(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _readings_up(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _readings_up(mount: Path, path: str, limit_name: str, used_name: str, prefix: str) -> Iterator[MemoryReading]:
    """Yield readings from a group up to the root. In a container the path is often the host's and does not exist: then
    the root is the group."""
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
    """Return the bytes of a group's cached files, which the system drops before an allocation fails."""
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
SLACK = 0.02  # of the limit: pressure ends when use is this far below the watermark
EVERY_SECONDS = 0.5


class Pressure(IntEnum):
    """Level of memory pressure; each level also does what those before it do."""

    NONE = 0
    EVICTING = 1  # evict cached prefixes
    HOLDING = 2  # start no request while another runs
    PREEMPTING = 3  # preempt the youngest running request


class MemoryWatch:
    """The memory pressure. Each reading above the watermark raises it by a level, because the last one did not free
    enough. It ends :data:`SLACK` below the watermark; in between, waiting requests still wait.

    Args:
        watermark: share of the limit; 0 disables the watch.
        read: reads memory in use and the limit.
        clock: returns seconds.
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
        """Read the memory and set the pressure, if a reading is due. Return the bytes above the watermark, negative
        below it; None if there was no reading. May be called often."""
        now = self._clock()
        if not self.watermark or now < self._next:
            return None
        self.last, before = self._read(), self.pressure
        self._next = now + EVERY_SECONDS
        if self.last is None:
            self._next = now + 60 * EVERY_SECONDS  # a system that reports nothing will not soon
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

    def relieve(self, batch: Any, pool: BlockPool | None, prompt_cache: Any) -> None:
        """Free memory between two steps, if a reading is due and above the watermark. For the engine thread.

        Args:
            batch: the running batch, or None.
            pool: the present model's pool, or None.
            prompt_cache: the prompt cache of all models; cached copies in it are dropped, too.
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
            batch.preempt_last()
        if pool is not None:
            pool.memory.give_back(excess)
        unpaged = getattr(prompt_cache, "unpaged", None)
        if unpaged is not None:
            unpaged.trim_to(n_bytes=max(0, int(unpaged.nbytes) - excess))

    def as_dict(self) -> dict[str, Any] | None:
        """Return what ``/health`` shows; None if there has been no reading."""
        if self.last is None:
            return None
        shown = {"used_bytes": self.last.used, "limit_bytes": self.last.limit, "source": self.last.source}
        return {**shown, "watermark": self.watermark, "pressure": self.pressure.name.lower()}
