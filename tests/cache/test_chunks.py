"""Caches of layers with chunked attention: masks, batched rows, trims and refusals."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.cache.batch import Batch
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import ConfigError, GeometryError, TrimError
from mlx_paged.kv.geometry import AttentionParams, Window
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool

DIM, CHUNK = 16, 10


def make_pool(chunk: int = CHUNK, block_size: int = 4) -> BlockPool:
    return BlockPool([LayerGroup((0,), chunk, stride=chunk)], block_size=block_size)


def keys_of(length: int, seed: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((1, 2, length, DIM)).astype(np.float32))


def expected(x: mx.array, first: int, chunk: int) -> np.ndarray:
    """Return MLX's attention under an array mask for the tokens from ``first`` on; keys serve as queries and values."""
    position = np.arange(x.shape[2])
    mask = (position[None] <= position[:, None]) & (position[None] // chunk == position[:, None] // chunk)
    out = mx.fast.scaled_dot_product_attention(x, x, x, scale=0.25, mask=mx.array(mask))
    return np.array(out)[:, :, first:]


@pytest.mark.parametrize("chunk", [1, 2, 8, 10])
@pytest.mark.parametrize("lengths", [[1, 5, 13, 1, 1, 30, 9], [40], [10, 10, 1, 9], [3] * 12])
def test_every_write_attends_to_its_chunk(chunk: int, lengths: list[int]) -> None:
    pool = make_pool(chunk)
    cache, x, done = PagedKVCache(SequenceTables(pool), 0), keys_of(sum(lengths), 0), 0
    for count in lengths:
        new = x[:, :, done : done + count]
        mask = cache.make_mask(count)
        if done % 2:
            out = cache.attend(new, new, new, AttentionParams(0.25, mask))
        else:  # as the seam does
            keys, values = cache.update_and_fetch(new, new)
            out = mx.fast.scaled_dot_product_attention(new, keys, values, scale=0.25, mask=mask)
        np.testing.assert_allclose(np.array(out), expected(x[:, :, : done + count], done, chunk), atol=1e-6)
        done += count
        assert cache.table.starts[0] % chunk == 0
        assert cache.table.num_blocks(0) <= -(-(chunk + count) // 4) + 1
    pool.check_integrity()


def test_batched_rows_see_their_own_chunks() -> None:
    pool, lengths = make_pool(), (3, 9, 10, 24)
    rows = [keys_of(length + 12, seed) for seed, length in enumerate(lengths)]
    caches = [PagedKVCache(SequenceTables(pool), 0) for _ in lengths]
    for cache, x, length in zip(caches, rows, lengths, strict=True):
        cache.update(x[:, :, :length], x[:, :, :length])
    batch = PagedBatchKVCache(Batch(pool, [cache.sequence for cache in caches]), 0)
    for step in range(12):
        new = mx.concatenate([x[:, :, n + step : n + step + 1] for x, n in zip(rows, lengths, strict=True)])
        batch.rows.reserve()
        mask = batch.make_mask(1, return_array=True)
        if step % 2:
            out = batch.attend(new, new, new, AttentionParams(0.25, mask))
        else:
            keys, values = batch.update_and_fetch(new, new)
            out = mx.fast.scaled_dot_product_attention(new, keys, values, scale=0.25, mask=mask)
        for row, (x, n) in enumerate(zip(rows, lengths, strict=True)):
            wanted = expected(x[:, :, : n + step + 1], n + step, CHUNK)
            np.testing.assert_allclose(np.array(out)[row : row + 1], wanted, atol=1e-6)


def test_trim_needs_the_chunk_of_the_new_end() -> None:
    pool = make_pool()
    cache, x = PagedKVCache(SequenceTables(pool), 0), keys_of(30, 0)
    for start, end in ((0, 15), (15, 23), (23, 24)):
        cache.update(x[:, :, start:end], x[:, :, start:end])
    assert cache.is_trimmable() and cache.trim(2) == 2 and cache.trim(2) == 2  # to 22, to 20
    before = (cache.offset, cache.table.length, list(cache.table.block_ids[0]))
    with pytest.raises(TrimError, match="cannot trim to 19 tokens: the next token sees positions from 10 on"):
        cache.trim(1)
    assert (cache.offset, cache.table.length, list(cache.table.block_ids[0])) == before
    new = x[:, :, 20:25]
    out = cache.attend(new, new, new, AttentionParams(0.25, cache.make_mask(5)))
    np.testing.assert_allclose(np.array(out), expected(x[:, :, :25], 20, CHUNK), atol=1e-6)


@pytest.mark.parametrize("size", [4, 20])
def test_a_mask_of_another_window_is_refused(size: int) -> None:
    pool = make_pool()
    cache, x = PagedKVCache(SequenceTables(pool), 0), keys_of(12, 0)
    cache.update(x, x)
    with pytest.raises(GeometryError, match=f"chunks of 10 tokens cannot have a window of {size} tokens"):
        cache.make_mask(1, window_size=size)
    assert cache.make_mask(1, window_size=CHUNK) is None
    if size < CHUNK:
        with pytest.raises(GeometryError, match="chunks"):
            PagedBatchKVCache(Batch(pool, [cache.sequence]), 0).make_mask(1, window_size=size)


def test_stride_must_be_one_or_the_window() -> None:
    with pytest.raises(ConfigError, match="stride must be 1 or equal to window"):
        BlockPool([LayerGroup((0,), 10, stride=5)])
    with pytest.raises(ConfigError, match="stride must be 1 or equal to window"):
        BlockPool([LayerGroup((0,), None, stride=5)])


@pytest.mark.parametrize("size", [1, 2, 7])
def test_sliding_and_chunked_windows_begin_where_expected(size: int) -> None:
    positions = np.arange(30)
    for window in (Window(size), Window(size, size)):
        starts = [window.first_seen(int(position)) for position in positions]
        assert window.first_seen_by(positions).tolist() == starts
        slides = [max(0, position - size + 1) for position in positions]
        assert starts == (slides if window.stride == 1 else [position // size * size for position in positions])
