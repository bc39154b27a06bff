"""When memory is short while a batch runs, prefixes are evicted, then the youngest request is preempted and none
starts. Answers do not change."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.machine import MemoryReading
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.server.memory import MemoryWatch, Pressure
from tests.support.cases import slow
from tests.support.models.batch_runs import Outcome, Spec, check, collect, insert, kv_budget, make_solos, model_of

LIMIT = 1 << 40
SPECS = [Spec(60 + n, 12, seed=n) for n in range(4)]
LATE = Spec(50, 6, seed=9)


class Batch:
    """A batch, with memory use set by the test."""

    def __init__(self, kind: str) -> None:
        make_solos(kind, [*SPECS, LATE])
        self.model = model_of(kind)
        mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=kv_budget(self.model, 600, 8)))
        self.used = 0
        clock = itertools.count()
        self.watch = MemoryWatch(0.5, lambda: MemoryReading(self.used, LIMIT, "system"), lambda: float(next(clock)))
        self.cache = PagedPromptCache(None)
        pool = mlx_paged.pool_of(self.model)
        assert pool is not None
        self.pool = pool
        self.generator = PagedBatchGenerator(
            self.model, prefixes=self.cache.shared_prefixes("model", pool), prefill_step_size=64
        )
        self.outcomes: dict[int, Outcome] = {}

    def step(self, above: int) -> Pressure:
        """Take a step with memory use ``above`` bytes over the watermark."""
        self.used = LIMIT // 2 + above
        self.watch.relieve(self.generator, self.pool, self.cache)
        prompts, generated = self.generator.next()
        collect(self.outcomes, prompts, generated)
        self.pool.check_integrity()
        return self.watch.pressure

    @property
    def running(self) -> int:
        return sum(not each["waiting"] for each in self.generator.progress())

    def finish(self) -> None:
        while self.generator.progress():
            self.step(-LIMIT // 4)


@pytest.mark.parametrize("kind", ["llama", *slow("gemma3")])
def test_memory_pressure_evicts_then_preempts(kind: str) -> None:
    batch = Batch(kind)
    insert(batch.generator, [Spec(100, 2, seed=30 + n) for n in range(4)], batch.outcomes)
    batch.finish()
    cached = batch.pool.stats().cached_blocks
    assert cached > 20
    batch.outcomes.clear()
    uids = insert(batch.generator, SPECS, batch.outcomes)
    while not all(batch.outcomes[uid].tokens for uid in uids):
        assert batch.step(-LIMIT // 4) == Pressure.NONE
    assert batch.running == 4 and batch.generator.admits

    excess = batch.pool.stats().bytes_reserved
    assert batch.step(excess) == Pressure.EVICTING
    stats = batch.pool.stats()
    assert stats.cached_blocks == 0 and stats.free_blocks > 20 and batch.running == 4
    assert batch.pool.memory.spare == 0

    (late,) = insert(batch.generator, [LATE], batch.outcomes)
    before = batch.pool.stats().live_blocks
    assert batch.step(1) == Pressure.PREEMPTING and not batch.generator.admits
    assert batch.running == 3 and batch.pool.stats().preemptions == 1 and batch.generator.num_waiting == 2
    assert batch.pool.stats().live_blocks < before
    for _ in range(3):  # one request keeps running
        batch.step(excess)
    assert batch.running == 1
    batch.finish()
    assert batch.generator.admits and batch.pool.memory.spare is not None and batch.pool.memory.spare > 0
    for uid, spec in zip([*uids, late], [*SPECS, LATE], strict=True):
        check(kind, spec, batch.outcomes[uid])
    stats = batch.pool.stats()
    assert stats.live_blocks == stats.cached_blocks


def test_one_request_runs_however_little_memory_is_left() -> None:
    batch = Batch("llama")
    uids = insert(batch.generator, SPECS, batch.outcomes)
    seen: list[Any] = []
    while batch.generator.progress():
        batch.step(LIMIT // 4)
        seen.append(batch.running)
    assert max(seen[4:]) == 1
    for uid, spec in zip(uids, SPECS, strict=True):
        check("llama", spec, batch.outcomes[uid])


def test_unpaged_prefixes_are_evicted_too() -> None:
    watch = MemoryWatch(0.5, lambda: MemoryReading(900, 1000, "system"), lambda: 1.0)
    cache = PagedPromptCache(None)

    class Whole:
        nbytes = 300

        def is_trimmable(self) -> bool:
            return False

    for number in range(3):
        cache.unpaged.insert_cache("model", [number], [Whole()])
    watch.relieve(None, None, cache)
    assert watch.pressure == Pressure.EVICTING and cache.unpaged.nbytes <= 600
