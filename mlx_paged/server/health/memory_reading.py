"""MemoryReading: how much of the memory that MLX computes in is used, and where the limit is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

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
    """Of the default device, now. Some files or a call: for a few times a second, not for every step.

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
    """The one of which the largest share is used."""
    return max(readings, key=lambda reading: reading.share, default=None)


def system_readings(meminfo: Path = Path("/proc/meminfo")) -> Iterator[MemoryReading]:
    """The machine's memory, and what of it is not available."""
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
    """Of this process's control groups that have a limit, the inner ones and those around them, of both versions."""
    for line in _read(groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _readings_up(mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _readings_up(mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _readings_up(mount: Path, path: str, limit_name: str, used_name: str, prefix: str) -> Iterator[MemoryReading]:
    """In a container the path is often the host's, and not to be found: then its root is the group."""
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


ReadMemory = Callable[[], MemoryReading | None]
