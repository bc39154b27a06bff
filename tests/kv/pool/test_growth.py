"""A pool grows with what is written, within its budget, and counts what it has."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import BLOCK_BYTES, assert_holds, joined, kv, pool_of, put


def test_growth_keeps_contents() -> None:
    pool = pool_of()
    tables = [pool.new_table() for _ in range(3)]
    parts: list[list[tuple[mx.array, mx.array]]] = [[] for _ in tables]
    sizes = set()
    for step in range(30):
        for i, table in enumerate(tables):
            parts[i].append(put(pool, table, 10 * step + i, 1 + (step + i) % 7))
        sizes.add(pool.stats().total_blocks)
    assert len(sizes) > 2, "the pool was meant to grow"
    for table, part in zip(tables, parts, strict=True):
        assert_holds(pool, table, *joined(*part))
    pool.check_integrity()


def test_growth_is_geometric() -> None:
    pool = pool_of()
    calls: list[int] = []
    group = pool.groups[0]
    grow = group.grow

    def counted(num_blocks: int) -> None:
        calls.append(num_blocks)
        grow(num_blocks)

    group.grow = counted  # type: ignore[method-assign]
    table = pool.new_table()
    k, v = kv(1, 1)
    pool.set_geometry(0, k, v, batch=1)
    for _ in range(5000):
        pool.append_tokens(table, 1)
    pool.write_decode([table], 0, k, v)
    assert table.num_blocks == 1250
    assert 2 <= len(calls) <= math.log2(5000), calls
    assert pool.stats().total_blocks < 2 * 1251


def test_growth_of_a_large_pool_is_by_an_eighth() -> None:
    pool = pool_of(block_size=32)
    k, v = (mx.zeros((1, 8, 1, 128)) for _ in range(2))  # 256 KiB per block
    pool.set_geometry(0, k, v, batch=1)
    pool.allocate(0, 299)
    assert pool.stats().bytes_reserved > 16 << 20
    total = pool.stats().total_blocks + 1
    pool.allocate(0, total - 299)
    assert pool.stats().total_blocks + 1 == int(total * 1.125)


def test_growth_stays_within_the_budget_and_uses_all_of_it() -> None:
    pool = pool_of(layers=2, memory_budget=2 * BLOCK_BYTES * 21 + 17)  # the null block and 20 more
    table = pool.new_table()
    pool.set_geometry(0, *kv(0, 1), batch=1)
    for _ in range(80):
        pool.append_tokens(table, 1)
        assert pool.stats().bytes_reserved <= pool.memory_budget
        assert pool.stats().total_blocks <= 20
    assert pool.stats().free_blocks == 0
    with pytest.raises(PoolExhaustedError):
        pool.append_tokens(table, 1)


def test_the_budget_is_shared_by_the_groups() -> None:
    pool = BlockPool([LayerGroup((0,)), LayerGroup((1,), 8, "window")], block_size=4, memory_budget=40 * BLOCK_BYTES)
    k, v = kv(0, 1)
    pool.set_geometry(0, k, v, batch=1)
    pool.set_geometry(1, k, v, batch=1)
    pool.allocate(0, 20)
    pool.allocate(1, 7)
    assert pool.stats().bytes_reserved <= pool.memory_budget
    reserved = pool.stats().bytes_reserved
    with pytest.raises(PoolExhaustedError) as caught:
        pool.allocate(1, 27)  # 21 of the 40 blocks are the other group's
    assert caught.value.bytes_reserved == reserved == pool.stats().bytes_reserved


def test_stats_count_blocks_and_bytes() -> None:
    pool = BlockPool([LayerGroup((0, 1)), LayerGroup((2,), 8, "window")], block_size=4, memory_budget=1 << 20)
    assert pool.stats().as_dict() == {
        "block_size": 4,
        "total_blocks": 0,
        "live_blocks": 0,
        "free_blocks": 0,
        "shared_blocks": 0,
        "bytes_reserved": 0,
        "bytes_in_use": 0,
        "budget_bytes": 1 << 20,
        "cow_forks": 0,
        "peak_live_blocks": 0,
        "cached_blocks": 0,
        "evictions": 0,
        "prefix_hit_tokens": 0,
        "preemptions": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "peak_bytes_in_use": 0,
        "shrinks": 0,
        "quantized_tokens": 0,
        "quantized_layers": 0,
        "dense_layers": 0,
        "bytes_per_token": 0,
        "state_bytes": 0,
        "checkpoint_bytes": 0,
    }
    k, v = kv(0, 6)
    tables = [pool.new_table(0), pool.new_table(1)]
    for table in tables:
        pool.append_tokens(table, 6)
    for layer in range(3):
        pool.write_prefill(tables[layer // 2], layer, k, v)
    fork = pool.fork(tables[0])
    stats = pool.stats()
    assert (stats.live_blocks, stats.shared_blocks, stats.free_blocks) == (4, 2, 0)
    assert (stats.quantized_layers, stats.dense_layers, stats.bytes_per_token) == (0, 3, 3 * BLOCK_BYTES // 4)
    assert stats.bytes_in_use == stats.peak_bytes_in_use == 2 * 2 * BLOCK_BYTES + 2 * BLOCK_BYTES
    assert stats.bytes_reserved == stats.bytes_in_use + 3 * BLOCK_BYTES  # a null block in each layer
    pool.append_tokens(fork, 1)
    assert pool.stats().cow_forks == 1
    assert pool.stats().live_blocks + pool.stats().free_blocks == pool.stats().total_blocks
    assert pool.stats().peak_live_blocks == 5
    pool.release_table(tables[0])
    assert (pool.stats().live_blocks, pool.stats().peak_live_blocks) == (4, 5)
    assert "4 tokens" in str(stats) and "4 live (peak 4, 2 shared)" in str(stats)
