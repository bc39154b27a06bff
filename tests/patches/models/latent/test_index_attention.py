"""Attention to the tokens that an indexer chooses, over pages of latents and index keys, against stock's runs."""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache, dispatch_counts, last_dispatch, reset_dispatch_counts
from mlx_paged.cache.batch import Batch, NotPackableError
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.composites import leaves
from mlx_paged.engine.compiled_step import compiled_steps
from mlx_paged.engine.request import RequestOptions
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.models.index_attention import CHOSEN
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from mlx_paged.prefix.shelf import Shelf
from scripts.support import model_configs
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.batch_runs import assert_released, generator, run_all
from tests.support.models.builders import build_latent, greedy, prompt_of, rms
from tests.support.models.oracle import oracles
from tests.support.models.packs import assert_alike, insert, packing, prompts_for

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["deepseek_v32", "glm_moe_dsa"]
TOPK = model_configs.COMMON["index_topk"]
LENGTHS = (70, 2, 33, 1, 17, 12, 40, 16, 51)
VOCAB = model_configs.VOCAB
KERNEL = ("kernel", "one new token per sequence")


def tokens_of(length: int, seed: int = 3) -> list[int]:
    return (prompt_of(length, seed) % VOCAB).tolist()


def expected_of(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[tuple[list[int], np.ndarray]]:
    return [greedy(model, mx.array(prompt, mx.uint32), num_tokens) for prompt in prompts]


@functools.cache
def solo(length: int) -> tuple[list[int], np.ndarray]:
    """Return stock mlx-lm's 20 tokens of DeepSeek V3.2 after the prompt of this length of :func:`prompts_for`."""
    assert not mlx_paged.patches.is_applied()
    (found,) = expected_of(model_configs.build("deepseek_v32"), prompts_for(VOCAB, [length]), 20)
    return found


def page_config(**options: Any) -> PagedConfig:
    return PagedConfig(block_size=8, **options)


@pytest.mark.parametrize(
    ("name", "length", "step"), quick(crossed(NAMES, [1, TOPK - 1, TOPK, TOPK + 1, 61], [2048, 16, 7]),
    ("deepseek_v32", 61, 7), ("glm_moe_dsa", TOPK - 1, 16))
)  # fmt: skip
def test_single_runs_equal_stock_exactly(name: str, length: int, step: int) -> None:
    model, prompt = model_configs.build(name), mx.array(tokens_of(length), mx.uint32)
    tokens, logprobs = greedy(model, prompt, 24, prefill_step_size=step)
    mlx_paged.apply_patches(page_config())
    got, ours = greedy(model, prompt, 24, prefill_step_size=step)
    assert got == tokens and rms(ours, logprobs) == 0
    assert last_dispatch() == CHOSEN
    assert all(isinstance(cache, PagedKVCache) for cache in leaves(make_prompt_cache(model)))
    assert_released(model)


def test_no_tokens_are_chosen_in_contexts_up_to_index_topk() -> None:
    model, prompt = model_configs.build("deepseek_v32"), mx.array(tokens_of(TOPK - 4), mx.uint32)
    tokens, logprobs = greedy(model, prompt, 4)
    mlx_paged.apply_patches(page_config())
    reset_dispatch_counts()
    got, ours = greedy(model, prompt, 4)
    assert got == tokens and rms(ours, logprobs) == 0
    assert CHOSEN not in dispatch_counts()


@pytest.mark.parametrize(("rows", "packs"), quick(crossed(range(1, 10), [False, True]), (5, True)))
def test_rows_of_a_ragged_batch_get_their_solo_tokens(rows: int, packs: bool) -> None:
    model, prompts = model_configs.build("deepseek_v32"), prompts_for(VOCAB, LENGTHS[:rows])
    expected = [solo(length) for length in LENGTHS[:rows]]
    mlx_paged.apply_patches(page_config())
    gen = packing(model, 64) if packs else generator(model, prefill_step_size=16)
    outcomes = insert(gen, prompts, 20)
    reset_dispatch_counts()
    run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert CHOSEN in dispatch_counts()  # not the last: its row may see at most index_topk tokens
    assert any(choice.path == "apart" for choice in dispatch_counts()) == packs or rows == 1
    assert_released(model)


@pytest.mark.parametrize("at", quick([1, 7, 8, TOPK - 1, TOPK, TOPK + 1, 33, 40], TOPK + 1))
def test_forks_at_any_token_continue_as_in_stock(at: int) -> None:
    model, tokens = model_configs.build("glm_moe_dsa"), tokens_of(45)

    def fork() -> list[tuple[list[int], np.ndarray]]:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([tokens[:at]]), cache=cache))
        forks = [cache, copy.deepcopy(cache)]
        return [
            greedy(model, mx.array(tokens[at + n :], mx.uint32), 12, prompt_cache=each) for n, each in enumerate(forks)
        ]

    expected = fork()
    mlx_paged.apply_patches(page_config())
    for (got, ours), (wanted, theirs) in zip(fork(), expected, strict=True):
        assert got == wanted and rms(ours, theirs) == 0
    stats = mlx_paged.pool_of(model).stats()
    assert (stats.cow_forks > 0) == bool(at % 8)
    assert_released(model)


def test_trimmed_prompt_caches_continue_as_in_stock() -> None:
    model, tokens = model_configs.build("deepseek_v32"), tokens_of(50)

    def run() -> tuple[list[int], np.ndarray]:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([tokens]), cache=cache))
        assert trim_prompt_cache(cache, 21) == 21
        return greedy(model, mx.array(tokens_of(9, 5), mx.uint32), 12, prompt_cache=cache)

    expected = run()
    mlx_paged.apply_patches(page_config())
    got = run()
    assert got[0] == expected[0] and rms(got[1], expected[1]) == 0


@pytest.mark.parametrize(
    ("name", "length"), quick(crossed(NAMES, [0, TOPK - 2, 40]), ("deepseek_v32", 40), ("glm_moe_dsa", 0))
)  # fmt: skip
def test_prompt_caches_continue_after_the_patches_are_removed(name: str, length: int) -> None:
    model, tokens = model_configs.build(name), tokens_of(length)

    def run(between: Any = lambda: None) -> list[tuple[list[int], np.ndarray]]:
        cache = make_prompt_cache(model)
        if tokens:
            mx.eval(model(mx.array([tokens]), cache=cache))
        between()
        found = []
        for seed in (5, 7):  # the second prompt reads what the first one wrote
            found.append(greedy(model, mx.array(tokens_of(9, seed), mx.uint32), 12, prompt_cache=cache))
        return found

    expected = run()
    mlx_paged.apply_patches(page_config())
    for (got, ours), (wanted, theirs) in zip(run(mlx_paged.remove_patches), expected, strict=True):
        assert got == wanted and rms(ours, theirs) == 0


def test_caches_of_several_rows_after_the_patches_are_removed() -> None:
    model, tokens = model_configs.build("deepseek_v32"), mx.array([tokens_of(40), tokens_of(40, 5)])
    expected = model(tokens, cache=make_prompt_cache(model))
    mlx_paged.apply_patches(page_config())
    cache = make_prompt_cache(model)
    mlx_paged.remove_patches()
    assert mx.array_equal(model(tokens, cache=cache), expected)


@pytest.mark.parametrize("shared", quick([1, 8, TOPK + 1, 37], TOPK + 1))
def test_prefixes_are_shared_in_whole_blocks(shared: int) -> None:
    model, first = model_configs.build("deepseek_v32"), tokens_of(40)
    prompts = [first, first[:shared] + tokens_of(20, seed=5)]
    expected = expected_of(model, prompts, 12)
    mlx_paged.apply_patches(page_config())
    tree = PrefixCache(mlx_paged.pool_of(model))
    for prompt, wanted in zip(prompts, expected, strict=True):
        gen = generator(model, prefixes=SharedPrefixes(tree))
        outcomes = insert(gen, [prompt], 12)
        run_all(gen, outcomes)
        assert_alike(outcomes, [wanted])
    assert tree.pool.stats().prefix_hit_tokens == shared // tree.block_size * tree.block_size
    tree.check_integrity()


def test_prefixes_are_restored_from_disk_with_their_index_keys(tmp_path: Path) -> None:
    model, prompt = model_configs.build("deepseek_v32"), tokens_of(60)
    expected = expected_of(model, [prompt], 12)
    for restored in (False, True):
        mlx_paged.apply_patches(page_config())
        store = PagedPromptCache(None, disk=DiskTier(Shelf(str(tmp_path))), identify=lambda key: "weights")
        store.learn_layout("key", make_prompt_cache(model))
        pool = mlx_paged.pool_of(model)
        gen = generator(model, prefixes=store.shared_prefixes("key", pool))
        outcomes = insert(gen, [prompt], 12)
        run_all(gen, outcomes)
        assert_alike(outcomes, expected)
        assert pool.stats().prefix_hit_tokens == (59 // pool.block_size * pool.block_size if restored else 0)
        gen.close()
        store.close()
        assert_released(model)
        mlx_paged.remove_patches()


def test_preempted_requests_give_their_solo_tokens() -> None:
    model, prompts = model_configs.build("deepseek_v32"), prompts_for(VOCAB, (60, 45, 50, 30, 41))
    expected = expected_of(model, prompts, 24)
    mlx_paged.apply_patches(page_config(kv_cache_memory=24 * bytes_of_block(model)))
    gen = generator(model, prefill_step_size=16)
    outcomes = insert(gen, prompts, 24)
    run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert gen.preemptions > 0
    assert_released(model)


def bytes_of_block(model: Any) -> int:
    args = model.args
    return 8 * len(model.layers) * (args.kv_lora_rank + args.qk_rope_head_dim + args.index_head_dim) * 4


def test_index_keys_count_in_the_budget() -> None:
    model = model_configs.build("deepseek_v32")
    mlx_paged.apply_patches(page_config())
    assert sum(group.bytes_per_block for group in mlx_paged.pool_of(model).groups) == bytes_of_block(model)
    mlx_paged.remove_patches()
    mlx_paged.apply_patches(page_config(kv_cache_memory=5 * bytes_of_block(model)))
    with pytest.raises(mlx_paged.RequestTooLargeError):
        generator(model).insert([tokens_of(60)])


def test_looked_up_drafts_are_accepted_and_give_solo_tokens() -> None:
    model, prompts = model_configs.build("deepseek_v32"), prompts_for(VOCAB, (3, 37, 12))
    expected = expected_of(model, prompts, 26)
    with oracles(VOCAB) as oracle:
        oracle.answers.update({tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)})
        mlx_paged.apply_patches(page_config())
        gen = generator(model)
        asked = [RequestOptions(prompt_lookup=4)] * len(prompts)
        gen.insert_segments([[prompt] for prompt in prompts], [22] * len(prompts), options=asked)
        found: dict[int, list[int]] = {}
        while responses := [(each.uid, each.token) for each in gen.next_generated()]:
            for uid, token in responses:
                found.setdefault(uid, []).append(token)
    assert list(found.values()) == [tokens[:22] for tokens, _ in expected]
    assert mlx_paged.pool_of(model).stats().accepted_tokens > 0
    assert_released(model)


# mlx-lm's caches ------------------------------------------------------------------------------------------------------


def test_adopted_stock_caches_convert_back_unchanged() -> None:
    model, tokens = model_configs.build("deepseek_v32"), tokens_of(30)
    stock = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=stock))
    expected = greedy(model, mx.array(tokens_of(6, 5), mx.uint32), 12, prompt_cache=copy.deepcopy(stock))
    mlx_paged.apply_patches(page_config())
    paged = mlx_paged.adopt_prompt_cache(model, stock)
    assert all(isinstance(cache, PagedKVCache) for cache in leaves(paged))
    for ours, theirs in zip(leaves(paged), leaves(stock), strict=True):
        given = ours.to_stock()
        assert given.offset == theirs.offset == 30
        for new, old in zip(given.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert new.shape == old.shape and mx.array_equal(new, old)
    got = greedy(model, mx.array(tokens_of(6, 5), mx.uint32), 12, prompt_cache=paged)
    assert got[0] == expected[0] and rms(got[1], expected[1]) == 0


def test_stock_cache_with_index_keys_of_another_size_is_refused() -> None:
    model = model_configs.build("deepseek_v32")
    stock = make_prompt_cache(model)
    for latents, index in ((each[0], each[1]) for each in stock):
        latents.update_and_fetch(mx.zeros((1, 1, 5, 32)), mx.zeros((1, 1, 5, 8)))
        index.update_and_fetch(mx.zeros((1, 1, 5, 12)), mx.zeros((1, 1, 5, 12)))
    mlx_paged.apply_patches(page_config())
    with pytest.raises(mlx_paged.PromptCacheError, match="1 KV heads of dimension 12, the model has 1 of 16"):
        mlx_paged.adopt_prompt_cache(model, stock)


def test_several_sequences_in_one_cache_run_as_in_stock() -> None:
    model, tokens = model_configs.build("deepseek_v32"), mx.array([tokens_of(40), tokens_of(40, 5)])

    def run() -> mx.array:
        cache = make_prompt_cache(model)
        first = model(tokens[:, :30], cache=cache)
        return mx.concatenate([first, model(tokens[:, 30:], cache=cache)], axis=1)

    expected = run()
    mlx_paged.apply_patches(page_config())
    assert mx.array_equal(run(), expected)


def test_saved_caches_have_the_format_of_stock(tmp_path: Path) -> None:
    model, file = model_configs.build("deepseek_v32"), str(tmp_path / "cache.safetensors")
    stock = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens_of(30)]), cache=stock))
    mlx_paged.apply_patches(page_config())
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens_of(30)]), cache=cache))
    upstream.save_prompt_cache(file, cache)
    for ours, theirs in zip(leaves(upstream.load_prompt_cache(file)), leaves(stock), strict=True):
        assert type(ours) is KVCache
        for new, old in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert mx.array_equal(new, old)


# Not supported --------------------------------------------------------------------------------------------------------


def test_index_keys_are_not_quantised_and_a_reason_is_given() -> None:
    model, prompt = model_configs.build("deepseek_v32"), mx.array(tokens_of(40), mx.uint32)
    expected = greedy(model, prompt, 8)
    mlx_paged.apply_patches(page_config(kv_bits=8, kv_group_size=32))
    assert greedy(model, prompt, 8)[0] == expected[0]
    groups = mlx_paged.pool_of(model).groups
    assert not any(group.is_quantized for group in groups)
    assert all("computes with the cached latents directly" in str(group.dense_reason) for group in groups)


@pytest.mark.parametrize("length", [3, 20])
def test_decode_steps_are_never_compiled(length: int) -> None:
    """Whether tokens are chosen depends on the context's length, which a trace does not know."""
    model, prompt = build_latent("deepseek_v32"), mx.array(tokens_of(length), mx.uint32)
    expected = greedy(model, prompt, 10)
    with traceable_kernels():
        mlx_paged.apply_patches(page_config())
        got = greedy(model, prompt, 10)
        step = compiled_steps.get(mlx_paged.pool_of(model))
        assert step.failure is None and not step._functions
    assert got[0] == expected[0]


def test_pack_of_index_keys_refuses_masks_and_wrong_shapes() -> None:
    model = model_configs.build("deepseek_v32")
    mlx_paged.apply_patches(page_config())
    cache = make_prompt_cache(model)[0]
    pack = Batch(cache[0].pool, [cache[0].sequence], [TOPK + 4])
    assert pack.reserve() is None
    x, pair = mx.zeros((TOPK + 4, 1, 64)), [PagedBatchKVCache(pack, n) for n in (0, 1)]
    with pytest.raises(NotPackableError, match="a mask of its own"):
        model.layers[0].self_attn(x, mx.ones((TOPK + 4, 1)), pair)
    with pytest.raises(mlx_paged.GeometryError):
        pair[1].update(mx.zeros((3, 1, 1, 8)), mx.zeros((3, 1, 1, 8)))


# Over blocks in place -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packs", quick([False, True], True))
def test_kernels_attend_up_to_index_topk_and_gather_attends_beyond(packs: bool) -> None:
    model, prompts = build_latent("deepseek_v32"), prompts_for(VOCAB, (2, TOPK - 4, 5))
    beyond = prompts_for(VOCAB, (40, 3, 25))
    expected = [expected_of(model, each, 4) for each in (prompts, beyond)]
    with fake_kernels():
        mlx_paged.apply_patches(page_config(kernel="on"))
        assert all(group.in_place for group in mlx_paged.pool_of(model).groups)
        for each, wanted in zip((prompts, beyond), expected, strict=True):
            gen = packing(model, 128) if packs else generator(model)
            outcomes = insert(gen, each, 4)
            reset_dispatch_counts()
            run_all(gen, outcomes)
            for outcome, (tokens, logprobs) in zip(outcomes.values(), wanted, strict=True):
                assert outcome.tokens == tokens
                assert rms(np.stack(outcome.logprobs), logprobs) < 5e-3
            assert (CHOSEN in dispatch_counts()) == (each is beyond)
            assert KERNEL in dispatch_counts() or each is beyond
        assert_released(model)
