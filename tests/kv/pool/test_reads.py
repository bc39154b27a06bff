"""Reads that are waited for before the next write: until they are there, and without keeping what was read."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool

HEADS, DIM, LENGTH = 2, 64, 1000
SLACK = 4096  # scalars, and what MLX rounds sizes up to


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool([LayerGroup((0, 1))], block_size=8)
    table = pool.new_table()
    write(pool, table, LENGTH)
    return pool


def write(pool: BlockPool, table: BlockTable, num_tokens: int) -> None:
    pool.append_tokens(table, num_tokens)
    keys = mx.ones((1, HEADS, num_tokens, DIM))
    for layer in (0, 1):
        pool.write([table], layer, keys, keys)
    mx.eval([pool.fence(layer) for layer in (0, 1)])


def test_a_watched_read_is_there_after_the_wait(pool: BlockPool) -> None:
    table = pool.new_table()
    write(pool, table, LENGTH)
    mx.synchronize()
    before = mx.get_active_memory()
    keys, values = pool.layer(1).watch_read(*pool.gather_visible(table, 1))
    assert mx.get_active_memory() - before < SLACK  # nothing is computed for being watched
    pool.groups[0].wait_for_reads(1)
    assert mx.get_active_memory() - before >= keys.nbytes + values.nbytes
    assert keys.tolist() == mx.ones((1, HEADS, LENGTH, DIM)).tolist()


@pytest.mark.parametrize("used", ["keys", "values"])
def test_a_watched_read_is_not_kept(pool: BlockPool, used: str) -> None:
    table = pool.new_table()
    write(pool, table, LENGTH)
    mx.synchronize()
    before = mx.get_active_memory()
    keys, values = pool.layer(1).watch_read(*pool.gather_visible(table, 1))
    total = (keys if used == "keys" else values).sum()
    mx.eval(total)
    del keys, values
    assert pool.groups[0]._last_read is not None
    assert mx.get_active_memory() - before < SLACK


def test_only_the_last_layers_reads_are_watched(pool: BlockPool) -> None:
    keys, values = mx.zeros((1, HEADS, 3, DIM)), mx.ones((1, HEADS, 3, DIM))
    assert pool.layer(0).watch_read(keys, values) == (keys, values)
    assert pool.groups[0]._last_read is None
