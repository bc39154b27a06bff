"""PagedKVCache against mlx-lm's KVCache and RotatingKVCache: the same numbers, the same order, the same masks."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, can_trim_prompt_cache, trim_prompt_cache

from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import BlockStateError, GeometryError, PoolExhaustedError, PromptCacheError, TrimError
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.storage.scoring import Scoring
from mlx_paged.patches.cache.layer_cache import PagedLayerCache

HEADS, KD, VD = 2, 8, 4
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def bits(x: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(x).view({2: mx.uint16, 4: mx.uint32}[x.dtype.size]))


def noise(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def kv(seed: int, n: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return noise(2 * seed, 1, HEADS, n, KD, dtype=dtype), noise(2 * seed + 1, 1, HEADS, n, VD, dtype=dtype)


def caches_of(
    *, layers: int = 1, window: int | None = None, block_size: int = 4, pool: BlockPool | None = None, **options: Any
) -> list[PagedKVCache]:
    pool = pool or BlockPool([LayerGroup(tuple(range(layers)), window)], block_size=block_size, **options)
    sequence = SequenceTables(pool)
    return [PagedKVCache(sequence, layer) for layer in range(layers)]


def dense_of(window: int | None) -> KVCache | RotatingKVCache:
    return KVCache() if window is None else RotatingKVCache(max_size=window)


def assert_same(got: tuple[mx.array, mx.array], expected: tuple[mx.array, mx.array]) -> None:
    for x, y in zip(got, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(bits(x), bits(y))


def filled(window: int | None = None, chunks: tuple[int, ...] = (6,), **options: Any) -> tuple[PagedKVCache, Any]:
    """A paged and a dense cache with the same tokens."""
    (paged,), dense = caches_of(window=window, **options), dense_of(window)
    for seed, n in enumerate(chunks):
        paged.update(*kv(seed, n))
        dense.update_and_fetch(*kv(seed, n))
    return paged, dense


# update_and_fetch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 16])
@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize("chunks", [(1,) * 30, (16,) + (1,) * 20, (15,) + (1,) * 20, (40, 1, 1, 40, 1, 1)])
def test_update_and_fetch_around_the_edge_of_the_window(chunks: tuple[int, ...]) -> None:
    (paged,), dense = caches_of(window=16), dense_of(16)
    for seed, n in enumerate(chunks):
        k, v = kv(seed, n)
        assert_same(paged.update_and_fetch(k, v), dense.update_and_fetch(k, v))


def test_layers_of_two_groups_go_their_own_way() -> None:
    pool = BlockPool([LayerGroup((0, 2)), LayerGroup((1, 3), 6, "window")], block_size=4)
    paged = caches_of(layers=4, pool=pool)
    dense = [dense_of(None if layer % 2 == 0 else 6) for layer in range(4)]
    for step, n in enumerate((9, 1, 1, 1, 7, 1, 1, 1, 1, 1)):
        for layer in range(4):
            k, v = kv(10 * step + layer, n)
            assert_same(paged[layer].update_and_fetch(k, v), dense[layer].update_and_fetch(k, v))
    assert [cache.offset for cache in paged] == [24] * 4
    assert pool.stats().live_blocks == 6 + 2
    pool.check_integrity()


@pytest.mark.parametrize("window", [None, 6])
def test_attend_equals_dense_attention(window: int | None) -> None:
    (paged,), dense = caches_of(window=window), dense_of(window)
    for step, n in enumerate((5, 1, 1, 1, 1, 9, 1, 1, 20, 1)):
        q, (k, v) = noise(500 + step, 1, 4, n, KD), kv(step, n)
        mask = create_attention_mask(q[0], dense, window_size=window)
        paged_mask = create_attention_mask(q[0], paged, window_size=window)
        keys, values = dense.update_and_fetch(k, v)
        expected = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.3, mask=mask)
        got = paged.attend(q, k, v, Scoring(0.3, paged_mask))
        assert np.array(expected).any()
        np.testing.assert_array_equal(bits(got), bits(expected))


# Masks ------------------------------------------------------------------------------------------------------------


def assert_same_mask(got: mx.array | str | None, expected: mx.array | str | None) -> None:
    if isinstance(expected, mx.array):
        assert isinstance(got, mx.array) and got.dtype == expected.dtype
        np.testing.assert_array_equal(np.array(got), np.array(expected))
    else:
        assert got == expected


@pytest.mark.parametrize("prefill", [0, 1, 3, 4, 5, 7, 8, 9, 20])
@pytest.mark.parametrize("decoded", [0, 1, 2, 6])
@pytest.mark.parametrize("window", [None, 5, 8])
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


def test_size_and_trimmability_of_a_window() -> None:
    (paged,) = caches_of(window=6)
    for step in range(12):
        assert (paged.offset, paged.size(), paged.is_trimmable()) == (step, min(step, 6), step < 6)
        paged.update(*kv(step, 1))


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
    caches[0].trim(8)
    assert caches[0].table.length == 9 and (caches[0].offset, caches[1].offset) == (1, 9)
    caches[1].trim(6)
    assert caches[0].table.length == 3


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
    with pytest.raises(BlockStateError, match="all layers of a group must take the same tokens"):
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


def test_a_refused_first_update_leaves_the_pool_open() -> None:
    (paged,) = caches_of()
    k, v = (noise(seed, 2, HEADS, 3, 16, dtype=mx.float16) for seed in (1, 2))
    with pytest.raises(GeometryError):
        paged.update(k, v)  # two sequences
    part = kv(1, 3)
    paged.update(*part)
    assert_same(paged.keys_and_values(), part)


def test_an_update_that_does_not_fit_changes_nothing() -> None:
    per_block = 4 * HEADS * (KD + VD) * 4
    first, second = caches_of(layers=2, memory_budget=2 * 4 * per_block)
    parts = [kv(0, 9), kv(1, 9)]
    first.update(*parts[0])
    second.update(*parts[1])
    with pytest.raises(PoolExhaustedError):
        first.update(*kv(2, 5))
    assert (first.offset, second.offset, first.table.length) == (9, 9, 9)
    for cache, part in zip((first, second), parts, strict=True):
        assert_same(cache.keys_and_values(), part)
    for cache in (first, second):
        cache.update(*kv(3, 3))
    first.pool.check_integrity()


def test_a_trim_past_a_window_is_refused_in_every_layer() -> None:
    caches = caches_of(layers=2, window=6)
    for step, cache in itertools.product(range(14), caches):
        cache.update(*kv(step, 1))
    for cache in caches:
        with pytest.raises(TrimError):
            cache.trim(3)
    assert [cache.offset for cache in caches] == [14, 14]
    for step, cache in itertools.product(range(3), caches):
        cache.update(*kv(20 + step, 1))


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


# Forks ------------------------------------------------------------------------------------------------------------


def test_deepcopy_is_a_fork_by_reference() -> None:
    pool = BlockPool([LayerGroup((0, 2)), LayerGroup((1,), 6, "window")], block_size=4)
    caches = caches_of(layers=3, pool=pool)
    dense = [dense_of(None), dense_of(6), dense_of(None)]
    for step, n in enumerate((9, 1)):
        for layer in range(3):
            caches[layer].update(*kv(10 * layer + step, n))
            dense[layer].update_and_fetch(*kv(10 * layer + step, n))
    before, active = pool.stats(), mx.get_active_memory()
    forks = copy.deepcopy(caches)
    dense_forks = copy.deepcopy(dense)
    after = pool.stats()
    assert (after.live_blocks, after.bytes_in_use, after.cow_forks) == (before.live_blocks, before.bytes_in_use, 0)
    assert after.shared_blocks == after.live_blocks
    assert mx.get_active_memory() - active < 1 << 20
    assert forks[0].pool is pool
    assert forks[0].sequence is forks[1].sequence is forks[2].sequence is not caches[0].sequence
    assert [f.offset for f in forks] == [10] * 3
    for step in range(8):  # they part ways
        for side, (ours, theirs) in enumerate(((caches, dense), (forks, dense_forks))):
            for layer in range(3):
                k, v = kv(1000 + 100 * side + 10 * step + layer, 1 + step % 2)
                assert_same(ours[layer].update_and_fetch(k, v), theirs[layer].update_and_fetch(k, v))
    pool.check_integrity()


def test_from_state_is_a_fork() -> None:
    paged, dense = filled(None, (6, 1))
    fork = PagedKVCache.from_state(paged.state)
    assert type(fork) is PagedKVCache and fork.pool is paged.pool and fork.sequence is not paged.sequence
    assert paged.pool.stats().shared_blocks == 2
    kept = dense.keys_and_values()
    fork.update(*kv(7, 3))
    assert_same(paged.keys_and_values(), kept)
    assert fork.offset == 10


def test_from_state_of_dense_keys_is_refused() -> None:
    with pytest.raises(PromptCacheError, match="need a pool"):
        PagedKVCache.from_state((*kv(1, 3), 3))


# State and load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6])
def test_the_state_of_a_paged_cache_restores_another(window: int | None) -> None:
    source, dense = filled(window, (9, 1, 1))
    (target,) = caches_of(window=window)
    target.state = source.state
    assert target.pool is not source.pool and target.offset == 11
    k, v = kv(7, 3)  # several tokens, so that the order of a ring starts afresh
    expected = dense.update_and_fetch(k, v)
    assert_same(target.update_and_fetch(k, v), expected)
    for step in range(8):
        k, v = kv(20 + step, 1)
        assert_same(target.update_and_fetch(k, v), dense.update_and_fetch(k, v))
    target.pool.check_integrity()


def test_the_state_of_an_empty_cache_restores_an_empty_one() -> None:
    (source,), (target,) = caches_of(), caches_of()
    target.state = source.state
    assert target.empty()


def test_the_state_of_a_dense_cache_restores_a_paged_one() -> None:
    dense = KVCache()
    dense.update_and_fetch(*kv(1, 7))
    assert dense.state[0].shape[2] > 7  # spare room that must not be taken over
    (paged,) = caches_of()
    paged.state = dense.state
    assert paged.offset == 7
    assert_same(paged.keys_and_values(), dense.keys_and_values())


@pytest.mark.parametrize("state", [(), (1, 2), (1, 2, 3), (None, None), "state"])
def test_other_states_are_refused(state: Any) -> None:
    (paged,) = caches_of()
    with pytest.raises(PromptCacheError, match="not the state of"):
        paged.state = state
    assert paged.empty()


def test_evaluating_the_state_evaluates_the_writes() -> None:
    paged, _ = filled(None, (6,))
    fence, cache = paged.state
    mx.eval(fence)
    assert cache is paged and fence.nbytes <= 64


@pytest.mark.parametrize(("window", "n", "offset"), [(None, 9, 9), (6, 5, 11), (6, 6, 11), (6, 9, 11), (6, 4, 4)])
def test_load_in_every_layer(window: int | None, n: int, offset: int) -> None:
    caches = caches_of(layers=2, window=window)
    dense = [dense_of(window) for _ in caches]
    for layer, cache in enumerate(caches):
        k, v = kv(layer, offset)
        dense[layer].update_and_fetch(k, v)
        cache.load(k[:, :, offset - n :], v[:, :, offset - n :], offset)
        assert cache.offset == offset
        assert_same(cache.keys_and_values(), (k[:, :, offset - n :], v[:, :, offset - n :]))
    caches[0].pool.check_integrity()
    for step in range(10):
        for layer, cache in enumerate(caches):
            k, v = kv(50 + 2 * step + layer, 1 + step % 2)
            assert_same(cache.update_and_fetch(k, v), dense[layer].update_and_fetch(k, v))
    caches[0].pool.check_integrity()


@pytest.mark.parametrize(("window", "n", "offset"), [(None, 5, 6), (None, 6, 5), (6, 4, 11), (6, 3, 2)])
def test_load_refuses_missing_or_impossible_tokens(window: int | None, n: int, offset: int) -> None:
    (paged,) = caches_of(window=window)
    with pytest.raises(PromptCacheError, match=f"cannot load {n} tokens ending at {offset}"):
        paged.load(*kv(1, n), offset)
    assert paged.empty() and paged.pool.stats().live_blocks == 0
    part = kv(2, 5)
    paged.load(*part, 5)
    assert_same(paged.keys_and_values(), part)


def test_load_refuses_a_cache_in_use() -> None:
    paged, dense = filled(None, (6,))
    with pytest.raises(PromptCacheError, match="into a cache at 6"):
        paged.load(*kv(2, 9), 9)
    assert_same(paged.keys_and_values(), dense.keys_and_values())


def test_load_refuses_another_length_than_the_layers_before() -> None:
    first, second = caches_of(layers=2)
    first.load(*kv(1, 6), 6)
    with pytest.raises(PromptCacheError, match="ends at 5, the layers before it at 6"):
        second.load(*kv(2, 5), 5)
    part = kv(3, 6)
    second.load(*part, 6)
    assert_same(second.keys_and_values(), part)


def test_a_refused_load_changes_nothing() -> None:
    (paged,) = caches_of()
    with pytest.raises(GeometryError):
        paged.load(noise(1, 2, HEADS, 3, KD), noise(2, 2, HEADS, 3, VD), 3)
    assert paged.empty() and paged.table.length == 0
    part = kv(1, 5)
    paged.load(*part, 5)
    assert_same(paged.keys_and_values(), part)


def test_a_load_that_does_not_fit_changes_nothing() -> None:
    (paged,) = caches_of(window=6, memory_budget=3 * 4 * HEADS * (KD + VD) * 4)
    other = PagedKVCache(SequenceTables(paged.pool), 0)
    other.update(*kv(1, 5))
    k, v = (x[:, :, 6:] for x in kv(2, 11))
    with pytest.raises(PoolExhaustedError):
        paged.load(k, v, 11)
    assert paged.empty() and paged.table.length == 0
    del other
    paged.load(k, v, 11)
    assert_same(paged.keys_and_values(), (k, v))


def test_the_state_of_a_full_ring_restores_its_order() -> None:
    source, dense = filled(5, (1,) * 9)
    (target,) = caches_of(window=5)
    target.state = source.state
    for step in range(3):
        k, v = kv(20 + step, 1)
        assert_same(target.update_and_fetch(k, v), dense.update_and_fetch(k, v))


# Blocks come back -------------------------------------------------------------------------------------------------


def test_collected_caches_give_their_blocks_back() -> None:
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


def test_one_layer_keeps_the_sequence() -> None:
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


def test_thousands_of_short_lived_caches_reuse_the_same_blocks() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    for seed in range(2000):
        (cache,) = caches_of(pool=pool)
        cache.update(*kv(seed % 5, 9))
        del cache
    assert pool.stats().total_blocks <= 2 * 16
    assert pool.stats().live_blocks == 0


def test_repr_says_which_layer_and_where() -> None:
    paged, _ = filled(None, (6,))
    assert repr(paged) == "PagedKVCache(layer=0, offset=6, BlockTable(group=0, length=6, logical_start=0, blocks=2))"
