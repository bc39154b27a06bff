"""The machine's memory: how much is in use, how much MLX may hold, and the KV cache's budget (docs/adr/0099)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .errors import WeightsTooLargeError

# Share of what the weights leave that the KV cache gets. A Mac's memory is also the system's and the screen's.
SHARE, MAC_SHARE = 0.8, 0.6
UNLIMITED = 1 << 60  # cgroup v1 reports nearly 1 << 63 if there is no limit
MACOS_WARNS = 2  # kern.memorystatus_vm_pressure_level: 1 is normal, 2 a warning, 4 critical


class MemoryReading(NamedTuple):
    """Memory in use and its limit, in bytes.

    Attributes:
        used: memory in use, without cached files, which the system can drop.
        limit: see :func:`memory_readings`.
        source: ``metal``, ``cuda``, ``cgroup`` or ``system``.
        warns: whether the system itself warns that memory is short, whichever process uses it.
    """

    used: int
    limit: int
    source: str
    warns: bool = False

    @property
    def share(self) -> float:
        """Share of the limit in use."""
        return self.used / self.limit


def kv_budget(weight_bytes: int) -> int:
    """Return the automatic budget of KV caches in bytes: a share of what the weights of all models leave. It is the
    same before and after the weights are read. Raises WeightsTooLargeError if they do not fit."""
    return int((MAC_SHARE if sys.platform == "darwin" else SHARE) * memory_beside(weight_bytes))


def memory_beside(weight_bytes: int) -> int:
    """Return the bytes that MLX may hold beside weights. Raises WeightsTooLargeError if that is nothing."""
    usable = usable_memory()
    if weight_bytes >= usable:
        raise WeightsTooLargeError(weight_bytes, usable)
    return usable - weight_bytes


def usable_memory() -> int:
    """Return the bytes that MLX may hold in this process: what it holds already and what is free. Half of the machine's
    memory where the system reports nothing."""
    free = [reading.limit - reading.used for reading in memory_readings()]
    if not free:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, min(free) + _held_by_mlx())


def _held_by_mlx() -> int:
    return mx.get_active_memory() + mx.get_cache_memory()


def memory_readings() -> list[MemoryReading]:
    """Return the memory in use on the default device against each limit. Reads files or calls the driver: use it a few
    times a second, not in every step.

    Metal: MLX's memory against the recommended working set. CUDA: the device's memory that is not free. CPU: the
    machine's memory, and that of each control group with a limit.
    """
    if mx.default_device() != mx.Device(mx.gpu):
        return [*control_group_readings(), *system_readings()]
    info = mx.device_info()
    if limit := int(info.get("max_recommended_working_set_size") or 0):
        return [MemoryReading(_held_by_mlx(), limit, "metal", macos_warns())]
    if total := int(info.get("total_memory") or 0):
        used = total - int(info["free_memory"]) if "free_memory" in info else _held_by_mlx()
        return [MemoryReading(used, total, "cuda")]
    return []


def macos_warns() -> bool:
    """Return whether macOS warns that memory is short; False on other systems."""
    if sys.platform != "darwin":
        return False
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    name, found = b"kern.memorystatus_vm_pressure_level", (ctypes.byref(level), ctypes.byref(size))
    return ctypes.CDLL(None).sysctlbyname(name, *found, None, ctypes.c_size_t(0)) == 0 and level.value >= MACOS_WARNS


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
