"""When the engine's thread does not count as hanging; test_server_faults.py has hangs."""

from __future__ import annotations

from typing import Any

from mlx_paged.server.engine_thread import EngineThread
from mlx_paged.server.memory import MemoryWatch


def test_loading_a_model_and_stopping_are_not_hangs() -> None:
    nothing: Any = None
    watched = EngineThread(nothing, nothing, MemoryWatch(0.0), None)
    assert watched.progress() is None  # it loads its first model
    watched.has_started = True
    assert watched.progress() is not None
    watched.is_loading = True
    assert watched.progress() is None
    watched.is_loading, watched.is_stopping = False, True
    assert watched.progress() is None
