"""The compiled decode step: when it is compiled, its shapes and rows, and quantised layers."""

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.engine import compiled_step
from mlx_paged.engine.compiled_step import compiled_steps
from mlx_paged.errors import BlockStateError
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels import shared_runs
from mlx_paged.kernels.check import CheckResult
from mlx_paged.kernels.launch_shape import SHARED_BODIES, Variant, shape_for
from mlx_paged.kernels.shared_runs import SharedCut
from mlx_paged.kv import device_blocks
from mlx_paged.kv.device_blocks import DeviceBlocks
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.patches.models import model_calls
from tests.support.cases import crossed, quick
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.batch_runs import Outcome, Spec, generator, run_all
from tests.support.models.builders import KINDS, build, greedy, prompt_of, rms
from tests.support.models.compiled_steps import Taken, compiled_steps_taken
from tests.support.without_collector import without_collector

ON = {"kernel": "on"}
pytestmark = pytest.mark.usefixtures("no_fall_through")


@pytest.fixture
def calls() -> Iterator[Taken]:
    with compiled_steps_taken() as taken:
        yield taken


def sizes_of(calls: Taken) -> list[int]:
    """Return the number of rows of each compiled step."""
    return [size for _, size in calls]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", quick(KINDS, "llama"))
def test_every_step_but_the_first_is_compiled(kind: str, calls: Taken) -> None:
    model, prompt = build(kind, head_dim=64), prompt_of(70)
    tokens, logprobs = greedy(model, prompt, 50)
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    got, got_logprobs = greedy(model, prompt, 50)
    assert got == tokens
    np.testing.assert_allclose(got_logprobs, logprobs, atol=5e-3)
    assert sizes_of(calls) == [1] * 50  # the step ahead included, the first one not
    counts = mlx_paged.dispatch_counts()
    assert sum(n for c, n in counts.items() if c.path == "kernel") == 51 * len(model.layers)
    mlx_paged.pool_of(model).check_integrity()


@pytest.mark.usefixtures("kernels")
def test_rare_shapes_are_not_compiled(monkeypatch: pytest.MonkeyPatch, calls: Taken) -> None:
    monkeypatch.setattr(compiled_step, "PATIENCE", 8)
    model, prompt = build("llama", head_dim=64), prompt_of(70)
    tokens = greedy(model, prompt, 30)[0]
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    assert greedy(model, prompt, 30)[0] == tokens
    # 31 steps: the first chooses the kernel, the next 8 are below PATIENCE. The pool does not grow any more.
    assert sizes_of(calls) == [1] * (31 - 1 - 8)
    assert greedy(model, prompt, 30)[0] == tokens
    assert sizes_of(calls) == [1] * (31 - 1 - 8 + 31)


def test_traces_of_an_earlier_pool_size_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    def keep(function: Any) -> Any:
        compiled = mx.compile(function)
        made.append(weakref.ref(function))
        return compiled

    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    monkeypatch.setattr(compiled_step, "MOST_TRACES", 1)
    model = build("llama", head_dim=64)
    with traceable_kernels(), monkeypatch.context() as patch:
        patch.setattr(compiled_step, "compile_function", keep)
        mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3, 4]]), cache=cache))
        pool = mlx_paged.pool_of(model)
        step_once(model, cache), step_once(model, cache)
        step = model_calls.step_of(pool, None)
        assert len(made) == len(step._functions) == 1
        for round_number in range(1, 4):
            table = pool.new_table()
            pool.append_tokens(table, 16 * (pool.groups[0].allocator.num_blocks + 1))  # grows, and stays grown
            with without_collector():
                step_once(model, cache)
            assert len(made) == round_number + 1 and len(step._functions) == 1
            assert [trace() is None for trace in made] == [True] * round_number + [False]


def step_once(model: Any, cache: list[Any]) -> None:
    """Compute a decode step, and take it back."""
    mx.eval(model(mx.array([[7]]), cache=cache))
    for each in cache:
        each.trim(1)


def test_traces_count_arrivals_in_the_counters_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that made its own counters would keep them for each of its layers."""
    given: list[Any] = []
    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    model = build("llama", head_dim=64)
    with traceable_kernels(), monkeypatch.context() as patch:
        prepare = kernels.prepare_decode

        def prepare_decode(*args: Any, **options: Any) -> Any:
            launch = prepare(*args, **options)
            return lambda *inputs: given.append(inputs[-1]) or launch(*inputs)

        patch.setattr(kernels, "prepare_decode", prepare_decode)
        mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3, 4]]), cache=cache))
        pool = mlx_paged.pool_of(model)
        step_once(model, cache), step_once(model, cache)
    layers = [pool.blocks_of(layer).counters for layer in range(len(model.layers))]
    assert pool.traces == 1 and len(set(map(id, layers))) == len(layers)
    assert given[-len(layers) :] == given[: len(layers)] == layers


def test_padded_batches_have_few_sizes() -> None:
    assert [compiled_step.padded_rows(n) for n in (1, 2, 3, 4, 5, 8, 17, 31, 32, 33, 64, 65, 100, 128)] == [
        1, 2, 4, 4, 8, 8, 24, 32, 32, 48, 64, 96, 128, 128
    ]  # fmt: skip
    assert len({compiled_step.padded_rows(n) for n in range(1, 1025)}) < 24


def test_pack_sizes_are_multiples_of_16_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "backend", lambda: "cuda")
    assert [compiled_step.padded_pack(n) for n in (2, 9, 16, 17, 33, 72, 129)] == [16, 16, 16, 32, 48, 80, 160]
    monkeypatch.setattr(compiled_step, "backend", lambda: "metal")
    assert all(compiled_step.padded_pack(n) == compiled_step.padded_rows(n) for n in range(1, 100))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", quick(KINDS, "llama"))
def test_batches_are_padded(monkeypatch: pytest.MonkeyPatch, calls: Taken, kind: str) -> None:
    specs = [Spec(5 + 16 * row, 10 + 4 * row, seed=row) for row in range(5)]
    model = build(kind, head_dim=64)
    expected = [greedy(model, prompt_of(spec.length, seed=spec.seed), spec.num_tokens)[0] for spec in specs]
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    traced: set[int] = set()
    attend = PagedBatchKVCache.attend

    def count(self: Any, queries: mx.array, *args: Any, **options: Any) -> mx.array:
        if self.batch.is_traced:
            traced.add(queries.shape[0])
        return attend(self, queries, *args, **options)

    monkeypatch.setattr(PagedBatchKVCache, "attend", count)
    batch = generator(model, completion_batch_size=8)
    uids = batch.insert([spec.prompt for spec in specs], [spec.num_tokens for spec in specs])
    outcomes = {uid: Outcome() for uid in uids}
    run_all(batch, outcomes)
    assert [outcome.tokens for outcome in outcomes.values()] == expected
    assert {3, 5} <= set(sizes_of(calls)) and {1, 8} <= traced <= {1, 2, 4, 8}
    mlx_paged.pool_of(model).check_integrity()


@pytest.mark.usefixtures("kernels")
def test_repeated_shapes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a size count with other sizes between them too, as when batches lose and gain rows."""
    monkeypatch.setattr(compiled_step, "PATIENCE", 3)
    monkeypatch.setattr(compiled_step, "MOST_TRACES", 2)
    model = build("llama", head_dim=64)
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    greedy(model, prompt_of(9), 2)
    pool = mlx_paged.pool_of(model)
    step = compiled_step.CompiledStep(lambda *args: args[1])

    def find(size: int, num_blocks: int = 1) -> Any:
        shapes = compiled_step.StepShapes.of(size, [pool.new_table()] * size)._replace(num_blocks=(num_blocks,))
        return shapes.num_rows if step._function_for(shapes) is not None else None

    for _ in range(3):
        assert find(4) is None and find(16) is None
    assert find(4) == 4 and find(16) == 16 and find(4) == 4
    assert [find(40) for _ in range(4)] == [None] * 3 + [48]
    assert len(step._functions) == 2 and find(4) == 4  # 16 was the least recently used
    assert find(40, num_blocks=9) == 48  # after the pool has grown


def test_steps_over_functional_pools_are_not_compiled(calls: Taken) -> None:
    model = build("llama")
    mlx_paged.apply_patches(PagedConfig(kernel="off"))
    greedy(model, prompt_of(9), 5)
    assert calls == []


@pytest.mark.usefixtures("kernels")
def test_an_exhausted_pool_raises_and_stays_usable(calls: Taken) -> None:
    model, prompt = build("llama", head_dim=64), prompt_of(60)
    per_block = 16 * 2 * 2 * 64 * 4 * len(model.layers)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=6 * per_block, **ON))
    cache = make_prompt_cache(model)
    tokens: list[int] = []
    with pytest.raises(mlx_paged.PoolExhaustedError):
        for token, _ in generate_step(prompt, model, max_tokens=100, prompt_cache=cache):
            tokens.append(token)
    assert len(calls) > 5
    mlx_paged.pool_of(model).check_integrity()
    del cache
    gc.collect()
    assert greedy(model, prompt, 15)[0] == tokens[:15]


@pytest.mark.usefixtures("kernels")
def test_traces_are_freed_with_the_model(calls: Taken) -> None:
    def run() -> weakref.ref[Any]:
        model = build("llama", head_dim=64)
        mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
        greedy(model, prompt_of(9), 5)
        return weakref.ref(compiled_steps.get(mlx_paged.pool_of(model)))

    with without_collector():
        step = run()
        assert calls
        assert step() is None


def test_compiled_step_runs_on_the_stream_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled on one thread, run on another: streams of MLX belong to a thread."""
    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    model, prompt = build("llama", head_dim=64), prompt_of(20)
    results: list[Any] = []

    def run() -> None:
        cache, tokens = make_prompt_cache(model), []
        with mx.stream(mx.new_stream(mx.default_device())):
            logits = model(prompt[None], cache=cache)
            for _ in range(12):
                token = mx.argmax(logits[:, -1], axis=-1)
                tokens.append(int(token.item()))
                logits = model(token[None], cache=cache)
            mx.eval(logits, [c.state[0] for c in cache])  # the fake's fences are separate from its results
        results.append(tokens)

    with traceable_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
        run()  # its first step is not compiled
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert len(results) == 3 and results[1] == results[2]


def test_a_step_of_one_token_is_taken_by_all_layers_or_by_none() -> None:
    pool = BlockPool([LayerGroup((0, 1))], block_size=4)
    x = mx.zeros((1, 1, 1, 8))
    pool.set_geometry(0, x, x, batch=1)
    sequence = SequenceTables(pool)
    assert [tokens.tables[0].length for tokens in sequence.begin_all()] == [1] and sequence.is_level()
    sequence.undo_begin()
    assert sequence.begin_all()[0].tables[0].length == 1  # the position that was reserved
    sequence.begin_layer(0, 1)
    with pytest.raises(BlockStateError, match="one reserved token in each layer"):
        sequence.begin_all()
    assert [sequence.offset(layer) for layer in (0, 1)] == [2, 1]
    sequence.begin_layer(1, 1)
    sequence.reserve(3)
    with pytest.raises(BlockStateError, match="one reserved token in each layer"):
        sequence.begin_all()
    pool.check_integrity()


@pytest.mark.usefixtures("kernels", "unfused")
@pytest.mark.parametrize(("kind", "rotate"), quick(crossed(KINDS, [False, True]), ("llama", False), ("qwen3", True)))
def test_compiled_quantised_steps_equal_the_gather_path(kind: str, rotate: bool, calls: Taken) -> None:
    options = {"kv_bits": 8, "kv_rotate": rotate}
    model, prompt = build(kind, head_dim=64), prompt_of(40)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="off", **options))
    tokens, logprobs = greedy(model, prompt, 8)
    assert not calls
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on", **options))
    got, got_logprobs = greedy(model, prompt, 8)
    assert got == tokens
    assert rms(got_logprobs, logprobs) < 5e-3
    assert set(sizes_of(calls)) == {1} and len(calls) in (8, 9)  # a GPU's blocks are there before the first step
    pool = mlx_paged.pool_of(model)
    storages = [storage for group in pool.groups for storage in group.blocks]
    assert all(isinstance(storage, DeviceBlocks) for storage in storages)
    assert all(storage.rotates == rotate for storage in storages)
    assert pool.stats().quantized_tokens == 40 + 8
    pool.check_integrity()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", quick(["llama", "llama-sliding"], "llama"))
def test_compiled_step_shares_common_blocks(kind: str, monkeypatch: pytest.MonkeyPatch, calls: Taken) -> None:
    """The kernel gets the blocks that rows with a shared prefix read together, and tokens do not change."""
    variant = Variant(SHARED_BODIES[0], "cuda", mx.float32, 64, 64, 2, 16)
    cut = SharedCut(variant, shape_for(variant)._replace(partition=64, rows=8), at_once=1)
    monkeypatch.setattr(shared_runs, "LEAST_COMMON", 64)
    monkeypatch.setattr(shared_runs, "LEAST_SAVED", 64)
    given: list[int] = []
    prepare = kernels.prepare_decode

    def prepare_decode(*args: Any, items: mx.array | None = None, **options: Any) -> Any:
        given.append(0 if items is None else len(items))
        return prepare(*args, **options)

    monkeypatch.setattr(kernels, "prepare_decode", prepare_decode)
    model, prompt = build(kind, head_dim=64), prompt_of(160)
    firsts = [3, 4, 5, 6]
    expected = [greedy(model, mx.concatenate([prompt, mx.array([first])]), 12)[0] for first in firsts]
    for used, is_good in ((None, True), (cut, False), (cut, True)):
        asked: list[Variant] = []

        def checked(variant: Variant, asked: list[Variant] = asked, is_good: bool = is_good) -> CheckResult:
            asked.append(variant)
            return CheckResult(is_good, 0.0, 0.0, "")

        monkeypatch.setattr(device_blocks, "shared_cut_of", lambda *_, used=used: used)
        monkeypatch.setattr(device_blocks, "checked", checked)
        mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
        given.clear()
        greedy(model, prompt, 3)
        assert not asked  # a single sequence does not check that kernel
        cache = make_prompt_cache(model)
        model(prompt[None], cache=cache)
        batch = generator(model, completion_batch_size=4)
        uids = batch.insert([[first] for first in firsts], [12] * 4, caches=[copy.deepcopy(cache) for _ in firsts])
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while any(len(own) < 12 for own in tokens.values()):
            for response in batch.next()[1]:
                tokens[response.uid].append(response.token)
        assert [tokens[uid] for uid in uids] == expected
        assert any(given) == (used is not None and is_good)
        assert bool(asked) == (used is not None)
        batch.close()
        mlx_paged.remove_patches()
    assert calls
