"""Prompts in packs: each request gets what it gets alone, whoever is in the pack, waits, fails or goes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models import phi3

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import live_requests, prefill
from mlx_paged.engine.prefill import can_pack, packs_of
from mlx_paged.engine.scheduler import Chunk
from mlx_paged.errors import RequestFailedError
from mlx_paged.kernels.build import KernelUnavailable
from mlx_paged.kv.storage import in_place
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.detached import SharedPrefixes
from mlx_paged.prefix.radix import RadixTree
from scripts.support import model_configs
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import Outcome, collect, generator, kv_budget, packing_generator, run_all
from tests.support.models.builders import KINDS, build, greedy, prompt_of
from tests.support.models.toy_engine import ToyEngine, answer, caches_of, make_pool
from tests.support.models.toy_engine import prompt_of as toy_prompt

TOLERANCE = 1e-4
# Shorter and longer than windows and chunks, at their ends and in the middle.
LENGTHS = (2, 70, 33, 1, 17, 12, 129, 40, 16, 51)
GENERIC = ("phi3", "olmo2", "qwen3_moe", "gpt_oss", "gemma3n", "gemma4_text", "gemma2")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs where they would not be tried: on a CPU."""
    monkeypatch.setattr(PagedBatchGenerator, "packs", True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each request in each pack."""
    noted: list[list[int]] = []
    original = prefill.compute_pack

    def noting(model: Any, chunks: Sequence[Chunk]) -> None:
        noted.append([chunk.num_tokens for chunk in chunks])
        original(model, chunks)

    monkeypatch.setattr(prefill, "compute_pack", noting)
    return noted


def prompts_for(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [(prompt_of(length, seed=length) % vocab).tolist() for length in lengths]


def packing(model: Any, most: int = 64, **options: Any) -> Any:
    """A generator whose packs have parts of prompts of up to 16 tokens each, ``most`` in all."""
    sizes = {"prefill_step_size": 16, "completion_batch_size": 16, "prefill_batch_size": 16}
    return packing_generator(model, most, **{**sizes, **options})


def insert(gen: Any, prompts: Sequence[list[int]], num_tokens: int) -> dict[int, Outcome]:
    uids = gen.insert(list(prompts), [num_tokens] * len(prompts))
    return {uid: Outcome() for uid in uids}


def assert_alike(outcomes: dict[int, Outcome], expected: Sequence[tuple[list[int], np.ndarray]]) -> None:
    for outcome, (tokens, logprobs) in zip(outcomes.values(), expected, strict=True):
        assert outcome.tokens == tokens
        got = np.stack(outcome.logprobs)
        same = got == logprobs  # minus infinity, where a model rules a token out
        assert np.abs(np.where(same, 0, got) - np.where(same, 0, logprobs)).max() < TOLERANCE


def assert_nothing_is_left(model: Any, prefixes: int = 0) -> None:
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().live_blocks == prefixes


# The same tokens as alone -----------------------------------------------------------------------------------------


@pytest.fixture(params=["functional", "in place", "kernel"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PagedConfig]:
    """Over functional blocks; over blocks in place, sequence by sequence, and in the kernel's stand-in."""
    if request.param == "functional":
        yield PagedConfig(block_size=8)
        return
    with fake_kernels():
        if request.param == "in place":
            monkeypatch.setattr(in_place, "prepare_prefill", no_kernel)
        yield PagedConfig(block_size=8, kernel="on")


def no_kernel(*_: object, **__: object) -> None:
    raise KernelUnavailable("not here")


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize("kind", KINDS)
def test_requests_in_packs_get_their_solo_tokens(kind: str, config: PagedConfig, calls: list[list[int]]) -> None:
    model = build(kind, head_dim=64)
    prompts = prompts_for(320)
    expected = [greedy(model, mx.array(prompt, mx.uint32), 8) for prompt in prompts]
    mlx_paged.apply_patches(config)
    gen = packing(model)
    outcomes = insert(gen, prompts, 8)
    run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert len(calls) > 3 and max(map(len, calls)) >= 4, "several parts of prompts came together"
    assert max(sum(call) for call in calls) <= 64
    assert_nothing_is_left(model)


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize("name", GENERIC)
def test_models_behind_the_seam_pack_too(name: str, calls: list[list[int]]) -> None:
    model = model_configs.build(name)
    prompts = prompts_for(model_configs.VOCAB)
    expected = [greedy(model, mx.array(prompt, mx.uint32), 8) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 8)
    run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert gen._engine.prefill.packs and len(calls) > 3
    assert_nothing_is_left(model)


@pytest.mark.parametrize("kind", ["llama", "llama-sliding"])
def test_requests_go_on_behind_prefixes_that_others_have_computed(kind: str, calls: list[list[int]]) -> None:
    model = build(kind)
    first = prompt_of(61, seed=1).tolist()
    others = [first[:n] + prompt_of(20 + n, seed=n).tolist() for n in (48, 17, 60, 3)]
    expected = [greedy(model, mx.array(prompt, mx.uint32), 8) for prompt in (first, *others)]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    tree = RadixTree(mlx_paged.pool_of(model))
    gen = packing(model, prefixes=SharedPrefixes(tree))
    outcomes = insert(gen, [first], 8)
    run_all(gen, outcomes)
    more = insert(gen, others, 8)
    run_all(gen, more)
    assert_alike({**outcomes, **more}, expected)
    assert tree.pool.stats().prefix_hit_tokens >= 48
    assert any(len(call) >= 3 for call in calls)
    tree.pool.check_integrity()


# Making room, leaving, failing ------------------------------------------------------------------------------------


def test_requests_make_room_in_the_middle_of_their_prompts(calls: list[list[int]]) -> None:
    model = build("llama")
    prompts = prompts_for(320, (60, 45, 50, 30, 41))
    expected = [greedy(model, mx.array(prompt, mx.uint32), 24) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=kv_budget(model, 22, 8)))
    gen = packing(model, 48)
    outcomes = insert(gen, prompts, 24)
    run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert gen.preemptions > 0 and calls
    assert_nothing_is_left(model)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_requests_that_are_cancelled_in_the_middle_leave_the_others_alone(steps: int, calls: list[list[int]]) -> None:
    model = build("gemma3")
    prompts = prompts_for(320, (70, 100, 33, 129, 66))
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model, 80)
    outcomes = insert(gen, prompts, 6)
    for _ in range(steps):
        collect(outcomes, *gen.next())
    uids = list(outcomes)
    assert all(0 < gen._engine.requests[uid].length < 66 for uid in (uids[1], uids[3]))
    gen.remove([uids[1], uids[3]])
    run_all(gen, outcomes)
    kept = [0, 2, 4]
    assert_alike({uids[i]: outcomes[uids[i]] for i in kept}, [expected[i] for i in kept])
    assert any(len(call) >= 4 for call in calls)
    assert_nothing_is_left(model)


def run_with_failures(gen: Any, outcomes: dict[int, Outcome]) -> dict[int, BaseException | None]:
    failed: dict[int, BaseException | None] = {}
    while True:
        try:
            run_all(gen, outcomes)
            return failed
        except RequestFailedError as error:
            failed[error.uid] = error.__cause__


POISON = 7


class RaisingNorm(nn.Module):
    """Raises in calls with a poisoned token, which the embedding has seen."""

    def __init__(self, inner: nn.Module, embedding: NotingEmbedding) -> None:
        super().__init__()
        self.inner = inner
        self._embedding = embedding

    def __call__(self, x: mx.array) -> mx.array:
        if self._embedding.poisoned:
            raise RuntimeError("injected: model")
        return self.inner(x)


class NotingEmbedding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.poisoned = False

    def __call__(self, tokens: mx.array) -> mx.array:
        self.poisoned = bool(mx.any(tokens == POISON).item())
        return self.inner(tokens)


@pytest.mark.parametrize("when", ["before a layer", "after all layers"])
def test_a_model_that_raises_for_one_of_them_fails_that_one_only(when: str, calls: list[list[int]]) -> None:
    model = build("llama")
    prompts = [[token + (token == POISON) for token in prompt] for prompt in prompts_for(320, (40, 25, 61, 30, 18))]
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    prompts[2][35] = POISON  # in its second or third part
    model.model.embed_tokens = NotingEmbedding(model.model.embed_tokens)
    place, name = (model.model, "norm") if when == "after all layers" else (model.layers[1], "post_attention_layernorm")
    setattr(place, name, RaisingNorm(getattr(place, name), model.model.embed_tokens))
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 6)
    failed = run_with_failures(gen, outcomes)
    uids = list(outcomes)
    assert list(failed) == [uids[2]] and str(failed[uids[2]]) == "injected: model"
    del outcomes[uids[2]]
    assert_alike(outcomes, [one for i, one in enumerate(expected) if i != 2])
    assert max(map(len, calls)) >= 3
    assert gen._engine.prefill.packs, "the model packs all the same"
    del failed
    assert_nothing_is_left(model)


def test_a_request_without_room_leaves_the_pack_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]
) -> None:
    model = build("llama-sliding")  # two groups
    prompts = prompts_for(320, (40, 25, 61, 30))
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 6)
    uids = list(outcomes)
    pool = mlx_paged.pool_of(model)
    original = pool.append_tokens

    def fails_once(table: Any, num_tokens: int) -> None:
        row = gen._engine.requests.get(uids[1])
        if row is not None and row.tables and table is row.tables[1]:
            raise OSError("injected: no block")
        original(table, num_tokens)

    pool.append_tokens = fails_once
    failed = run_with_failures(gen, outcomes)
    assert list(failed) == [uids[1]]
    assert len(calls[0]) == 3, "it was not even started with"
    del outcomes[uids[1]], failed
    assert_alike(outcomes, [one for i, one in enumerate(expected) if i != 1])
    del pool.append_tokens
    assert_nothing_is_left(model)


def test_a_model_that_turns_out_not_to_pack_is_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]
) -> None:
    """Its attention multiplies the fetched keys itself where there are several rows, so no probe has seen it."""
    original = phi3.Attention.__call__

    class Copying:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def __getattr__(self, name: str) -> Any:
            return getattr(self.cache, name)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self.cache.update_and_fetch(keys, values)
            return keys + 0, values

    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return original(self, x, mask, cache if cache is None or x.shape[0] < 8 else Copying(cache))

    monkeypatch.setattr(phi3.Attention, "__call__", attention)
    model = model_configs.build("phi3")
    prompts = prompts_for(model_configs.VOCAB, (20, 30, 9))
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 6)
    with pytest.warns(mlx_paged.FallThroughWarning, match="one by one through models of mlx_lm.models.phi3"):
        run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert len(calls) == 1 and not gen._engine.prefill.packs
    assert not packing(model)._engine.prefill.packs, "that is remembered"
    assert_nothing_is_left(model)


@pytest.mark.parametrize("lengths", [(20, 30, 9), (20,)], ids=["together", "alone"])
def test_a_model_whose_chunks_see_more_than_its_caches_keep_is_computed_one_by_one(
    calls: list[list[int]], lengths: tuple[int, ...]
) -> None:
    model = model_configs.build("plamo3")
    prompts = prompts_for(model_configs.VOCAB, lengths)
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model, 128, prefill_step_size=128)
    outcomes = insert(gen, prompts, 6)
    with pytest.warns(mlx_paged.FallThroughWarning, match="one by one through models of mlx_lm.models.plamo3"):
        run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert len(calls) == 1 and not gen._engine.prefill.packs
    assert_nothing_is_left(model)


# Who packs ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "packs"),
    [
        ("llama", {}, True),
        ("phi3", {}, True),
        ("qwen3", {"max_kv_size": 20}, False),  # pinned tokens
        ("deepseek_v3", {}, False),  # its attention works with what is fetched
        ("gpt_bigcode", {}, False),  # one row after the other
        ("falcon_h1", {}, False),  # other states than keys and values
    ],
)
def test_which_models_pack(name: str, options: dict[str, Any], packs: bool) -> None:
    model = model_configs.build(name)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    engine = generator(model, **options)._engine
    assert engine.packs == engine.prefill.packs == packs


def test_packs_are_taken_where_plans_are_prepared_and_blocks_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedBatchGenerator, "packs", None)
    model = build("llama", head_dim=64)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert not generator(model)._engine.packs
    monkeypatch.setattr(live_requests, "prepares_plans", lambda: True)
    assert not generator(model)._engine.packs
    with fake_kernels():
        mlx_paged.remove_patches()
        mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
        assert generator(model)._engine.packs
        monkeypatch.setattr(live_requests, "prepares_plans", lambda: False)
        engine = generator(model)._engine
        assert not engine.packs and engine.shares_calls


@pytest.mark.parametrize(
    ("step", "grid", "budget", "chunk"),
    [(2048, 512, 4096, 2048), (3000, 512, 4096, 3000), (10000, 512, 4096, 4096), (600, 512, 600, 600), (64,) * 4],
)
def test_a_chosen_step_size_bounds_steps(step: int, grid: int, budget: int, chunk: int) -> None:
    scheduler = ToyEngine(make_pool(), packs=True, prefill_step_size=step).engine.scheduler
    assert (scheduler.grid, scheduler.token_budget, scheduler.chunk) == (grid, budget, chunk)


def test_steps_without_packs_are_as_they_were() -> None:
    scheduler = ToyEngine(make_pool(), prefill_step_size=2048).engine.scheduler
    assert (scheduler.token_budget, scheduler.chunk, scheduler.grid) == (2048, None, None)


def test_chunks_that_failed_with_others_come_alone() -> None:
    pool = make_pool()
    engine = ToyEngine(pool)
    requests = [engine.engine.requests[engine.add(toy_prompt(5 + n))] for n in range(4)]
    requests[1].alone = True
    chunks = [Chunk(request, 3) for request in requests]
    assert packs_of(chunks) == [[chunks[0], chunks[2], chunks[3]], [chunks[1]]]
    assert packs_of(chunks[1:2]) == [[chunks[1]]] and packs_of([]) == []
    assert can_pack(caches_of(pool))


@pytest.mark.parametrize(("most", "expected"), [(64, [[16], [16], [7]]), (20, [[16]]), (0, [])])
def test_a_chunk_alone_goes_as_a_pack_while_its_context_is_short(
    calls: list[list[int]], monkeypatch: pytest.MonkeyPatch, most: int, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(prefill, "MOST_ALONE", most)
    engine = ToyEngine(make_pool(), packs=True)
    uid = engine.add(toy_prompt(40), max_tokens=3)
    engine.run()
    assert engine.tokens(uid) == answer(toy_prompt(40), 3)
    assert calls == expected


# At random ----------------------------------------------------------------------------------------------------------


@functools.cache
def answered(length: int, seed: int) -> list[int]:
    return answer(toy_prompt(length, seed=seed), 12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_lengths_and_budgets_are_each_request_gets_its_tokens(data: st.DataObject) -> None:
    draw: Callable[..., Any] = data.draw
    blocks = draw(st.sampled_from([None, 14, 20, 40]))
    pool = make_pool(num_blocks=blocks)
    tree = RadixTree(pool) if draw(st.booleans()) else None
    engine = ToyEngine(
        pool,
        packs=True,
        prefixes=None if tree is None else SharedPrefixes(tree),
        prefill_step_size=draw(st.integers(2, 40)),
        completion_batch_size=draw(st.integers(1, 8)),
        prefill_batch_size=draw(st.integers(1, 8)),
    )
    engine.engine.scheduler.token_budget = draw(st.integers(2, 100))
    expected: dict[int, tuple[tuple[int, int], int]] = {}
    for _ in range(draw(st.integers(2, 14))):
        action = draw(st.sampled_from(["add", "add", "step", "cancel"]))
        if action == "add":
            what, most = (draw(st.integers(1, 30)), draw(st.integers(0, 2))), draw(st.integers(1, 12))
            expected[engine.add(toy_prompt(*what), max_tokens=most)] = (what, most)
        elif action == "step":
            engine.step()
        elif engine.engine.requests:
            uid = draw(st.sampled_from(sorted(engine.engine.requests)))
            engine.engine.remove([uid])
            del expected[uid]
    engine.run()
    assert not engine.failures
    for uid, (what, most) in expected.items():
        assert engine.tokens(uid) == answered(*what)[:most]
    assert Counter(engine.model.call_sizes)[0] == 0
    engine.responses.clear()
    if tree is None:
        assert pool.stats().live_blocks == 0
    pool.check_integrity()
