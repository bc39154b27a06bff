"""When a thread counts as hanging, and when it is not worth being started again."""

from __future__ import annotations

import threading

from mlx_paged.serve.health.drain import Drain
from mlx_paged.serve.health.restarts import Restarts
from mlx_paged.serve.health.watchdog import Watchdog


class Thread:
    def __init__(self) -> None:
        self.is_alive, self.may_take_long, self.done = True, False, 0

    def progress(self) -> object:
        return self.done


class Watch:
    def __init__(self, timeout: float = 10) -> None:
        self.now, self.thread = 0.0, Thread()
        self.reports: list[tuple[Thread, str]] = []
        self.dog = Watchdog(lambda: self.thread, lambda *report: self.reports.append(report), timeout, lambda: self.now)

    def after(self, seconds: float) -> list[str]:
        """Looking every second."""
        for _ in range(int(seconds)):
            self.now += 1
            self.dog.check()
        return [trouble for _, trouble in self.reports]


def test_no_progress_for_the_whole_time_is_a_hang() -> None:
    watch = Watch()
    assert watch.after(10) == []
    watch.thread.done += 1
    assert watch.after(10) == [] and watch.after(1) == ["hangs"]
    assert watch.after(50) == ["hangs"]  # told once
    watch.thread = Thread()
    assert watch.after(10) == ["hangs"] and watch.after(1) == ["hangs"] * 2


def test_what_may_take_long_is_none() -> None:
    watch = Watch()
    watch.thread.may_take_long = True
    assert watch.after(1000) == []
    watch.thread.may_take_long = False
    assert watch.after(9) == [] and watch.after(1) == ["hangs"]  # from the last sign on
    assert Watch(timeout=0).after(1000) == []


def test_a_thread_that_has_ended_is_told_at_once() -> None:
    watch = Watch(timeout=0)
    watch.thread.is_alive = False
    assert watch.after(1) == ["ended"] == watch.after(5)


def test_restarts_that_come_too_often() -> None:
    now = [0.0]
    restarts = Restarts(lambda: now[0])
    assert restarts.as_dict() == {"restarts": 0, "last_restart": None, "seconds_since_restart": None}
    assert not restarts.is_recent
    for _ in range(5):
        assert restarts.note("x")
    assert restarts.is_recent and not restarts.note("x")
    restarts = Restarts(lambda: now[0])
    for _ in range(50):  # now and then it can go on for ever
        now[0] += 121
        assert restarts.note("y")
    assert restarts.as_dict() == {"restarts": 50, "last_restart": "y", "seconds_since_restart": 0.0}
    now[0] += 61
    assert not restarts.is_recent


def test_a_drain_waits_for_those_who_are_being_answered() -> None:
    drain, ended, may_end = Drain(30), threading.Event(), threading.Event()

    def answer() -> None:
        with drain.answering():
            may_end.wait(30)

    client = threading.Thread(target=answer)
    client.start()
    while not drain.num_answering:
        pass
    drain.check()
    drain.begin(ended.set)
    assert drain.is_draining and not ended.wait(0.05)
    may_end.set()
    assert ended.wait(30)
    client.join()
