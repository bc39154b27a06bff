"""Where the time of the thread that computes goes in decode steps, of stock mlx-lm and of mlx_paged alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

# What is called, by what it is called here. In `dispatch` MLX encodes and captures; `wait` is for a result.
KINDS = ("model", "dispatch", "wait", "vote", "checksum")


class HostTime:
    """Seconds in calls of five kinds, and seconds of the processor in them; the rest is Python between them.

    Calls within a call count as that one. Stays for the life of the process; a call takes a microsecond more.

    Args:
        model: whose calls are counted; it gets a class of its own, derived from its class.
    """

    def __init__(self, model: Any) -> None:
        self._counts = {kind: [0, 0.0, 0.0] for kind in KINDS}
        self._inside = False
        original = type(model)
        call = self._timed("model", lambda self, *args, **kwargs: original.__call__(self, *args, **kwargs))
        names = {"__call__": call, "__module__": original.__module__}
        model.__class__ = type(original.__name__, (original,), names)
        mx.async_eval = self._timed("dispatch", mx.async_eval)
        mx.eval = self._timed("wait", mx.eval)
        mx.array.tolist = self._timed("wait", mx.array.tolist)  # type: ignore[method-assign]

    def watch_ranks(self) -> None:
        """Also what mlx_paged's ranks say to each other."""
        from mlx_paged.engine.ranks.ranks import Ranks

        Ranks.exchange = self._timed("vote", Ranks.exchange)  # type: ignore[method-assign]
        Ranks.broadcast = self._timed("checksum", Ranks.broadcast)  # type: ignore[method-assign]

    def _timed(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        counts = self._counts[kind]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            cpu, begin = time.thread_time(), time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False
                counts[0] += 1
                counts[1] += time.perf_counter() - begin
                counts[2] += time.thread_time() - cpu

        return call

    def now(self) -> dict[str, list[float]]:
        """Calls, seconds and seconds of the processor so far, by kind, and of ``all``."""
        counts: dict[str, list[float]] = {kind: list(each) for kind, each in self._counts.items()}
        return counts | {"all": [0, time.perf_counter(), time.thread_time()]}


def per_step(begin: dict[str, list[float]], end: dict[str, list[float]], steps: int) -> dict[str, list[float]]:
    """Between two of :meth:`HostTime.now`, a step: of each kind calls, milliseconds, milliseconds of the processor."""
    found = {}
    for kind, before in begin.items():
        calls, wall, cpu = (after - each for each, after in zip(before, end[kind], strict=True))
        found[kind] = [calls / steps, 1e3 * wall / steps, 1e3 * cpu / steps]
    python = [found["all"][i] - sum(found[kind][i] for kind in KINDS) for i in (1, 2)]
    return found | {"python": [0, *python]}
