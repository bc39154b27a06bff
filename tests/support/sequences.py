"""Pools of two groups, one with a window, and sequences of random keys and values in them."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged import BlockPool, LayerGroup, PagedKVCache, SequenceTables
from mlx_paged.kv.blocks import blocks_choice

HEADS, KV_HEADS, DIM, BLOCK, WINDOW = 4, 2, 16, 8, 20
LAYERS = 3  # 0 and 2 global, 1 sliding
SCALE = DIM**-0.5
Parts = list[tuple[mx.array, mx.array, mx.array]]  # per layer: queries, keys, values


def pool_of(budget: int = 1 << 30, *, in_place: bool = False) -> BlockPool:
    groups = [LayerGroup((0, 2)), LayerGroup((1,), WINDOW, "window")]
    return BlockPool(groups, block_size=BLOCK, memory_budget=budget, choose_blocks=blocks_choice(in_place))


def parts_of(seed: int, batch: int, width: int = 1) -> Parts:
    """Return random queries, keys and values of each layer."""
    mx.random.seed(seed)
    shapes = [(batch, heads, width, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [tuple(mx.random.normal(shape) for shape in shapes) for _ in range(LAYERS)]  # type: ignore[misc]


def sequences(pool: BlockPool, lengths: Sequence[int]) -> list[SequenceTables]:
    """Return sequences that hold ``lengths`` random tokens."""
    rows = [SequenceTables(pool) for _ in lengths]
    for seed, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        for layer, (_, k, v) in enumerate(parts_of(seed, 1, length) if length else ()):
            PagedKVCache(row, layer).update(k, v)
    mx.eval(pool.ready())
    return rows


def caches_of(row: SequenceTables) -> list[PagedKVCache]:
    return [PagedKVCache(row, layer) for layer in range(LAYERS)]
