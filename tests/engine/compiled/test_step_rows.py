"""Taking the rows of a compiled step: all layers or none."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.batch_tables import BatchTables
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.engine.compiled_step import StepRows, rows_of
from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool

BLOCK_BYTES = 2 * 4 * 2 * 8 * 4  # of two layers of keys and values


def full_pool() -> tuple[BlockPool, SequenceTables]:
    """Two groups of two layers, a sequence at a block's end, and one free block."""
    pool = BlockPool([LayerGroup((0, 1)), LayerGroup((2, 3))], block_size=4, memory_budget=5 * BLOCK_BYTES)
    x = mx.zeros((1, 1, 1, 8))
    for layer in (0, 2):
        pool.set_geometry(layer, x, x, batch=1)
    sequence = SequenceTables(pool)
    for layer in range(4):
        sequence.reserve(layer, 4)
    return pool, sequence


def caches_of(sequence: SequenceTables, batch: bool) -> list[Any]:
    if not batch:
        return [PagedKVCache(sequence, layer) for layer in range(4)]
    tables = BatchTables(sequence.pool, [sequence])
    return [PagedBatchKVCache(tables, layer) for layer in range(4)]


@pytest.mark.parametrize("batch", [False, True])
def test_layers_stay_where_they_are_if_a_group_has_no_block(batch: bool) -> None:
    pool, sequence = full_pool()
    caches = caches_of(sequence, batch)
    rows: StepRows | None = rows_of(caches)
    assert rows is not None
    before = [cache.offset if not batch else cache.batch.offsets(cache.layer) for cache in caches]
    with pytest.raises(PoolExhaustedError):
        rows.reserve(caches)
    assert [cache.offset if not batch else cache.batch.offsets(cache.layer) for cache in caches] == before
    pool.check_integrity()
