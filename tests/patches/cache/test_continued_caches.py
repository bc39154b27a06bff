"""Prompt caches that are forked or trimmed, outlive the patches, or get several rows continue as in stock mlx-lm."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.composites import leaves
from tests.support.cases import crossed, quick
from tests.support.models import llama4
from tests.support.models.builders import KINDS, any_model, assert_same, greedy, prompt_of, small_prompt, tolerance_of

Runs = list[tuple[list[int], np.ndarray]]
MODELS = ("llama", "gemma3", "qwen2")  # adapters, the seam
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # their caches need the patches
LENGTH = 45


def model_of(name: str) -> Any:
    return llama4.build(64) if name == "llama4" else any_model(name)


def prompt(name: str, length: int, seed: int = 0) -> mx.array:
    tokens = prompt_of(length, seed) if name in KINDS else small_prompt(length, seed)
    return tokens % llama4.VOCAB if name == "llama4" else tokens  # MLX reads past the embeddings for a larger token


def filled(name: str, model: Any, length: int = LENGTH) -> list[Any]:
    cache = upstream.make_prompt_cache(model)
    mx.eval(model(prompt(name, length)[None], cache=cache))
    return cache


def follow(name: str, model: Any, cache: list[Any], seed: int = 5) -> tuple[list[int], np.ndarray]:
    return greedy(model, prompt(name, 9, seed), 12, prompt_cache=cache)


def forked(name: str, model: Any) -> Runs:
    cache = filled(name, model)
    pool = mlx_paged.pool_of(model)
    before = pool and pool.stats().live_blocks
    forks = [cache, copy.deepcopy(cache)]
    assert pool is None or pool.stats().live_blocks == before == pool.stats().shared_blocks
    runs = [follow(name, model, fork, seed) for seed, fork in enumerate(forks)]
    assert pool is None or pool.stats().cow_forks > 0
    return runs


def trimmed(name: str, model: Any) -> Runs:
    cache = filled(name, model, 35)  # within the windows
    assert upstream.can_trim_prompt_cache(cache) and upstream.trim_prompt_cache(cache, 21) == 21
    return [follow(name, model, cache)]


def without_the_patches(name: str, model: Any) -> Runs:
    cache = filled(name, model)
    mlx_paged.remove_patches()
    return [follow(name, model, cache, seed) for seed in (5, 7)]  # the second prompt reads what the first one wrote


def begun_without_the_patches(name: str, model: Any) -> Runs:
    cache = upstream.make_prompt_cache(model)
    mlx_paged.remove_patches()
    return [follow(name, model, cache)]


WAYS: tuple[Callable[[str, Any], Runs], ...] = (forked, trimmed, without_the_patches, begun_without_the_patches)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way"),
    quick(
        [*crossed(MODELS, WAYS), *crossed(INDEXED, WAYS[:2])],
        *(("gemma3", forked), ("llama", trimmed), ("qwen2", without_the_patches), ("gemma3", without_the_patches)),
        *(("deepseek_v32", way) for way in (forked, trimmed)),
        ("qwen2", begun_without_the_patches),
    ),
)
def test_prompt_caches_continue_as_in_stock(name: str, way: Callable[[str, Any], Runs]) -> None:
    model = model_of(name)
    expected = way(name, model)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for got, wanted in zip(way(name, model), expected, strict=True):
        assert_same(got, wanted, tolerance_of(name, LENGTH + 21))
    pool = mlx_paged.pool_of(model)
    if pool is not None:  # it is gone with the patches
        pool.check_integrity()
        assert pool.stats().live_blocks == 0


@pytest.mark.parametrize(
    ("name", "removed"),
    [("gemma3", False), ("llama4", False), *crossed(["qwen2", "deepseek_v32"], [False, True])],
)
def test_several_rows_in_one_cache_run_as_in_stock(name: str, removed: bool) -> None:
    """The caches become mlx-lm's, with one warning."""
    model = model_of(name)
    rows = mx.stack([prompt(name, 50, seed) for seed in (1, 2)])

    def run(cache: list[Any]) -> mx.array:
        return mx.concatenate([model(part, cache=cache) for part in (rows[:, :30], rows[:, 30:])], axis=1)

    expected = run(upstream.make_prompt_cache(model))
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = upstream.make_prompt_cache(model)
    if removed:
        mlx_paged.remove_patches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert mx.array_equal(run(cache), expected)
    told = [str(each.message) for each in caught if each.category is mlx_paged.NotPagedWarning]
    assert ["several sequences" in message for message in told] == [True]
    assert all(type(each).__module__ == "mlx_lm.models.cache" for each in leaves(cache))


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_prompt_caches_with_states_are_not_trimmed(kind: str) -> None:
    model = any_model(kind)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = filled(kind, model, 21)
    offsets = [part.offset for part in leaves(cache) if hasattr(part, "offset")]
    assert not upstream.can_trim_prompt_cache(cache) and upstream.trim_prompt_cache(cache, 3) == 0
    assert [part.offset for part in leaves(cache) if hasattr(part, "offset")] == offsets
