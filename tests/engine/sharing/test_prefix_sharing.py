"""Requests of one burst share a prefix: it is computed once and stored once, and the answers are those of solo runs."""

import gc
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.memory import PoolBudget
from mlx_paged.engine.request import RequestOptions
from mlx_paged.errors import RequestTooLargeError
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import kv_budget, mlx_lm_generate, model_of
from tests.support.models.builders import KINDS, WINDOW, greedy, prompt_of
from tests.support.models.recurrent import RECURRENT

BLOCK = 8


def burst(
    prompts: list[list[int]], kind: str, *, new: int, block_size: int, in_place: bool = False, **options: Any
) -> tuple[Any, Any, list[int], list[list[int]]]:
    """Run all requests and compare them with solo runs. Returns the generator, the pool, how many tokens of each prompt
    were cached, and the solo runs' tokens."""
    changes = {"head_dim": 64} if in_place else {}
    model = model_of(kind, **changes)
    expected = [greedy(model, mx.array(prompt), new)[0] for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=block_size))
    pool = prefix_pool_of(model)
    tree = PrefixCache(pool)
    gen = PagedBatchGenerator(model, prefixes=SharedPrefixes(tree), **options)
    tokens, cached = run(gen, prompts, new)
    assert tokens == expected
    gc.collect()
    tree.check_integrity()
    pool.check_integrity()
    assert pool.stats().live_blocks == pool.stats().cached_blocks
    return gen, pool, cached, expected


def run(gen: Any, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[int]]:
    """Return the requests' tokens, and how many tokens of each prompt its last response says were cached."""
    tokens: dict[int, list[int]] = {uid: [] for uid in gen.insert(prompts, [new] * len(prompts))}
    cached = dict.fromkeys(tokens, 0)
    while any(answer := gen.next()):
        for response in answer[1]:
            tokens[response.uid].append(response.token)
            cached[response.uid] = response.num_cached
    return list(tokens.values()), list(cached.values())


def prompts_with_a_common_prefix(requests: int) -> list[list[int]]:
    """Return prompts that share 101 tokens, of which each has some more, and one that shares none."""
    system = prompt_of(101, seed=1).tolist()
    own = [prompt_of(5 + n, seed=10 + n).tolist() for n in range(requests)]
    return [*(system + each for each in own), prompt_of(30, seed=2).tolist()]


@pytest.mark.parametrize(("kind", "in_place"), quick(crossed(KINDS, [False, True]), ("llama", False), ("llama", True)))
def test_bursts_of_every_kind_share_and_answer_like_solo_runs(kind: str, in_place: bool) -> None:
    """Sliding windows are crossed by the prompt. Chunks are smaller than the shared prefix. Blocks that (fake) kernels
    write in place are shared while their owner keeps writing."""
    prompts = prompts_with_a_common_prefix(5)
    with fake_kernels() if in_place else nullcontext():
        gen, pool, cached, _ = burst(prompts, kind, new=5, block_size=BLOCK, in_place=in_place, prefill_step_size=40)
        assert all(group.in_place == in_place for group in pool.groups)
    # With a window, a hit may end some blocks before the end of the shared prefix.
    slack = BLOCK if kind in ("llama", "qwen3") else 4 * BLOCK
    assert gen._engine.computed_prompt_tokens <= 101 + sum(5 + n for n in range(5)) + 30 + 4 * slack
    assert cached[0] == cached[5] == 0
    assert all(101 - slack <= each <= 101 for each in cached[1:5])


@pytest.mark.parametrize("kind", quick(KINDS, "llama", "qwen3"))
def test_repeated_prompt_computes_at_most_a_block(kind: str) -> None:
    prompt = prompt_of(100, seed=3).tolist()
    _, _, cached, _ = burst([prompt] * 4, kind, new=24, block_size=BLOCK)
    assert cached[0] == 0
    assert all(each >= 99 - BLOCK for each in cached[1:])


@pytest.mark.parametrize("keep", [0, 64])
def test_kept_prompts_outlive_newer_ones_under_pressure(keep: int) -> None:
    model = model_of("llama")
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=kv_budget(model, 24, BLOCK)))
    tree = PrefixCache(prefix_pool_of(model))
    gen = PagedBatchGenerator(model, prefixes=SharedPrefixes(tree))
    prompts = [prompt_of(64, seed=seed).tolist() for seed in range(8)]  # 9 blocks each
    gen.insert_segments([[prompts[0]]], [2], options=[RequestOptions(keep=keep)])
    while any(gen.next()):
        pass
    for prompt in prompts[1:]:
        assert run(gen, [prompt], 2)[1] == [0]
    assert run(gen, [prompts[0]], 2)[1] == [64 - BLOCK if keep else 0]
    tree.check_integrity()


@pytest.mark.parametrize("kind", quick(RECURRENT, "mamba"))
def test_models_with_states_share_the_states_at_the_common_end(kind: str) -> None:
    """The common prefix is a chunk of its own, and the states at its end serve the other prompts."""
    prompts = prompts_with_a_common_prefix(5)
    gen, _, cached, expected = burst(prompts, kind, new=5, block_size=BLOCK, prefill_step_size=64)
    assert gen._engine.computed_prompt_tokens <= 101 + sum(5 + n for n in range(5)) + 30 + 4 * 5
    assert cached == [0, *[96] * 4, 0]
    # A chat continues from the end of its answer.
    again = [*prompts[0], *expected[0], *prompt_of(9, seed=9).tolist()]
    mlx_paged.remove_patches()
    later = greedy(model_of(kind), mx.array(again), 5)[0]
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    tokens, (num_cached,) = run(gen, [again], 5)
    assert tokens == [later] and num_cached >= len(prompts[0]) + 4


@pytest.mark.parametrize("kind", quick(KINDS, "llama", "llama-sliding", "qwen3"))
def test_sharing_request_equals_a_cold_one_with_the_same_cut(kind: str) -> None:
    model = model_of(kind)
    system, suffix = prompt_of(2 * WINDOW, seed=6).tolist(), prompt_of(9, seed=7).tolist()
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))

    def logprobs_of(prefixes: Any, *requests: list[list[int]]) -> list[np.ndarray]:
        gen = PagedBatchGenerator(model, prefixes=prefixes)
        logprobs: list[np.ndarray] = []
        for segments in requests:
            gen.insert_segments([segments], [6])
            logprobs.clear()
            while any(answer := gen.next()):
                logprobs += [np.array(response.logprobs) for response in answer[1]]
        return logprobs

    cold = logprobs_of(None, [system, suffix])
    pool = mlx_lm_generate.make_prompt_cache(model)[0].pool
    tree = PrefixCache(pool)  # kept alive: its counters go with it
    warm = logprobs_of(SharedPrefixes(tree), [system, [1, 2, 3]], [[*system, *suffix]])
    assert pool.stats().prefix_hit_tokens == len(system)
    np.testing.assert_array_equal(np.stack(cold), np.stack(warm))
    anyhow = logprobs_of(None, [[*system, *suffix]])  # without a cut
    assert np.abs(np.stack(anyhow) - np.stack(warm)).max() < 1e-4


class Tight:
    """A generator with a prefix cache, in the least budget that holds a sequence of ``num_tokens`` tokens."""

    def __init__(self, kind: str, num_tokens: int, block_size: int = BLOCK, step_size: int = 2 * BLOCK) -> None:
        model = model_of(kind)
        mlx_paged.apply_patches(PagedConfig(block_size=block_size))
        caches = mlx_lm_generate.make_prompt_cache(model)
        self.pool = caches[0].pool
        self.tree = PrefixCache(self.pool)
        self.pool.memory.budget = PoolBudget(self.pool, chunk=step_size).bytes_for(num_tokens)
        self.gen = PagedBatchGenerator(model, prefixes=SharedPrefixes(self.tree), prefill_step_size=step_size)

    def run(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[int]]:
        found = run(self.gen, prompts, new)
        self.tree.check_integrity()
        self.pool.check_integrity()
        return found


# The quick cases: two kinds with windows, two without.
@pytest.mark.parametrize(
    "kind, size", quick(crossed(KINDS, [(100, 128), (100, 32), (96, 8), (250, 32)]), ("llama", (100, 128)),
    ("llama-sliding", (100, 128)), ("qwen3", (100, 32)), ("gemma3", (96, 8)))
)  # fmt: skip
def test_the_longest_request_uses_all_of_a_known_prefix(kind: str, size: tuple[int, int]) -> None:
    """The budget counts the copy of a partly shared block, so no token is computed again."""
    length, block_size = size
    prompt, new = prompt_of(length, seed=3).tolist(), 4
    expected = greedy(model_of(kind), mx.array(prompt), new)[0]
    tight = Tight(kind, length + new, block_size, step_size=64)
    for attempt in range(3):
        tokens, cached = tight.run([prompt], new)
        assert tokens == [expected]
        if kind in ("llama", "qwen3"):
            assert cached == [(length - 1) // block_size * block_size if attempt else 0]
    with pytest.raises(RequestTooLargeError):
        tight.gen.insert([prompt_of(length + new + block_size, seed=4).tolist()], [1])


def test_preempted_request_at_the_budgets_limit_restarts() -> None:
    """It is preempted for the older request, which takes the last block and leaves its blocks to the tree. The copy of
    the block in which both diverge fits, because the tree evicts the blocks after it."""
    for common, own in [(19, 2), (17, 1), (20, 2), (16, 2)]:
        mlx_paged.remove_patches()
        system = prompt_of(common, seed=1).tolist()
        prompts = [system + prompt_of(own, seed=10 + n).tolist() for n in range(2)]
        fill = 4 * BLOCK - common - own  # a block more than the budget surely holds
        expected = [greedy(model_of("llama"), mx.array(prompt), fill)[0] for prompt in prompts]
        tight = Tight("llama", 3 * BLOCK)
        tokens, _ = tight.run(prompts, fill)
        assert tokens == expected
        assert tight.gen.preemptions > 0


def test_a_prefix_lost_before_it_was_used_is_not_reported() -> None:
    prompt = prompt_of(3 * BLOCK, seed=1).tolist()
    tight = Tight("llama", 20 * BLOCK)
    tight.run([prompt], 1)
    (uid,) = tight.gen.insert([[*prompt, 7]], [2])
    engine = tight.gen._engine
    engine.scheduler.plan()
    assert engine.requests[uid].num_cached == len(prompt)
    engine.scheduler.preempt(engine.requests[uid])
    tight.tree.clear()
    generated = iter(tight.gen.next_generated, [])
    assert [response.num_cached for responses in generated for response in responses] == [0, 0]
