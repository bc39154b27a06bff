"""The rotation: orthonormal, its own inverse, each vector by itself."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.quantized import rotate
from tests.support.pools import DTYPES, noise

DIMS = [32, 64, 96, 128, 160, 192, 256, 288, 512]


@pytest.mark.parametrize("dim", DIMS)
def test_the_matrix_is_orthonormal_and_symmetric(dim: int) -> None:
    matrix = np.array(rotate(mx.eye(dim)), np.float64)
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    block = dim & -dim
    assert block >= 32
    np.testing.assert_allclose(np.abs(matrix[:block, :block]), block**-0.5, rtol=1e-6)  # an outlier goes everywhere


@pytest.mark.parametrize("dim", [64, 192, 256])
def test_twice_is_exact_where_nothing_is_rounded(dim: int) -> None:
    """Blocks of 64 and 256 have a factor that is a power of two."""
    x = mx.array(np.random.default_rng(0).integers(-100, 100, (2, 3, 5, dim)).astype(np.float32))
    assert mx.array_equal(rotate(rotate(x)), x)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twice_is_nearly_the_same_in_every_dtype(dtype: mx.Dtype, dim: int) -> None:
    x = noise(1, 1, 2, 40, dim, dtype=dtype)
    once, twice = rotate(x), rotate(rotate(x))
    assert once.dtype == twice.dtype == dtype and once.shape == x.shape
    rms = mx.sqrt(mx.mean((twice.astype(mx.float32) - x.astype(mx.float32)) ** 2)).item()
    assert rms < 2 * mx.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96])
def test_a_vector_is_rotated_as_if_it_were_alone(dim: int, dtype: mx.Dtype) -> None:
    x = noise(2, 3, 4, 21, dim, dtype=dtype)
    whole = rotate(x)
    for view in (x[:, 1:3, 5:9], x[:, ::2, 3:20:4], x[1:2, :, -1:]):
        index = {3 * 2 * 4: np.s_[:, 1:3, 5:9], 3 * 2 * 5: np.s_[:, ::2, 3:20:4], 4: np.s_[1:2, :, -1:]}
        assert mx.array_equal(rotate(view), whole[index[view.size // dim]])
    swapped = rotate(x.swapaxes(1, 2))
    assert mx.array_equal(swapped.swapaxes(1, 2), whole)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (96, 128)])
def test_attention_over_rotated_keys_is_attention(k_dim: int, v_dim: int) -> None:
    q, k, v = noise(3, 1, 6, 4, k_dim), noise(4, 1, 2, 30, k_dim), noise(5, 1, 2, 30, v_dim)

    def attend(keys: mx.array, values: mx.array, queries: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=k_dim**-0.5)

    expected = attend(k, v, q)
    got = rotate(attend(rotate(k), rotate(v), rotate(q)))
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_the_gpu_rotates_as_the_cpu(dim: int, dtype: mx.Dtype) -> None:
    x = noise(6, 2, 3, 50, dim, dtype=dtype)
    with mx.stream(mx.cpu):
        expected = rotate(x.astype(mx.float32))
        mx.eval(expected)
    rms = mx.sqrt(mx.mean((rotate(x).astype(mx.float32) - expected) ** 2)).item()
    assert rms < mx.finfo(dtype).eps
