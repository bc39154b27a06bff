"""A pool refuses invalid arguments and requests beyond its budget before it changes anything."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.errors import BlockStateError, GeometryError, PoolExhaustedError
from mlx_paged.kv.blocks import BlocksChoice
from mlx_paged.kv.geometry import Geometry
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.host_blocks import HostBlocks
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import BLOCK_BYTES, Watched, assert_holds, joined, kv, pool_of, put

ONE, TWO = kv(1, 1), kv(1, 2)
BAD_WRITES: dict[str, tuple[mx.array, mx.array, str]] = {
    "rank 3": (TWO[0][0], TWO[1][0], r"must be \[batch, n_kv_heads, tokens, head_dim\]"),
    "rank 5": (TWO[0][None], TWO[1][None], "must be"),
    "rank 0": (mx.array(1.0), mx.array(1.0), "must be"),
    "values of rank 3": (TWO[0], TWO[1][0], "must be"),
    "batch": (*kv(1, 2, batch=2), r"1 sequence\(s\), got 2"),
    "empty batch": (TWO[0][:0], TWO[1][:0], r"1 sequence\(s\), got 0"),
    "heads": (*kv(1, 2, heads=3), "holds"),
    "key head dim": (*kv(1, 2, kd=16), "holds"),
    "value head dim": (*kv(1, 2, vd=4), "holds"),
    "dtype": (*kv(1, 2, dtype=mx.float16), "holds"),
    "dtypes differ": (TWO[0], TWO[1].astype(mx.float16), "one dtype, got mlx.core.float32 and mlx.core.float16"),
    "integers": (TWO[0].astype(mx.int32), TWO[1].astype(mx.int32), "floating point"),
    "heads of values": (TWO[0], kv(1, 2, heads=1)[1], "differ in batch, heads or tokens"),
    "tokens of values": (TWO[0], ONE[1], "differ in batch, heads or tokens"),
    "batch of values": (TWO[0], kv(1, 2, batch=2)[1], "differ in batch, heads or tokens"),
    "more tokens than reserved": (*kv(1, 7), "cannot write 7 tokens: only 6 reserved"),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_write_of_mismatched_keys_and_values_is_refused(case: str) -> None:
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


def test_write_requires_one_row_per_table() -> None:
    watched = Watched()
    pool, table = watched.pool, watched.table
    before = watched.picture()
    with pytest.raises(GeometryError, match=r"1 sequence\(s\), got 2"):
        pool.write(0, [table], *kv(1, 1, batch=2))
    other = pool.new_table()
    with pytest.raises(GeometryError, match=r"2 sequence\(s\), got 1"):
        pool.write(0, [table, other], *kv(1, 1))
    with pytest.raises(GeometryError, match="only 0 reserved"):
        pool.write(0, [table, other], *kv(1, 1, batch=2))
    watched.assert_unchanged(before)
    watched.go_on()


@pytest.mark.parametrize("problem", ["was released, or belongs to another pool", "belongs to another pool"])
def test_use_of_a_released_or_foreign_table_is_refused(problem: str) -> None:
    watched, other = Watched(), Watched()
    pool, bad = watched.pool, other.table
    if problem.startswith("was released"):
        bad = pool.fork(watched.table)
        pool.release_table(bad)
        assert bad.released and not bad.block_ids[0] and "released" in repr(bad)
    before, before_other = watched.picture(), other.picture()
    uses: list[Callable[[], object]] = [
        lambda: pool.release_table(bad),
        lambda: pool.append_tokens(bad, 1),
        lambda: pool.fork(bad),
        lambda: pool.trim(bad, 1),
        lambda: pool.write_prefill(bad, 0, *kv(1, 2)),
        lambda: pool.write(0, [bad], *kv(1, 1)),
        lambda: pool.write(0, [watched.table, bad], *kv(1, 1, batch=2)),
        lambda: pool.gather_visible(bad, 0),
        lambda: pool.tokens_of(0, [bad], 1),
    ]
    for use in uses:
        with pytest.raises(BlockStateError, match=problem):
            use()
    for each, picture in ((watched, before), (other, before_other)):
        each.assert_unchanged(picture)
        each.go_on()


def test_writing_to_a_shared_block_without_append_is_refused() -> None:
    watched = Watched()
    pool = watched.pool
    fork = pool.fork(watched.table)
    before = watched.picture()
    with pytest.raises(BlockStateError, match="it has 2 references, not 1"):
        pool.write_prefill(watched.table, 0, *kv(9, 2))
    with pytest.raises(BlockStateError, match="it has 2 references, not 1"):
        pool.write(0, [fork], *kv(9, 1))
    watched.assert_unchanged(before)
    for layer in range(2):
        assert_holds(pool, fork, *watched.parts[layer], layer)
    watched.go_on()


def test_writing_behind_the_window_is_refused() -> None:
    pool = pool_of(window=4)
    table = pool.new_table()
    put(pool, table, 1, 12)
    last = put(pool, table, 2, 1)
    with pytest.raises(BlockStateError, match="cannot write block 0"):
        pool.write_prefill(table, 0, *kv(3, 13))
    assert_holds(pool, table, *joined(tuple(x[:, :, -3:] for x in kv(1, 12)), last))


def test_appending_no_tokens_or_reading_before_any_write_is_refused() -> None:
    pool = pool_of()
    table = pool.new_table()
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.blocks_of(0)
    assert pool.ready(0) == []
    for reserved in (0, 3):
        with pytest.raises(BlockStateError, match="nothing has been written"):
            pool.gather_visible(table, 0)
        for n in (0, -1):
            with pytest.raises(ValueError, match=f"num_tokens must be at least 1, got {n}"):
                pool.append_tokens(table, n)
        assert table.length == reserved
        pool.append_tokens(table, 3)


def test_exhaustion_in_append_tokens() -> None:
    budget = 2 * 8 * BLOCK_BYTES  # two layers; the null block and seven more
    watched = Watched(memory_budget=budget)
    pool, table = watched.pool, watched.table
    other = pool.new_table()
    pool.append_tokens(other, 16)  # 2 + 4 of 7 blocks
    before, other_ids = watched.picture(), list(other.block_ids[0])
    with pytest.raises(PoolExhaustedError) as caught:
        pool.append_tokens(table, 11)  # 17 tokens: 3 more blocks, and only one is free
    error = caught.value
    assert (error.blocks_needed, error.bytes_needed) == (2, 2 * 2 * BLOCK_BYTES)
    assert (error.budget_bytes, error.bytes_reserved) == (budget, before[0].bytes_reserved)
    for number in (error.bytes_needed, error.budget_bytes, error.budget_bytes - error.bytes_reserved):
        assert f"{number:,}" in str(error)
    assert "2 more block(s)" in str(error) and "--kv-cache-memory" in str(error)
    assert isinstance(error, MemoryError)
    watched.assert_unchanged(before)
    assert other.block_ids[0] == other_ids and other.length == 16
    pool.trim(other, 8)
    pool.append_tokens(table, 11)
    more = kv(20, 11)
    pool.write_prefill(table, 1, *more)
    assert_holds(pool, table, *joined(watched.parts[1], more), 1)
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
        assert caught.value.bytes_reserved == BLOCK_BYTES, "only the null block is reserved"
        assert pool.stats() == before
    for each in (table, other):
        pool.release_table(each)
    pool.append_tokens(table := pool.new_table(), 6)
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


def _fail(*_: Any) -> None:
    raise RuntimeError("the device failed")


def test_allocation_that_fails_at_the_end_of_a_turn_frees_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()
    table = pool.new_table()
    put(pool, table, 1, 6)
    held = pool.stats().live_blocks
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", _fail)  # the turn evaluates its work at its end, which fails
        with pytest.raises(RuntimeError, match="device"):
            pool.allocate(0, pool.stats().total_blocks)
    assert pool.stats().live_blocks == held
    pool.check_integrity()
    pool.release(0, pool.allocate(0, pool.stats().total_blocks))


def test_failed_copy_of_a_shared_block_leaks_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()
    table = pool.new_table()
    k, v = put(pool, table, 1, 6)
    fork = pool.fork(table)
    for storage in pool.groups[0].blocks:
        monkeypatch.setattr(storage, "copy", _fail)
    with pytest.raises(RuntimeError, match="device"):
        pool.append_tokens(fork, 1)
    pool.check_integrity()
    assert fork.block_ids[0] == table.block_ids[0]
    assert_holds(pool, fork, k, v)


def test_failed_first_allocation_leaves_the_layer_unchanged() -> None:
    is_full = True

    def form(geometry: Geometry, block_size: int, num_blocks: int) -> HostBlocks:
        if is_full:
            raise RuntimeError("out of memory")
        return HostBlocks(geometry, block_size, num_blocks)

    pool = BlockPool([LayerGroup((0,))], block_size=4, choose_blocks=lambda *_: BlocksChoice(form, "chosen"))
    table, (k, v) = pool.new_table(), kv(0, 5)
    pool.append_tokens(table, 5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.write(0, [table], k, v)
    assert pool.groups[0].geometry is None and pool.groups[0].blocks_reason == "nothing written yet"
    is_full = False
    pool.write(0, [table], k, v)
    assert_holds(pool, table, k, v)
