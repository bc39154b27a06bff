"""When a thread counts as hanging."""

from __future__ import annotations

from mlx_paged.server.health.watchdog import Watchdog


class Watch:
    def __init__(self, timeout: float = 10) -> None:
        self.now, self.done = 0.0, 0
        self.may_take_long = False
        self.dog = Watchdog(lambda: None if self.may_take_long else self.done, lambda: None, timeout, lambda: self.now)

    def after(self, seconds: int) -> bool:
        """Looking every second."""
        found = False
        for _ in range(seconds):
            self.now += 1
            found = self.dog.check()
        return found


def test_no_progress_for_the_whole_time_is_a_hang() -> None:
    watch = Watch()
    assert not watch.after(10)
    watch.done += 1
    assert not watch.after(10) and watch.after(1)


def test_what_may_take_long_is_none() -> None:
    watch = Watch()
    watch.may_take_long = True
    assert not watch.after(1000)
    watch.may_take_long = False
    assert not watch.after(10) and watch.after(1)  # from the last sign on
    assert not Watch(timeout=0).after(1000)
