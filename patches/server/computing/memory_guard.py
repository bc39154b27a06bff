"""MemoryGuard: does to a model's pool and requests what the memory watch says."""

from __future__ import annotations

import logging

import mlx.core as mx

from ....kv.pool import BlockPool
from ....serve.health.heap import trim_heap
from ....serve.health.memory_watch import MemoryWatch, Pressure
from ...cache.lru_prompt_cache import PagedPromptCache, PromptStore
from ...generate.batch_generator import PagedBatchGenerator


class MemoryGuard:
    """For the thread that computes.

    Args:
        watch: says what is to be done.
    """

    def __init__(self, watch: MemoryWatch) -> None:
        self._watch = watch
        self._told = Pressure.NONE

    def keep(self, generator: PagedBatchGenerator | None, pool: BlockPool | None, prompt_cache: PromptStore) -> None:
        """Between two steps; nothing but a look at the clock unless a reading is due."""
        measures = self._watch.look()
        if measures is None:
            return
        pressure, excess = measures
        self._tell(pressure)
        if generator is not None:
            generator.admits = pressure < Pressure.HOLDING
        if pool is not None:
            pool.memory.spare = max(0, -excess)
        if excess <= 0:
            return
        mx.clear_cache()
        trim_heap()
        if generator is not None and pressure >= Pressure.PREEMPTING:
            generator.preempt_youngest()
        if pool is not None:
            pool.memory.give_back(excess)
        if isinstance(prompt_cache, PagedPromptCache):
            others = prompt_cache.others
            others.trim_to(n_bytes=max(0, int(others.nbytes) - excess))

    def _tell(self, pressure: Pressure) -> None:
        if pressure > self._told and self._watch.last is not None:
            used, limit, source = self._watch.last
            logging.warning("memory (%s): %s of %s bytes in use: %s", source, used, limit, pressure.name.lower())
        elif pressure < self._told and pressure == Pressure.NONE:
            logging.info("memory is below its watermark again")
        self._told = pressure
