"""One model used by several threads, as stock mlx-lm allows, with failing, paused and dropped runs in between."""

import functools
import gc
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig, pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.patches.models.model_calls import guard, lock_of, unguard
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import answers
from tests.support.models.builders import build, greedy, prompt_of
from tests.support.processes.bounded import build_qwen2
from tests.support.processes.threads import in_thread, start, together

KINDS = ("llama", "gemma3", "qwen2")  # one group, two groups, the seam
PROMPTS = [prompt_of(length, seed=length) for length in (40, 33, 70, 21)]
TOKENS = 12
# Which storage the blocks have, and which model.
ALL = crossed(["functional", "in place"], KINDS)
CASES = quick(ALL, ("in place", "llama"))


@functools.cache
def model_of(kind: str) -> Any:
    model = build_qwen2() if kind == "qwen2" else build(kind)
    mx.eval(model.parameters())
    return model


@functools.cache
def solo(kind: str) -> list[list[int]]:
    """Stock mlx-lm's tokens of each prompt."""
    assert not mlx_paged.is_applied()
    return [greedy(model_of(kind), prompt, TOKENS)[0] for prompt in PROMPTS]


@pytest.fixture
def patched(request: pytest.FixtureRequest) -> Iterator[None]:
    for kind in KINDS:
        solo(kind)
    with nullcontext() if request.param == "functional" else fake_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=32 << 20))
        yield
        mlx_paged.remove_patches()


def generated(kind: str, index: int, num_tokens: int = TOKENS, **options: Any) -> list[int]:
    return greedy(model_of(kind), PROMPTS[index], num_tokens, **options)[0]


def fail_at(call: int) -> Any:
    calls = itertools.count(1)

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if next(calls) == call:
            raise ValueError("a bad request")
        return logits

    return processor


@pytest.mark.parametrize(("patched", "kind"), CASES, indirect=["patched"])
@pytest.mark.usefixtures("patched")
class TestFailedWork:
    def assert_usable(self, kind: str) -> None:
        assert generated(kind, 1) == solo(kind)[1]
        assert in_thread(lambda: generated(kind, 2)) == solo(kind)[2]
        pool = pool_of(model_of(kind))
        assert pool is not None
        pool.check_integrity()

    @pytest.mark.parametrize("call", [1, 3])
    def test_processor_raising_in_a_thread_leaves_the_pool_usable(self, kind: str, call: int) -> None:
        with pytest.raises(ValueError, match="bad request"):
            in_thread(lambda: generated(kind, 0, logits_processors=[fail_at(call)]))
        self.assert_usable(kind)

    def test_layer_raising_during_a_call_leaves_the_pool_usable(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        last = type(model_of(kind).layers[-1].mlp)
        original, here = last.__call__, threading.get_ident()
        calls = itertools.count(1)

        def raising(self: Any, *args: Any) -> Any:
            if threading.get_ident() != here and next(calls) == 2 * len(model_of(kind).layers):
                raise ValueError("a layer")
            return original(self, *args)

        monkeypatch.setattr(last, "__call__", raising)
        with pytest.raises(ValueError, match="a layer"):
            in_thread(lambda: generated(kind, 0))
        self.assert_usable(kind)

    def test_call_that_is_never_evaluated_leaves_the_pool_usable(self, kind: str) -> None:
        model = model_of(kind)

        def call() -> None:
            with mx.stream(generation_stream):
                model(PROMPTS[0][None], cache=upstream.make_prompt_cache(model))

        in_thread(call)
        self.assert_usable(kind)


@pytest.mark.parametrize(("patched", "kind"), quick(ALL, ("functional", "gemma3")), indirect=["patched"])
@pytest.mark.usefixtures("patched")
class TestAtTheSameTime:
    def test_four_threads_generate_stock_tokens(self, kind: str) -> None:
        def work(index: int) -> list[list[int]]:
            return [generated(kind, index) for _ in range(3)]

        found = together([functools.partial(work, index) for index in range(4)])
        assert found == [[tokens] * 3 for tokens in solo(kind)]
        pool = pool_of(model_of(kind))
        assert pool is not None
        pool.check_integrity()
        assert pool.stats().live_blocks == 0

    def test_prompt_caches_used_directly_in_threads_give_stock_tokens(self, kind: str) -> None:
        model = model_of(kind)

        def work(index: int) -> list[int]:
            with mx.stream(generation_stream):
                cache, found, tokens = upstream.make_prompt_cache(model), [], PROMPTS[index][None]
                while len(found) < TOKENS:
                    tokens = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
                    found.append(tokens.item())
                return found

        assert together([functools.partial(work, index) for index in range(4)]) == solo(kind)

    def test_unguarded_calls_in_threads_give_stock_tokens(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The guarded class is not the one called, as when one model wraps another."""
        monkeypatch.setattr("mlx_paged.patches.cache.prompt_cache.guard", lambda model: None)
        unguard()
        assert together([functools.partial(generated, kind, index) for index in range(4)]) == solo(kind)

    def test_batches_in_two_threads_give_stock_tokens(self, kind: str) -> None:
        def work(indices: list[int]) -> list[list[int]]:
            generator = PagedBatchGenerator(model_of(kind))
            found = answers(generator, [PROMPTS[i].tolist() for i in indices], [TOKENS] * len(indices))
            generator.close()
            mx.synchronize(generation_stream)
            return found

        left, right = together([functools.partial(work, [0, 1]), functools.partial(work, [2, 3])])
        assert left + right == solo(kind)


@pytest.mark.parametrize(("patched", "kind"), CASES, indirect=["patched"])
@pytest.mark.usefixtures("patched")
class TestHandedOver:
    def test_generator_continues_in_another_thread(self, kind: str) -> None:
        steps = _steps(kind, 0)
        first = in_thread(lambda: [next(steps)[0] for _ in range(5)])
        # Not run to its end: mlx-lm's generator cannot exit its stream in another thread.
        assert first + in_thread(lambda: [next(steps)[0] for _ in range(TOKENS - 5)]) == solo(kind)[0]

    def test_a_generator_dropped_in_another_thread_frees_its_blocks(self, kind: str) -> None:
        held = [_steps(kind, 0)]
        in_thread(lambda: next(held[0]))
        in_thread(held.clear)
        gc.collect()
        assert generated(kind, 1) == solo(kind)[1]
        pool = pool_of(model_of(kind))
        assert pool is not None and pool.stats().live_blocks == 0

    def test_paused_generation_does_not_block_another_thread(self, kind: str) -> None:
        stopped, go_on = threading.Event(), threading.Event()

        def slow() -> list[int]:
            found = []
            for token, _ in _steps(kind, 0):
                found.append(token)
                if len(found) == 4:
                    stopped.set()
                    go_on.wait(60)
            return found

        result = start(slow)
        assert stopped.wait(60)
        assert generated(kind, 1) == solo(kind)[1]
        go_on.set()
        assert result() == solo(kind)[0]


def _steps(kind: str, index: int) -> Iterator[Any]:
    steps: Iterator[Any] = generate_step(PROMPTS[index], model_of(kind), max_tokens=TOKENS)
    return steps


def test_two_models_in_threads_give_stock_tokens() -> None:
    expected = {kind: solo(kind) for kind in KINDS}
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=32 << 20))
    found = together([functools.partial(generated, kind, index) for kind in KINDS[:2] for index in range(2)])
    assert found == [expected[kind][index] for kind in KINDS[:2] for index in range(2)]


def test_remove_patches_restores_the_call_of_a_model() -> None:
    model = build("llama")
    original = type(model).__call__
    mlx_paged.apply_patches()
    greedy(model, PROMPTS[0], 1)
    mlx_paged.remove_patches()
    assert type(model).__call__ is original

    class Derived(type(model)):  # type: ignore[misc]
        pass

    derived = Derived(model.args)
    guard(derived)
    assert "__call__" in vars(Derived)
    unguard()
    assert "__call__" not in vars(Derived) and Derived.__call__ is original


@pytest.mark.parametrize(
    ("patched", "kind"), quick(ALL, ("functional", "llama"), ("in place", "llama")), indirect=["patched"]
)
@pytest.mark.usefixtures("patched")
def test_prompts_in_chunks_beside_decoding_threads_give_stock_tokens(kind: str) -> None:
    """Between chunks mlx-lm evaluates a cache's state, while another thread may write to the pool."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        chunks = [functools.partial(generated, kind, index, prefill_step_size=4) for index in range(len(PROMPTS))]
        assert together([*chunks, *(functools.partial(generated, kind, index) for index in (0, 2))]) == [
            *solo(kind), solo(kind)[0], solo(kind)[2]
        ]  # fmt: skip
    finally:
        sys.setswitchinterval(interval)
    pool_of(model_of(kind)).check_integrity()


def test_call_without_a_paged_cache_waits_while_the_model_is_traced() -> None:
    model = model_of("llama")
    mlx_paged.apply_patches()
    upstream.make_prompt_cache(model)
    called = threading.Event()

    def call() -> None:
        mx.eval(model(mx.array([[1, 2]])))
        called.set()

    with lock_of(model):  # as a call over a GPU's blocks does
        ended = start(call)
        assert not called.wait(0.2)
    ended()
    assert called.is_set()
