"""The seam: attention without an adapter runs over blocks if it gets back the arrays that its cache fetched."""

import gc
import importlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache import lazy_kv
from mlx_paged.cache.composites import leaves
from mlx_paged.patches.models import seam
from scripts.support import model_configs
from tests.support.caches import batch_over
from tests.support.cases import slow
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.builders import KINDS, build, greedy, prompt_of, rms
from tests.support.without_collector import without_collector

ON = {"kernel": "on"}


def prompt(length: int, seed: int = 0) -> mx.array:
    return prompt_of(length, seed) % model_configs.VOCAB


def fresh(model: Any) -> list[Any]:
    """Make a prompt cache; the patches rebind the function in this module, too."""
    return make_prompt_cache(model)


def steps(cache: Any, seed: int, sizes: tuple[int, ...] = (9, 1, 1)) -> Iterator[tuple[Any, ...]]:
    """Yield queries, fetched keys, fetched values and mask of some steps through one cache."""
    rng = np.random.default_rng(seed)
    for n in sizes:
        q, k, v = (mx.array(rng.standard_normal((1, heads, n, 16)), mx.float32) for heads in (4, 2, 2))
        mask = cache.make_mask(n)
        yield q, *cache.update_and_fetch(k, v), mask


@pytest.fixture
def model() -> Any:
    return model_configs.build("qwen2")


@pytest.fixture
def single() -> Any:
    """A model of one layer, whose cache can be filled by itself: layers of a group take the same tokens."""
    with mock.patch.dict(model_configs.COMMON, num_hidden_layers=1):
        return model_configs.build("qwen2")


def attention(*args: Any, **kwargs: Any) -> mx.array:
    """Call mlx-lm's attention function, patched or not."""
    return base.scaled_dot_product_attention(*args, **kwargs)


@pytest.mark.usefixtures("no_fall_through")
def test_only_the_fetched_arrays_themselves_are_read_from_blocks(single: Any) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = fresh(single)[0]
    for q, k, v, mask in steps(cache, 0):
        before = sum(mlx_paged.dispatch_counts().values())
        got = attention(q, k, v, cache=cache, scale=0.25, mask=mask)
        assert sum(mlx_paged.dispatch_counts().values()) == before + 1
        same_values = attention(q, k + 0, v, cache=cache, scale=0.25, mask=mask)
        swapped = attention(q, v, k, cache=cache, scale=0.25, mask=mask)
        assert sum(mlx_paged.dispatch_counts().values()) == before + 1
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
        assert mx.array_equal(got, expected) and mx.array_equal(same_values, expected)
        assert not mx.allclose(swapped, expected)


def test_arrays_of_an_earlier_step_keep_their_values(single: Any) -> None:
    """After more tokens the blocks hold more than the arrays, so attention uses the arrays."""
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = fresh(single)[0]
    first, second, _ = steps(cache, 1)
    q, k, v, _ = second
    counted = mlx_paged.dispatch_counts()
    got = attention(q, k, v, cache=cache, scale=0.25, mask=None)
    assert mlx_paged.dispatch_counts() == counted and k.shape[2] == 10
    assert mx.array_equal(got, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=None))
    assert first[1].shape[2] == 9


def test_arrays_of_trimmed_tokens_keep_their_values(single: Any) -> None:
    """After a trim and another token the length is the same, the tokens are not."""
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    caches = fresh(single)
    run = steps(caches[0], 4)
    next(run)
    q, k, v, _ = next(run)
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=None)
    mx.eval(expected)
    upstream.trim_prompt_cache(caches, 1)
    next(run)
    assert k.shape[2] == caches[0].offset == 10
    assert mx.array_equal(attention(q, k, v, cache=caches[0], scale=0.25, mask=None), expected)


def test_kept_arrays_are_computed_before_the_next_write(single: Any) -> None:
    """In-place attention read the blocks and the gather left the chain of fences, but the arrays are still held."""
    with fake_kernels() as kernels:
        mlx_paged.apply_patches(PagedConfig(block_size=8, **ON))
        cache = fresh(single)[0]
        kept = []
        for q, k, v, mask in steps(cache, 5, sizes=(9, 1, 1, 1)):
            got = attention(q, k, v, cache=cache, scale=0.25, mask=mask)
            assert mx.allclose(got, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask), atol=1e-5)
            kept.append((k, v))
        assert kernels.rewound == 3
        keys, values = cache.keys_and_values()
        for k, v in kept:
            assert mx.array_equal(k, keys[:, :, : k.shape[2]]) and mx.array_equal(v, values[:, :, : v.shape[2]])


def test_queries_without_a_mask_see_all_keys(model: Any) -> None:
    """mlx-lm's function masks nothing without a mask; the paged one would be causal."""
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = fresh(model)[0]
    ((q, k, v, _),) = steps(cache, 2, sizes=(6,))
    got = attention(q, k, v, cache=cache, scale=0.25, mask=None)
    assert mx.array_equal(got, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=None))


def test_dropped_arrays_are_forgotten(single: Any) -> None:
    """A kept gather would hold the pool's buffer, and the next write would copy it."""
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gc.collect()
    others = set(lazy_kv._handed_out)  # that other tests still hold
    greedy(single, prompt(20), 10)
    assert not set(lazy_kv._handed_out) - others
    cache = fresh(single)[0]
    kept = [step[1:3] for step in steps(cache, 3)]
    assert len(set(lazy_kv._handed_out) - others) == len(kept)
    del kept
    assert not set(lazy_kv._handed_out) - others


@pytest.mark.parametrize("use_kernel", [False, True])
def test_fetched_arrays_keep_neither_blocks_nor_pool_alive(use_kernel: bool) -> None:
    with fake_kernels() as kernels, without_collector():
        model = model_configs.build("qwen2")
        mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on" if use_kernel else "off"))
        rows = [fresh(model) for _ in range(2)]
        taken = [
            step for row in rows for layers in zip(*[steps(cache, 3) for cache in row], strict=True) for step in layers
        ]
        kept = [array for step in taken for array in step[1:3]]
        batch = batch_over(rows)[0]
        kept += batch.update_and_fetch(*mx.ones((2, 2, 2, 1, 16)))
        mx.eval(kept)
        pool = mlx_paged.pool_of(model)
        assert pool.stats().live_blocks > 0
        assert (kernels.calls["gather_blocks"] > 0) == use_kernel
        kernels._chains.clear()
        del rows, batch
        assert pool.stats().live_blocks == 0
        gone = weakref.ref(pool)
        del model, pool
        assert gone() is None
        assert attention(mx.ones((1, 4, 1, 16)), *kept[:2], None, 1.0, None).shape == (1, 4, 1, 16)


# gpt_oss has sinks, too; the next test covers windows alone.
@pytest.mark.parametrize(
    "name",
    ["gpt_oss", *slow("gemma3n", "olmo3", "exaone4", "cohere2")],
)
def test_sliding_layers_hold_their_window_over_5000_tokens(name: str) -> None:
    """Blocks of a sliding layer stay within the window however long the sequence gets."""
    model = model_configs.build(name)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=1 << 28))
    cache = fresh(model)
    sliding = [c for c in cache if getattr(c, "window", None) is not None]
    rng = np.random.default_rng(0)
    step, total = 50, 0
    bound = -(-(model_configs.WINDOW + step) // 8) + 1
    assert sliding
    while total < 5000:
        n = step if total % 500 < 400 else 1
        for layer in cache:
            heads, k_dim, v_dim, dtype, _ = layer.group.geometry
            k, v = (mx.array(rng.standard_normal((1, heads, n, dim)), dtype) for dim in (k_dim, v_dim))
            layer.make_mask(n)
            layer.update_and_fetch(k, v)
            assert layer.window is None or layer.table.num_blocks(layer.group_index) <= bound
        mx.eval([layer.state for layer in cache])
        total += n
    pool = sliding[0].pool
    pool.check_integrity()
    groups = {layer.group_index for layer in sliding}
    assert all(pool.groups[group].allocator.num_blocks <= 4 * bound for group in groups)


@pytest.mark.parametrize("length", [400, pytest.param(4900, marks=pytest.mark.slow)])
def test_generation_holds_only_blocks_of_the_window(length: int) -> None:
    model = model_configs.build("olmo3")
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=1 << 28))
    cache, step = fresh(model), 64
    bound = -(-(model_configs.WINDOW + step) // 8) + 1
    sliding = [c for c in cache if c.window is not None]
    run = generate_step(prompt(length), model, max_tokens=60, prompt_cache=cache, prefill_step_size=step)
    for _ in run:
        assert all(c.table.num_blocks(c.group_index) <= bound for c in sliding)
    assert cache[0].offset >= length + 59


def test_patches_can_be_applied_twice_reconfigured_and_removed(model: Any) -> None:
    original = base.scaled_dot_product_attention
    expected = greedy(model, prompt(20), 10)
    for block_size in (8, 16):
        mlx_paged.apply_patches(PagedConfig(block_size=block_size))
        mlx_paged.apply_patches()
        assert base.scaled_dot_product_attention is not original
        assert sys.modules["mlx_lm.models.qwen2"].scaled_dot_product_attention is base.scaled_dot_product_attention
        got = greedy(model, prompt(20), 10)
        assert got[0] == expected[0] and rms(got[1], expected[1]) == 0.0
        assert mlx_paged.pool_of(model).block_size == block_size
    mlx_paged.apply_patches(PagedConfig(block_size=32))  # other options, while patched
    assert greedy(model, prompt(20), 10)[0] == expected[0]
    assert mlx_paged.pool_of(model).block_size == 32
    mlx_paged.remove_patches()
    assert base.scaled_dot_product_attention is original
    assert sys.modules["mlx_lm.models.qwen2"].scaled_dot_product_attention is original
    assert type(fresh(model)[0]) is upstream.KVCache
    assert mlx_paged.pool_of(model) is None


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_caches_made_under_the_patches_work_without_them(name: str) -> None:
    """After remove_patches() upstream's attention runs on them through update_and_fetch, with the same tokens."""
    model = build(name) if name in KINDS else model_configs.build(name)
    expected = greedy(model, prompt(60), 12)[0]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = fresh(model)
    mlx_paged.remove_patches()
    assert greedy(model, prompt(60), 12, prompt_cache=cache)[0] == expected


def test_module_imported_after_patching_is_patched_and_restored() -> None:
    name = "mlx_lm.models.starcoder2"
    sys.modules.pop(name, None)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    module = importlib.import_module(name)
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert module.scaled_dot_product_attention.__module__ == seam.__name__
    model = model_configs.build("starcoder2")
    tokens = greedy(model, prompt(20), 10)[0]
    assert mlx_paged.last_dispatch().path == "gather" and mlx_paged.pool_of(model) is not None
    mlx_paged.remove_patches()
    assert module.scaled_dot_product_attention.__module__ == base.__name__
    assert greedy(model, prompt(20), 10)[0] == tokens


def test_models_of_different_geometry_have_separate_pools() -> None:
    models = [model_configs.build("qwen2"), build("qwen3"), model_configs.build("nemotron-nas")]
    expected = [greedy(model, prompt(20), 10) for model in models]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    caches = [fresh(model) for model in models]
    for model, cache, (tokens, logprobs) in zip(models, caches, expected, strict=True):
        got = greedy(model, prompt(20), 10, prompt_cache=cache)
        assert got[0] == tokens and rms(got[1], logprobs) == 0.0
    assert len({id(mlx_paged.pool_of(model)) for model in models}) == 3
    names = [group.spec.name for group in mlx_paged.pool_of(models[2]).groups]
    assert names == ["global, 2 x 16/16", "global, 1 x 16/16"]  # split where layers differ in KV heads


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_several_rows_in_one_cache_run_as_in_stock(name: str) -> None:
    """With the seam and with an adapter; the caches become mlx-lm's."""
    model = build(name) if name in KINDS else model_configs.build(name)
    rows = mx.stack([prompt(50, seed=1), prompt(50, seed=2)])
    expected = [model(rows, cache=(cache := fresh(model))), model(rows[:, :1], cache=cache)]
    mlx_paged.apply_patches()
    with pytest.warns(mlx_paged.NotPagedWarning, match="several sequences") as warned:
        got = [model(rows, cache=(cache := fresh(model))), model(rows[:, :1], cache=cache)]
    assert len(warned) == 1 and cache[0].offset == 51
    assert all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", *slow("gpt_oss", "nemotron_h", "gemma3n", "falcon_h1")])
def test_prompt_cache_files_are_exchanged_with_stock(name: str, tmp_path: Any) -> None:
    """Saved under the patches, loaded by stock mlx-lm, and the other way round."""
    model = model_configs.build(name)
    file = str(tmp_path / "cache.safetensors")

    def first() -> None:
        cache = fresh(model)
        model(prompt(33)[None], cache=cache)
        upstream.save_prompt_cache(file, cache)

    def second() -> list[int]:
        cache = upstream.load_prompt_cache(file)
        if mlx_paged.patches.is_applied():
            cache = mlx_paged.patches.adopt_prompt_cache(model, cache)
            assert any(isinstance(c, mlx_paged.PagedKVCache) for c in leaves(cache))
        return greedy(model, prompt(4, seed=5), 20, prompt_cache=cache)[0]

    first()
    expected = second()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert second() == expected
    first()
    mlx_paged.remove_patches()
    assert second() == expected


@pytest.mark.parametrize("name", ["stablelm", "phi"])
def test_queries_in_f32_attend_over_16_bit_blocks(name: str, kernels: Any) -> None:
    """mlx-lm casts them, and StableLM's keys too, which no kernel supports over 16-bit blocks."""
    model = model_configs.build(name)
    model.set_dtype(mx.bfloat16)
    tokens, expected = greedy(model, prompt(21), 6, prefill_step_size=8)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    found, logprobs = greedy(model, prompt(21), 6, prefill_step_size=8)
    assert found == tokens and abs(logprobs - expected).max() < 0.1  # they differ by rounding
