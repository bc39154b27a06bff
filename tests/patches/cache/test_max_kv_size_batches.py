"""``max_kv_size`` in batches: each row is mlx-lm's single run, which its own batches are not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.store import SharedPrefixes
from scripts.support import model_configs
from tests.support.models.batch_runs import Outcome, assert_released, collect, generator, kv_budget, run_all
from tests.support.models.builders import COMMON, HEADS, greedy, prompt_of, rms
from tests.support.processes.bounded import (
    KINDS,
    SIZE,
    STEP,
    assert_gathered,
    blocks_at_most,
    conversation,
    model_of,
    solo,
)

pytestmark = pytest.mark.usefixtures("no_fall_through")


def check(kind: str, length: int, outcome: Outcome, *, bits: bool = False) -> None:
    tokens, logprobs = solo(kind, length, len(outcome.tokens))
    assert outcome.tokens == tokens
    assert np.abs(np.stack(outcome.logprobs) - logprobs).max() <= (0.0 if bits else 1e-5)
    assert outcome.reason == "length"


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_join_and_finish_equal_stocks_single_runs(kind: str) -> None:
    """mlx-lm's own batches forget which tokens to keep, and their rows are other than single runs."""
    first, later = {5: 60, 40: 20, 61: 45, 1: 70}, {33: 50, 90: 30, SIZE: 60, 7: 1}
    for length, num_tokens in (first | later).items():
        solo(kind, length, num_tokens)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model_of(kind), max_kv_size=SIZE, prefill_step_size=STEP, completion_batch_size=5)
    pool, outcomes, lengths = gen._engine.pool, {}, {}

    def add(requests: dict[int, int]) -> None:
        uids = gen.insert([prompt_of(n, seed=n).tolist() for n in requests], list(requests.values()))
        outcomes.update({uid: Outcome() for uid in uids})
        lengths.update(dict(zip(uids, requests, strict=True)))

    add(first)
    for step in range(400):
        if step == 15:
            add(later)
        prompts, generated = gen.next()
        if not prompts and not generated:
            break
        collect(outcomes, prompts, generated)
        for row in gen._engine.requests.values():
            if row.sequence is not None:
                assert row.sequence.tables[0].num_blocks <= blocks_at_most(SIZE, STEP, 8)
        if step % 20 == 0:
            pool.check_integrity()
    assert gen._engine.batch.kind == "together"
    assert_gathered()
    for uid, outcome in outcomes.items():
        check(kind, lengths[uid], outcome)
    gen.close()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", ["pixtral", "mistral3", "gemma2", "mistral4"])
def test_other_ways_to_attend_equal_stocks_single_runs(name: str) -> None:
    """A narrower window than the bound by an adapter and by the seam, a soft cap, and keys gathered for all rows."""
    model, lengths = model_configs.build(name), (5, 30, 45)
    prompts = [prompt_of(n, seed=n) % model_configs.VOCAB for n in lengths]
    options = {"max_kv_size": 20, "prefill_step_size": 16}
    expected = [greedy(model, prompt, 24, **options) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for prompt, (tokens, logprobs) in zip(prompts, expected, strict=True):
        got = greedy(model, prompt, 24, **options)
        assert got[0] == tokens
        assert rms(got[1], logprobs) == 0.0
    gen = generator(model, **options)
    uids = gen.insert([prompt.tolist() for prompt in prompts], [24] * 3)
    outcomes = {uid: Outcome() for uid in uids}
    run_all(gen, outcomes)
    for uid, (tokens, logprobs) in zip(uids, expected, strict=True):
        assert outcomes[uid].tokens == tokens
        assert np.abs(np.stack(outcomes[uid].logprobs) - logprobs).max() <= 1e-5
    gen.close()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_made_room_go_on_as_if_nothing_had_been(kind: str) -> None:
    """Tokens that were decoded saw the pinned ones; computed again in chunks they must, too."""
    lengths = (5, 20, 30, 38, 45)
    for length in lengths:
        solo(kind, length, 60)
    model = model_of(kind)
    mlx_paged.apply_patches()
    head = HEADS["head_dim"] if kind == "qwen3" else COMMON["hidden_size"] // 6
    budget = kv_budget(model, 22, 8) * head // HEADS["head_dim"]
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=budget))
    gen = generator(model, max_kv_size=SIZE, prefill_step_size=STEP)
    uids = gen.insert([prompt_of(n, seed=n).tolist() for n in lengths], [60] * len(lengths))
    outcomes = {uid: Outcome() for uid in uids}
    recomputed = []
    preempt = gen._engine.scheduler.preempt
    gen._engine.scheduler.preempt = lambda request: (recomputed.append(request.length), preempt(request))
    for _ in range(45):
        collect(outcomes, *gen.next())
    for _ in range(2):  # whatever the budget says: rows far beyond the window
        gen._engine.scheduler.preempt_for(gen._engine.scheduler.running[0])
    run_all(gen, outcomes)
    assert max(recomputed) > SIZE + 20
    for uid, length in zip(uids, lengths, strict=True):
        check(kind, length, outcomes[uid])
    gen._engine.pool.check_integrity()
    gen.close()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_caches_computed_alone_join_a_batch(kind: str) -> None:
    """Chunks begin where the cache that was given ends, as they do alone; stock's own caches are taken over."""
    model, tail = model_of(kind), prompt_of(50, seed=9)
    histories = [(9,), (SIZE + 5, 1, 1), (70,)]

    def caches() -> list[list[Any]]:
        return [conversation(model, turns)[0] for turns in histories]

    expected = [greedy(model, tail, 50, prompt_cache=cache, prefill_step_size=STEP) for cache in caches()]
    stock = caches()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for given in (caches(), stock):
        gen = generator(model, max_kv_size=SIZE, prefill_step_size=STEP)
        uids = gen.insert([tail.tolist()] * 3, [50] * 3, caches=given)
        outcomes = {uid: Outcome() for uid in uids}
        for _ in range(30):
            collect(outcomes, *gen.next())
        gen._engine.scheduler.preempt_for(gen._engine.scheduler.running[0])
        run_all(gen, outcomes)
        for uid, (tokens, logprobs) in zip(uids, expected, strict=True):
            assert outcomes[uid].tokens == tokens
            assert np.abs(np.stack(outcomes[uid].logprobs) - logprobs).max() <= 1e-5
        gen.close()


def test_finished_caches_of_a_batch_go_on_alone() -> None:
    kind, model = "qwen3", model_of("qwen3")
    tokens, _ = solo(kind, 61, 40)

    def goes_on(cache: list[Any], last: int) -> list[np.ndarray]:
        turns = (mx.array([last]), prompt_of(30, seed=8), *prompt_of(12, seed=7).split(12))
        return [np.array(model(turn[None], cache=cache)) for turn in turns]

    cache = upstream.make_prompt_cache(model, SIZE)
    assert greedy(model, prompt_of(61, seed=61), 40, prompt_cache=cache, prefill_step_size=STEP)[0] == tokens
    expected = goes_on(cache, 3)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model, max_kv_size=SIZE, prefill_step_size=STEP)
    gen.insert([prompt_of(61, seed=61).tolist()], [40])
    last = None
    for step in range(200):
        if step == 25:
            gen._engine.scheduler.preempt(gen._engine.scheduler.running[0])
        _, generated = gen.next()
        last = generated[-1] if generated else last
        if last is not None and last.finish_reason is not None:
            break
    got = goes_on(last.prompt_cache, 3)
    np.testing.assert_allclose(got[1], expected[1], atol=1e-4)
    np.testing.assert_allclose(got[-1], expected[-1], atol=1e-4)
    gen.close()


def test_requests_share_no_prefixes_where_tokens_are_pinned() -> None:
    kind, model = "qwen3", model_of("qwen3")
    for num_tokens in (10, 45):
        solo(kind, 61, num_tokens)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    upstream.make_prompt_cache(model)
    prefixes = SharedPrefixes(RadixTree(mlx_paged.pool_of(model)))  # of the unbounded pool
    gen = generator(model, max_kv_size=SIZE, prefill_step_size=STEP, prefixes=prefixes)
    assert not gen.shares_prefixes
    for num_tokens in (10, 45):
        uids = gen.insert([prompt_of(61, seed=61).tolist()] * 2, [num_tokens] * 2)
        outcomes = {uid: Outcome() for uid in uids}
        run_all(gen, outcomes)
        for outcome in outcomes.values():
            check(kind, 61, outcome)
    gen.close()


def test_a_prompt_cache_store_keeps_whole_bounded_caches() -> None:
    model = model_of("qwen3")
    tokens = prompt_of(60, seed=4).tolist()

    def run(store: Any) -> list[np.ndarray]:
        store.insert_cache("m", tokens[:50], conversation(model, (50,))[0])
        cache, rest = store.fetch_nearest_cache("m", tokens)
        logits = [np.array(model(mx.array(rest)[None], cache=cache))]
        assert len(rest) == 10
        cache, rest = store.fetch_nearest_cache("m", [*tokens[:20], 1, 2, 3])
        return [*logits, np.array([cache is None, len(rest)])]

    expected = run(upstream.LRUPromptCache())
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    store = PagedPromptCache()
    for got, want in zip(run(store), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(store) == 1
    store.close()
    assert_released(model)
