"""Quantised pages, rotated or not: equality with mlx-lm's quantised cache, batches, files, refused options."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generate_step, speculative_generate_step
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import mlx_paged
from mlx_paged import ConfigError, PagedConfig, PagedKVCache, PromptCacheError
from mlx_paged.config import QUANTIZED_KV_START
from mlx_paged.kv.geometry import PageFormat
from tests.support.cases import crossed, quick, slow
from tests.support.models.batch_runs import assert_released, fall_throughs
from tests.support.models.builders import KINDS, assert_same, build, greedy, perturbed, prompt_of, rms
from tests.support.models.tokenizers import plain_tokenizer

STEP = 16


def wide(kind: str, **changes):
    return build(kind, hidden_size=128, head_dim=64, num_attention_heads=4, **changes)


@pytest.mark.parametrize(
    ("group_size", "bits", "kind"), quick(crossed([32, 64], [8, 4], ["llama", "qwen3"]), (32, 8, "llama"),
    (64, 4, "qwen3"))
)  # fmt: skip
def test_logits_equal_those_of_mlx_lms_quantized_cache(kind: str, bits: int, group_size: int) -> None:
    """mlx-lm's cache is quantised from the first chunk on, as pages are."""
    model = wide(kind)
    caches = [QuantizedKVCache(group_size, bits) for _ in model.layers]
    expected = greedy(model, prompt_of(45), 30, prompt_cache=caches, prefill_step_size=STEP)
    mlx_paged.apply_patches(PagedConfig(kv_bits=bits, kv_group_size=group_size, block_size=8))
    (tokens, logprobs), messages = fall_throughs(lambda: greedy(model, prompt_of(45), 30, prefill_step_size=STEP))
    assert tokens == expected[0] and not messages
    assert rms(logprobs, expected[1]) < 1e-6
    pool = mlx_paged.pool_of(model)
    assert pool.page_format == PageFormat(bits, bits, group_size)
    assert pool.stats().quantized_tokens == 45 + 30  # mlx-lm computes one token ahead
    # No chunk attends to its unquantised keys.
    assert {choice.path for choice in mlx_paged.dispatch_counts()} == {"gather"}


@pytest.mark.parametrize("bits", [8, (8, 4)])
@pytest.mark.parametrize("start", [*slow(None), 0, DEFAULT_QUANTIZED_KV_START])
def test_kv_bits_of_a_call_make_pages_as_those_of_the_configuration(start: int | None, bits: Any) -> None:
    model = wide("llama")
    mlx_paged.apply_patches(PagedConfig(kv_bits=bits))
    configured = greedy(model, prompt_of(45), 20)
    pages = mlx_paged.pool_of(model).page_format
    mlx_paged.apply_patches(PagedConfig())
    options = {"kv_bits": bits, **({} if start is None else {"quantized_kv_start": start})}
    called, messages = fall_throughs(lambda: greedy(model, prompt_of(45), 20, **options))
    assert called[0] == configured[0] and rms(called[1], configured[1]) == 0 and not messages
    assert mlx_paged.pool_of(model).page_format == pages == PageFormat(8, 8 if bits == 8 else 4, 64)
    assert QUANTIZED_KV_START == DEFAULT_QUANTIZED_KV_START
    plain = greedy(model, prompt_of(45), 20)
    assert mlx_paged.pool_of(model).page_format is None  # kv_bits held for that call only
    assert rms(plain[1][:5], configured[1][:5]) > 0


@pytest.mark.parametrize("options", [{"kv_bits": 8, "quantized_kv_start": 10}, {"kv_bits": 3}, {"kv_bits": 6}])
def test_unsupported_kv_bits_run_in_mlx_lms_cache_with_a_warning(options) -> None:
    model = wide("llama")
    options = {"quantized_kv_start": 0, **options}
    expected = greedy(model, prompt_of(20), 10, **options)
    mlx_paged.apply_patches(PagedConfig(kv_bits=8))  # the call's options take precedence
    got, messages = fall_throughs(lambda: greedy(model, prompt_of(20), 10, **options))
    assert_same(got, expected)
    assert len(messages) == 1 and "quantises from the first token on" in messages[0]


def test_target_and_draft_model_are_both_quantised() -> None:
    changes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4}
    model, draft = build("llama", **changes), perturbed("llama", 0.1, **changes)
    mlx_paged.apply_patches()
    expected = greedy(model, prompt_of(40), 30, kv_bits=8)[0]
    step = speculative_generate_step(prompt_of(40), model, draft, max_tokens=30, kv_bits=8, num_draft_tokens=3)
    got, messages = fall_throughs(lambda: [token for token, *_ in step])
    assert got == expected and not messages
    assert [mlx_paged.pool_of(each).page_format for each in (model, draft)] == [PageFormat(8, 8, 64)] * 2


RAGGED = [
    (kind, count, 8 if (count == 5) == rotate else 4, rotate)
    for rotate in (False, True) for count in (1, 5, 17) for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "count", "bits", "rotate"), quick(RAGGED, ("qwen3", 5, 4, False), ("gemma3", 5, 8, True))
)
def test_ragged_batches_equal_their_solo_runs(kind: str, count: int, bits: int, rotate: bool) -> None:
    model = build(kind)
    prompts = [prompt_of(1 + (17 * n) % 71, seed=n).tolist() for n in range(count)]
    mlx_paged.apply_patches(PagedConfig(kv_bits=bits, kv_group_size=32, block_size=8, kv_rotate=rotate))
    solo = [" ".join(f"w{t}" for t in greedy(model, mx.array(prompt), 6)[0]) for prompt in prompts]
    got, messages = fall_throughs(lambda: batch_generate(model, plain_tokenizer(), prompts, max_tokens=6).texts)
    assert [text.split() for text in got] == [text.split() for text in solo]
    groups = mlx_paged.pool_of(model).groups
    assert not messages and all(group.is_quantized and group.geometry.format.rotate == rotate for group in groups)
    assert_released(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_prompt_cache_is_quantised_once_in_place(kind: str) -> None:
    model = wide(kind)
    mlx_paged.apply_patches()
    cache = upstream.make_prompt_cache(model)
    given = list(cache)
    model(prompt_of(50)[None], cache=cache)
    dense = [c.keys_and_values() for c in given]
    steps = generate_step(mx.array([5]), model, max_tokens=1, kv_bits=8, prompt_cache=cache)
    next(steps)
    steps.close()
    pool = mlx_paged.pool_of(model)
    assert pool.page_format == PageFormat(8, 8, 64) and all(c.pool is pool for c in cache)
    assert all(isinstance(c, PagedKVCache) and c.offset == 52 for c in cache)
    for c, (k, v) in zip(cache, dense, strict=True):
        if c.window is None:
            held = c.to_stock()
            for got, x in zip((held.keys, held.values), (k, v), strict=True):
                want = mx.quantize(x, 64, 8)
                assert all(mx.array_equal(a[:, :, :50], b) for a, b in zip(got, want, strict=True))


def test_prompt_cache_with_other_bits_or_group_size_is_refused() -> None:
    model = wide("llama")
    mlx_paged.apply_patches(PagedConfig(kv_bits=8))
    cache = upstream.make_prompt_cache(model)
    model(prompt_of(20)[None], cache=cache)
    for options in ({"kv_bits": 4}, {"kv_bits": 8, "kv_group_size": 32}, {"kv_bits": 8, "quantized_kv_start": 99}):
        with pytest.raises(PromptCacheError, match="8 bits in groups of 64"):
            next(generate_step(prompt_of(3), model, prompt_cache=cache, **options))
    with pytest.raises(PromptCacheError, match="8 bits in groups of 64"):
        cache[0].to_quantized(64, 4)
    assert cache[0].to_quantized(64, 8) is cache[0]
    next(generate_step(prompt_of(3), model, prompt_cache=cache, kv_bits=8))  # still usable


def test_kv_bits_pair_is_refused_for_mlx_lms_own_caches() -> None:
    model = wide("llama")
    mlx_paged.apply_patches()
    with pytest.raises(ConfigError, match="mlx-lm's own"):
        next(generate_step(prompt_of(3), model, prompt_cache=[KVCache() for _ in model.layers], kv_bits=(8, 4)))


# Files ----------------------------------------------------------------------------------------------------------------


def test_files_of_quantized_caches_round_trip_bit_for_bit(tmp_path) -> None:
    model = wide("llama")
    stock = [QuantizedKVCache(32, 4) for _ in model.layers]
    model(prompt_of(300)[None], cache=stock)
    upstream.save_prompt_cache(str(tmp_path / "stock.safetensors"), stock, {"x": "y"})
    expected = greedy(model, prompt_of(4), 20, prompt_cache=stock)
    mlx_paged.apply_patches()
    loaded, metadata = upstream.load_prompt_cache(str(tmp_path / "stock.safetensors"), return_metadata=True)
    assert metadata == {"x": "y"}
    paged = mlx_paged.adopt_prompt_cache(model, loaded)
    pool = paged[0].pool
    assert pool.page_format == PageFormat(4, 4, 32)  # as in the file
    assert all(isinstance(c, PagedKVCache) and c.offset == 300 for c in paged)
    assert pool.stats().quantized_tokens == 0
    upstream.save_prompt_cache(str(tmp_path / "back.safetensors"), paged)
    mlx_paged.remove_patches()
    back = upstream.load_prompt_cache(str(tmp_path / "back.safetensors"))
    for mine, theirs in zip(back, loaded, strict=True):
        assert type(mine) is QuantizedKVCache and (mine.bits, mine.group_size, mine.offset) == (4, 32, 300)
        for got, want in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
            assert got.dtype == want.dtype and mx.array_equal(got, want[:, :, :300])
    mlx_paged.apply_patches()
    got = greedy(model, prompt_of(4), 20, prompt_cache=paged)
    assert got[0] == expected[0] and rms(got[1], expected[1]) < 1e-6


@pytest.mark.parametrize(
    ("config", "pages"),
    [
        (PagedConfig(kv_bits=8), "8 bits in groups of 64"),
        (PagedConfig(kv_bits=4, kv_rotate=True), "4 bits in groups of 64, rotated"),
    ],
)
def test_file_with_other_pages_than_configured_is_refused(config: PagedConfig, pages: str) -> None:
    model = wide("llama")
    stock = [QuantizedKVCache(64, 4) for _ in model.layers]
    model(prompt_of(30)[None], cache=stock)
    mlx_paged.apply_patches(config)
    with pytest.raises(PromptCacheError, match=f"4 bits in groups of 64.*{pages}"):
        mlx_paged.adopt_prompt_cache(model, stock)
    assert mlx_paged.pool_of(model).stats().live_blocks == 0
    dense = [KVCache() for _ in model.layers]
    model(prompt_of(30)[None], cache=dense)
    paged = mlx_paged.adopt_prompt_cache(model, dense)  # quantised on adoption
    assert paged[0].pool.stats().quantized_layers == len(paged)


@pytest.mark.parametrize(("kind", "rotate"), [("gemma3", False), ("llama", True)])
def test_pages_that_mlx_lm_does_not_have_are_saved_dequantised(kind: str, rotate: bool, tmp_path: Path) -> None:
    model = wide(kind)
    mlx_paged.apply_patches(PagedConfig(kv_bits=8, kv_rotate=rotate))
    cache = upstream.make_prompt_cache(model)
    model(prompt_of(60)[None], cache=cache)
    file = str(tmp_path / "cache.safetensors")
    _, messages = fall_throughs(lambda: upstream.save_prompt_cache(file, cache))
    assert len(messages) == 1 and "rotated" in messages[0] and "saved dequantised" in messages[0]
    loaded = upstream.load_prompt_cache(file)
    for mine, theirs in zip(cache, loaded, strict=True):
        has_form = mine.window is None and not rotate
        assert type(theirs) is (QuantizedKVCache if has_form else KVCache if rotate else RotatingKVCache)
        if not has_form:
            held = mx.sort(mine.keys_and_values()[0], axis=2)
            assert theirs.offset == 60 and np.isin(np.array(held), np.array(theirs.keys)).all()
    again = mlx_paged.adopt_prompt_cache(model, loaded)
    assert [c.offset for c in again] == [60] * len(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_log_probabilities_are_close_to_those_of_dense_pages(kind: str) -> None:
    model = wide(kind)
    mlx_paged.apply_patches()
    expected = greedy(model, prompt_of(45), 1)[1]
    mlx_paged.apply_patches(PagedConfig(kv_bits=8))
    plain = greedy(model, prompt_of(45), 1)[1]
    mlx_paged.apply_patches(PagedConfig(kv_bits=8, kv_rotate=True))
    got, messages = fall_throughs(lambda: greedy(model, prompt_of(45), 1)[1])
    assert not messages and rms(got, plain) > 0
    # Random keys have no outliers for rotation to spread.
    assert 0 < rms(got, expected) < 2 * rms(plain, expected) < 0.2
    assert mlx_paged.pool_of(model).page_format == PageFormat(8, 8, 64, True)


def test_kv_bits_of_a_call_keep_the_configured_rotation() -> None:
    """A call cannot choose rotation; only the configuration can."""
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


# What is refused ------------------------------------------------------------------------------------------------------


def test_kv_rotate_without_kv_bits_is_refused_and_nothing_is_patched() -> None:
    model = wide("llama")
    with pytest.raises(ConfigError, match="kv_rotate requires kv_bits"):
        mlx_paged.apply_patches(PagedConfig(kv_rotate=True))
    assert not mlx_paged.is_applied()
    mlx_paged.apply_patches(PagedConfig(kv_bits=8))
    with pytest.raises(ConfigError, match="kv_rotate"):
        mlx_paged.apply_patches(PagedConfig(kv_rotate=True))
    greedy(model, prompt_of(5), 2)
    assert mlx_paged.pool_of(model).page_format == PageFormat(8, 8, 64)  # as before
