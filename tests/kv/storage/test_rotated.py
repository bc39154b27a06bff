"""Pages of rotated keys and values: the rows of the rotated vectors, and the vectors themselves for who reads them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_paged.kernels.quantized import rotate
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.step import Columns
from mlx_paged.kv.storage.base import Geometry, PageFormat
from mlx_paged.kv.storage.quantized import QuantizedStorage
from tests.support.pools import DTYPES, kv, pool_of

FORMATS = [PageFormat(*bits, size, True) for bits in ((8, 8), (4, 4), (8, 4)) for size in (32, 64)]


def outlying(seed: int, n: int, dim: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Keys with channels that are far from zero in every token, as RoPE models have them; values are noise."""
    k, v = kv(seed, n, kd=dim, vd=dim, dtype=dtype)
    offset = mx.zeros((dim,), dtype)
    offset[7::64], offset[40::64] = 12, -9
    return k + offset, v


def filled(page_format: PageFormat | None, k: mx.array, v: mx.array) -> tuple[BlockPool, tuple[mx.array, mx.array]]:
    """A pool that holds these, and what is read of it."""
    pool = pool_of(page_format=page_format)
    table = pool.new_table()
    pool.append_tokens(table, k.shape[2])
    pool.write([table], 0, k, v)
    return pool, pool.gather_visible(table, 0)


def rms(a: mx.array, b: mx.array) -> float:
    return mx.sqrt(mx.mean((a.astype(mx.float32) - b.astype(mx.float32)) ** 2)).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_pages_hold_the_rows_of_rotated_vectors(page_format: PageFormat, dtype: mx.Dtype) -> None:
    pool = pool_of(page_format=page_format)
    table, parts = pool.new_table(), []
    for seed, n in enumerate((5, 13, 1, 2, 1)):
        parts.append(outlying(seed, n, 64, dtype))
        pool.append_tokens(table, n)
        pool.write([table], 0, *parts[-1])
    k, v = (mx.concatenate(each, axis=2) for each in zip(*parts, strict=True))
    rows = pool.layer(0).read_stored(table)
    for x, form, held, read in zip(
        (k, v), pool.groups[0].geometry.rows, rows, pool.gather_visible(table, 0), strict=True
    ):
        assert mx.array_equal(held, form.quantize(rotate(x)))
        assert read.dtype == dtype and mx.array_equal(read, rotate(form.dequantize(held)))
    pool.check_integrity()
    assert pool.stats().quantized_tokens == 22


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_four_bits_of_outlying_keys_are_nearer_to_them(dim: int) -> None:
    """RMS bounds: a rotated group of g values has no range much above that of g values of noise of the same energy."""
    k, v = outlying(7, 200, dim)
    size = 32 if dim == 96 else 64
    _, plain = filled(PageFormat(4, 4, size), k, v)
    _, rotated = filled(PageFormat(4, 4, size, True), k, v)
    assert rms(rotated[0], k) < 0.6 * rms(plain[0], k)
    spread = mx.sqrt(mx.mean(k * k)).item()
    assert rms(rotated[0], k) < 6 * spread / 15 / 12**0.5  # a step of a range of six deviations
    assert rms(rotated[1], v) < 6 / 15 / 12**0.5


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.015), ((8, 4), 0.15), (4, 0.25)])
def test_attention_over_rotated_pages_is_near_to_dense(bits: int | tuple[int, int], limit: float) -> None:
    k, v = outlying(3, 150, 64)
    q, _ = kv(11, 4, heads=6, kd=64, vd=64)

    def attend(keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125)

    expected = attend(k, v)
    _, got = filled(PageFormat.of(bits, 64, True), k, v)
    assert rms(attend(*got), expected) < limit * mx.sqrt(mx.mean(expected * expected)).item()


def test_a_format_that_rotates_is_another_one() -> None:
    plain, rotated = PageFormat.of(4), PageFormat.of(4, rotate=True)
    assert plain != rotated and str(rotated) == "4 bits in groups of 64, rotated" and str(plain) != str(rotated)
    geometry = Geometry(2, 64, 64, mx.float32)
    a, b = geometry._replace(format=plain), geometry._replace(format=rotated)
    assert a != b and a.bytes_per_token() == b.bytes_per_token() and a.stored == b.stored


def test_packed_and_batched_rows_are_those_of_each_alone() -> None:
    page_format = PageFormat.of(4, 32, True)
    pool = pool_of(page_format=page_format)
    tables = [pool.new_table() for _ in range(3)]
    k, v = kv(5, 1, batch=3, kd=96, vd=64)
    for table in tables:
        pool.append_tokens(table, 1)
    pool.write(tables, 0, k, v)
    for row, table in enumerate(tables):
        _, alone = filled(page_format, k[row : row + 1], v[row : row + 1])
        for got, want in zip(pool.gather_visible(table, 0), alone, strict=True):
            assert mx.array_equal(got, want)


def test_rows_read_by_positions_are_rotated_back() -> None:
    geometry = Geometry(2, 64, 64, mx.float32, PageFormat.of(8, 64, True))
    pool = pool_of(page_format=geometry.format)
    table = pool.new_table()
    k, v = outlying(2, 10, 64)
    pool.append_tokens(table, 10)
    pool.write([table], 0, k, v)
    storage = pool.layer(0).storage
    assert isinstance(storage, QuantizedStorage)
    columns = Columns(mx.array([list(table.block_ids)]), mx.array([[9, 0, 4]]), mx.ones((1, 1, 3, 1), mx.bool_))
    got = storage.read_rows(columns)
    for x, read in zip((k, v), got, strict=True):
        assert rms(read, x[:, :, mx.array([9, 0, 4])]) < 0.03
