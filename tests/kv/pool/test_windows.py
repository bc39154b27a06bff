"""A sliding window holds what is visible, and no more."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.errors import BlockStateError
from tests.support.pools import assert_holds, joined, pool_of, put


@pytest.mark.sample
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


@pytest.mark.parametrize("window", [None, 5, 8])
def test_a_position_for_each_of_many_is_what_each_would_append(window: int | None) -> None:
    pool = pool_of(window=window, block_size=4)
    one_by_one, together = [], []
    for length in range(1, 19):
        for tables in (one_by_one, together):
            table = pool.new_table()
            put(pool, table, length, length)
            tables.append(table)
    num_others = 0
    for _ in range(9):
        for table in one_by_one:
            pool.append_tokens(table, 1)
        # Only who needs another block is left; what fell behind the window is gone without that.
        full = [index for index, table in enumerate(together) if table.length % 4 == 0]
        others = pool.append_token(0, together)
        assert others == full
        num_others += len(others)
        for index in others:
            pool.append_tokens(together[index], 1)
        for a, b in zip(one_by_one, together, strict=True):
            assert (a.length, a.logical_start, a.num_blocks) == (b.length, b.logical_start, b.num_blocks)
        pool.check_integrity()
    assert num_others < 9 * len(together) / 2


def test_a_shared_block_is_left_alone_when_many_take_a_position() -> None:
    pool = pool_of(window=6, block_size=4)
    table = pool.new_table()
    prefix = put(pool, table, 1, 10)
    fork = pool.fork(table)
    assert pool.append_token(0, [table]) == [0]
    assert table.length == 10
    assert_holds(pool, fork, *prefix)
