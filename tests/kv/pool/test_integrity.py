"""Free and stale slots never show; check_integrity sees what does not agree."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.attention.dispatch import paged_attention
from mlx_paged.errors import BlockStateError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.storage.attention_params import AttentionParams
from tests.support.pools import DTYPES, assert_holds, bits, joined, kv, noise, pool_of, put


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
