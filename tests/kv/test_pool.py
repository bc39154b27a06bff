"""BlockPool: what is written is what is read, in place, within the budget; bad input changes nothing."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.attention.dispatch import paged_attention
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import BlockStateError, ConfigError, GeometryError, PoolExhaustedError, TrimError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def bits(x: mx.array) -> np.ndarray:
    """The bytes, so that NaNs and signed zeros compare."""
    return np.array(mx.contiguous(x).view({2: mx.uint16, 4: mx.uint32}[x.dtype.size]))


def noise(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def kv(
    seed: int, n: int, *, batch: int = 1, heads: int = 2, kd: int = 8, vd: int = 8, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    return noise(2 * seed, batch, heads, n, kd, dtype=dtype), noise(2 * seed + 1, batch, heads, n, vd, dtype=dtype)


def pool_of(*, layers: int = 1, window: int | None = None, block_size: int = 4, **options: Any) -> BlockPool:
    return BlockPool([LayerGroup(tuple(range(layers)), window)], block_size=block_size, **options)


def put(pool: BlockPool, table: BlockTable, seed: int, n: int, **shape: Any) -> tuple[mx.array, mx.array]:
    """Append n tokens and write them to layer 0."""
    k, v = kv(seed, n, **shape)
    pool.append_tokens(table, n)
    if n == 1:
        pool.write_decode([table], 0, k, v)
    else:
        pool.write_prefill(table, 0, k, v)
    return k, v


def assert_holds(pool: BlockPool, table: BlockTable, k: mx.array, v: mx.array, layer: int = 0) -> None:
    got_k, got_v = pool.gather_visible(table, layer)
    assert (got_k.dtype, got_v.dtype) == (k.dtype, v.dtype)
    np.testing.assert_array_equal(bits(got_k), bits(k))
    np.testing.assert_array_equal(bits(got_v), bits(v))


def joined(*parts: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    return mx.concatenate([k for k, _ in parts], axis=2), mx.concatenate([v for _, v in parts], axis=2)


def scatter_free_blocks(pool: BlockPool, group: int = 0) -> list[int]:
    """Leave every second of the first blocks in use, so that the next ones are not consecutive."""
    ids = pool.allocate(group, 20)
    pool.release(group, ids[::2])
    return ids[1::2]


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


# Forks and copy-on-write ------------------------------------------------------------------------------------------


def test_write_prefill_cow_forks_shared_partial_tail_block() -> None:
    pool = pool_of()
    first = pool.new_table()
    prefix = put(pool, first, 1, 6)
    second = pool.fork(first)
    assert second.block_ids == first.block_ids
    assert (pool.stats().shared_blocks, pool.stats().live_blocks, pool.stats().cow_forks) == (2, 2, 0)
    full, tail = first.block_ids

    mine = put(pool, first, 2, 3)  # shared: the writer copies the tail block
    assert pool.stats().cow_forks == 1
    assert first.block_ids[0] == full and first.block_ids[1] != tail
    assert second.block_ids == [full, tail]
    assert pool.stats().shared_blocks == 1

    other = put(pool, second, 3, 3)  # sole owner by now: it does not
    assert pool.stats().cow_forks == 1
    assert second.block_ids[:2] == [full, tail]

    assert_holds(pool, first, *joined(prefix, mine))
    assert_holds(pool, second, *joined(prefix, other))
    pool.check_integrity()


def test_decode_after_a_fork_copies_the_tail_in_every_layer() -> None:
    pool = pool_of(layers=3)
    first = pool.new_table()
    pool.append_tokens(first, 6)
    prefix = [kv(layer, 6) for layer in range(3)]
    for layer in range(3):
        pool.write_prefill(first, layer, *prefix[layer])
    second, third = pool.fork(first), pool.fork(first)
    for table in (first, second, third):
        pool.append_tokens(table, 1)
    assert pool.stats().cow_forks == 2  # the last one owns the old block
    tokens = [kv(10 + layer, 1, batch=3) for layer in range(3)]
    for layer in range(3):
        pool.write_decode([first, second, third], layer, *tokens[layer])
    for row, table in enumerate((first, second, third)):
        for layer in range(3):
            token = tuple(x[row : row + 1] for x in tokens[layer])
            assert_holds(pool, table, *joined(prefix[layer], token), layer)
    pool.check_integrity()


def test_a_fork_at_a_block_boundary_never_copies() -> None:
    pool = pool_of()
    first = pool.new_table()
    prefix = put(pool, first, 1, 8)
    second = pool.fork(first)
    mine, other = put(pool, first, 2, 2), put(pool, second, 3, 2)
    assert pool.stats().cow_forks == 0
    assert pool.stats().live_blocks == 4
    assert_holds(pool, first, *joined(prefix, mine))
    assert_holds(pool, second, *joined(prefix, other))


def test_trimming_into_a_shared_block_and_writing_on_copies_it() -> None:
    pool = pool_of()
    first = pool.new_table()
    prefix = put(pool, first, 1, 8)
    second = pool.fork(first)
    pool.trim(second, 3)
    other = put(pool, second, 2, 3)
    assert pool.stats().cow_forks == 1
    assert_holds(pool, first, *prefix)
    assert_holds(pool, second, *joined(tuple(x[:, :, :5] for x in prefix), other))
    pool.check_integrity()


@pytest.mark.parametrize("how", ["release", "drop"])
def test_a_block_shared_only_with_a_table_that_is_gone_is_not_copied(how: str) -> None:
    pool = pool_of()
    table = pool.new_table()
    prefix = put(pool, table, 1, 6)
    fork = pool.fork(table)
    if how == "release":
        pool.release_table(fork)
    del fork
    gc.collect()
    more = put(pool, table, 2, 1)
    assert pool.stats().cow_forks == 0
    assert_holds(pool, table, *joined(prefix, more))


def test_a_dropped_fork_does_not_stand_in_the_way_of_a_write() -> None:
    pool = pool_of()
    table = pool.new_table()
    pool.append_tokens(table, 6)
    fork = pool.fork(table)
    del fork
    gc.collect()
    k, v = kv(1, 6)
    pool.write_prefill(table, 0, k, v)
    assert_holds(pool, table, k, v)


def test_copy_on_write_block_copies_a_shared_block_once() -> None:
    pool = pool_of()
    first = pool.new_table()
    k, v = put(pool, first, 1, 8)
    assert pool.copy_on_write_block(first, 0) == first.block_ids[0]
    assert pool.stats().cow_forks == 0
    second = pool.fork(first)
    old = first.block_ids[0]
    new = pool.copy_on_write_block(second, 0)
    assert new not in first.block_ids and second.block_ids[0] == new and first.block_ids[0] == old
    assert pool.copy_on_write_block(second, 0) == new
    assert pool.copy_on_write_block(first, 0) == old
    assert pool.stats().cow_forks == 1
    assert_holds(pool, first, k, v)
    assert_holds(pool, second, k, v)
    pool.check_integrity()


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
                got = caches[layer].attend(q, k, v, scale=scale, mask=mask)
            else:
                caches[layer].update(k, v)
                got = paged_attention(q, pool, layer, [sequence.table(layer)], scale=scale)
            assert got.shape == expected.shape and mx.any(expected != 0).item()
            squares += mx.sum(mx.square(got - expected)).item()
            values += got.size
    ids = sequence.tables[0].block_ids
    assert sum(b != a + 1 for a, b in itertools.pairwise(ids)) >= 8, "the blocks were meant to be scattered"
    assert math.sqrt(squares / values) == 0.0
    pool.release(0, others)
    pool.check_integrity()


# No copies of the pool --------------------------------------------------------------------------------------------

FEW_MB = 6 << 20


@pytest.fixture
def big_pool() -> Iterator[BlockPool]:
    """About 1 GB of K and V in one layer: 8 heads of 128 + 128 in half precision, 4 KiB per token."""
    pool = pool_of(block_size=32)
    table = pool.new_table()
    pool.append_tokens(table, 250_000)
    k, v = kv(0, 1, heads=8, kd=128, vd=128, dtype=mx.float16)
    pool.write_decode([table], 0, k, v)
    mx.eval(pool.fence(0))
    pool.release_table(table)
    assert pool.stats().bytes_reserved > 1_000_000_000
    assert mx.get_active_memory() > 1_000_000_000
    yield pool
    del pool, table
    gc.collect()
    mx.clear_cache()


def extra_peak(action: Callable[[], None]) -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    mx.synchronize()
    return mx.get_peak_memory() - before


def test_write_never_copies_the_pool(big_pool: BlockPool) -> None:
    pool = big_pool
    shape = {"heads": 8, "kd": 128, "vd": 128, "dtype": mx.float16}
    sequence = SequenceTables(pool)
    cache = PagedKVCache(sequence, 0)
    seeds = iter(range(1, 1000))

    def query(n: int = 1) -> mx.array:
        return noise(5, 1, 16, n, 128, dtype=mx.float16)

    def prefill() -> None:
        cache.update(*kv(next(seeds), 70, **shape))
        mx.eval(pool.fence(0))

    def decode() -> None:
        cache.update(*kv(next(seeds), 1, **shape))
        mx.eval(pool.fence(0))

    def batched_decode() -> None:
        tables = [sequence.tables[0], pool.new_table()]
        for table in tables:
            pool.append_tokens(table, 1)
        cache.sequence.offsets[0] += 1
        pool.write_decode(tables, 0, *kv(next(seeds), 1, batch=2, **shape))
        mx.eval(pool.fence(0))

    def write_then_read() -> None:  # one graph
        k, v = kv(next(seeds), 1, **shape)
        mx.eval(cache.attend(query(), k, v, scale=0.1, mask=None))

    def chunk_then_read() -> None:
        k, v = kv(next(seeds), 40, **shape)
        mx.eval(cache.attend(query(40), k, v, scale=0.1, mask="causal"))

    def pipelined() -> None:
        # Step t + 1 is built, on what step t gives, and started before the result of step t is looked at.
        x, pending = query(), None
        for _ in range(12):
            slow = mx.ones((256, 256)) * x[0, 0, 0, 0].astype(mx.float32)
            for _ in range(12):  # keeps the read of this step unfinished while the next one is built
                slow = mx.tanh(slow @ slow)
            token = mx.broadcast_to(x[:, :8] + 0 * slow[0, 0].astype(x.dtype), (1, 8, 1, 128))
            out = cache.attend(x, token, token * 0.5, scale=0.1, mask=None)
            x = mx.tanh(out)
            mx.async_eval(x)
            if pending is not None:
                assert mx.all(mx.isfinite(pending)).item()
            pending = x
        mx.eval(x)

    def fork_and_copy() -> None:
        forks = [pool.fork(sequence.tables[0]) for _ in range(3)]
        before = pool.stats().cow_forks
        for table in forks:
            pool.append_tokens(table, 1)
            pool.write_decode([table], 0, *kv(next(seeds), 1, **shape))
            mx.eval(pool.gather_visible(table, 0))
        assert pool.stats().cow_forks == before + 3

    actions = (prefill, decode, batched_decode, write_then_read, chunk_then_read, pipelined, fork_and_copy)
    sequence.reserve(0, 5)  # so that the tail block is never full when it is forked
    pool.write_prefill(sequence.tables[0], 0, *kv(0, 5, **shape))
    peaks = {action.__name__: extra_peak(action) for action in actions}
    assert max(peaks.values()) < FEW_MB, peaks
    assert min(peaks.values()) >= 0

    # The measurement does see a copy: a second handle on the keys' buffer makes MLX copy it on the next write.
    held = pool.groups[0].storages[0]._keys.reshape(-1)
    mx.eval(held)
    assert extra_peak(decode) > 400_000_000
    del held
    assert extra_peak(decode) < FEW_MB
    pool.check_integrity()


# Sliding window ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "block_size"), [(5, 4), (8, 4), (64, 8)])
@pytest.mark.parametrize("step", [1, 7])
def test_a_sliding_window_holds_no_more_than_it_needs(window: int, block_size: int, step: int) -> None:
    pool = pool_of(window=window, block_size=block_size)
    table = pool.new_table()
    rng = np.random.default_rng(0)
    history = rng.standard_normal((1, 1, 5000 + step, 2)).astype(np.float32)
    bound = -(-(window + step) // block_size) + 1
    most = written = 0
    while written < 5000:
        k = mx.array(history[:, :, written : written + step])
        pool.append_tokens(table, step)
        if step == 1:
            pool.write_decode([table], 0, k, -k)
        else:
            pool.write_prefill(table, 0, k, -k)
        written += step
        most = max(most, table.num_blocks)
        visible = min(written, window - 1 + step)
        assert table.length - table.logical_start == visible
        if written % 23 == 0 or written < 4 * window:
            got_k, got_v = pool.gather_visible(table, 0)
            np.testing.assert_array_equal(np.array(got_k), history[:, :, written - visible : written])
            np.testing.assert_array_equal(np.array(got_v), -history[:, :, written - visible : written])
    assert most <= bound
    assert pool.stats().live_blocks <= bound
    assert pool.stats().total_blocks <= 2 * max(16, bound)  # blocks are used again, not added
    pool.check_integrity()


def test_a_window_slide_leaves_the_blocks_of_a_fork_alone() -> None:
    pool = pool_of(window=6)
    table = pool.new_table()
    prefix = put(pool, table, 1, 6)
    fork = pool.fork(table)
    more = put(pool, table, 2, 9)
    assert_holds(pool, fork, *prefix)
    assert_holds(pool, table, *tuple(x[:, :, -14:] for x in joined(prefix, more)))
    pool.release_table(table)
    assert_holds(pool, fork, *prefix)
    pool.check_integrity()


@pytest.mark.parametrize("start", [4, 5, 7, 8])
def test_a_table_may_start_behind_a_window(start: int) -> None:
    pool = pool_of(window=6)
    table = pool.new_table(start=start)
    pool.check_integrity()
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.gather_visible(table, 0)
    k, v = put(pool, table, 1, 3)
    assert (table.length, table.logical_start) == (start + 3, start)
    assert_holds(pool, table, k, v)
    pool.check_integrity()


# Growth and budget ------------------------------------------------------------------------------------------------

TOKEN_BYTES = 2 * (8 + 8) * 4  # of kv() in one layer
BLOCK_BYTES = 4 * TOKEN_BYTES


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
        "peak_bytes_in_use": 0,
        "shrinks": 0,
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
    assert stats.bytes_in_use == stats.peak_bytes_in_use == 2 * 2 * BLOCK_BYTES + 2 * BLOCK_BYTES
    assert stats.bytes_reserved == stats.bytes_in_use + 3 * BLOCK_BYTES  # a null block in each layer
    pool.append_tokens(fork, 1)
    assert pool.stats().cow_forks == 1
    assert pool.stats().live_blocks + pool.stats().free_blocks == pool.stats().total_blocks
    assert pool.stats().peak_live_blocks == 5
    pool.release_table(tables[0])
    assert (pool.stats().live_blocks, pool.stats().peak_live_blocks) == (4, 5)
    assert "4 tokens" in str(stats) and "4 live (peak 4, 2 shared)" in str(stats)


# Bad input: a typed error, and everything as before -----------------------------------------------------------------


class Watched:
    """A pool with a sequence in it, to see that an error changes nothing and that life goes on."""

    def __init__(self, **options: Any) -> None:
        self.pool = pool_of(layers=2, **options)
        self.table = self.pool.new_table()
        self.pool.append_tokens(self.table, 6)
        self.parts = [kv(layer, 6) for layer in range(2)]
        for layer in range(2):
            self.pool.write_prefill(self.table, layer, *self.parts[layer])

    def picture(self) -> tuple[Any, ...]:
        table = self.table
        return self.pool.stats(), list(table.block_ids), table.length, table.logical_start, table.ring_origin

    def assert_unchanged(self, picture: tuple[Any, ...]) -> None:
        assert self.picture() == picture
        for layer in range(2):
            assert_holds(self.pool, self.table, *self.parts[layer], layer)
        self.pool.check_integrity()

    def go_on(self) -> None:
        self.pool.append_tokens(self.table, 2)
        for layer in range(2):
            more = kv(50 + layer, 2)
            self.pool.write_prefill(self.table, layer, *more)
            assert_holds(self.pool, self.table, *joined(self.parts[layer], more), layer)
        self.pool.check_integrity()


ONE, TWO = kv(1, 1), kv(1, 2)
BAD_WRITES: dict[str, tuple[mx.array, mx.array, str]] = {
    "rank 3": (TWO[0][0], TWO[1][0], r"must be \[batch, n_kv_heads, tokens, head_dim\]"),
    "rank 5": (TWO[0][None], TWO[1][None], "must be"),
    "rank 0": (mx.array(1.0), mx.array(1.0), "must be"),
    "values of rank 3": (TWO[0], TWO[1][0], "must be"),
    "batch": (*kv(1, 2, batch=2), r"2 sequence\(s\), 1 expected"),
    "empty batch": (TWO[0][:0], TWO[1][:0], r"0 sequence\(s\), 1 expected"),
    "heads": (*kv(1, 2, heads=3), "holds"),
    "key head dim": (*kv(1, 2, kd=16), "holds"),
    "value head dim": (*kv(1, 2, vd=4), "holds"),
    "dtype": (*kv(1, 2, dtype=mx.float16), "holds"),
    "dtypes differ": (TWO[0], TWO[1].astype(mx.float16), "keys are mlx.core.float32, values mlx.core.float16"),
    "integers": (TWO[0].astype(mx.int32), TWO[1].astype(mx.int32), "floating point"),
    "heads of values": (TWO[0], kv(1, 2, heads=1)[1], "differ in batch, heads or tokens"),
    "tokens of values": (TWO[0], ONE[1], "differ in batch, heads or tokens"),
    "batch of values": (TWO[0], kv(1, 2, batch=2)[1], "differ in batch, heads or tokens"),
    "more tokens than reserved": (*kv(1, 7), "7 tokens to write, only 6 reserved"),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_keys_and_values_that_do_not_fit_are_refused(case: str) -> None:
    k, v, message = BAD_WRITES[case]
    watched = Watched()
    before = watched.picture()
    with pytest.raises(GeometryError, match=message):
        watched.pool.write_prefill(watched.table, 0, k, v)
    watched.assert_unchanged(before)
    watched.go_on()


@pytest.mark.parametrize("case", BAD_WRITES)
def test_a_refused_first_write_does_not_fix_the_geometry(case: str) -> None:
    k, v, _ = BAD_WRITES[case]
    if case in ("heads", "key head dim", "value head dim", "dtype"):
        pytest.skip("any of these is fine as the first")
    pool = pool_of()
    table = pool.new_table()
    pool.append_tokens(table, 6)
    with pytest.raises(GeometryError):
        pool.write_prefill(table, 0, k, v)
    other = kv(3, 6, heads=5, kd=4, vd=12, dtype=mx.bfloat16)
    pool.write_prefill(table, 0, *other)
    assert_holds(pool, table, *other)


def test_decode_takes_one_token_for_each_table() -> None:
    watched = Watched()
    pool, table = watched.pool, watched.table
    before = watched.picture()
    with pytest.raises(GeometryError, match="one token per sequence, not 2"):
        pool.write_decode([table], 0, *kv(1, 2))
    with pytest.raises(GeometryError, match=r"2 sequence\(s\), 1 expected"):
        pool.write_decode([table], 0, *kv(1, 1, batch=2))
    other = pool.new_table()
    with pytest.raises(GeometryError, match=r"1 sequence\(s\), 2 expected"):
        pool.write_decode([table, other], 0, *kv(1, 1))
    with pytest.raises(GeometryError, match="only 0 reserved"):
        pool.write_decode([table, other], 0, *kv(1, 1, batch=2))
    watched.assert_unchanged(before)
    watched.go_on()


def test_a_layer_of_another_group_is_refused() -> None:
    pool = BlockPool([LayerGroup((0,)), LayerGroup((1,), 8, "window")], block_size=4)
    tables = [pool.new_table(0), pool.new_table(1)]
    parts = [kv(1, 6), kv(2, 6)]
    for layer, table in enumerate(tables):
        pool.append_tokens(table, 6)
        pool.write_prefill(table, layer, *parts[layer])
    with pytest.raises(GeometryError, match="layer 1 is not of the table's group 0"):
        pool.write_prefill(tables[0], 1, *kv(3, 6))
    with pytest.raises(GeometryError, match="layer 0 is not of the table's group 1"):
        pool.write_decode([tables[1]], 0, *kv(3, 1))
    with pytest.raises(GeometryError, match="layer 1 is not of the table's group 0"):
        pool.gather_visible(tables[0], 1)
    for layer, table in enumerate(tables):
        assert_holds(pool, table, *parts[layer], layer)


def test_block_double_release_and_retain_of_a_free_block() -> None:
    watched = Watched()
    pool = watched.pool
    (block,) = pool.allocate(0, 1)
    pool.release(0, [block])
    before = watched.picture()
    for action in (pool.release, pool.retain):
        with pytest.raises(BlockStateError, match=f"block {block} re.* while free"):
            action(0, [block])
        with pytest.raises(BlockStateError, match="while free"):
            action(0, [watched.table.block_ids[0], block])
    watched.assert_unchanged(before)
    watched.go_on()


def test_use_after_release_and_double_release_of_a_table() -> None:
    watched = Watched()
    pool = watched.pool
    gone = pool.fork(watched.table)
    pool.release_table(gone)
    assert gone.released and not gone.block_ids
    before = watched.picture()
    uses: list[Callable[[], object]] = [
        lambda: pool.release_table(gone),
        lambda: pool.append_tokens(gone, 1),
        lambda: pool.fork(gone),
        lambda: pool.trim(gone, 1),
        lambda: pool.copy_on_write_block(gone, 0),
        lambda: pool.write_prefill(gone, 0, *kv(1, 2)),
        lambda: pool.write_decode([gone], 0, *kv(1, 1)),
        lambda: pool.write_decode([watched.table, gone], 0, *kv(1, 1, batch=2)),
        lambda: pool.gather_visible(gone, 0),
    ]
    for use in uses:
        with pytest.raises(BlockStateError, match="after release, or of another pool"):
            use()
    watched.assert_unchanged(before)
    watched.go_on()


def test_a_table_of_another_pool_is_refused() -> None:
    watched, other = Watched(), Watched()
    before, before_other = watched.picture(), other.picture()
    pool, foreign = watched.pool, other.table
    uses: list[Callable[[], object]] = [
        lambda: pool.release_table(foreign),
        lambda: pool.append_tokens(foreign, 1),
        lambda: pool.fork(foreign),
        lambda: pool.trim(foreign, 1),
        lambda: pool.copy_on_write_block(foreign, 0),
        lambda: pool.write_prefill(foreign, 0, *kv(1, 2)),
        lambda: pool.gather_visible(foreign, 0),
    ]
    for use in uses:
        with pytest.raises(BlockStateError, match="of another pool"):
            use()
    watched.assert_unchanged(before)
    other.assert_unchanged(before_other)
    watched.go_on()
    other.go_on()


def test_writing_to_a_shared_block_without_append_is_refused() -> None:
    watched = Watched()
    pool = watched.pool
    fork = pool.fork(watched.table)
    before = watched.picture()
    with pytest.raises(BlockStateError, match="is to be written but held 2 times"):
        pool.write_prefill(watched.table, 0, *kv(9, 2))
    with pytest.raises(BlockStateError, match="is to be written but held 2 times"):
        pool.write_decode([fork], 0, *kv(9, 1))
    watched.assert_unchanged(before)
    for layer in range(2):
        assert_holds(pool, fork, *watched.parts[layer], layer)
    watched.go_on()


def test_writing_behind_the_window_is_refused() -> None:
    pool = pool_of(window=4)
    table = pool.new_table()
    put(pool, table, 1, 12)
    last = put(pool, table, 2, 1)
    with pytest.raises(BlockStateError, match="block 0 is to be written"):
        pool.write_prefill(table, 0, *kv(3, 13))
    assert_holds(pool, table, *joined(tuple(x[:, :, -3:] for x in kv(1, 12)), last))


@pytest.mark.parametrize("n", [0, -1])
def test_appending_no_tokens_is_refused(n: int) -> None:
    watched = Watched()
    before = watched.picture()
    with pytest.raises(ValueError, match="at least one token"):
        watched.pool.append_tokens(watched.table, n)
    watched.assert_unchanged(before)


def test_reading_what_was_never_written_is_refused() -> None:
    pool = pool_of()
    table = pool.new_table()
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.gather_visible(table, 0)
    pool.append_tokens(table, 3)
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.gather_visible(table, 0)


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


# Exhaustion -----------------------------------------------------------------------------------------------------------


def test_exhaustion_in_append_tokens() -> None:
    budget = 2 * 8 * BLOCK_BYTES  # two layers; the null block and seven more
    watched = Watched(memory_budget=budget)
    pool, table = watched.pool, watched.table
    other = pool.new_table()
    pool.append_tokens(other, 16)  # 2 + 4 of 7 blocks
    before, other_ids = watched.picture(), list(other.block_ids)
    with pytest.raises(PoolExhaustedError) as caught:
        pool.append_tokens(table, 11)  # 17 tokens: 3 more blocks, and only one still fits
    error = caught.value
    assert (error.blocks_needed, error.bytes_needed) == (3, 3 * 2 * BLOCK_BYTES)
    assert (error.budget_bytes, error.bytes_reserved) == (budget, before[0].bytes_reserved)
    for number in (error.bytes_needed, error.budget_bytes, error.budget_bytes - error.bytes_reserved):
        assert f"{number:,}" in str(error)
    assert "3 more block(s)" in str(error) and "--kv-cache-memory" in str(error)
    assert isinstance(error, MemoryError)
    watched.assert_unchanged(before)
    assert other.block_ids == other_ids and other.length == 16
    pool.trim(other, 8)
    pool.append_tokens(table, 11)
    more = kv(20, 11)
    pool.write_prefill(table, 1, *more)
    assert_holds(pool, table, *joined(watched.parts[1], more), 1)
    pool.check_integrity()


def test_exhaustion_behind_a_window_keeps_the_window() -> None:
    pool = pool_of(window=5, memory_budget=5 * BLOCK_BYTES)
    table = pool.new_table()
    k, v = put(pool, table, 1, 16)
    with pytest.raises(PoolExhaustedError):
        pool.append_tokens(table, 30)
    assert table.length == 16
    assert_holds(pool, table, k[:, :, 12:], v[:, :, 12:])
    more = put(pool, table, 2, 8)
    assert_holds(pool, table, *joined((k[:, :, 12:], v[:, :, 12:]), more))
    pool.check_integrity()


def test_exhaustion_at_set_geometry() -> None:
    pool = pool_of(memory_budget=4 * BLOCK_BYTES)
    table, other = pool.new_table(), pool.new_table()
    pool.append_tokens(table, 6)
    pool.append_tokens(other, 5)
    k, v = kv(1, 6)
    before = pool.stats()
    for write in (lambda: pool.set_geometry(0, k, v, batch=1), lambda: pool.write_prefill(table, 0, k, v)):
        with pytest.raises(PoolExhaustedError) as caught:
            write()
        assert (caught.value.bytes_needed, caught.value.budget_bytes) == (4 * BLOCK_BYTES, 4 * BLOCK_BYTES)
        assert caught.value.bytes_reserved == BLOCK_BYTES, "the null block, which is nobody's need"
        assert pool.stats() == before
    pool.trim(other, 1)  # its second block goes
    pool.write_prefill(table, 0, k, v)
    assert_holds(pool, table, k, v)
    assert pool.stats().bytes_reserved <= pool.memory_budget
    pool.check_integrity()


def test_blocks_reserved_before_the_geometry_cost_no_more_than_needed() -> None:
    pool = pool_of(memory_budget=3 * BLOCK_BYTES)
    table = pool.new_table()
    pool.append_tokens(table, 1)
    pool.append_tokens(table, 5)
    k, v = kv(1, 6)
    pool.write_prefill(table, 0, k, v)
    assert pool.stats().bytes_reserved == 3 * BLOCK_BYTES
    assert_holds(pool, table, k, v)


@pytest.mark.parametrize("through", ["append_tokens", "copy_on_write_block"])
def test_exhaustion_in_copy_on_write(through: str) -> None:
    watched = Watched(memory_budget=2 * 4 * BLOCK_BYTES)
    pool = watched.pool
    fork = pool.fork(watched.table)
    spare = pool.new_table()
    pool.append_tokens(spare, 4)
    before, ids = watched.picture(), list(fork.block_ids)

    def fork_off() -> None:
        if through == "append_tokens":
            pool.append_tokens(fork, 1)
        else:
            pool.copy_on_write_block(fork, 1)

    with pytest.raises(PoolExhaustedError) as caught:
        fork_off()
    assert (caught.value.blocks_needed, caught.value.bytes_needed) == (1, 2 * BLOCK_BYTES)
    assert fork.block_ids == ids and fork.length == 6
    watched.assert_unchanged(before)
    pool.release_table(spare)
    fork_off()
    assert fork.block_ids[0] == ids[0] and fork.block_ids[1] != ids[1]
    assert pool.stats().cow_forks == 1
    watched.go_on()


def _fail(*_: Any) -> None:
    raise RuntimeError("the device failed")


def test_blocks_whose_memory_cannot_be_had_after_all_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()
    table = pool.new_table()
    put(pool, table, 1, 6)
    held = pool.stats().live_blocks
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", _fail)  # what was built in the turn is found to fail at its end
        with pytest.raises(RuntimeError, match="device"):
            pool.allocate(0, pool.stats().total_blocks)
    assert pool.stats().live_blocks == held
    pool.check_integrity()
    pool.release(0, pool.allocate(0, pool.stats().total_blocks))


def test_a_copy_of_a_shared_block_that_fails_leaves_no_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()
    table = pool.new_table()
    k, v = put(pool, table, 1, 6)
    fork = pool.fork(table)
    for storage in pool.groups[0].storages:
        monkeypatch.setattr(storage, "copy_blocks", _fail)
    with pytest.raises(RuntimeError, match="device"):
        pool.copy_on_write_block(fork, 1)
    pool.check_integrity()
    assert fork.block_ids == table.block_ids
    assert_holds(pool, fork, k, v)


def test_exhausted_pool_takes_blocks_of_dropped_tables() -> None:
    pool = pool_of(memory_budget=3 * BLOCK_BYTES)
    table = pool.new_table()
    put(pool, table, 1, 8)
    del table
    gc.collect()
    again = pool.new_table()
    k, v = put(pool, again, 2, 8)
    assert_holds(pool, again, k, v)
    assert pool.stats().live_blocks == 2


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
    [[], [LayerGroup(())], [LayerGroup((0, 1)), LayerGroup((1, 2), 8)], [LayerGroup((3, 3))]],
    ids=["none", "no layers", "layer in two groups", "layer twice"],
)
def test_each_layer_belongs_to_one_group(groups: list[LayerGroup]) -> None:
    with pytest.raises(ConfigError, match="exactly one group"):
        BlockPool(groups)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_holds_at_least_one_token(window: int) -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        pool_of(window=window)


# Stale and free slots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_in_free_and_stale_slots_never_shows(dtype: mx.Dtype) -> None:
    def poison(n: int, batch: int = 1) -> mx.array:
        return mx.full((batch, 2, n, 8), float("nan"), dtype)

    pool = pool_of()
    for _ in range(2):  # fill every block with NaN, the tail of a sequence that goes on too
        filler = pool.new_table()
        pool.append_tokens(filler, 80)
        pool.write_prefill(filler, 0, poison(80), poison(80))
        pool.release_table(filler)
    assert pool.stats().live_blocks == 0
    storage = pool.groups[0].storages[0]
    storage._keys[:, 0], storage._values[:, 0] = float("nan"), float("nan")

    tables = [pool.new_table() for _ in range(2)]
    histories = [[put(pool, table, i, n, dtype=dtype)] for i, (table, n) in enumerate(zip(tables, (6, 9), strict=True))]
    for table in tables:  # stale slots behind the end of the last block, and a whole stale block
        pool.append_tokens(table, 5)
        pool.write_prefill(table, 0, poison(5), poison(5))
        pool.trim(table, 5)
    for step in range(5):
        for table in tables:
            pool.append_tokens(table, 1)
        k, v = kv(20 + step, 1, batch=2, dtype=dtype)
        pool.write_decode(tables, 0, k, v)
        for row, history in enumerate(histories):
            history.append((k[row : row + 1], v[row : row + 1]))
        q = noise(step, 2, 4, 1, 8, dtype=dtype)
        got = paged_attention(q, pool, 0, tables, scale=0.3)
        for row, (table, history) in enumerate(zip(tables, histories, strict=True)):
            assert_holds(pool, table, *joined(*history))
            dense = mx.fast.scaled_dot_product_attention(q[row : row + 1], *joined(*history), scale=0.3)
            np.testing.assert_array_equal(bits(got[row : row + 1]), bits(dense))
        assert mx.all(mx.isfinite(got)).item()


def test_copy_on_write_of_a_block_with_stale_slots_reads_clean() -> None:
    pool = pool_of()
    table = pool.new_table()
    k, v = put(pool, table, 1, 8)
    nan = mx.full((1, 2, 2, 8), float("nan"))
    pool.write_prefill(table, 0, nan, nan)
    pool.trim(table, 2)
    fork = pool.fork(table)
    more = put(pool, fork, 2, 1)
    assert pool.stats().cow_forks == 1
    assert_holds(pool, fork, *joined((k[:, :, :6], v[:, :, :6]), more))
    q = noise(3, 1, 4, 1, 8)
    assert mx.all(mx.isfinite(paged_attention(q, pool, 0, [fork], scale=0.3))).item()


# Integrity ------------------------------------------------------------------------------------------------------------


def test_check_integrity_sees_tables_and_tensors_that_do_not_agree() -> None:
    def damaged(damage: Callable[[BlockPool, BlockTable], object]) -> BlockPool:
        pool = pool_of(window=5)
        table = pool.new_table()
        put(pool, table, 1, 10)
        put(pool, table, 2, 1)
        pool.check_integrity()
        damage(pool, table)
        keep.append(table)
        return pool

    keep: list[BlockTable] = []
    cases: list[tuple[Callable[[BlockPool, BlockTable], object], str]] = [
        (lambda pool, table: table.block_ids.pop(), "reference counts differ"),
        (lambda pool, table: setattr(table, "length", 13), "has 3 entries"),
        (lambda pool, table: setattr(table, "logical_start", 0), "still visible"),
        (lambda pool, table: pool.groups[0].storages[0].resize(40), "differ in number"),
        (lambda pool, table: pool.groups[0].allocator.grow(40), "differ in number"),
        (lambda pool, table: pool.allocate(0, 1), "reference counts differ"),
    ]
    for damage, message in cases:
        with pytest.raises(BlockStateError, match=message):
            damaged(damage).check_integrity()
