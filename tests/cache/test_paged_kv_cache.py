"""PagedKVCache against mlx-lm's KVCache and RotatingKVCache: the same numbers, the same order, the same masks."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import BlockStateError, GeometryError, TrimError
from mlx_paged.kv.geometry import AttentionParams
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.patches.cache.layer_cache import PagedLayerCache
from tests.support.caches import HEADS, KD, VD, assert_same, caches_of, dense_of, filled, kv
from tests.support.cases import crossed, quick
from tests.support.pools import bits, noise

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


# update_and_fetch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "seed", "dtype"),
    quick(
        crossed([None, 1, 2, 5, 8, 16], range(4), DTYPES),
        (None, 0, mx.float32),
        (1, 1, mx.float16),
        (2, 2, mx.bfloat16),
        (5, 3, mx.float32),
        (8, 0, mx.float16),
        (16, 1, mx.bfloat16),
    ),
    ids=str,
)
def test_update_and_fetch_equals_the_dense_cache_over_random_chunks(
    window: int | None, seed: int, dtype: mx.Dtype
) -> None:
    rng = np.random.default_rng(seed)
    (paged,), dense = caches_of(window=window), dense_of(window)
    for step in range(40):
        n = 1 if rng.random() < 0.7 else int(rng.integers(1, 24))
        k, v = kv(100 * seed + step, n, dtype)
        expected = dense.update_and_fetch(k, v)
        assert_same(paged.update_and_fetch(k, v), expected)
        assert_same(paged.keys_and_values(), dense.keys_and_values())
        assert (paged.offset, paged.size(), paged.empty()) == (dense.offset, dense.size(), dense.empty())
        assert paged.is_trimmable() == dense.is_trimmable()
    paged.pool.check_integrity()


@pytest.mark.parametrize("window", [None, 6])
def test_attend_equals_dense_attention(window: int | None) -> None:
    (paged,), dense = caches_of(window=window), dense_of(window)
    for step, n in enumerate((5, 1, 1, 1, 1, 9, 1, 1, 20, 1)):
        q, (k, v) = noise(500 + step, 1, 4, n, KD), kv(step, n)
        mask = create_attention_mask(q[0], dense, window_size=window)
        paged_mask = create_attention_mask(q[0], paged, window_size=window)
        keys, values = dense.update_and_fetch(k, v)
        expected = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.3, mask=mask)
        got = paged.attend(q, k, v, AttentionParams(0.3, paged_mask))
        assert np.array(expected).any()
        np.testing.assert_array_equal(bits(got), bits(expected))


# Masks ------------------------------------------------------------------------------------------------------------


def assert_same_mask(got: mx.array | str | None, expected: mx.array | str | None) -> None:
    if isinstance(expected, mx.array):
        assert isinstance(got, mx.array) and got.dtype == expected.dtype
        np.testing.assert_array_equal(np.array(got), np.array(expected))
    else:
        assert got == expected


MASKS = [  # window, tokens of the prompt, tokens decoded: blocks have 4 tokens
    *((None, 0, 0), (None, 1, 1), (None, 4, 0), (None, 9, 6), (None, 20, 2)),
    *((5, 0, 1), (5, 3, 0), (5, 4, 1), (5, 5, 2), (5, 7, 6), (5, 20, 0)),
    *((8, 0, 2), (8, 7, 1), (8, 8, 0), (8, 8, 1), (8, 9, 6)),
]


@pytest.mark.parametrize(
    ("window", "prefill", "decoded"),
    quick(crossed([None, 5, 8], [0, 1, 3, 4, 5, 7, 8, 9, 20], [0, 1, 2, 6]), *MASKS),
)
def test_make_mask_equals_the_dense_cache(window: int | None, prefill: int, decoded: int) -> None:
    chunks = ((prefill,) if prefill else ()) + (1,) * decoded
    paged, dense = filled(window, chunks)
    kinds = set()
    for n, size, array in itertools.product((1, 2, 3, 4, 7, 12), (None, 2, 5, 8, 30), (False, True)):
        expected = dense.make_mask(n, return_array=array, window_size=size)
        kinds.add(type(expected))
        assert_same_mask(paged.make_mask(n, return_array=array, window_size=size), expected)
    assert kinds == {mx.array, str, type(None)}


# The rest of the protocol -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6])
def test_an_empty_cache(window: int | None) -> None:
    (paged,) = caches_of(window=window)
    assert paged.empty() and paged.is_trimmable()
    assert (paged.offset, paged.size(), paged.nbytes, paged.trim(3)) == (0, 0, 0, 0)
    mx.eval(paged.state[0])
    assert paged.state[1] is paged
    assert paged.window == window


def test_nbytes_counts_the_blocks_held_in_this_layer() -> None:
    paged = caches_of(layers=3)
    for layer, cache in enumerate(paged):
        cache.update(*kv(layer, 9))
    for cache in paged:
        assert cache.nbytes == 3 * 4 * HEADS * (KD + VD) * 4
    assert paged[0].pool.stats().bytes_in_use == sum(cache.nbytes for cache in paged)


@pytest.mark.parametrize("n", [0, 1, 4, 7, 10, 11, 50])
def test_trim_and_go_on_equals_the_dense_cache(n: int) -> None:
    paged, dense = filled(None, (7, 1, 1, 1))
    assert paged.trim(n) == dense.trim(n) == min(n, 10)
    assert paged.offset == dense.offset
    for step in range(6):
        k, v = kv(50 + step, 1 + step % 3)
        assert_same(paged.update_and_fetch(k, v), dense.update_and_fetch(k, v))
    paged.pool.check_integrity()


def test_trim_of_a_window_that_is_not_full_equals_the_dense_cache() -> None:
    paged, dense = filled(8, (5, 1, 1))
    assert paged.trim(4) == dense.trim(4) == 4
    for step in range(20):
        k, v = kv(50 + step, 1)
        assert_same(paged.update_and_fetch(k, v), dense.update_and_fetch(k, v))


def test_mlx_lm_trims_a_list_of_paged_caches() -> None:
    caches = caches_of(layers=3)
    parts = [kv(layer, 9) for layer in range(3)]
    for cache, part in zip(caches, parts, strict=True):
        cache.update(*part)
    assert can_trim_prompt_cache(caches)
    assert trim_prompt_cache(caches, 5) == 5
    for cache, (k, v) in zip(caches, parts, strict=True):
        assert cache.offset == 4
        assert_same(cache.keys_and_values(), (k[:, :, :4], v[:, :, :4]))
    assert caches[0].pool.stats().live_blocks == 1
    assert not can_trim_prompt_cache([filled(4, (9,))[0]])


def test_a_table_is_trimmed_with_its_last_layer() -> None:
    caches = caches_of(layers=2)
    for layer, cache in enumerate(caches):
        cache.update(*kv(layer, 9))
    caches[0].trim(6)
    assert caches[0].table.length == 9 and (caches[0].offset, caches[1].offset) == (3, 9)
    with pytest.raises(BlockStateError, match="trimmed by the same number of tokens, got 8"):
        caches[1].trim(8)
    caches[1].trim(6)
    assert caches[0].table.length == caches[1].offset == 3


def test_trim_past_a_window_is_refused_and_changes_nothing() -> None:
    paged, dense = filled(6, (1,) * 14)
    kept = dense.keys_and_values()
    with pytest.raises(TrimError):
        paged.trim(3)
    assert paged.offset == 14
    assert_same(paged.keys_and_values(), kept)


def test_layers_of_a_group_must_take_the_same_tokens() -> None:
    first, second = caches_of(layers=2)
    first.update(*kv(0, 5))
    with pytest.raises(BlockStateError, match="all layers must write the same tokens"):
        second.update(*kv(1, 3))
    part = kv(1, 5)
    second.update(*part)
    assert_same(second.keys_and_values(), part)


@pytest.mark.parametrize(
    "bad",
    [
        lambda k, v: (k[0], v[0]),
        lambda k, v: (k[:, :1], v[:, :1]),
        lambda k, v: (k, v[:, :, :1]),
        lambda k, v: (k.astype(mx.int32), v.astype(mx.int32)),
        lambda k, v: (k, v.astype(mx.float16)),
        lambda k, v: (mx.concatenate([k, k]), mx.concatenate([v, v])),
    ],
    ids=["rank", "heads", "tokens", "integers", "dtypes", "batch"],
)
def test_a_refused_update_changes_nothing(bad: Callable[..., tuple[mx.array, mx.array]]) -> None:
    paged, dense = filled(None, (6,))
    before = paged.pool.stats()
    with pytest.raises(GeometryError):
        paged.update(*bad(*kv(9, 3)))
    assert (paged.offset, paged.table.length, paged.pool.stats()) == (6, 6, before)
    k, v = kv(10, 3)
    assert_same(paged.update_and_fetch(k, v), dense.update_and_fetch(k, v))


def test_later_keys_are_cast_to_the_dtype_of_the_first() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    cache = PagedLayerCache(SequenceTables(pool), 0)
    cache.update_and_fetch(*kv(0, 3, mx.bfloat16))
    keys, values = cache.update_and_fetch(*kv(1, 2))
    assert keys.dtype == values.dtype == mx.bfloat16
    assert mx.array_equal(keys[:, :, 3:], kv(1, 2)[0].astype(mx.bfloat16))


@pytest.mark.parametrize(("chunks", "n"), [((1,) * 10, 1), ((12,), 2), ((4, 1, 1, 1, 9), 6)])
def test_a_trimmed_window_turns_into_a_dense_cache_of_the_same_tokens(chunks: tuple[int, ...], n: int) -> None:
    pool = BlockPool([LayerGroup((0,), 5)], block_size=4)
    paged = PagedLayerCache(SequenceTables(pool), 0)
    tokens = mx.arange(1, 31, dtype=mx.float32).reshape(1, 1, 30, 1)
    end = 0
    for count in chunks:
        paged.update(tokens[:, :, end : end + count], tokens[:, :, end : end + count])
        end += count
    end -= paged.trim(n)
    keys, _ = paged.to_stock().update_and_fetch(tokens[:, :, end : end + 1], tokens[:, :, end : end + 1])
    assert sorted(keys.flatten().tolist()) == [float(p + 1) for p in range(end - 4, end + 1)]


# Blocks come back -------------------------------------------------------------------------------------------------


def test_collected_caches_release_their_blocks() -> None:
    pool = BlockPool([LayerGroup((0, 1))], block_size=4)
    caches = caches_of(layers=2, pool=pool)
    for layer, cache in enumerate(caches):
        cache.update(*kv(layer, 9))
    fork = copy.deepcopy(caches)
    for layer, cache in enumerate(fork):
        cache.update(*kv(10 + layer, 9))
    assert pool.stats().live_blocks == 3 + 3
    del caches, cache
    gc.collect()
    assert (pool.stats().live_blocks, pool.stats().shared_blocks) == (5, 0)
    del fork
    gc.collect()
    assert pool.stats().live_blocks == 0
    pool.check_integrity()


def test_one_remaining_layer_keeps_the_blocks_of_its_sequence() -> None:
    pool = BlockPool([LayerGroup((0, 1))], block_size=4)
    caches = caches_of(layers=2, pool=pool)
    parts = [kv(0, 9), kv(1, 9)]
    for cache, part in zip(caches, parts, strict=True):
        cache.update(*part)
    last = caches.pop()
    del caches, cache
    gc.collect()
    assert pool.stats().live_blocks == 3
    assert_same(last.keys_and_values(), parts[1])


def test_repr_names_layer_offset_and_table() -> None:
    paged, _ = filled(None, (6,))
    assert repr(paged) == "PagedKVCache(layer=0, offset=6, BlockTable(length=6, starts=[0], blocks=[2]))"
