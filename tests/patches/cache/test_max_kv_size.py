"""``max_kv_size`` on blocks: pinned first tokens and a window, as in mlx-lm's single runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import KernelUnavailableError, PagedConfig, PagedKVCache, PromptCacheError
from mlx_paged.patches.cache import layout as layouts
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import Outcome, collect, generator
from tests.support.models.builders import assert_same, build, greedy, prompt_of, rms
from tests.support.processes.bounded import (
    KINDS,
    PINNED,
    SIZE,
    STEP,
    assert_gathered,
    blocks_at_most,
    conversation,
    model_of,
    solo,
)
from tests.support.samples import each_value

pytestmark = pytest.mark.usefixtures("no_fall_through")


STEPS = (7, STEP, 2048)
LENGTHS = (1, 3, 20, SIZE - 1, SIZE, SIZE + 1, SIZE + 2, 75)


@pytest.mark.sample
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_single_sequences_equal_stock_bit_for_bit(kind: str, step: int, part: int) -> None:
    # Always every second length: each with each kind, and with each step by one of the two kinds.
    lengths = LENGTHS[(KINDS.index(kind) + STEPS.index(step) + part) % 2 :: 2]
    # Each goes twice through what is not pinned; the longest one's prompt does.
    counts = [max(20, PINNED + 2 * (SIZE - PINNED) + 4 - length) for length in lengths]
    expected = [solo(kind, length, count, SIZE, step) for length, count in zip(lengths, counts, strict=True)]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for length, count, (tokens, logprobs) in zip(lengths, counts, expected, strict=True):
        prompt = prompt_of(length, seed=length)
        got = greedy(model_of(kind), prompt, count, max_kv_size=SIZE, prefill_step_size=step)
        assert got[0] == tokens
        assert rms(got[1], logprobs) == 0.0
        assert_gathered()
    pool = mlx_paged.pool_of(model_of(kind))
    pool.check_integrity()
    assert pool.stats().live_blocks == 0
    assert pool.stats().peak_live_blocks <= blocks_at_most(SIZE, min(step, 75), 8)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("kind", "size"), each_value(KINDS, (5, 6, 9)))
def test_hardly_more_room_than_is_pinned(kind: str, size: int) -> None:
    lengths = (1, 4, 5, 6, 30)
    expected = [solo(kind, length, 24, size, 7) for length in lengths]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for length, (tokens, logprobs) in zip(lengths, expected, strict=True):
        prompt = prompt_of(length, seed=length)
        got = greedy(model_of(kind), prompt, 24, max_kv_size=size, prefill_step_size=7)
        assert got[0] == tokens
        assert rms(got[1], logprobs) == 0.0


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


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("kind", "turns"), each_value(KINDS, HISTORIES), ids=str)
def test_saved_caches_are_stocks_both_ways(kind: str, turns: tuple[int, ...], tmp_path: Path) -> None:
    model = model_of(kind)
    file, paged_file = str(tmp_path / "stock.safetensors"), str(tmp_path / "paged.safetensors")

    def goes_on(cache: list[Any], first: int = 6) -> tuple[list[int], np.ndarray]:
        return greedy(model, prompt_of(first, seed=5), 36, prompt_cache=cache)

    upstream.save_prompt_cache(file, conversation(model, turns)[0])
    expected = goes_on(upstream.load_prompt_cache(file))
    decoded = goes_on(upstream.load_prompt_cache(file), 1)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    adopted = mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file))
    assert all(isinstance(c, PagedKVCache) and c.pinned == PINNED for c in adopted)
    again = str(tmp_path / "again.safetensors")
    upstream.save_prompt_cache(again, adopted)
    got = goes_on(adopted)
    assert_same(got, expected)
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
        assert_same(got, expected)


def test_speculative_decoding_within_the_bound_equals_stock() -> None:
    model, draft = model_of("qwen3"), build("qwen3", num_hidden_layers=1)

    def run() -> list[int]:
        caches = upstream.make_prompt_cache(model, 128) + upstream.make_prompt_cache(draft, 128)
        steps = speculative_generate_step(prompt_of(20), model, draft, max_tokens=40, prompt_cache=caches)
        return [int(token) for token, *_ in steps]

    expected = run()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert run() == expected


# Models and pools -------------------------------------------------------------------------------------------------


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_with_and_without_a_bound_alternately(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = model_of(kind), (SIZE, None, 48)
    expected = {size: greedy(model, prompt_of(40), 60, max_kv_size=size)[1] for size in sizes}
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    caches = {size: upstream.make_prompt_cache(model, size) for size in sizes}
    runs = {size: [np.array(model(prompt_of(40)[None, :39], cache=caches[size]))] for size in sizes}
    monkeypatch.setattr(layouts, "probe_layers", lambda *_: pytest.fail("looked at the model again"))
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
        mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
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
