"""Attention to the tokens that an indexer chooses, over pages of latents and index keys, against stock's runs."""

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache, dispatch_counts, last_dispatch, reset_dispatch_counts
from mlx_paged.cache.batch import Batch, NotPackableError
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.composites import leaves
from mlx_paged.engine.compiled_step import compiled_steps
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.models.latent import CHOSEN
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.shelf import Shelf
from scripts.support import model_configs
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.batch_runs import assert_released, generator, run_all
from tests.support.models.builders import build_latent, greedy, rms, small_prompt
from tests.support.models.packs import assert_alike, expected_of, insert, packing, prompts_for

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["deepseek_v32", "glm_moe_dsa"]
TOPK = model_configs.COMMON["index_topk"]
LENGTHS = (70, 2, 33, 1, 17, 12, 40, 16, 51)
VOCAB = model_configs.VOCAB
KERNEL = ("kernel", "one new token per sequence")


def tokens_of(length: int, seed: int = 3) -> list[int]:
    return small_prompt(length, seed).tolist()


@functools.cache
def solo(length: int) -> tuple[list[int], np.ndarray]:
    """Return stock mlx-lm's 20 tokens of DeepSeek V3.2 after the prompt of this length of :func:`prompts_for`."""
    assert not mlx_paged.is_applied()
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


# mlx-lm's caches ------------------------------------------------------------------------------------------------------


def test_stock_cache_with_index_keys_of_another_size_is_refused() -> None:
    model = model_configs.build("deepseek_v32")
    stock = make_prompt_cache(model)
    for latents, index in ((each[0], each[1]) for each in stock):
        latents.update_and_fetch(mx.zeros((1, 1, 5, 32)), mx.zeros((1, 1, 5, 8)))
        index.update_and_fetch(mx.zeros((1, 1, 5, 12)), mx.zeros((1, 1, 5, 12)))
    mlx_paged.apply_patches(page_config())
    with pytest.raises(mlx_paged.PromptCacheError, match="1 KV heads of dimension 12, the model has 1 of 16"):
        mlx_paged.adopt_prompt_cache(model, stock)


# Not supported --------------------------------------------------------------------------------------------------------


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
    pack.reserve()
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
