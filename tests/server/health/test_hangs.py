"""When the engine's thread counts as hanging."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.server import engine_thread
from mlx_paged.server.engine_thread import EngineThread
from mlx_paged.server.memory import MemoryWatch


class Died(Exception):
    pass


def died_at(monkeypatch: pytest.MonkeyPatch, progress: Callable[[float], object], end: float = 100.0) -> float | None:
    """Return when the watchdog ends the process, with a timeout of 10 s; None if it does not."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def die(why: str) -> None:
        raise Died(why)

    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    nothing: Any = SimpleNamespace()
    watched = EngineThread(nothing, nothing, MemoryWatch(0.0), 10.0, make_loop=lambda thread: nothing)
    watched.thread = SimpleNamespace(is_alive=lambda: now[0] < end, ident=None)  # type: ignore[assignment]
    monkeypatch.setattr(watched, "_progress", lambda: progress(now[0]))
    monkeypatch.setattr(watched, "_die", die)
    try:
        watched._watch()
    except Died:
        return now[0]
    return None


@pytest.mark.parametrize(
    ("progress", "end"),
    [
        (lambda now: 1, 11.0),  # no progress from the start
        (lambda now: min(now, 50.0), 60.0),  # no progress after 50 s
        (lambda now: now, None),
        (lambda now: None, None),  # an operation without a time limit
        (lambda now: None if now < 50 else 1, 60.0),
    ],
)
def test_no_progress_for_the_whole_timeout_is_a_hang(
    progress: Callable[[float], object], end: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert died_at(monkeypatch, progress) == end


def test_loading_a_model_and_stopping_are_not_hangs() -> None:
    loop: Any = SimpleNamespace(is_loading=False, progress=lambda: 1)
    watched = EngineThread(loop, loop, MemoryWatch(0.0), None, make_loop=lambda thread: loop)
    assert watched._progress() is None  # it loads its first model
    watched.has_started = True
    assert watched._progress() == (loop, 1)
    loop.is_loading = True
    assert watched._progress() is None
    loop.is_loading, watched.is_stopping = False, True
    assert watched._progress() is None
