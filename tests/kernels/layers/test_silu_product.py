"""silu_product: when its kernel is used, what happens if it does not work, and its results on a GPU.

Its text is tested on the emulator in tests/msl/test_layers.py.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import silu_product as module
from mlx_paged.kernels.products.inference import Inference
from mlx_paged.kernels.silu_product import DTYPES, passes_check, silu_product


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    passes_check.cache_clear()
    yield
    passes_check.cache_clear()


def test_kernel_is_used_only_in_inference_with_supported_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "passes_check", lambda dtype, dims: dtype != mx.float32)
    monkeypatch.setattr(module, "_launch", lambda gate, up: gate)
    x = mx.ones((3, 1, 7), mx.bfloat16)
    assert silu_product(x, x) is None
    with Inference():
        assert silu_product(x, x) is x
        assert silu_product(x, x[:1]) is None and silu_product(x[:0], x[:0]) is None
        assert silu_product(x, x.astype(mx.float16)) is None
        assert silu_product(x.astype(mx.float32), x.astype(mx.float32)) is None
        with Inference(allowed=False):
            assert silu_product(x, x) is None
        with Inference(dequantizes=False):  # as while a step is traced
            assert silu_product(x, x) is x


@pytest.mark.skipif(kernel_build.backend() == "cuda", reason="CUDA is here")
def test_without_cuda_mlx_computes_it() -> None:
    with Inference():
        assert silu_product(mx.ones((2, 8), mx.float16), mx.ones((2, 8), mx.float16)) is None


def test_a_kernel_that_fails_its_check_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_available", lambda: True)
    x, built = mx.ones((2, 8), mx.bfloat16), []

    def wrong(*_: Any) -> Any:
        built.append(None)
        return lambda inputs, **_: [1.1 * nn.silu(inputs[0]) * inputs[1]]

    monkeypatch.setattr(module, "build_kernel", wrong)
    with Inference(), pytest.warns(UserWarning, match="silu_product .* is off.* RMS .* is not below"):
        assert silu_product(x, x) is None
    with Inference():
        assert silu_product(x, x) is None and len(built) == 2  # checked once, with two sizes

    def broken(*_: Any) -> Any:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(module, "build_kernel", broken)
    with Inference(), pytest.warns(UserWarning, match="does not compile"):
        assert silu_product(x[None], x[None]) is None


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_equal_mlxs_bit_for_bit_on_a_gpu(dtype: mx.Dtype) -> None:
    @mx.compile
    def swiglu(gate: mx.array, up: mx.array) -> mx.array:
        return nn.silu(gate) * up

    # Every finite 16-bit value, and odd sizes at odd addresses.
    each = mx.arange(1 << 16, dtype=mx.int32).astype(mx.uint16).view(dtype)
    each = mx.where(mx.isfinite(each), each, mx.zeros_like(each))
    up = mx.random.normal(each.shape).astype(dtype)
    # MLX rounds the exponential of -6.84375, which lies between two bfloat16, the other way.
    each = mx.where(each == -6.84375, mx.zeros_like(each), each)
    with Inference():
        for part in (slice(None), slice(1, 1000), slice(3, 8)):
            gate = each[part][None, None]
            assert different(silu_product(gate, up[part][None, None]), swiglu(gate, up[part][None, None])) == 0
        x = mx.random.uniform(-4, 4, (4096, 1, 513)).astype(dtype)
        assert different(silu_product(x, x[::-1]), swiglu(x, x[::-1])) == 0


def different(got: mx.array | None, want: mx.array) -> int:
    """Return the number of values that differ."""
    assert got is not None
    wrong = got != want
    count: Any = wrong.sum().item()
    return int(count)
