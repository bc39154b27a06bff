import mlx.core as mx
import pytest

from mlx_paged.kernels.quantized import QuantizedRows


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("dim", "group_size"), [(64, 64), (64, 32), (96, 32), (128, 128), (256, 64)])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_the_bytes_of_mlx(dim: int, group_size: int, bits: int, dtype: mx.Dtype) -> None:
    form = QuantizedRows(dim, bits, group_size, dtype)
    x = mx.random.normal((1, 3, 7, dim), key=mx.random.key(dim)).astype(dtype)
    rows = form.quantize(x)
    assert rows.shape == (1, 3, 7, form.num_words) and rows.dtype == mx.uint32
    assert rows.nbytes == 21 * form.nbytes == sum(part.nbytes for part in mx.quantize(x, group_size, bits))
    for got, want in zip(form.split(rows), mx.quantize(x, group_size, bits), strict=True):
        assert got.dtype == want.dtype and mx.array_equal(got, want)
    expected = mx.dequantize(*mx.quantize(x, group_size, bits), group_size, bits)
    assert form.dequantize(rows).dtype == dtype and mx.array_equal(form.dequantize(rows), expected)


def test_bytes_of_a_vector_of_128() -> None:
    assert [QuantizedRows(128, bits, 64, mx.bfloat16).nbytes for bits in (8, 4)] == [136, 72]
