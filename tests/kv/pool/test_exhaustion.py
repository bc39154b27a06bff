"""A full pool says what was missing, and everything is as before."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.errors import PoolExhaustedError
from tests.support.pools import BLOCK_BYTES, Watched, assert_holds, joined, kv, pool_of, put


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
