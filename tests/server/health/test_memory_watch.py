"""Levels of memory pressure, and where memory limits are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_paged.server import memory as memory_reading
from mlx_paged.server.memory import (
    MemoryReading,
    MemoryWatch,
    Pressure,
    control_group_readings,
    nearest,
    read_memory,
    system_readings,
)


class Memory:
    """Fake memory with a clock."""

    def __init__(self, limit: int = 1000) -> None:
        self.used, self.limit, self.now, self.num_read = 0, limit, 0.0, 0

    def read(self) -> MemoryReading | None:
        self.num_read += 1
        return MemoryReading(self.used, self.limit, "system") if self.limit else None

    def watch(self, watermark: float = 0.9) -> MemoryWatch:
        return MemoryWatch(watermark, self.read, lambda: self.now)


def test_each_reading_above_the_watermark_raises_the_pressure_a_level() -> None:
    memory = Memory()
    watch = memory.watch()

    def after(used: int) -> tuple[str, int]:
        memory.used, memory.now = used, memory.now + 0.5
        excess = watch.look()
        assert excess is not None
        return watch.pressure.name, excess

    assert after(900) == ("NONE", 0)
    assert after(901) == ("EVICTING", 1)
    assert after(950) == ("HOLDING", 50)
    assert after(990) == ("PREEMPTING", 90)
    assert after(1200) == ("PREEMPTING", 300)
    assert after(890) == ("HOLDING", -10)  # not low enough to admit others
    assert after(879) == ("NONE", -21)
    assert after(905) == ("EVICTING", 5)
    assert after(890) == ("EVICTING", -10)
    assert watch.as_dict() == {
        "used_bytes": 890,
        "limit_bytes": 1000,
        "source": "system",
        "watermark": 0.9,
        "pressure": "evicting",
    }


def test_memory_is_not_read_at_every_look() -> None:
    memory = Memory()
    watch = memory.watch()
    for _ in range(1000):
        watch.look()
        memory.now += 0.001
    assert memory.num_read == 2
    silent = Memory(limit=0)
    watch = silent.watch()
    for _ in range(100):
        assert watch.look() is None
        silent.now += 0.5
    assert silent.num_read == 2 and watch.as_dict() is None and watch.pressure == Pressure.NONE
    off = memory.watch(watermark=0)
    memory.num_read = 0
    assert off.look() is None and memory.num_read == 0


def group(folder: Path, limit: str, used: int, stat: str, names: tuple[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


SECOND, FIRST = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_limits_of_control_groups_v2_are_read(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("0::/a/b\n")
    group(mount / "a/b", "1000", 700, "anon 100\ninactive_file 150\nactive_file 50\n", SECOND)
    group(mount / "a", "max", 900, "", SECOND)
    group(mount, "5000", 1000, "inactive_file 1\n", SECOND)
    found = list(control_group_readings(groups, mount))
    assert found == [MemoryReading(500, 1000, "cgroup"), MemoryReading(999, 5000, "cgroup")]
    assert nearest(found) == found[0]
    groups.write_text("0::/not/here\n")  # a path of the host, seen from a container
    assert list(control_group_readings(groups, mount)) == found[1:]


def test_limits_of_control_groups_v1_are_read(tmp_path: Path) -> None:
    groups, mount = tmp_path / "cgroup", tmp_path / "mount"
    groups.write_text("9:cpu:/x\n4:memory:/x/y\n0::/\n")
    group(mount / "memory/x/y", "9223372036854771712", 70, "total_inactive_file 10\n", FIRST)  # no limit
    group(mount / "memory/x", "100", 70, "inactive_file 5\ntotal_inactive_file 10\n", FIRST)
    assert list(control_group_readings(groups, mount)) == [MemoryReading(60, 100, "cgroup")]


def test_missing_or_malformed_memory_files_give_no_reading(tmp_path: Path) -> None:
    nowhere = tmp_path / "nothing"
    assert list(control_group_readings(nowhere, nowhere)) == list(system_readings(nowhere)) == []
    assert nearest([]) is None
    for text in ("", "MemTotal: x kB\nMemAvailable: 1 kB\n", "MemTotal: 5 kB\n"):
        nowhere.write_text(text)
        assert list(system_readings(nowhere)) == []
    nowhere.write_text("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:   6 kB\n")
    assert list(system_readings(nowhere)) == [MemoryReading(2048, 8192, "system")]


@pytest.mark.parametrize(
    "info, expected",
    [
        ({"max_recommended_working_set_size": 1000}, MemoryReading(30, 1000, "metal")),
        ({"total_memory": 500, "free_memory": 100}, MemoryReading(400, 500, "cuda")),
        ({"total_memory": 500}, None),
    ],
)
def test_memory_of_metal_and_cuda_gpus_is_read(
    info: dict[str, Any], expected: MemoryReading | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx = memory_reading.mx
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 20)
    assert read_memory() == expected
