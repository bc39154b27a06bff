"""BlockPool: options, growth, writes to shared blocks and its own check. Random histories are in
test_pool_properties.py."""

import gc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import mlx.core as mx
import pytest

from mlx_paged.errors import BlockStateError, ConfigError, PoolExhaustedError, TrimError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import (
    BLOCK_BYTES,
    DTYPES,
    Watched,
    assert_holds,
    joined,
    kv,
    pool_of,
    put,
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


@pytest.mark.parametrize("n", [7, 100, -1])
def test_trim_too_far_is_refused(n: int) -> None:
    watched = Watched()
    before = watched.picture()
    with pytest.raises(TrimError, match=f"cannot trim to {6 - n} tokens: the table has 6"):
        watched.pool.trim(watched.table, n)
    watched.assert_unchanged(before)
    watched.go_on()


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"block_size": n}, f"power of two from 4 to 128, not {n}") for n in (0, -4, 1, 2, 3, 5, 12, 100, 129, 256)),
        *(({"memory_budget": n}, f"must be positive, not {n}") for n in (0, -1)),
        *(({"window": n}, f"window must be at least 1, got {n}") for n in (0, -3)),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_of(**options)


@pytest.mark.parametrize(
    "groups",
    [[LayerGroup(())], [LayerGroup((0, 1)), LayerGroup((1, 2), 8)], [LayerGroup((3, 3))]],
    ids=["no layers", "layer in two groups", "layer twice"],
)
def test_each_layer_belongs_to_one_group(groups: list[LayerGroup]) -> None:
    with pytest.raises(ConfigError, match="exactly one group"):
        BlockPool(groups)


@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128])
def test_every_block_size_in_range_works(block_size: int) -> None:
    pool = pool_of(block_size=block_size)
    table = pool.new_table()
    parts = [put(pool, table, seed, n) for seed, n in enumerate((block_size - 1, 1, 1, 2 * block_size))]
    assert_holds(pool, table, *joined(*parts))
    assert table.num_blocks(0) == 4


def test_growth_of_a_large_pool_is_by_an_eighth() -> None:
    pool = pool_of(block_size=32)
    k, v = (mx.zeros((1, 8, 1, 128)) for _ in range(2))  # 256 KiB per block
    pool.set_geometry(0, k, v, batch=1)
    pool.allocate(0, 299)
    assert pool.stats().bytes_reserved > 16 << 20
    total = pool.stats().total_blocks + 1
    pool.allocate(0, total - 299)
    assert pool.stats().total_blocks + 1 == int(total * 1.125)


def test_growth_is_geometric_stays_within_the_budget_and_uses_all_of_it() -> None:
    pool = pool_of(layers=2, memory_budget=2 * BLOCK_BYTES * 1001 + 17)  # the null block and 1,000 more
    table, totals = pool.new_table(), set()
    pool.set_geometry(0, *kv(0, 1), batch=1)
    for _ in range(1000):
        pool.append_tokens(table, 4)
        totals.add(pool.stats().total_blocks)
        assert pool.stats().bytes_reserved <= pool.memory_budget
    assert pool.stats().free_blocks == 0 and 2 <= len(totals) <= 10
    with pytest.raises(PoolExhaustedError):
        pool.append_tokens(table, 1)


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
