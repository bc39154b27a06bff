"""Kernels over quantised pages: writes, reads, rotation and rows."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.quantized import new_blocks, rotate
from scripts.support.paged_decode import gather_blocks, write_slots
from tests.support.kernels.quantized_pages import page_shape
from tests.support.pools import DTYPES, noise

VALUES = [mx.float32, mx.float16, mx.bfloat16]
needs_gpu = pytest.mark.skipif(build.backend() is None, reason="MLX sees no GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("length", [1, 7, 1001])
def test_written_rows_equal_mlxs(length: int, dtype: mx.Dtype) -> None:
    """Values come in the layouts of projections: contiguous, and with the tokens before the heads."""
    pages, block, heads = page_shape(128, (8, 4), 64, dtype), 32, 3
    count = -(-length // block)
    ids = list(range(count))[::-1]
    slots = [ids[t // block] * block + t % block for t in range(length)]
    mx.random.seed(length)
    k = mx.random.normal((1, heads, length, 128)).astype(dtype)
    v = mx.random.normal((1, length, heads, 128)).astype(dtype).swapaxes(1, 2)
    pools = new_blocks(count, heads, block, (128, 128), dtype, pages)
    fence = write_slots(*pools, kernels.new_fence(), k, v, mx.array(slots, mx.int32), pages)
    table = mx.array(ids, mx.int32)
    *rows, fence = kernels.prepare_gather(*pools, table, 0, length, pages, stored=True)(*pools, fence)
    *read, fence = gather_blocks(*pools, fence, table, 0, length, pages)
    for got, want in zip(rows, pages.quantize(k, v), strict=True):
        assert mx.array_equal(got, want).item()
    for got, want in zip(read, pages.dequantize(*rows), strict=True):
        assert mx.array_equal(got, want).item()


DIMS = [32, 64, 96, 128, 160, 192, 256, 288, 512]


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_matrix_is_orthonormal_and_symmetric(dim: int) -> None:
    matrix = np.array(rotate(mx.eye(dim)), np.float64)
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    block = dim & -dim
    assert block >= 32
    np.testing.assert_allclose(np.abs(matrix[:block, :block]), block**-0.5, rtol=1e-6)  # an outlier is spread evenly


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotating_twice_is_nearly_exact_in_every_dtype(dtype: mx.Dtype, dim: int) -> None:
    x = noise(1, 1, 2, 40, dim, dtype=dtype)
    once, twice = rotate(x), rotate(rotate(x))
    assert once.dtype == twice.dtype == dtype and once.shape == x.shape
    rms = mx.sqrt(mx.mean((twice.astype(mx.float32) - x.astype(mx.float32)) ** 2)).item()
    assert rms < 2 * mx.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96])
def test_rotation_of_a_vector_does_not_depend_on_others(dim: int, dtype: mx.Dtype) -> None:
    x = noise(2, 3, 4, 21, dim, dtype=dtype)
    whole = rotate(x)
    for view in (x[:, 1:3, 5:9], x[:, ::2, 3:20:4], x[1:2, :, -1:]):
        index = {3 * 2 * 4: np.s_[:, 1:3, 5:9], 3 * 2 * 5: np.s_[:, ::2, 3:20:4], 4: np.s_[1:2, :, -1:]}
        assert mx.array_equal(rotate(view), whole[index[view.size // dim]])
    swapped = rotate(x.swapaxes(1, 2))
    assert mx.array_equal(swapped.swapaxes(1, 2), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_gpu_rotates_like_the_cpu(dim: int, dtype: mx.Dtype) -> None:
    x = noise(6, 2, 3, 50, dim, dtype=dtype)
    with mx.stream(mx.cpu):
        expected = rotate(x.astype(mx.float32))
        mx.eval(expected)
    rms = mx.sqrt(mx.mean((rotate(x).astype(mx.float32) - expected) ** 2)).item()
    assert rms < mx.finfo(dtype).eps
