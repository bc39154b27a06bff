"""Forks share blocks; who writes to a shared one writes to a copy."""

from __future__ import annotations

import gc

import pytest

from tests.support.pools import assert_holds, joined, kv, pool_of, put


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
