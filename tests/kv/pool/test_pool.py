"""BlockPool: what is written is what is read, after trimming too; its options."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.attention.dispatch import paged_attention
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import ConfigError, TrimError
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.storage.attention_params import AttentionParams
from tests.support.pools import DTYPES, Watched, assert_holds, joined, kv, noise, pool_of, put, scatter_free_blocks

# Round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kd", "vd"), [(8, 8), (12, 4), (64, 128)])
def test_write_prefill_cold_round_trip_is_byte_identical_to_dense(dtype: mx.Dtype, kd: int, vd: int) -> None:
    pool = pool_of(layers=2)
    table = pool.new_table()
    pool.append_tokens(table, 13)
    dense = [kv(layer, 13, kd=kd, vd=vd, dtype=dtype) for layer in range(2)]
    for layer, (k, v) in enumerate(dense):
        k[0, 0, 0, :3] = mx.array([float("nan"), -0.0, float("-inf")])
        pool.write_prefill(table, layer, k, v)
    for layer, (k, v) in enumerate(dense):
        assert_holds(pool, table, k, v, layer)
    pool.check_integrity()


@pytest.mark.parametrize("n", [4, 8, 64])
def test_write_prefill_block_aligned_prompt_round_trips(n: int) -> None:
    pool = pool_of()
    table = pool.new_table()
    first = put(pool, table, 1, n)
    assert table.num_blocks == n // 4  # no block beyond the last full one
    assert_holds(pool, table, *first)
    second = put(pool, table, 2, 4)
    third = put(pool, table, 3, 1)
    assert table.num_blocks == n // 4 + 2
    assert_holds(pool, table, *joined(first, second, third))


@pytest.mark.parametrize("chunks", [[1, 1, 1, 1, 1, 1], [3, 3, 3], [5, 1, 7, 4, 1], [2, 20, 2, 33, 1, 8]])
def test_any_split_into_chunks_reads_the_same(chunks: list[int]) -> None:
    pool = pool_of()
    scatter_free_blocks(pool)
    table = pool.new_table()
    parts = [put(pool, table, seed, n) for seed, n in enumerate(chunks)]
    assert_holds(pool, table, *joined(*parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batched_decode_writes_each_sequence_its_own_row(dtype: mx.Dtype) -> None:
    pool = pool_of(layers=2)
    tables = [pool.new_table() for _ in range(3)]
    histories: list[list[list[tuple[mx.array, mx.array]]]] = [[[], []] for _ in tables]
    for i, (table, n) in enumerate(zip(tables, (3, 4, 9), strict=True)):
        pool.append_tokens(table, n)
        for layer in range(2):
            part = kv(10 * i + layer, n, kd=8, vd=4, dtype=dtype)
            pool.write_prefill(table, layer, *part)
            histories[i][layer].append(part)
    for step in range(6):
        chosen = [i for i in (2, 0, 1) if (step + i) % 3]  # not always all, nor in order
        for i in chosen:
            pool.append_tokens(tables[i], 1)
        for layer in range(2):
            k, v = kv(100 + 2 * step + layer, 1, batch=len(chosen), kd=8, vd=4, dtype=dtype)
            pool.write_decode([tables[i] for i in chosen], layer, k, v)
            for row, i in enumerate(chosen):
                histories[i][layer].append((k[row : row + 1], v[row : row + 1]))
    for table, history in zip(tables, histories, strict=True):
        for layer in range(2):
            assert_holds(pool, table, *joined(*history[layer]), layer)
    pool.check_integrity()


@pytest.mark.parametrize("rotation", [1, 3, 9])
def test_a_rotated_gather_starts_later_and_wraps_around(rotation: int) -> None:
    pool = pool_of()
    scatter_free_blocks(pool)
    table = pool.new_table()
    k, v = put(pool, table, 1, 10)
    got_k, got_v = pool.gather_visible(table, 0, rotation=rotation)
    np.testing.assert_array_equal(np.array(got_k), np.roll(np.array(k), -rotation, axis=2))
    np.testing.assert_array_equal(np.array(got_v), np.roll(np.array(v), -rotation, axis=2))


def test_a_write_replaces_the_tokens_reserved_last_only() -> None:
    pool = pool_of()
    table = pool.new_table()
    k, v = put(pool, table, 1, 10)
    again = kv(2, 3)
    pool.write_prefill(table, 0, *again)
    assert_holds(pool, table, *joined((k[:, :, :7], v[:, :, :7]), again))


# Decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["paged_attention", "attend"])
def test_pooled_prefill_then_decode_matches_dense(through: str) -> None:
    layers, q_heads, kv_heads, dim, vdim, scale = 3, 6, 2, 16, 8, 0.25
    pool = pool_of(layers=layers)
    others = scatter_free_blocks(pool)
    sequence = SequenceTables(pool)
    caches = [PagedKVCache(sequence, layer) for layer in range(layers)]
    dense: list[tuple[mx.array, mx.array]] = []
    squares, values = 0.0, 0
    for step in range(25):
        n = 13 if step == 0 else 1
        for layer in range(layers):
            seed = 100 * step + layer
            q = noise(1000 + seed, 1, q_heads, n, dim)
            k, v = kv(seed, n, heads=kv_heads, kd=dim, vd=vdim)
            if step == 0:
                dense.append((k, v))
            else:
                dense[layer] = joined(dense[layer], (k, v))
            mask = "causal" if n > 1 else None
            expected = mx.fast.scaled_dot_product_attention(q, *dense[layer], scale=scale, mask=mask)
            if through == "attend" or n > 1:
                got = caches[layer].attend(q, k, v, AttentionParams(scale, mask))
            else:
                caches[layer].update(k, v)
                got = paged_attention(q, pool, layer, [sequence.table(layer)], AttentionParams(scale))
            assert got.shape == expected.shape and mx.any(expected != 0).item()
            squares += mx.sum(mx.square(got - expected)).item()
            values += got.size
    ids = sequence.tables[0].block_ids
    assert sum(b != a + 1 for a, b in itertools.pairwise(ids)) >= 8, "the blocks were meant to be scattered"
    assert math.sqrt(squares / values) == 0.0
    pool.release(0, others)
    pool.check_integrity()


# Trim ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "blocks"), [(0, 3), (1, 3), (2, 2), (5, 2), (6, 1), (9, 1), (10, 0)])
def test_trim_releases_the_blocks_beyond_the_new_end(n: int, blocks: int) -> None:
    pool = pool_of()
    table = pool.new_table()
    k, v = put(pool, table, 1, 10)
    pool.trim(table, n)
    assert (table.length, table.num_blocks, pool.stats().live_blocks) == (10 - n, blocks, blocks)
    if n < 10:
        assert_holds(pool, table, k[:, :, : 10 - n], v[:, :, : 10 - n])
    more = put(pool, table, 2, 5)
    assert_holds(pool, table, *joined((k[:, :, : 10 - n], v[:, :, : 10 - n]), more))
    pool.check_integrity()


@pytest.mark.parametrize("n", [7, 100, -1])
def test_trim_too_far_is_refused(n: int) -> None:
    watched = Watched()
    before = watched.picture()
    with pytest.raises(TrimError, match=f"cannot trim {n} of 6 tokens"):
        watched.pool.trim(watched.table, n)
    watched.assert_unchanged(before)
    watched.go_on()


def test_trim_past_a_window_is_refused() -> None:
    pool = pool_of(window=5)
    table = pool.new_table()
    first = put(pool, table, 1, 12)
    pool.trim(table, 11)  # all of the first chunk is still held
    more = put(pool, table, 2, 9)
    last = put(pool, table, 3, 3)  # 13 tokens; held from 10 - 4 on
    before = (pool.stats(), list(table.block_ids), table.length)
    with pytest.raises(TrimError, match="cannot trim to 9 tokens: the window of 5"):
        pool.trim(table, 4)
    assert (pool.stats(), list(table.block_ids), table.length) == before
    history = joined(tuple(x[:, :, :1] for x in first), more, last)
    assert_holds(pool, table, *tuple(x[:, :, 6:] for x in history))
    pool.trim(table, 3)
    assert_holds(pool, table, *tuple(x[:, :, 6:10] for x in history))
    pool.check_integrity()


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, -4, 1, 2, 3, 5, 12, 100, 129, 256])
def test_block_size_must_be_a_power_of_two_in_range(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"power of two from 4 to 128, not {block_size}"):
        pool_of(block_size=block_size)


@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128])
def test_every_block_size_in_range_works(block_size: int) -> None:
    pool = pool_of(block_size=block_size)
    table = pool.new_table()
    parts = [put(pool, table, seed, n) for seed, n in enumerate((block_size - 1, 1, 1, 2 * block_size))]
    assert_holds(pool, table, *joined(*parts))
    assert table.num_blocks == 4


@pytest.mark.parametrize("budget", [0, -1])
def test_budget_must_be_positive(budget: int) -> None:
    with pytest.raises(ConfigError, match=f"must be positive, not {budget}"):
        pool_of(memory_budget=budget)


@pytest.mark.parametrize(
    "groups",
    [[LayerGroup(())], [LayerGroup((0, 1)), LayerGroup((1, 2), 8)], [LayerGroup((3, 3))]],
    ids=["no layers", "layer in two groups", "layer twice"],
)
def test_each_layer_belongs_to_one_group(groups: list[LayerGroup]) -> None:
    with pytest.raises(ConfigError, match="exactly one group"):
        BlockPool(groups)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_holds_at_least_one_token(window: int) -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        pool_of(window=window)
