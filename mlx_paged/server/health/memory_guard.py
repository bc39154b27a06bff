"""MemoryGuard: evicts, holds or preempts according to memory pressure."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from ...kv.pool import BlockPool
from .heap import trim_heap
from .memory_watch import MemoryWatch, Pressure


class MemoryGuard:
    """For the thread that computes.

    Args:
        watch: says what is to be done.
    """

    def __init__(self, watch: MemoryWatch) -> None:
        self._watch = watch
        self._told = Pressure.NONE

    def keep(self, batch: Any, pool: BlockPool | None, prompt_cache: Any) -> None:
        """Act between two steps; nothing but a look at the clock unless a reading is due.

        Args:
            batch: of the requests that run; None: none do.
            pool: of the present model.
            prompt_cache: of all models; what is copied there goes, too.
        """
        measures = self._watch.look()
        if measures is None:
            return
        pressure, excess = measures
        self._tell(pressure)
        if batch is not None:
            batch.admits = pressure < Pressure.HOLDING
        if pool is not None:
            pool.memory.spare = max(0, -excess)
        if excess <= 0:
            return
        mx.clear_cache()
        trim_heap()
        if batch is not None and pressure >= Pressure.PREEMPTING:
            batch.preempt_youngest()
        if pool is not None:
            pool.memory.give_back(excess)
        others = getattr(prompt_cache, "others", None)
        if others is not None:
            others.trim_to(n_bytes=max(0, int(others.nbytes) - excess))

    def _tell(self, pressure: Pressure) -> None:
        if pressure > self._told and self._watch.last is not None:
            used, limit, source = self._watch.last
            logging.warning("memory (%s): %s of %s bytes in use: %s", source, used, limit, pressure.name.lower())
        elif pressure < self._told and pressure == Pressure.NONE:
            logging.info("memory is below its watermark again")
        self._told = pressure
