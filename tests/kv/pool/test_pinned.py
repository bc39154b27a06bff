"""Groups that pin their first tokens: the contents, order and masks of mlx-lm's RotatingKVCache, within a bound."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from mlx_paged.attention.gather import attention
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import BlockStateError, ConfigError, PoolExhaustedError, TrimError
from mlx_paged.kv.allocator import NULL_BLOCK
from mlx_paged.kv.budget import PoolBudget
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.storage.attention_params import AttentionParams
from mlx_paged.kv.storage.choice import storage_choice
from mlx_paged.patches.cache.layer_cache import PagedLayerCache
from mlx_paged.prefix import detached as prefix
from mlx_paged.prefix.radix import RadixTree
from tests.support.caches import HEADS, KD, VD, assert_same, kv, noise
from tests.support.kernels.fake_kernels import fake_kernels

KEEP = 4


def pinned_pool(window: int, *, pinned: int = KEEP, block_size: int = 4, layers: int = 1, **options: int) -> BlockPool:
    return BlockPool([LayerGroup(tuple(range(layers)), window, "bounded", pinned)], block_size=block_size, **options)


def caches_over(pool: BlockPool) -> list[PagedKVCache]:
    sequence = SequenceTables(pool)
    return [PagedKVCache(sequence, layer) for layer in pool.groups[0].spec.layers]


def block_bound(window: int, step: int, block_size: int, pinned: int) -> int:
    return -(-(window + step) // block_size) + 1 + -(-pinned // block_size)


def same_mask(a: mx.array | str | None, b: mx.array | str | None) -> bool:
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        return a.shape == b.shape and bool(mx.array_equal(a, b))
    return a is b or a == b


@pytest.mark.sample
@pytest.mark.parametrize(
    ("window", "pinned", "block_size"), [(5, 4, 4), (6, 4, 8), (32, 4, 8), (33, 9, 4), (40, 17, 16)]
)
@pytest.mark.parametrize("seed", range(3))
def test_contents_order_and_masks_equal_the_dense_cache(window: int, pinned: int, block_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = pinned_pool(window, pinned=pinned, block_size=block_size)
    (paged,), dense = caches_over(pool), RotatingKVCache(max_size=window, keep=pinned)
    for step in range(60):
        n = 1 if rng.random() < 0.7 else int(rng.integers(1, 24))
        for options in ({}, {"return_array": True}, {"window_size": window}, {"window_size": 3}):
            if n == 1 and options.get("return_array"):
                continue
            assert same_mask(paged.make_mask(n, **options), dense.make_mask(n, **options)), (step, options)
        k, v = kv(100 * seed + step, n)
        expected = dense.update_and_fetch(k, v)
        assert_same(paged.update_and_fetch(k, v), expected)
        assert (paged.offset, paged.size(), paged.is_trimmable()) == (dense.offset, dense.size(), dense.is_trimmable())
        if dense.is_trimmable() and rng.random() < 0.3:
            count = int(rng.integers(0, 4))
            assert paged.trim(count) == dense.trim(count)
        pool.check_integrity()


def test_5000_tokens_stay_within_the_bound_and_equal_the_dense_cache() -> None:
    window, size, step = 48, 8, 21
    pool = pinned_pool(window, block_size=size)
    (paged,), dense = caches_over(pool), RotatingKVCache(max_size=window, keep=KEEP)
    rng, most = np.random.default_rng(0), 0
    while paged.offset < 5000:
        n = int(rng.integers(2, step + 1)) if rng.random() < 0.02 else 1
        k, v = kv(paged.offset, n)
        expected = dense.update_and_fetch(k, v)
        got = paged.update_and_fetch(k, v)
        assert paged.table.num_blocks <= block_bound(window, n, size, KEEP)
        assert pool.stats().live_blocks == paged.table.num_blocks
        most = max(most, paged.table.num_blocks)
        if paged.offset % 5 == 0:
            assert_same(got, expected)
        if paged.offset % 100 == 0:
            pool.check_integrity()
    assert most <= block_bound(window, step, size, KEEP)
    assert paged.table.block_ids[0] != NULL_BLOCK and paged.table.block_ids[2:600].count(NULL_BLOCK) == 598
    assert pool.stats().total_blocks <= 2 * block_bound(window, step, size, KEEP)


def test_a_fork_goes_on_by_itself_and_pins_what_it_shares() -> None:
    pool = pinned_pool(12)
    (paged,), dense = caches_over(pool), RotatingKVCache(max_size=12, keep=KEEP)
    for seed, n in enumerate((7, 1, 20, 1, 1)):
        paged.update(*kv(seed, n))
        dense.update_and_fetch(*kv(seed, n))
    paged.sequence.decoded = range(5, 50)
    fork, dense_fork = copy.deepcopy(paged), copy.deepcopy(dense)
    assert not fork.sequence.decoded  # it goes on with other tokens
    shared = paged.table.block_ids[0]
    for seed in range(10, 40):
        assert_same(fork.update_and_fetch(*kv(seed, 1)), dense_fork.update_and_fetch(*kv(seed, 1)))
        assert_same(paged.update_and_fetch(*kv(100 + seed, 1)), dense.update_and_fetch(*kv(100 + seed, 1)))
        pool.check_integrity()
    assert paged.table.block_ids[0] == fork.table.block_ids[0] == shared
    del paged
    assert_same(fork.update_and_fetch(*kv(50, 9)), dense_fork.update_and_fetch(*kv(50, 9)))
    pool.check_integrity()


def test_a_parked_sequence_goes_on_where_it_was() -> None:
    pool = pinned_pool(12, layers=2)
    caches, dense = caches_over(pool), RotatingKVCache(max_size=12, keep=KEEP)
    for seed, n in enumerate((7, 1, 20, 1, 1)):
        for cache in caches:
            cache.update(*kv(seed, n))
        dense.update_and_fetch(*kv(seed, n))
    parked = prefix.DetachedPrefix(caches[0].sequence)
    for cache in caches:
        cache.update(*kv(60, 5))
    assert (parked.longest(30), parked.longest(29), parked.longest(28)) == (30, 29, 0)
    adopted = PagedKVCache(parked.adopt(), 1)
    del caches, cache
    assert_same(adopted.update_and_fetch(*kv(7, 1)), dense.update_and_fetch(*kv(7, 1)))
    parked.discard()
    pool.check_integrity()
    assert pool.stats().live_blocks == adopted.table.num_blocks


def test_a_cut_keeps_what_the_window_before_it_needs() -> None:
    pool = pinned_pool(12)
    (paged,) = caches_over(pool)
    paged.update(*kv(0, 30))
    paged.trim(5)  # a long first chunk: nothing is behind the window yet
    expected = [x[:, :, [*range(4), *range(18, 25)]] for x in kv(0, 30)]
    paged.update(*kv(1, 1))
    kept = [x[:, :, :11] for x in pool.gather_visible(paged.table, 0)]
    assert_same(kept, expected)
    with pytest.raises(TrimError):
        paged.trim(2)
    assert paged.offset == 26


@pytest.mark.parametrize(("offset", "tokens"), [(9, 9), (12, 12), (30, 12), (30, 11), (30, 17), (1000, 12)])
def test_loading_dense_keys_puts_pinned_ones_first(offset: int, tokens: int) -> None:
    pool = pinned_pool(12, layers=2)
    caches = caches_over(pool)
    k, v = kv(3, tokens)
    for cache in caches:
        cache.load(k, v, offset)
    for cache in caches:
        assert_same(pool.gather_visible(cache.table, cache.layer), (k, v))
        assert cache.offset == offset
    pool.check_integrity()
    assert caches[0].table.num_blocks <= block_bound(12, tokens - 12 if tokens > 12 else 0, 4, KEEP)


@pytest.mark.parametrize("tokens", [11, 12, 20])
def test_stocks_form_of_a_cache_goes_on_as_it_does(tokens: int) -> None:
    """With 11 tokens the one that mlx-lm is about to overwrite is gone already."""
    cache = PagedLayerCache(SequenceTables(pinned_pool(12)), 0)
    cache.load(*kv(3, tokens), 30)
    for first in (1, 5):
        stock, paged = cache.to_stock(), copy.deepcopy(cache)
        assert (stock.keep, stock.max_size, stock.offset) == (KEEP, 12, cache.offset)
        for seed, n in enumerate((first, 1, 1, 1)):
            assert_same(paged.update_and_fetch(*kv(seed, n)), stock.update_and_fetch(*kv(seed, n)))


def test_a_block_of_pinned_tokens_that_was_lost_is_found_out() -> None:
    pool = pinned_pool(12)
    (paged,) = caches_over(pool)
    for seed in range(30):
        paged.update(*kv(seed, 1))
    pool.check_integrity()
    lost = paged.table.block_ids[0]
    paged.table.block_ids[0] = NULL_BLOCK
    pool.release(0, [lost])
    with pytest.raises(BlockStateError, match="still visible"):
        pool.check_integrity()


# Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", [None, 5, 11])
@pytest.mark.parametrize("width", [1, 3])
def test_padded_rows_and_their_mask_are_what_each_row_sees(width: int, narrow: int | None) -> None:
    """For attention that is not recognised: arrays as mlx-lm's batches give them, which forget what is pinned."""
    pool, rows = pinned_pool(12), []
    histories = [(3,), (11,), (12,), (7, 1, 20, 1), (40, 5), *[(4, *[1] * n) for n in range(6, 18)]]
    for row, chunks in enumerate(histories):
        (cache,) = caches_over(pool)
        for seed, n in enumerate(chunks):
            cache.update(*kv(100 * row + seed, n))
        rows.append(cache)
    q = noise(1, len(rows), 2 * HEADS, width, KD)
    new = [kv(900 + row, width) for row in range(len(rows))]
    batch = PagedBatchKVCache.merge(rows)
    mask = batch.make_mask(width, return_array=True, window_size=narrow)
    k, v = batch.update_and_fetch(*(mx.concatenate(x) for x in zip(*new, strict=True)))
    got = attention(q, k, v, AttentionParams(0.3, mask))
    for row, cache in enumerate(rows):
        own_mask = cache.make_mask(width, window_size=narrow)
        own = attention(q[row : row + 1], *cache.update_and_fetch(*new[row]), AttentionParams(0.3, own_mask))
        np.testing.assert_allclose(np.array(got[row : row + 1]), np.array(own), atol=2e-6)
    pool.check_integrity()


# Pools ------------------------------------------------------------------------------------------------------------


def test_the_budget_counts_pinned_blocks_and_the_window() -> None:
    window, size, chunk = 24, 8, 16
    bound = block_bound(window, chunk, size, KEEP)
    token = HEADS * (KD + VD) * 4
    for blocks, holds in ((bound + 1, True), (bound - 1, False)):
        pool = pinned_pool(window, block_size=size, memory_budget=blocks * size * token)
        pool.set_geometry(0, *kv(0, 1), batch=1)
        assert PoolBudget(pool, chunk=chunk).holds(100_000) is holds


def test_pinned_blocks_are_not_counted_as_given_back() -> None:
    pool = pinned_pool(24, block_size=8)
    pool.set_geometry(0, *kv(0, 1), batch=1)
    table = pool.new_table()
    pool.append_tokens(table, 40)
    assert PoolBudget(pool, chunk=16).exhausted([table], 8).blocks_needed == 1
    before = table.block_ids[:2]
    pool.append_tokens(table, 8)
    assert table.block_ids[:2] == [before[0], NULL_BLOCK]


@pytest.mark.parametrize("seed", range(4))
def test_what_fits_by_the_budget_can_be_appended(seed: int) -> None:
    rng = np.random.default_rng(seed)
    token = HEADS * (KD + VD) * 4
    pool = pinned_pool(24, pinned=9, block_size=4, memory_budget=30 * 4 * token)
    pool.set_geometry(0, *kv(0, 1), batch=1)
    budget = PoolBudget(pool, chunk=16)
    tables = [pool.new_table() for _ in range(3)]
    refused = 0
    for _ in range(300):
        growth = [int(rng.integers(1, 17)) if rng.random() < 0.2 else 1 for _ in tables]
        if not budget.fits([([t], n) for t, n in zip(tables, growth, strict=True)]):
            refused += 1
            index = int(rng.integers(0, 3))
            pool.release_table(tables[index])
            tables[index] = pool.new_table() if rng.random() < 0.5 else pool.fork(tables[index - 1])
            continue
        for table, n in zip(tables, growth, strict=True):
            pool.append_tokens(table, n)
        pool.check_integrity()
    assert 0 < refused < 250


def test_a_failed_load_leaves_nothing_behind() -> None:
    token = HEADS * (KD + VD) * 4
    pool = pinned_pool(24, memory_budget=4 * 4 * token)
    (cache,) = caches_over(pool)
    with pytest.raises(PoolExhaustedError):
        cache.load(*kv(0, 24), 100)
    pool.check_integrity()
    assert pool.stats().live_blocks == cache.offset == 0


@pytest.mark.parametrize(("window", "pinned"), [(None, 4), (4, 4), (3, 4), (8, -1)])
def test_groups_that_cannot_pin_are_refused(window: int | None, pinned: int) -> None:
    with pytest.raises(ConfigError, match="pinned"):
        BlockPool([LayerGroup((0,), window, "bounded", pinned)])


def test_prefixes_of_pinned_groups_are_not_shared() -> None:
    with pytest.raises(ConfigError, match="pins tokens"):
        RadixTree(pinned_pool(12))


def test_stand_in_kernels_do_not_serve_pinned_groups() -> None:
    with fake_kernels():
        for use, pinned, in_place in ((None, 0, True), (None, KEEP, False), (False, KEEP, False)):
            pool = BlockPool(
                [LayerGroup((0,), 12, "bounded", pinned)], block_size=8, choose_storage=storage_choice(use)
            )
            pool.set_geometry(0, *kv(0, 1), batch=1)
            assert pool.groups[0].in_place is in_place
            if use is None and pinned:
                assert "pinned" in pool.groups[0].storage_reason
