"""Accepted requests run whatever ran before, in budgets from barely enough to ample. Nothing held, nothing reserved."""

import contextlib
import functools
import gc
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.memory import PoolBudget
from mlx_paged.errors import RequestTooLargeError
from mlx_paged.kv.pool import BlockPool
from mlx_paged.patches import registry
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.cache.prompt_cache import factory_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.shelf import Shelf
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.builders import build, greedy, prompt_of

CHUNK, SIZE = 32, 8


@functools.cache
def model_of(kind: str) -> Any:
    """Build a small model with a sliding window of 24 tokens in two of its three layers."""
    if kind == "gemma3":
        return build("gemma3", num_hidden_layers=3, sliding_window=24)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return build("llama-sliding", num_hidden_layers=3, layer_types=layers, sliding_window=24)


@functools.cache
def solo(kind: str, length: int, seed: int) -> list[int]:
    assert not mlx_paged.is_applied()
    return greedy(model_of(kind), prompt_of(length, seed), 24)[0]


class Run:
    """A generator over a pool whose budget is ``layer_blocks`` blocks of one layer."""

    def __init__(self, kind: str, layer_blocks: int, *, cached: bool, disk: DiskTier | None = None, rows: int = 6):
        registry.remove_patches()  # drops the pool, too
        layer_block = SIZE * 2 * 2 * 32 * 4
        mlx_paged.apply_patches(PagedConfig(block_size=SIZE, kv_cache_memory=layer_blocks * layer_block))
        self.cached, self.model = cached, model_of(kind)
        caches = factory_of(self.model, None)()
        pool = mlx_paged.pool_of(self.model)
        assert pool is not None
        self.pool: BlockPool = pool
        self.prompts = PagedPromptCache(None, disk=disk, identify=lambda key: "weights" if disk else None)
        self.prompts.learn_layout("key", caches)
        prefixes = self.prompts.shared_prefixes("key", pool) if cached else None
        self.gen = PagedBatchGenerator(
            self.model,
            prefixes=prefixes,
            completion_batch_size=rows,
            prefill_batch_size=rows,
            prefill_step_size=CHUNK,
        )
        self.expected: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}

    def insert(self, length: int, num_tokens: int, seed: int, expected: list[int] | None = None) -> None:
        (uid,) = self.gen.insert([prompt_of(length, seed).tolist()], [num_tokens])
        if expected is not None:
            self.expected[uid] = expected[:num_tokens]
        self.got[uid] = []

    def step(self) -> bool:
        prompts, generated = self.gen.next()  # a request that failed raises
        for response in generated:
            self.got[response.uid].append(response.token)
        assert self.pool.stats().bytes_reserved <= self.pool.memory_budget
        return bool(prompts or generated)

    def finish(self) -> None:
        while self.step():
            pass
        for uid, expected in self.expected.items():
            assert self.got[uid] == expected
        self.pool.check_integrity()
        if self.cached:
            self.prompts.cache_of(self.pool).check_integrity()


@pytest.mark.parametrize("cached", [False, *slow(True)])
def test_a_long_prompt_runs_after_a_burst_of_short_ones(cached: bool) -> None:
    """The burst takes memory in the window group; the long prompt needs memory in the global group."""
    for _ in range(1 if cached else 2):  # without the prefix cache, repeat in a second pool of the model
        run = Run("gemma3", 130, cached=cached, rows=12)
        budget = PoolBudget(run.pool, chunk=CHUNK)
        longest = max(n for n in range(1, 2000, 7) if budget.holds(n + 4))
        for seed in range(12):
            run.insert(30, 4, seed)
        run.finish()
        for seed in (100, 101):
            run.insert(longest, 4, seed)
            run.finish()
        for seed in range(12):
            run.insert(30, 2, seed)
        run.finish()


@pytest.mark.parametrize(
    ("kind", "cached", "layer_blocks"), quick(crossed(["gemma3", "llama-sliding"], [False, True], [40, 61, 90]),
    ("gemma3", False, 40))
)  # fmt: skip
def test_longest_accepted_prompt_runs(kind: str, cached: bool, layer_blocks: int) -> None:
    """It runs in a fresh pool, and again when the prefix cache holds its own prefix in both groups."""
    run = Run(kind, layer_blocks, cached=cached)
    lengths = []
    for length in range(8, 2000, 8):
        try:
            run.insert(length, 2, length)
        except RequestTooLargeError:
            break
        lengths.append(length)
        run.gen.remove(list(run.got))
    assert lengths and lengths[-1] < 8 * layer_blocks
    for length in (lengths[-1], lengths[-1], lengths[len(lengths) // 2], lengths[-1] - 3):
        run.insert(length, 2, length)
        run.finish()
        run.insert(length, 2, 7)
        run.finish()


def test_given_cache_counts_in_the_size_of_its_request() -> None:
    """The cache stays unchanged while a copy is continued; the request is refused if both do not fit."""
    for layer_blocks, accepted in ((80, False), (160, True)):
        run = Run("gemma3", layer_blocks, cached=False)
        caches = make_prompt_cache(run.model)
        tokens = prompt_of(100, seed=1)
        for start in range(0, 100, CHUNK):
            run.model(tokens[None, start : start + CHUNK], cache=caches)
        if accepted:
            run.gen.insert([prompt_of(140, seed=2).tolist()], [3], caches=[caches])
            assert sum(len(generated) for _, generated in iter(run.gen.next, ([], []))) == 3
        else:
            with pytest.raises(RequestTooLargeError):
                run.gen.insert([prompt_of(140, seed=2).tolist()], [3], caches=[caches])
            assert run.gen.next() == ([], [])


LENGTHS = (1, 8, 23, 31, 40, 64, 97, 150)


def random_history(kind: str, seed: int, *, in_place: bool, tmp_path: Any) -> int:
    """Run random requests, some cancelled, some sharing prefixes; return how often memory lacked."""
    rng = random.Random(seed)
    registry.remove_patches()
    pairs = [(length, number) for number in range(2) for length in LENGTHS]  # prompts with one number share a prefix
    solos = {pair: solo(kind, *pair) for pair in pairs}
    cached = rng.random() < 0.7
    disk = DiskTier(Shelf(tmp_path / str(seed))) if cached and rng.random() < 0.3 else None
    with fake_kernels() if in_place else contextlib.nullcontext():
        probe = PoolBudget(Run(kind, 1 << 20, cached=cached).pool, chunk=CHUNK)
        layer_block = SIZE * 2 * 2 * 32 * 4
        least = 1
        probe.pool.memory.budget = layer_block
        while not probe.holds(LENGTHS[-1] + 25):
            least += 1
            probe.pool.memory.budget = least * layer_block
        del probe
        run = Run(kind, least + rng.choice([0, 1, 3, 10, 40, 200]), cached=cached, disk=disk, rows=rng.randint(1, 8))
        for _ in range(rng.randint(3, 5)):
            burst = rng.sample(pairs, rng.randint(1, 8))
            for length, number in burst:
                run.insert(length, rng.randint(1, 24), number, solos[length, number])
            for _ in range(rng.choice([0, 5, 10_000])):
                if not run.step():
                    break
                if rng.random() < 0.02 and run.expected:
                    uid = rng.choice(list(run.expected))
                    run.gen.remove([uid])
                    del run.expected[uid]
            if rng.random() < 0.3:
                run.prompts.tidy()
        run.finish()
        assert all(group.in_place == in_place for group in run.pool.groups)
        stats = run.pool.stats()
        return stats.evictions + stats.preemptions


def test_a_random_history_runs_and_equals_solo_runs(tmp_path: Any) -> None:
    """With a prefix cache, also on disk."""
    assert random_history("gemma3", 4, in_place=False, tmp_path=tmp_path) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "llama-sliding"])
def test_three_hundred_random_histories_run_and_equal_solo_runs(kind: str, tmp_path: Any) -> None:
    for seed in range(300):
        random_history(kind, seed, in_place=seed % 5 == 0, tmp_path=tmp_path)


@pytest.mark.parametrize("end", ["read", *slow("removed")])
def test_memory_is_back_when_the_last_request_has_gone(end: str) -> None:
    run = Run("gemma3", 40_000, cached=False, rows=16)
    gc.collect()  # other tests' leftovers
    before = mx.get_active_memory()
    for seed in range(4):
        run.insert(100, 4, seed)
    run.step()
    reserved = run.pool.stats().bytes_reserved
    assert reserved > 0
    if end == "removed":
        run.gen.remove(list(run.got))
    run.finish()
    for stream in (mx.default_stream(mx.default_device()), generation_stream):
        mx.synchronize(stream)  # what is still being computed keeps its buffers
    assert run.pool.stats().bytes_reserved == 0 and mx.get_active_memory() - before < reserved // 2
    run.insert(100, 4, 3)
    run.finish()


def test_a_pool_grows_once_for_the_prompts_that_run_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size of a GPU's pool needs compiled steps of its own."""
    monkeypatch.setattr("mlx_paged.kv.group.IN_PLACE_FIRST_BYTES", 0)
    model = build("llama", head_dim=64)
    with fake_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=SIZE, kernel="on", kv_cache_memory=64 << 20))
        gen = PagedBatchGenerator(model, completion_batch_size=8, prefill_batch_size=2, prefill_step_size=64)
        gen.insert([prompt_of(20 + 17 * index, seed=index).tolist() for index in range(8)], [4] * 8)
        pool, sizes = mlx_paged.pool_of(model), set()
        while any(gen.next()):
            sizes.add(pool.stats().bytes_reserved)
        gen.close()
    assert len(sizes - {0}) == 1
