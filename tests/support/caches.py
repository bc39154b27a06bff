"""Paged and dense caches of one sequence, their keys and values, and bitwise comparison."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged.cache.batch import Batch, NoBlocksError
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.composites import leaves, with_leaves
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support import pools
from tests.support.pools import bits

HEADS, KD, VD = 2, 8, 4


def kv(seed: int, n: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return pools.kv(seed, n, heads=HEADS, kd=KD, vd=VD, dtype=dtype)


def caches_of(
    *, layers: int = 1, window: int | None = None, block_size: int = 4, pool: BlockPool | None = None, **options: Any
) -> list[PagedKVCache]:
    pool = pool or BlockPool([LayerGroup(tuple(range(layers)), window)], block_size=block_size, **options)
    sequence = SequenceTables(pool)
    return [PagedKVCache(sequence, layer) for layer in range(layers)]


class OrderedRing(RotatingKVCache):
    """mlx-lm's rotating cache, whose keys and values are in order of position, not of its buffer."""

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = map(self._temporal_order, super().keys_and_values())
        return keys, values

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        mask: mx.array | str | None = super().make_mask(N, window_size=window_size, return_array=return_array)
        if N > 1 or not isinstance(mask, mx.array) or self.offset < self.max_size:
            return mask
        return mx.roll(mask, -1 - (0 if self._idx >= self.max_size else self._idx))


def dense_of(window: int | None) -> KVCache | RotatingKVCache:
    return KVCache() if window is None else OrderedRing(max_size=window)


def assert_same(got: tuple[mx.array, mx.array], expected: tuple[mx.array, mx.array]) -> None:
    for x, y in zip(got, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(bits(x), bits(y))


def filled(window: int | None = None, chunks: tuple[int, ...] = (6,), **options: Any) -> tuple[PagedKVCache, Any]:
    """Return a paged and a dense cache with the same tokens."""
    (paged,), dense = caches_of(window=window, **options), dense_of(window)
    for seed, n in enumerate(chunks):
        paged.update(*kv(seed, n))
        dense.update_and_fetch(*kv(seed, n))
    return paged, dense


def batch_over(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the caches of a decode step of forks of these prompt caches, whose tokens are reserved.

    Raises:
        PoolExhaustedError: there is no room for a row's token.
    """
    parts = [leaves(row) for row in rows]
    first = next(index for index, part in enumerate(parts[0]) if isinstance(part, PagedKVCache))
    batch = Batch(parts[0][first].pool, [copy.deepcopy(row[first].sequence) for row in parts])
    error = None
    try:
        batch.reserve()
    except NoBlocksError as lack:
        error = lack.error
    if error is not None:
        try:
            raise error
        finally:
            del error, batch, parts
    layers = [
        PagedBatchKVCache(batch, layer[0].layer) if isinstance(layer[0], PagedKVCache) else layer[0].merge(list(layer))
        for layer in zip(*parts, strict=True)
    ]
    return with_leaves(rows[0], layers)
