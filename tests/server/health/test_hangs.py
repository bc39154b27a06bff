"""When the engine's thread does not count as hanging; test_server_faults.py has hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlx_paged.server.engine_thread import EngineThread
from mlx_paged.server.memory import MemoryWatch


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
