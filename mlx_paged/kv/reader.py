"""How one sequence's visible tokens are read: in place where its blocks are consecutive, else gathered."""

from __future__ import annotations

import mlx.core as mx

from .block_table import BlockTable
from .storage import FunctionalStorage


def read_visible(
    table: BlockTable, storage: FunctionalStorage, *, rotation: int = 0, copy: bool = False
) -> tuple[mx.array, mx.array]:
    """Keys and values of positions ``logical_start .. length - 1`` of one layer (lazy).

    Args:
        table: the sequence's table; caches the device indices, so that all layers of a step share them.
        storage: the layer's.
        rotation: start the order at this visible token and wrap around (0: by position).
        copy: never a view of the pool's buffer.

    Returns:
        K ``[1, n_kv_heads, n, k_head_dim]``, V ``[1, n_kv_heads, n, v_head_dim]``.
    """
    if rotation:
        return storage.gather_slots(_rotated_index(table, storage, rotation))
    size = table.block_size
    start, end = table.logical_start, table.length
    first, last = start // size, -(-end // size)
    block_ids = table.block_ids[first:last]
    if not copy and _consecutive(table, first, last):
        k, v = storage.view_blocks(block_ids[0], len(block_ids))
    else:
        key = ("blocks", first, last, storage.num_blocks)
        index = table._index_cache.get(key)
        if not isinstance(index, mx.array):
            index = table._index_cache[key] = storage.block_index(block_ids)
        k, v = storage.gather_blocks(index)
    skip = start - first * size
    return k[:, :, skip : skip + end - start], v[:, :, skip : skip + end - start]


def _consecutive(table: BlockTable, first: int, last: int) -> bool:
    key = ("consecutive", first, last)
    known = table._index_cache.get(key)
    if known is None:
        ids = table.block_ids
        known = table._index_cache[key] = all(ids[i + 1] == ids[i] + 1 for i in range(first, last - 1))
    return bool(known)


def _rotated_index(table: BlockTable, storage: FunctionalStorage, rotation: int) -> mx.array:
    start, end, size = table.logical_start, table.length, table.block_size
    key = ("rotated", start, end, rotation, storage.num_blocks)
    index = table._index_cache.get(key)
    if not isinstance(index, mx.array):
        table.forget_indices()  # one such index per step: the one before is of no use any more
        positions = mx.concatenate(
            [mx.arange(start + rotation, end, dtype=mx.int32), mx.arange(start, start + rotation, dtype=mx.int32)]
        )
        first = start // size
        block_ids = mx.array(table.block_ids[first:], dtype=mx.int32)
        index = storage.slot_index(block_ids[positions // size - first], positions % size)
        table._index_cache[key] = index
    return index
