"""The machine's memory as it is read, and the rule for the KV cache's budget."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlx_paged
from mlx_paged import machine
from mlx_paged.errors import WeightsTooLargeError
from mlx_paged.machine import (
    MemoryReading,
    control_group_readings,
    kv_budget,
    macos_warns,
    memory_readings,
    system_readings,
    usable_memory,
)
from mlx_paged.patches.cache.pools import count_weights
from tests.support.models.builders import build

GIB = 1 << 30
DOCS = Path(__file__).parents[1] / "docs"


def on_gpu(monkeypatch: pytest.MonkeyPatch, held: int = 0, **info: int) -> None:
    """Let the default device be a GPU with this information, of which MLX holds ``held`` bytes."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: held)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)


# The rule --------------------------------------------------------------------------------------------------------


def table_row(monkeypatch: pytest.MonkeyPatch, gigabytes: int, share: float, billions: int) -> str:
    """Return the row of docs/metal.md for a Mac, whose Metal recommends ``share`` of its memory, and a 4-bit model."""
    on_gpu(monkeypatch, max_recommended_working_set_size=int(share * gigabytes * GIB))
    weights = int(4.5 * billions * 1e9) // 8
    cells = [f"{gigabytes} GB, {billions}B", f"{usable_memory() / 1e9:.2f}", f"{weights / 1e9:.2f}"]
    try:
        budget = kv_budget(weights)
    except WeightsTooLargeError:
        return f"| {' | '.join(cells)} | does not fit | | |"
    left = gigabytes * GIB - weights - budget
    assert left >= 0.45 * gigabytes * GIB, "a system and its programs need some room"
    return f"| {' | '.join(cells)} | {' | '.join(f'{n / 1e9:.2f}' for n in (budget, weights + budget, left))} |"


def test_table_of_macs_follows_from_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine, "macos_warns", lambda: False)
    macs = [(16, 2 / 3), (64, 3 / 4)]
    rows = [table_row(monkeypatch, *mac, billions) for mac in macs for billions in (8, 30)]
    assert "does not fit" in rows[1] and "\n".join(rows) in (DOCS / "metal.md").read_text(), rows


def test_budget_is_the_same_before_and_after_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, held=0, total_memory=100_000, free_memory=70_000)  # other processes have 30,000
    before = kv_budget(40_000)
    on_gpu(monkeypatch, held=40_000, total_memory=100_000, free_memory=30_000)
    assert kv_budget(40_000) == before == 24_000
    on_gpu(monkeypatch, held=40_000, max_recommended_working_set_size=100_000)
    assert kv_budget(40_000) == 48_000


def test_error_of_weights_that_do_not_fit_names_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, max_recommended_working_set_size=11_450_000_000)
    with pytest.raises(WeightsTooLargeError, match=r"take 16\.88 GB, .* only 11\.45 GB on this machine") as caught:
        kv_budget(16_880_000_000)
    assert (caught.value.weight_bytes, caught.value.usable_bytes) == (16_880_000_000, 11_450_000_000)
    assert kv_budget(11_449_999_990) == 8


def test_pools_leave_room_for_the_weights_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights count although nothing of them is read, and do not count twice when they are."""
    monkeypatch.setattr(machine, "usable_memory", lambda: 10**9)
    mlx_paged.apply_patches()
    one, two = build("llama"), build("qwen3")
    sizes = [sum(x.nbytes for _, x in tree_flatten(each.parameters())) for each in (one, two)]

    def budget(model: Any) -> int:
        pool = mlx_paged.pool_of(model)
        assert pool is not None
        return pool.memory_budget

    assert budget(one) == int(0.8 * (10**9 - sizes[0]))
    part = copy.copy(one)
    assert budget(part) == budget(one), "the same arrays count once"
    assert budget(two) == int(0.8 * (10**9 - sum(sizes))), "the other model is in memory"
    third = build("llama")
    count_weights(third)
    assert budget(third) == int(0.8 * (10**9 - sizes[0])), "it takes the place of others"


# Readings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "reading", "usable"),
    [
        ({"max_recommended_working_set_size": 1000, "free_memory": 1}, MemoryReading(30, 1000, "metal"), 1000),
        ({"total_memory": 500, "free_memory": 100}, MemoryReading(400, 500, "cuda"), 130),
        ({"total_memory": 500}, MemoryReading(30, 500, "cuda"), 500),
    ],
)
def test_memory_of_metal_and_cuda_gpus_is_read(
    info: dict[str, int], reading: MemoryReading, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, held=30, **info)
    assert memory_readings() == [reading] and usable_memory() == usable


def test_usable_memory_of_a_cpu_is_what_the_nearest_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(mx, "get_active_memory", lambda: 20)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 3)
    limits = [MemoryReading(600, 1000, "cgroup"), MemoryReading(50, 200, "cgroup")]
    monkeypatch.setattr(machine, "control_group_readings", lambda: limits)
    monkeypatch.setattr(machine, "system_readings", lambda: [MemoryReading(5000, 9000, "system")])
    assert usable_memory() == 150 + 23
    limits[1] = MemoryReading(400, 200, "cgroup")
    assert usable_memory() == 0
    limits.clear()
    assert usable_memory() == 4000 + 23
    monkeypatch.setattr(machine, "system_readings", lambda: [])
    monkeypatch.setattr(machine.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert usable_memory() == 4096 * 500


@pytest.mark.parametrize(("level", "status", "warns"), [(1, 0, False), (2, 0, True), (4, 0, True), (4, -1, False)])
def test_warning_of_macos_is_read(level: int, status: int, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not macos_warns(), "this is not macOS, or nothing is short"

    def sysctlbyname(name: bytes, value: Any, size: Any, new: Any, new_size: Any) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level" and size._obj.value == 4 and new is None
        value._obj.value = level
        return status

    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert macos_warns() is warns
    on_gpu(monkeypatch, held=30, max_recommended_working_set_size=1000)
    assert memory_readings() == [MemoryReading(30, 1000, "metal", warns)]


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
    for text in ("", "MemTotal: x kB\nMemAvailable: 1 kB\n", "MemTotal: 5 kB\n"):
        nowhere.write_text(text)
        assert list(system_readings(nowhere)) == []
    nowhere.write_text("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:   6 kB\n")
    assert list(system_readings(nowhere)) == [MemoryReading(2048, 8192, "system")]
