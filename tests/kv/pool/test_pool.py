"""BlockPool: growth, reads, writes to shared blocks, windows and its own check."""

import gc
import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import BlockStateError, ConfigError, PoolExhaustedError, TrimError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.geometry import AttentionParams
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.new_tokens import NewTokens
from mlx_paged.kv.pool import BlockPool
from tests.support.cases import quick
from tests.support.pools import (
    BLOCK_BYTES,
    DTYPES,
    Watched,
    assert_holds,
    bits,
    joined,
    kv,
    noise,
    paged_attention,
    pool_of,
    put,
    scatter_free_blocks,
)

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


def test_write_replaces_only_the_last_reserved_tokens() -> None:
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
    block_bytes = 4 * layers * kv_heads * (dim + vdim) * 4
    pool = pool_of(layers=layers, memory_budget=36 * block_bytes)  # too few to be consecutive
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
                got = paged_attention(q, pool, layer, [sequence.table], AttentionParams(scale))
            assert got.shape == expected.shape and mx.any(expected != 0).item()
            squares += mx.sum(mx.square(got - expected)).item()
            values += got.size
    ids = sequence.table.block_ids[0]
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
    assert (table.length, table.num_blocks(0), pool.stats().live_blocks) == (10 - n, blocks, blocks)
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
    before = (pool.stats(), list(table.block_ids[0]), table.length)
    with pytest.raises(TrimError, match="cannot trim to 9 tokens: the next token sees positions from 5 on"):
        pool.trim(table, 4)
    assert (pool.stats(), list(table.block_ids[0]), table.length) == before
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
    assert table.num_blocks(0) == 4


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
    with pytest.raises(ConfigError, match=f"window must be at least 1, got {window}"):
        pool_of(window=window)


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
    pool.write(0, [table], k, v)
    assert table.num_blocks(0) == 1250
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


def test_a_group_takes_its_part_of_the_budget_and_leaves_the_others_theirs() -> None:
    pool = BlockPool([LayerGroup((0,)), LayerGroup((1,), 8, "window")], block_size=4, memory_budget=40 * BLOCK_BYTES)
    k, v = kv(0, 1)
    pool.set_geometry(0, k, v, batch=1)
    pool.set_geometry(1, k, v, batch=1)
    most = pool.memory.capacities()
    assert sum(most) == 40 and min(most) > 10
    for group in (1, 0):
        pool.allocate(group, most[group] - 1)
        with pytest.raises(PoolExhaustedError) as caught:
            pool.allocate(group, 1)
        assert caught.value.budget_bytes == caught.value.bytes_reserved == most[group] * BLOCK_BYTES
    assert pool.stats().bytes_reserved == pool.memory_budget


def test_stats_count_blocks_and_bytes() -> None:
    pool = BlockPool([LayerGroup((0, 1)), LayerGroup((2,), 8, "window")], block_size=4, memory_budget=1 << 20)
    assert {name: n for name, n in pool.stats().as_dict().items() if n} == {"block_size": 4, "budget_bytes": 1 << 20}
    k, v = kv(0, 6)
    table = pool.new_table()
    pool.append_tokens(table, 6)
    for layer in range(3):
        pool.write_prefill(table, layer, k, v)
    fork = pool.fork(table)
    stats = pool.stats()
    assert (stats.live_blocks, stats.shared_blocks, stats.free_blocks) == (4, 4, 0)
    assert (stats.quantized_layers, stats.dense_layers, stats.bytes_per_token) == (0, 3, 3 * BLOCK_BYTES // 4)
    assert stats.bytes_in_use == stats.peak_bytes_in_use == 2 * 2 * BLOCK_BYTES + 2 * BLOCK_BYTES
    assert stats.bytes_reserved == stats.bytes_in_use + 3 * BLOCK_BYTES  # a null block in each layer
    pool.append_tokens(fork, 1)
    assert pool.stats().cow_forks == 2
    assert pool.stats().live_blocks + pool.stats().free_blocks == pool.stats().total_blocks
    assert pool.stats().peak_live_blocks == 6
    pool.release_table(table)
    assert (pool.stats().live_blocks, pool.stats().peak_live_blocks) == (4, 6)
    assert "4 tokens" in str(stats) and "4 live (peak 4, 4 shared)" in str(stats)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_garbage_in_free_and_stale_slots_is_never_read(dtype: mx.Dtype) -> None:
    def poison(n: int, batch: int = 1) -> mx.array:
        return mx.full((batch, 2, n, 8), float("nan"), dtype)

    pool = pool_of()
    put(pool, kept := pool.new_table(), 0, 1, dtype=dtype)  # keeps the tensors
    for _ in range(2):  # fill every other block with NaN
        filler = pool.new_table()
        pool.append_tokens(filler, 80)
        pool.write_prefill(filler, 0, poison(80), poison(80))
        pool.release_table(filler)
    assert pool.stats().live_blocks == kept.num_blocks(0)
    storage = pool.groups[0].blocks[0]
    null = pool.new_table()
    null.block_ids[0][:], null.length = [0], 4
    tokens = NewTokens([null], (4,))
    tokens.begin(0, storage.num_blocks)
    storage.write(tokens, poison(4), poison(4))

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
        pool.write(0, tables, k, v)
        for row, history in enumerate(histories):
            history.append((k[row : row + 1], v[row : row + 1]))
        q = noise(step, 2, 4, 1, 8, dtype=dtype)
        got = paged_attention(q, pool, 0, tables, AttentionParams(0.3))
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
    assert mx.all(mx.isfinite(paged_attention(q, pool, 0, [fork], AttentionParams(0.3)))).item()


def test_check_integrity_detects_tables_and_tensors_that_disagree() -> None:
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
        (lambda pool, table: table.block_ids[0].pop(), "reference counts differ"),
        (lambda pool, table: setattr(table, "length", 13), "must have 4 block ids, got 3"),
        (lambda pool, table: setattr(table, "starts", [0]), "still visible"),
        (lambda pool, table: pool.groups[0].blocks[0].resize(40), "have 40 blocks, the allocator"),
        (lambda pool, table: pool.groups[0].allocator.grow(40), "the allocator 40"),
        (lambda pool, table: pool.allocate(0, 1), "reference counts differ"),
    ]
    for damage, message in cases:
        with pytest.raises(BlockStateError, match=message):
            damaged(damage).check_integrity()


def test_write_prefill_cow_forks_shared_partial_tail_block() -> None:
    pool = pool_of()
    first = pool.new_table()
    prefix = put(pool, first, 1, 6)
    second = pool.fork(first)
    assert second.block_ids[0] == first.block_ids[0]
    assert (pool.stats().shared_blocks, pool.stats().live_blocks, pool.stats().cow_forks) == (2, 2, 0)
    full, tail = first.block_ids[0]

    mine = put(pool, first, 2, 3)  # shared: the writer copies the tail block
    assert pool.stats().cow_forks == 1
    assert first.block_ids[0][0] == full and first.block_ids[0][1] != tail
    assert second.block_ids[0] == [full, tail]
    assert pool.stats().shared_blocks == 1

    other = put(pool, second, 3, 3)  # sole owner by now: no copy
    assert pool.stats().cow_forks == 1
    assert second.block_ids[0][:2] == [full, tail]

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
        pool.write(layer, [first, second, third], *tokens[layer])
    for row, table in enumerate((first, second, third)):
        for layer in range(3):
            token = tuple(x[row : row + 1] for x in tokens[layer])
            assert_holds(pool, table, *joined(prefix[layer], token), layer)
    pool.check_integrity()


@pytest.mark.parametrize("how", ["release", "drop"])
def test_block_once_shared_with_a_released_table_is_not_copied(how: str) -> None:
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


def test_write_succeeds_after_a_fork_is_dropped() -> None:
    pool = pool_of()
    table = pool.new_table()
    pool.append_tokens(table, 6)
    fork = pool.fork(table)
    del fork
    gc.collect()
    k, v = kv(1, 6)
    pool.write_prefill(table, 0, k, v)
    assert_holds(pool, table, k, v)


@pytest.mark.parametrize(
    ("window", "block_size", "step"), quick([(*a, b) for a in [(5, 4), (8, 4), (64, 8)] for b in [1, 7]], (5, 4, 1),
    (8, 4, 7))
)  # fmt: skip
def test_sliding_window_holds_a_bounded_number_of_blocks(window: int, block_size: int, step: int) -> None:
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
            pool.write(0, [table], k, -k)
        else:
            pool.write_prefill(table, 0, k, -k)
        written += step
        most = max(most, table.num_blocks(0))
        visible = min(written, window - 1 + step)
        assert table.length - table.starts[0] == visible
        if written % 23 == 0 or written < 4 * window:
            got_k, got_v = pool.gather_visible(table, 0)
            np.testing.assert_array_equal(np.array(got_k), history[:, :, written - visible : written])
            np.testing.assert_array_equal(np.array(got_v), -history[:, :, written - visible : written])
    assert most <= bound
    assert pool.stats().live_blocks <= bound
    assert pool.stats().total_blocks <= 2 * max(16, bound)  # blocks are reused, not added
    pool.check_integrity()


@pytest.mark.parametrize("start", [4, 5, 7, 8])
def test_table_can_start_at_a_position_above_zero(start: int) -> None:
    pool = pool_of(window=6)
    table = pool.table_over([[0] * (start // 4)], start, [start])
    pool.check_integrity()
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.gather_visible(table, 0)
    k, v = put(pool, table, 1, 3)
    assert (table.length, table.starts[0]) == (start + 3, start)
    assert_holds(pool, table, k, v)
    pool.check_integrity()


@pytest.mark.parametrize("window", [None, 5, 8])
def test_append_token_to_many_tables_equals_appending_to_each(window: int | None) -> None:
    pool = pool_of(window=window, block_size=4)
    one_by_one, together = [], []
    for length in range(1, 19):
        for tables in (one_by_one, together):
            table = pool.new_table()
            put(pool, table, length, length)
            tables.append(table)
    for _ in range(9):
        for table in one_by_one:
            pool.append_tokens(table, 1)
        full = [index for index, table in enumerate(together) if table.length % 4 == 0]
        others = pool.append_token(together)
        assert others == full
        for index in others:
            pool.append_tokens(together[index], 1)
        for a, b in zip(one_by_one, together, strict=True):
            assert (a.length, a.starts[0], a.num_blocks(0)) == (b.length, b.starts[0], b.num_blocks(0))
        pool.check_integrity()


def test_append_token_skips_a_table_whose_tail_block_is_shared() -> None:
    pool = pool_of(window=6, block_size=4)
    table = pool.new_table()
    prefix = put(pool, table, 1, 10)
    fork = pool.fork(table)
    assert pool.append_token([table]) == [0]
    assert table.length == 10
    assert_holds(pool, fork, *prefix)


def test_integrity_can_be_checked_while_another_thread_drops_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped table is gone before its finalizer has given its blocks back."""
    pool = pool_of()
    checks: list[Future[None]] = []

    def finalizer(block_ids: list[list[int]]) -> None:
        checks.append(executor.submit(pool.check_integrity))
        wait(checks)
        abandon(block_ids)

    abandon = pool.lock.abandon
    monkeypatch.setattr(pool.lock, "abandon", finalizer)
    with ThreadPoolExecutor(1) as executor:
        table = pool.new_table()
        put(pool, table, 0, 5)
        del table
    (check,) = checks
    assert check.result() is None
    pool.check_integrity()
    assert pool.stats().live_blocks == 0
