"""Products with quantised weights: all rows in one product; for many rows, weights are dequantised a few at a time."""

from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_paged.cuda import narrow_matmul, quantized_matmul
from mlx_paged.cuda.quantized_matmul import DEQUANTIZED_ROWS, product, sorted_experts_product
from mlx_paged.kernels import inference
from mlx_paged.kernels.inference import Inference
from tests.support.cases import crossed, quick
from tests.support.kernels.gather_mm import gather_mm_of_16_bits

# Mode, group size and bits.
MODES = [
    ("affine", 32, 4), ("affine", 64, 8), ("affine", 128, 4), ("affine", 64, 6), ("affine", 32, 3),
    ("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8),
]  # fmt: skip
DEPTH, WIDTH, EXPERTS = 256, 48, 4


def linear(mode: str, group_size: int, bits: int, dtype: mx.Dtype = mx.float32) -> nn.QuantizedLinear:
    mx.random.seed(1)
    layer = nn.Linear(DEPTH, WIDTH, bias=False)
    layer.set_dtype(dtype)
    return layer.to_quantized(group_size, bits, mode=mode)


def experts(mode: str, group_size: int, bits: int, dtype: mx.Dtype) -> QuantizedSwitchLinear:
    mx.random.seed(1)
    layer = QuantizedSwitchLinear(DEPTH, WIDTH, EXPERTS, False, group_size, bits, mode)
    layer._quantize((mx.random.normal((EXPERTS, WIDTH, DEPTH)) * DEPTH**-0.5).astype(dtype))
    return layer


def rows(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((*shape, DEPTH), key=mx.random.key(2)).astype(dtype)


def rms(a: mx.array, b: mx.array) -> float:
    return float(mx.sqrt(mx.square(a.astype(mx.float32) - b.astype(mx.float32)).mean()).item())


def dequantized(layer: Any) -> mx.array:
    return mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode, dtype=mx.float32
    )


@pytest.fixture
def dequantize() -> Any:
    """Count the weights that are dequantised."""
    with mock.patch.object(quantized_matmul.mx, "dequantize", wraps=mx.dequantize) as counted:
        yield counted


@pytest.mark.parametrize("form", MODES)
@pytest.mark.parametrize("shape", [(5, 1), (16, 1), (2, 3), (2, 2, 2)])
def test_all_rows_are_one_product(form: tuple[str, int, int], shape: tuple[int, ...]) -> None:
    layer, x = linear(*form), rows(*shape)
    with mock.patch.object(quantized_matmul.mx, "quantized_matmul", wraps=mx.quantized_matmul) as multiply:
        got = product(layer, x)
    assert got is not None and got.shape == (*shape, WIDTH)
    assert multiply.call_args.args[0].shape == (x.size // DEPTH, DEPTH)
    if mx.default_device() == mx.Device(mx.cpu):
        assert mx.array_equal(got, layer(x)).item()
    else:  # other kernels add in another order
        assert rms(got, layer(x)) < 1e-5


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (1, 7), (1, 1, 1), (0, 1)])
def test_single_products_are_left_to_mlx(shape: tuple[int, ...]) -> None:
    assert product(linear("affine", 32, 4), rows(*shape)) is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(2, 1), (1, 32), (5,)])
def test_few_rows_use_a_kernel_in_inference(bits: int, shape: tuple[int, ...]) -> None:
    layer, x = linear("affine", 64, bits, mx.bfloat16), rows(*shape, dtype=mx.bfloat16)
    with Inference():  # the self-checks launch, too
        product(layer, x), product(layer, rows(1, 33, dtype=mx.bfloat16))
    with mock.patch.object(narrow_matmul, "launch", wraps=narrow_matmul.launch) as launch:
        outside = product(layer, x)
        with Inference(allowed=False):
            product(layer, x)
        assert not launch.called and (outside is None) == (len(shape) == 1 or shape[0] == 1)
        with Inference():
            got = product(layer, x)
            assert product(layer, x[:1, ..., :][:1] if len(shape) == 1 else x[:1, :1]) is None  # one row: MLX's kernel
            others = linear("affine", 32, 3, mx.bfloat16), linear("mxfp4", 32, 4, mx.bfloat16)
            assert all(product(other, rows(1, 5, dtype=mx.bfloat16)) is None for other in others)
            assert product(layer, rows(1, 33, dtype=mx.bfloat16)) is not None
            assert launch.call_count == 2
            assert product(linear("affine", 64, bits), rows(1, 5)) is None  # float32
    assert launch.call_count == 2
    expected = x.astype(mx.float32) @ dequantized(layer).T
    assert got is not None and got.shape == (*shape, WIDTH)
    assert rms(got, expected) < 1e-2 * rms(expected, mx.zeros(expected.shape))


@pytest.mark.parametrize(
    ("form", "dtype", "shape"), quick(crossed(MODES, [mx.bfloat16, mx.float16], [(DEQUANTIZED_ROWS,), (1,
    DEQUANTIZED_ROWS + 1), (DEQUANTIZED_ROWS, 1)]), (("affine", 32, 4), mx.bfloat16, (129,)),
    (("mxfp8", 32, 8), mx.bfloat16, (129,)), (("nvfp4", 16, 4), mx.float16, (129,)),
    (("mxfp4", 32, 4), mx.bfloat16, (1, 130)), (("affine", 32, 3), mx.float16, (1, 130)),
    (("affine", 64, 6), mx.bfloat16, (129, 1)), (("affine", 128, 4), mx.float16, (129, 1)))
)  # fmt: skip
def test_weight_is_dequantised_for_many_rows(
    form: tuple[str, int, int], dtype: mx.Dtype, shape: tuple[int, ...], dequantize: mock.Mock
) -> None:
    layer, x = linear(*form, dtype=dtype), rows(*shape, dtype=dtype)
    with Inference():
        got = product(layer, x)
    assert dequantize.call_count == 1
    assert got is not None and got.dtype == dtype and got.shape == (*shape, WIDTH)
    expected = x.astype(mx.float32) @ dequantized(layer).T
    assert rms(got, expected) < (5e-3 if dtype == mx.bfloat16 else 1e-3) * rms(expected, mx.zeros(expected.shape))


@pytest.mark.usefixtures("kernels")
def test_weight_too_large_to_dequantise_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_matmul, "MOST_BYTES", 1)
    layer = linear("affine", 32, 4, mx.bfloat16)
    with Inference():  # its self-check launches, too
        product(layer, rows(narrow_matmul.MAX_PACKED_ROWS, dtype=mx.bfloat16))
    with Inference(), mock.patch.object(narrow_matmul, "launch", wraps=narrow_matmul.launch) as launch:
        assert product(layer, rows(narrow_matmul.MAX_PACKED_ROWS, dtype=mx.bfloat16)) is not None
        assert launch.call_count == 1
        assert product(layer, rows(narrow_matmul.MAX_PACKED_ROWS + 1, dtype=mx.bfloat16)) is None


@pytest.mark.parametrize("case", ["few rows", "outside", "not allowed", "float32", "scales of another dtype", "large"])
def test_weight_is_not_dequantised_in_other_cases(
    case: str, dequantize: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = linear("affine", 32, 4, mx.float16 if case == "scales of another dtype" else mx.bfloat16)
    dtype = mx.float32 if case == "float32" else mx.bfloat16
    x = rows(DEQUANTIZED_ROWS - (case == "few rows"), dtype=dtype)
    if case == "large":
        monkeypatch.setattr(quantized_matmul, "MOST_BYTES", 2 * DEPTH * WIDTH - 1)
    if case == "outside":
        assert product(layer, x) is None
    else:
        with Inference(allowed=case != "not allowed"):
            assert product(layer, x) is None
    assert not dequantize.called


def test_inference_ends_with_its_block_and_may_be_nested() -> None:
    layer, x = linear("affine", 32, 4, mx.float16), rows(DEQUANTIZED_ROWS, dtype=mx.float16)
    with Inference():
        with Inference(allowed=False):
            assert product(layer, x) is None
        assert product(layer, x) is not None
        with pytest.raises(ZeroDivisionError), Inference():
            raise ZeroDivisionError
        assert product(layer, x) is not None
    assert product(layer, x) is None


def test_host_waits_before_it_dequantises_more_weights_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * DEPTH * WIDTH
    monkeypatch.setattr(inference, "BYTES_AHEAD", 2 * size)
    layer, x = linear("affine", 32, 4, mx.float16), rows(DEQUANTIZED_ROWS, dtype=mx.float16)
    square = nn.Linear(WIDTH, DEPTH, bias=False)
    square.set_dtype(mx.float16)
    started: list[int] = []
    waited: list[int] = []
    inputs = []
    begin, wait = mx.async_eval, mx.eval

    def number_of(array: mx.array) -> int:
        return next(i for i, each in enumerate(inputs) if each is array)

    with (
        Inference(),
        mock.patch.object(mx, "async_eval", lambda a: (started.append(number_of(a)), begin(a))),
        mock.patch.object(mx, "eval", lambda a: (waited.append(number_of(a)), wait(a))),
    ):
        for _ in range(7):
            inputs.append(x)
            x = square(product(layer, x))
    # Two weights fit: the third's input is started first, and awaited at the fifth.
    assert started == [2, 4, 6] and waited == [2, 4]


def test_weight_larger_than_the_limit_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "BYTES_AHEAD", 1)
    with Inference(), mock.patch.object(mx, "async_eval") as begin:
        assert product(linear("affine", 32, 4, mx.float16), rows(DEQUANTIZED_ROWS, dtype=mx.float16)) is not None
    assert not begin.called


@pytest.mark.slow
def test_traced_function_gives_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "BYTES_AHEAD", 1)
    layer, x = linear("affine", 32, 4, mx.float16), rows(DEQUANTIZED_ROWS, 1, dtype=mx.float16)

    def twice(x: mx.array) -> list[mx.array | None]:
        with Inference():
            return [product(layer, 2 * x), product(layer, 2 * x)]

    first, second = mx.compile(twice)(x)
    expected = (2 * x).astype(mx.float32) @ dequantized(layer).T
    assert rms(first, expected) < 5e-3 and rms(second, expected) < 2e-2


@pytest.mark.parametrize("form", MODES)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_weights_of_experts_are_dequantised_for_many_rows(
    form: tuple[str, int, int], dtype: mx.Dtype, dequantize: mock.Mock
) -> None:
    layer = experts(*form, dtype=dtype)
    num_rows = quantized_matmul.DEQUANTIZED_ROWS_PER_EXPERT * EXPERTS
    x = rows(num_rows, 1, dtype=dtype)
    indices = mx.sort(mx.random.randint(0, EXPERTS - 1, (num_rows,), key=mx.random.key(3)).astype(mx.uint32))
    with Inference(), gather_mm_of_16_bits():
        got = sorted_experts_product(layer, x, indices)
        assert sorted_experts_product(layer, x[1:], indices[1:]) is None  # a row too few
        assert sorted_experts_product(layer, x[:, None], indices[:, None]) is None
        layer.global_scale = mx.ones((EXPERTS,))
        assert sorted_experts_product(layer, x, indices) is None
        layer.global_scale = None
    assert sorted_experts_product(layer, x, indices) is None
    assert dequantize.call_count == 1
    assert got is not None and got.shape == (num_rows, 1, WIDTH) and got.dtype == dtype
    expected = x.astype(mx.float32) @ dequantized(layer)[indices].swapaxes(-1, -2)
    assert rms(got, expected) < (5e-3 if dtype == mx.bfloat16 else 1e-3) * rms(expected, mx.zeros(expected.shape))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [2, 16, 32, DEQUANTIZED_ROWS - 1, DEQUANTIZED_ROWS, 2048])
def test_products_of_a_models_size_on_the_gpu(bits: int, num_rows: int) -> None:
    mx.random.seed(4)
    layer = nn.Linear(2048, 1024, bias=False)
    layer.set_dtype(mx.bfloat16)
    layer = layer.to_quantized(64, bits)
    x = mx.random.normal((num_rows, 1, 2048)).astype(mx.bfloat16)
    with Inference():
        got = product(layer, x)
    expected = x.astype(mx.float32) @ dequantized(layer).T
    assert got is not None and got.shape == expected.shape
    assert rms(got, expected) < 1e-2 * rms(expected, mx.zeros(expected.shape))
