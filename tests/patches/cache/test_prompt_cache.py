"""Saved prompt caches are mlx-lm's own format, both ways."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import KVCache, RotatingKVCache

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache, PoolExhaustedError, PromptCacheError
from tests.support.models.batch_runs import assert_released
from tests.support.models.builders import KINDS, WINDOW, assert_same, build, greedy, prompt_of
from tests.support.samples import each_value

# Below, at and past the window; after prefill only, and after decode steps that turned mlx-lm's ring.
HISTORIES = [(5, 0), (WINDOW - 1, 0), (WINDOW, 0), (WINDOW + 1, 3), (90, 0), (90, 1), (90, 17), (3, WINDOW + 9)]


def history(model, prompt_tokens: int, decoded: int):
    """A prompt cache after a prefill and some single-token steps, by the present binding."""
    cache = upstream.make_prompt_cache(model)
    tokens = prompt_of(prompt_tokens + decoded, seed=4)
    model(tokens[None, :prompt_tokens], cache=cache)
    for i in range(decoded):
        model(tokens[None, prompt_tokens + i : prompt_tokens + i + 1], cache=cache)
    mx.eval([c.state for c in cache])
    return cache


def goes_on(model, cache):
    return greedy(model, prompt_of(6, seed=5), 10, prompt_cache=cache)


# Always each history by a kind with windows and by one without: they are neighbours.
@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("kind", "tokens"), each_value(KINDS, HISTORIES, times=2), ids=str)
def test_round_trips_with_stock(kind: str, tokens: tuple[int, int], tmp_path: Path) -> None:
    model, (prompt_tokens, decoded) = build(kind), tokens
    file, paged_file = str(tmp_path / "stock.safetensors"), str(tmp_path / "paged.safetensors")
    upstream.save_prompt_cache(file, history(model, prompt_tokens, decoded), {"model": "m"})
    expected = goes_on(model, upstream.load_prompt_cache(file))

    mlx_paged.apply_patches(PagedConfig(block_size=8))
    # Stock file, adopted into the pool.
    loaded, metadata = upstream.load_prompt_cache(file, return_metadata=True)
    assert metadata == {"model": "m"}
    adopted = mlx_paged.adopt_prompt_cache(model, loaded)
    assert all(isinstance(c, PagedKVCache) for c in adopted)
    got = goes_on(model, adopted)
    assert_same(got, expected)
    # Stock file, used as the stock cache it is.
    got = goes_on(model, upstream.load_prompt_cache(file))
    assert got[0] == expected[0]
    # Paged file, saved again after being adopted, and made by paged generation.
    upstream.save_prompt_cache(paged_file, history(model, prompt_tokens, decoded), {"model": "m"})
    mlx_paged.pool_of(model).check_integrity()
    mlx_paged.remove_patches()
    got = goes_on(model, upstream.load_prompt_cache(paged_file))
    assert_same(got, expected)


def test_saved_file_names_only_stock_classes(tmp_path: Path) -> None:
    mlx_paged.apply_patches()
    model = build("gemma3")
    upstream.save_prompt_cache(str(tmp_path / "c.safetensors"), history(model, 70, 0))
    kinds = {type(c).__name__ for c in upstream.load_prompt_cache(str(tmp_path / "c.safetensors"))}
    assert kinds == {"KVCache", "RotatingKVCache"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_hidden_layers": 2}, "has 2 layers, the model 3"),
        ({"num_key_value_heads": 3}, "3 KV heads of 32, the model has 2 of 32"),
        ({"head_dim": 64}, "2 KV heads of 64, the model has 2 of 32"),
    ],
)
def test_prompt_cache_of_another_model_is_refused(other: dict[str, int], message: str, tmp_path: Path) -> None:
    file = str(tmp_path / "other.safetensors")
    upstream.save_prompt_cache(file, history(build("llama", **other), 20, 0))
    model = build("llama")
    mlx_paged.apply_patches()
    with pytest.raises(PromptCacheError, match=message):
        mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file))
    assert_released(model)
    assert len(greedy(model, prompt_of(5), 4)[0]) == 4


def test_window_of_another_model_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "other.safetensors")
    upstream.save_prompt_cache(file, history(build("gemma3", sliding_window=24), 20, 0))
    mlx_paged.apply_patches()
    with pytest.raises(PromptCacheError, match="another window"):
        mlx_paged.adopt_prompt_cache(build("gemma3"), upstream.load_prompt_cache(file))


def test_prompt_cache_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "c.safetensors")
    model = build("llama")
    upstream.save_prompt_cache(file, history(model, 200, 0))
    mlx_paged.apply_patches(PagedConfig(kv_cache_memory=100_000))
    with pytest.raises(PoolExhaustedError):
        mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file))
    assert mlx_paged.pool_of(model).stats().live_blocks == 0


def test_trim_and_reuse_of_a_prompt_cache_equals_stock() -> None:
    """What mlx-lm's server does with a cache that is longer than the shared prefix."""
    model = build("qwen3")

    def run():
        cache = history(model, 50, 0)
        assert upstream.can_trim_prompt_cache(cache)
        assert upstream.trim_prompt_cache(cache, 23) == 23
        return goes_on(model, cache)

    expected = run()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    got = run()
    assert_same(got, expected)


@pytest.mark.parametrize("max_kv_size", [None, 24])
def test_scripts_that_ask_for_mlx_lms_classes_get_yes(max_kv_size: int | None) -> None:
    """With the attributes that go with them; ``type`` is the paged one, and nothing of the others is inherited."""
    model = build("llama-sliding") if max_kv_size is None else build("llama")
    stock = upstream.make_prompt_cache(model, max_kv_size)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    paged = upstream.make_prompt_cache(model, max_kv_size)
    for old, new in zip(stock, paged, strict=True):
        assert type(new) is not type(old) and isinstance(new, PagedKVCache)
        for kind in (KVCache, RotatingKVCache):
            assert isinstance(new, kind) == isinstance(old, kind)
        for name in ("max_size", "keep"):
            assert getattr(new, name, None) == getattr(old, name, None)
        assert isinstance(copy.deepcopy(new), PagedKVCache)


def test_a_paged_cache_that_turned_into_mlx_lms_is_one() -> None:
    model = build("llama")
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = upstream.make_prompt_cache(model)
    with pytest.warns(mlx_paged.NotPagedWarning):
        model(mx.zeros((3, 4), mx.uint32), cache=cache)
    assert all(type(layer) is KVCache and layer.keys is not None for layer in cache)
