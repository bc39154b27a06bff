"""Levels of memory pressure."""

from __future__ import annotations

from mlx_paged.machine import MemoryReading
from mlx_paged.server.memory import MemoryWatch, Pressure, nearest


class Memory:
    """Fake memory with a clock."""

    def __init__(self, limit: int = 1000) -> None:
        self.used, self.limit, self.now, self.num_read, self.warns = 0, limit, 0.0, 0, False

    def read(self) -> MemoryReading | None:
        self.num_read += 1
        return MemoryReading(self.used, self.limit, "system", self.warns) if self.limit else None

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
    assert after(950) == ("PREEMPTING", 50)
    assert after(1200) == ("PREEMPTING", 300)
    assert after(890) == ("PREEMPTING", -10)  # not low enough to admit others
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


def test_warning_of_the_system_evicts_and_never_preempts() -> None:
    memory = Memory()
    watch = memory.watch()

    def after(used: int, *, warns: bool) -> tuple[str, int]:
        memory.used, memory.warns, memory.now = used, warns, memory.now + 0.5
        excess = watch.look()
        assert excess is not None
        return watch.pressure.name, excess

    assert [after(400, warns=True) for _ in range(4)] == [("EVICTING", 20)] * 4, "5 % of what is in use"
    assert after(910, warns=True) == ("PREEMPTING", 10), "the watermark holds beside the warning"
    assert after(890, warns=True) == ("EVICTING", 44)
    assert after(400, warns=False) == ("NONE", -500)


def test_nearest_reading_keeps_a_warning_of_another() -> None:
    full, warned = MemoryReading(9, 10, "metal"), MemoryReading(1, 10, "metal", warns=True)
    assert nearest([full, warned]) == MemoryReading(9, 10, "metal", warns=True)
    assert nearest([full]) == full and nearest([]) is None
