"""Rotated pages under mlx-lm: results near to those of dense ones, batches, prompt-cache files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import mlx_paged
from mlx_paged import ConfigError, PagedConfig, PagedKVCache, PromptCacheError
from mlx_paged.kv.storage.base import PageFormat
from tests.patches.cache.test_fall_through import fall_throughs
from tests.support.models.builders import KINDS, build, greedy, prompt_of, rms
from tests.support.models.tokenizers import plain_tokenizer
from tests.support.samples import each_value


def wide(kind: str, **changes):
    return build(kind, hidden_size=128, head_dim=64, num_attention_heads=4, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_near_to_those_of_dense_pages(kind: str) -> None:
    model = wide(kind)
    mlx_paged.apply_patches()
    expected = greedy(model, prompt_of(45), 1)[1]
    mlx_paged.apply_patches(PagedConfig(kv_bits=8))
    plain = greedy(model, prompt_of(45), 1)[1]
    mlx_paged.apply_patches(PagedConfig(kv_bits=8, kv_rotate=True))
    got, messages = fall_throughs(lambda: greedy(model, prompt_of(45), 1)[1])
    assert not messages and rms(got, plain) > 0
    assert 0 < rms(got, expected) < 2 * rms(plain, expected) < 0.2  # noise has no outliers
    assert mlx_paged.pool_of(model).page_format == PageFormat(8, 8, 64, True)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("count", "kind"), each_value((5, 1, 17), KINDS[::-1]))
def test_ragged_batches_equal_their_solo_runs(kind: str, count: int) -> None:
    model = build(kind)
    prompts = [prompt_of(1 + (17 * n) % 71, seed=n).tolist() for n in range(count)]
    bits = 8 if count == 5 else 4
    mlx_paged.apply_patches(PagedConfig(kv_bits=bits, kv_group_size=32, block_size=8, kv_rotate=True))
    solo = [" ".join(f"w{t}" for t in greedy(model, mx.array(prompt), 6)[0]) for prompt in prompts]
    got, messages = fall_throughs(lambda: batch_generate(model, plain_tokenizer(), prompts, max_tokens=6).texts)
    assert [text.split() for text in got] == [text.split() for text in solo]
    pool = mlx_paged.pool_of(model)
    assert not messages and all(group.is_quantized and group.geometry.format.rotate for group in pool.groups)
    pool.check_integrity()
    assert pool.stats().live_blocks == 0


def test_a_calls_kv_bits_go_with_rotated_pages() -> None:
    """A call says nothing of rotation: the configuration does."""
    model = wide("llama")
    mlx_paged.apply_patches(PagedConfig(kv_bits=4, kv_rotate=True))
    cache = upstream.make_prompt_cache(model)
    model(prompt_of(20)[None], cache=cache)
    next(generate_step(prompt_of(3), model, prompt_cache=cache, kv_bits=4))
    assert all(isinstance(c, PagedKVCache) and c.pool.page_format.rotate for c in cache)
    with pytest.raises(PromptCacheError, match="4 bits in groups of 64, rotated"):
        next(generate_step(prompt_of(3), model, prompt_cache=cache, kv_bits=8))
    greedy(model, prompt_of(5), 3, kv_bits=8)
    assert mlx_paged.pool_of(model).page_format == PageFormat(8, 8, 64, True)


# Files ----------------------------------------------------------------------------------------------------------------


def test_rotated_pages_are_saved_dequantised_and_say_so(tmp_path: Path) -> None:
    model = wide("llama")
    mlx_paged.apply_patches(PagedConfig(kv_bits=8, kv_rotate=True))
    cache = upstream.make_prompt_cache(model)
    model(prompt_of(60)[None], cache=cache)
    file = str(tmp_path / "cache.safetensors")
    _, messages = fall_throughs(lambda: upstream.save_prompt_cache(file, cache))
    assert len(messages) == 1 and "rotated" in messages[0] and "saved dequantised" in messages[0]
    loaded = upstream.load_prompt_cache(file)
    for mine, theirs in zip(cache, loaded, strict=True):
        assert type(theirs) is KVCache and theirs.offset == 60
        for read, saved in zip(mine.keys_and_values(), theirs.state[:2], strict=True):
            assert mx.array_equal(read, saved)
    again = mlx_paged.adopt_prompt_cache(model, loaded)
    assert [c.offset for c in again] == [60] * len(cache)


def test_mlx_lms_quantised_files_do_not_come_into_rotated_pages() -> None:
    model = wide("llama")
    stock = [QuantizedKVCache(64, 4) for _ in model.layers]
    model(prompt_of(30)[None], cache=stock)
    mlx_paged.apply_patches(PagedConfig(kv_bits=4, kv_rotate=True))
    with pytest.raises(PromptCacheError, match=r"4 bits in groups of 64.*4 bits in groups of 64, rotated"):
        mlx_paged.adopt_prompt_cache(model, stock)
    assert mlx_paged.pool_of(model).stats().live_blocks == 0
    dense = [KVCache() for _ in model.layers]
    model(prompt_of(30)[None], cache=dense)
    paged = mlx_paged.adopt_prompt_cache(model, dense)
    assert paged[0].pool.stats().quantized_tokens == 30


# What is refused ------------------------------------------------------------------------------------------------------


def test_rotation_without_bits_is_refused_and_nothing_is_patched() -> None:
    model = wide("llama")
    with pytest.raises(ConfigError, match="kv_rotate is for quantised pages"):
        mlx_paged.apply_patches(PagedConfig(kv_rotate=True))
    assert not mlx_paged.is_applied()
    mlx_paged.apply_patches(PagedConfig(kv_bits=8))
    with pytest.raises(ConfigError, match="kv_rotate"):
        mlx_paged.apply_patches(PagedConfig(kv_rotate=True))
    greedy(model, prompt_of(5), 2)
    assert mlx_paged.pool_of(model).page_format == PageFormat(8, 8, 64)  # as before
