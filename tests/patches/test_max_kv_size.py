"""``max_kv_size`` on blocks: pinned first tokens and a window, as in mlx-lm's single runs, alone and in batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import cache as upstream
from mlx_lm.models import qwen2

import mlx_paged
from mlx_paged import KernelUnavailableError, PagedConfig, PagedKVCache, PromptCacheError
from mlx_paged.kv.radix import RadixTree
from mlx_paged.patches import plan as plans
from mlx_paged.patches.prefix_cache import PagedPromptCache
from mlx_paged.prefix import SharedPrefixes
from scripts import model_configs
from tests.batch_runs import Outcome, collect, generator, kv_budget, run_all
from tests.builders import COMMON, HEADS, build, greedy, prompt_of, rms
from tests.fake_kernels import fake_kernels

pytestmark = pytest.mark.usefixtures("no_fall_through")

KINDS = ("qwen3", "qwen2")  # an adapter, and the seam
SIZE, STEP = 32, 16
PINNED = 4


@functools.cache
def model_of(kind: str) -> Any:
    if kind == "qwen3":
        return build("qwen3")
    mx.random.seed(0)
    args = {**COMMON, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3}
    model = qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **args))
    mx.eval(model.parameters())
    return model


@functools.cache
def solo(kind: str, length: int, num_tokens: int, size: int = SIZE, step: int = STEP) -> tuple[list[int], np.ndarray]:
    """Stock mlx-lm's single run."""
    assert not mlx_paged.patches.is_applied()
    return greedy(model_of(kind), prompt_of(length, seed=length), num_tokens, max_kv_size=size, prefill_step_size=step)


def blocks_at_most(size: int, step: int, block_size: int) -> int:
    """Blocks of one sequence."""
    return -(-(size + step) // block_size) + 1 + -(-PINNED // block_size)


def assert_gathered() -> None:
    last = mlx_paged.last_dispatch()
    assert last is not None and last.path == "gather" and "pinned" in last.reason


# One sequence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [7, STEP, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_single_sequences_equal_stock_bit_for_bit(kind: str, step: int) -> None:
    lengths = (1, 3, 20, SIZE - 1, SIZE, SIZE + 1, SIZE + 2, 75)
    expected = [solo(kind, length, 110, SIZE, step) for length in lengths]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for length, (tokens, logprobs) in zip(lengths, expected, strict=True):
        prompt = prompt_of(length, seed=length)
        got = greedy(model_of(kind), prompt, 110, max_kv_size=SIZE, prefill_step_size=step)
        assert got[0] == tokens
        assert rms(got[1], logprobs) == 0.0
        assert_gathered()
    pool = mlx_paged.pool_of(model_of(kind))
    pool.check_integrity()
    assert pool.stats().live_blocks == 0
    assert pool.stats().peak_live_blocks <= blocks_at_most(SIZE, min(step, 75), 8)


@pytest.mark.parametrize("size", [5, 6, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_hardly_more_room_than_is_pinned(kind: str, size: int) -> None:
    lengths = (1, 4, 5, 6, 30)
    expected = [solo(kind, length, 40, size, 7) for length in lengths]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for length, (tokens, logprobs) in zip(lengths, expected, strict=True):
        prompt = prompt_of(length, seed=length)
        got = greedy(model_of(kind), prompt, 40, max_kv_size=size, prefill_step_size=7)
        assert got[0] == tokens
        assert rms(got[1], logprobs) == 0.0


def conversation(model: Any, turns: Sequence[int]) -> tuple[list[Any], list[np.ndarray]]:
    """A bounded prompt cache after turns of so many tokens, each in one call, and the logits."""
    cache, logits = upstream.make_prompt_cache(model, SIZE), []
    tokens = prompt_of(sum(turns), seed=4)
    done = 0
    for turn in turns:
        logits.append(np.array(model(tokens[None, done : done + turn], cache=cache)))
        done += turn
    return cache, logits


@pytest.mark.parametrize("kind", KINDS)
def test_turns_forks_and_trims_equal_stock(kind: str) -> None:
    model = model_of(kind)

    def run() -> list[np.ndarray]:
        cache, logits = conversation(model, (9, 1, 1, 15))
        assert upstream.can_trim_prompt_cache(cache)
        assert upstream.trim_prompt_cache(cache, 7) == 7
        for turn in (3, 1, 1, 20, 1, 1, 1, 11, *[1] * 40, 2, 1):
            logits.append(np.array(model(prompt_of(turn, seed=turn)[None], cache=cache)))
        assert not upstream.can_trim_prompt_cache(cache)
        assert cache[0].size() == SIZE and cache[0].offset == sum((9, 1, 1, 15, -7, 3, 1, 1, 20, 1, 1, 1, 11, 40, 2, 1))
        fork = copy.deepcopy(cache)
        for each in (fork, cache):
            for turn in (1, 1, 6, 1):
                logits.append(np.array(model(prompt_of(turn, seed=50 + turn)[None], cache=each)))
        return logits

    expected = run()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for got, want in zip(run(), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    mlx_paged.pool_of(model).check_integrity()


HISTORIES = [
    (5,),
    (SIZE - 1,),
    (SIZE,),
    (SIZE + 1, 1, 1, 1),
    (75,),
    (75, *[1] * 17),
    (3, *[1] * (SIZE + 9)),
    (40, 1, 9),
]


@pytest.mark.parametrize("turns", HISTORIES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_caches_are_stocks_both_ways(kind: str, turns: tuple[int, ...], tmp_path: Path) -> None:
    model = model_of(kind)
    file, paged_file = str(tmp_path / "stock.safetensors"), str(tmp_path / "paged.safetensors")

    def goes_on(cache: list[Any], first: int = 6) -> tuple[list[int], np.ndarray]:
        return greedy(model, prompt_of(first, seed=5), 45, prompt_cache=cache)

    upstream.save_prompt_cache(file, conversation(model, turns)[0])
    expected = goes_on(upstream.load_prompt_cache(file))
    decoded = goes_on(upstream.load_prompt_cache(file), 1)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    adopted = mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file))
    assert all(isinstance(c, PagedKVCache) and c.pinned == PINNED for c in adopted)
    again = str(tmp_path / "again.safetensors")
    upstream.save_prompt_cache(again, adopted)
    got = goes_on(adopted)
    assert got[0] == expected[0]
    assert rms(got[1], expected[1]) == 0.0
    got = goes_on(mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file)), 1)
    assert got[0] == decoded[0]
    assert rms(got[1], decoded[1]) == 0.0
    upstream.save_prompt_cache(paged_file, conversation(model, turns)[0])
    mlx_paged.pool_of(model).check_integrity()
    mlx_paged.remove_patches()
    stock = upstream.load_prompt_cache(file)
    for name in (paged_file, again):
        loaded = upstream.load_prompt_cache(name)
        for ours, theirs in zip(loaded, stock, strict=True):
            for x, y in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
                assert mx.array_equal(x, y)
            assert (ours.offset, ours.keep, ours.max_size) == (theirs.offset, theirs.keep, theirs.max_size)
        got = goes_on(loaded)
        assert got[0] == expected[0]
        assert rms(got[1], expected[1]) == 0.0


def test_speculative_decoding_within_the_bound_equals_stock() -> None:
    model, draft = model_of("qwen3"), build("qwen3", num_hidden_layers=1)

    def run() -> list[int]:
        caches = upstream.make_prompt_cache(model, 128) + upstream.make_prompt_cache(draft, 128)
        steps = speculative_generate_step(prompt_of(20), model, draft, max_tokens=40, prompt_cache=caches)
        return [int(token) for token, *_ in steps]

    expected = run()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert run() == expected


# Batches ----------------------------------------------------------------------------------------------------------


def check(kind: str, length: int, outcome: Outcome, *, bits: bool = False) -> None:
    tokens, logprobs = solo(kind, length, len(outcome.tokens))
    assert outcome.tokens == tokens
    assert np.abs(np.stack(outcome.logprobs) - logprobs).max() <= (0.0 if bits else 1e-5)
    assert outcome.reason == "length"


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
        for row in gen._engine.rows.values():
            if row.sequence is not None:
                assert row.sequence.tables[0].num_blocks <= blocks_at_most(SIZE, STEP, 8)
        if step % 20 == 0:
            pool.check_integrity()
    assert gen._engine.batch.kind == "together"
    assert_gathered()
    for uid, outcome in outcomes.items():
        check(kind, lengths[uid], outcome)
    gen.close()


@pytest.mark.parametrize("name", ["pixtral", "mistral3", "gemma2", "mistral4"])
def test_other_ways_to_attend_equal_stocks_single_runs(name: str) -> None:
    """A narrower window than the bound by an adapter and by the seam, a soft cap, and keys gathered for all rows."""
    model, lengths = model_configs.build(name), (5, 30, 45)
    prompts = [prompt_of(n, seed=n) % model_configs.VOCAB for n in lengths]
    options = {"max_kv_size": 20, "prefill_step_size": 16}
    expected = [greedy(model, prompt, 40, **options) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for prompt, (tokens, logprobs) in zip(prompts, expected, strict=True):
        got = greedy(model, prompt, 40, **options)
        assert got[0] == tokens
        assert rms(got[1], logprobs) == 0.0
    gen = generator(model, **options)
    uids = gen.insert([prompt.tolist() for prompt in prompts], [40] * 3)
    outcomes = {uid: Outcome() for uid in uids}
    run_all(gen, outcomes)
    for uid, (tokens, logprobs) in zip(uids, expected, strict=True):
        assert outcomes[uid].tokens == tokens
        assert np.abs(np.stack(outcomes[uid].logprobs) - logprobs).max() <= 1e-5
    gen.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_made_room_go_on_as_if_nothing_had_been(kind: str) -> None:
    """Tokens that were decoded saw the pinned ones; computed again in chunks they must, too."""
    lengths = (5, 20, 30, 38, 45)
    for length in lengths:
        solo(kind, length, 90)
    model = model_of(kind)
    mlx_paged.apply_patches()
    head = HEADS["head_dim"] if kind == "qwen3" else COMMON["hidden_size"] // 6
    budget = kv_budget(model, 22, 8) * head // HEADS["head_dim"]
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=budget))
    gen = generator(model, max_kv_size=SIZE, prefill_step_size=STEP)
    uids = gen.insert([prompt_of(n, seed=n).tolist() for n in lengths], [90] * len(lengths))
    outcomes = {uid: Outcome() for uid in uids}
    recomputed = []
    preempt = gen._engine.scheduler.preempt
    gen._engine.scheduler.preempt = lambda request: (recomputed.append(request.length), preempt(request))
    for _ in range(60):
        collect(outcomes, *gen.next())
    for _ in range(2):  # whatever the budget says: rows far beyond the window
        gen._engine.scheduler.preempt_for(gen._engine.scheduler.running[0])
    run_all(gen, outcomes)
    assert max(recomputed) > SIZE + 20
    for uid, length in zip(uids, lengths, strict=True):
        check(kind, length, outcomes[uid])
    gen._engine.pool.check_integrity()
    gen.close()


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
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().live_blocks == 0


# Models and pools -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_with_and_without_a_bound_alternately(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = model_of(kind), (SIZE, None, 48)
    expected = {size: greedy(model, prompt_of(40), 60, max_kv_size=size)[1] for size in sizes}
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    caches = {size: upstream.make_prompt_cache(model, size) for size in sizes}
    runs = {size: [np.array(model(prompt_of(40)[None, :39], cache=caches[size]))] for size in sizes}
    monkeypatch.setattr(plans, "probe_layers", lambda *_: pytest.fail("looked at the model again"))
    pools = {size: cache[0].pool for size, cache in caches.items()}
    assert len(set(map(id, pools.values()))) == 3
    for size in sizes * 2:
        assert upstream.make_prompt_cache(model, size)[0].pool is pools[size] is mlx_paged.pool_of(model)
    steps = {size: [] for size in sizes}
    last = {size: prompt_of(40)[-1:] for size in sizes}
    for _ in range(60):
        for size in sizes:
            logits = model(last[size][None], cache=caches[size])[:, -1]
            steps[size].append(np.array(logits - mx.logsumexp(logits, keepdims=True))[0])
            last[size] = mx.argmax(logits, axis=-1)
    for size in sizes:
        assert rms(np.stack(steps[size]), expected[size]) == 0.0
        pools[size].check_integrity()
        assert runs[size]
    # One batch of each, at the same time.
    gens = {size: generator(model, max_kv_size=size, prefill_step_size=64) for size in (SIZE, 48)}
    outcomes = {size: {gen.insert([prompt_of(40).tolist()], [60])[0]: Outcome()} for size, gen in gens.items()}
    for _ in range(70):
        for size, gen in gens.items():
            collect(outcomes[size], *gen.next())
    for size, gen in gens.items():
        (outcome,) = outcomes[size].values()
        assert np.abs(np.stack(outcome.logprobs) - expected[size]).max() <= 1e-5
        gen.close()


def test_a_cache_of_another_bound_is_refused() -> None:
    model = model_of("qwen3")
    stock, paged = upstream.make_prompt_cache(model, 48), None
    model(prompt_of(9)[None], cache=stock)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    paged = upstream.make_prompt_cache(model, 48)
    model(prompt_of(9)[None], cache=paged)
    gen = generator(model, max_kv_size=SIZE)
    for given in (stock, paged):
        with pytest.raises(PromptCacheError, match="other options"):
            gen.insert([[1, 2, 3]], [4], caches=[given])
    gen.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_demanded_is_an_error_before_anything_is_changed(kind: str) -> None:
    model = model_of(kind)
    with fake_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=8, use_native_paged_kernel=True))
        with pytest.raises(KernelUnavailableError, match=r"kernel=on, but .*pinned"):
            greedy(model, prompt_of(9), 4, max_kv_size=SIZE)
        pool = mlx_paged.pool_of(model)
        assert pool is None or pool.stats().live_blocks == 0
        mlx_paged.remove_patches()
        mlx_paged.apply_patches(PagedConfig(block_size=8))  # not demanded: gathered, and the rest in place
        assert len(greedy(model, prompt_of(9), 50, max_kv_size=SIZE)[0]) == 50
        assert_gathered()
        assert not mlx_paged.pool_of(model).groups[0].in_place
        upstream.make_prompt_cache(model)
        greedy(model, prompt_of(9), 4)
        assert mlx_paged.pool_of(model).groups[0].in_place
