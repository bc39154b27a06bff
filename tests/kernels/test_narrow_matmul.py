"""narrow_matmul: which products it covers, what happens if its kernel does not work, and its results on a GPU.

The kernel's text is tested on the emulator in tests/msl/test_narrow_matmul.py.
"""

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged.cuda import narrow_matmul
from mlx_paged.cuda.narrow_matmul import (
    BIASED,
    BITS,
    BODIES,
    GATED,
    GROUPED,
    LARGE,
    MEDIUM,
    PLAIN,
    SMALL,
    TILES,
    PackedWeight,
    covers,
    products,
    self_check,
)
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels.check import MAX_RMS, CheckResult


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    narrow_matmul.passes_check.cache_clear()
    yield
    narrow_matmul.passes_check.cache_clear()


def arrays(num_rows: int, width: int, depth: int, dtype: mx.Dtype = mx.bfloat16) -> tuple[mx.array, list[mx.array]]:
    return mx.zeros((num_rows, 1, depth), dtype), [mx.zeros((width, depth), dtype)]


def test_which_products_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(narrow_matmul, "passes_check", lambda *choice: asked.append(choice) or choice[1] != mx.float32)
    assert covers(*arrays(1, 5, 64)) and covers(*arrays(8, 5, 64)) and covers(*arrays(17, 5, 64, mx.float16))
    x, (w,) = arrays(32, 5, 64)
    bias = mx.zeros((5,), mx.bfloat16)
    assert covers(x, [w], bias) and covers(x, [w, w]) and covers(x, [w, w[:3], w])
    assert (
        covers(x, [w, w], gated=True)
        and not covers(x, [w, w[:4]], gated=True)
        and not covers(x, [w, w.astype(mx.float16)], gated=True)
    )
    bodies, dtypes, tiles, bits = zip(*asked, strict=True)
    assert bodies == (PLAIN, PLAIN, PLAIN, BIASED, GROUPED, GROUPED, GATED) and set(bits) == {0}
    assert tiles == (SMALL, SMALL, *[LARGE] * 5) and dtypes[2] == mx.float16
    assert covers(*arrays(9, 5, 64)) and covers(*arrays(16, 5, 64)) and {choice[2] for choice in asked[-2:]} == {MEDIUM}
    assert not covers(*arrays(2, 5, 64, mx.float32))
    assert not covers(*arrays(0, 5, 64)) and not covers(*arrays(33, 5, 64)) and not covers(*arrays(2, 5, 60))
    assert not covers(*arrays(2, (1 << 17) + 1, 512))
    assert not covers(x.astype(mx.float32), [w]) and not covers(x, [w[None]]) and not covers(x[..., :32], [w])
    assert not covers(x, [w, w.astype(mx.float16)]) and not covers(x, [w] * 4) and not covers(x, [w, w], bias)
    assert not covers(x, [w], bias[:4]) and not covers(x, [w], bias.astype(mx.float32))


def packed(width: int, depth: int, bits: int = 4, group_size: int = 32, dtype: mx.Dtype = mx.bfloat16) -> PackedWeight:
    layer = nn.Linear(depth, width, bias=False)
    layer.set_dtype(dtype)
    weight = PackedWeight.of(layer.to_quantized(group_size, bits))
    assert weight is not None and weight.shape == (width, depth) and weight.dtype == dtype
    return weight


def test_which_quantised_matrices_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(narrow_matmul, "passes_check", lambda *choice: asked.append(choice) or choice[1] != mx.float32)
    x = mx.zeros((3, 1, 64), mx.bfloat16)
    four, eight, wide = packed(5, 64), packed(5, 64, 8), packed(5, 64, group_size=64)
    bias = mx.zeros((5,), mx.bfloat16)
    assert covers(x, [four]) and covers(x, [eight], bias) and covers(x, [four, packed(9, 64), four])
    assert covers(x, [eight, eight], gated=True)
    assert [(body, bits) for body, *_, bits in asked] == [(PLAIN, 4), (BIASED, 8), (GROUPED, 4), (GATED, 8)]
    asked.clear()
    assert not covers(x, [four, eight]) and not covers(x, [four, wide]) and not covers(x, [four, eight], gated=True)
    assert not covers(x, [four, mx.zeros((5, 64), mx.bfloat16)]) and not covers(x.astype(mx.float16), [four])
    assert not covers(x[..., :32], [four]) and not covers(x[:0], [four]) and not asked
    many = mx.zeros((narrow_matmul.MAX_PACKED_ROWS, 1, 64), mx.bfloat16)
    assert covers(many, [four]) and not covers(mx.concatenate([many, x]), [four])
    monkeypatch.setattr(narrow_matmul, "MAX_PACKED_SIZE", 5 * 64 - 1)
    assert not covers(x, [four])


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("affine", 32, 3), ("affine", 64, 6)])
def test_other_packings_are_not_supported(mode: str, group_size: int, bits: int) -> None:
    assert PackedWeight.of(nn.Linear(64, 8).to_quantized(group_size, bits, mode=mode)) is None


@pytest.mark.skipif(kernel_build.backend() == "cuda", reason="CUDA is here")
def test_without_cuda_nothing_is_built() -> None:
    assert not covers(*arrays(2, 5, 64))
    assert kernel_build.build_kernel.cache_info().currsize == 0


def test_a_kernel_that_fails_its_check_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_matmul, "backend", lambda: "cuda")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    built = []

    def wrong(body: str, constants: object) -> object:
        built.append(body)

        def launch(inputs: list[mx.array], **options: object) -> list[mx.array]:
            x, *weights = inputs
            if weights[0].dtype == mx.uint32:
                return [mx.zeros(shape, x.dtype) for shape in options["output_shapes"]]
            return [1.01 * (x @ w.T) for w in weights]

        return launch

    monkeypatch.setattr(kernel_build, "build_kernel", wrong)
    with pytest.warns(UserWarning, match="RMS .* is not below"):
        assert not covers(*arrays(2, 5, 64))
    assert not covers(*arrays(3, 5, 64)) and len(built) == 1  # checked once
    with pytest.warns(UserWarning, match="narrow_quantized .* is off"):
        assert not covers(mx.zeros((2, 1, 64), mx.bfloat16), [packed(5, 64)])
    x, weights = arrays(3, 5, 64)
    with pytest.warns(UserWarning, match="narrow_matmul_group .* RMS .* is not below"):
        assert not covers(x, weights * 3)

    def broken(body: str, constants: object) -> object:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(kernel_build, "build_kernel", broken)
    result = self_check(BIASED, mx.float16, LARGE)
    assert not result.ok and "does not compile" in result.reason and np.isnan(result.rms)


def test_tiles_for_more_rows_are_compiled_ahead_with_that_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(narrow_matmul, "is_available", lambda: True)
    monkeypatch.setattr(narrow_matmul, "compile_ahead", lambda kernels: begun.extend(kernels))
    monkeypatch.setattr(narrow_matmul, "self_check", lambda *choice: CheckResult(True, 0.0, 0.0, ""))
    assert narrow_matmul.passes_check(GROUPED, mx.bfloat16, SMALL, 0)
    assert {narrow_matmul.kernel_key(GROUPED, mx.bfloat16, tile) for tile in TILES} <= set(begun)


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("dtype", narrow_matmul.DTYPES)
def test_products_on_a_gpu(dtype: mx.Dtype) -> None:
    for tile in TILES:
        for body in BODIES:
            result = self_check(body, dtype, tile)
            assert result.ok, result.reason
    mx.random.seed(0)
    for num_rows in (1, 2, 3, 8, 9, 15, 16, 17, 24, 31, 32):
        for width, depth in ((512, 2048), (2048, 8192), (100, 64), (2051, 1000), (8, 8), (33, 3000)):
            x = mx.random.normal((num_rows, 1, depth)).astype(dtype)
            w = (mx.random.normal((width, depth)) * depth**-0.5).astype(dtype)
            assert covers(x, [w])
            (got,) = products(x, [w])
            want = (x.astype(mx.float32) * w.astype(mx.float32)).sum(-1)[:, None]
            assert mx.sqrt(mx.square(got.astype(mx.float32) - want).mean()).item() < MAX_RMS, (num_rows, width, depth)
            for again in products(x, [w[: width // 2], w, w])[1:]:
                assert mx.array_equal(got, again).item()
            (again,) = narrow_matmul.launch(PLAIN, x, [w], None, LARGE, [got.shape])
            assert mx.array_equal(got, again).item()
    up = (mx.random.normal((33, 3000)) * 0.02).astype(dtype)
    (gated,) = products(x, [w, up], gated=True)
    assert mx.allclose(gated, nn.silu(got) * products(x, [up])[0], rtol=2e-2, atol=2e-2).item()
    assert mx.array_equal(products(x[5:7], [w, up], gated=True)[0], gated[5:7]).item()
    (whole,), (alone,), (some,) = (products(rows, [w]) for rows in (x, x[5:7], x[:12]))
    assert mx.array_equal(alone, whole[5:7]).item() and mx.array_equal(some, whole[:12]).item()


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() != "cuda", reason="needs CUDA")
def test_weights_may_begin_at_any_address() -> None:
    mx.random.seed(0)
    flat = mx.random.normal((3 + 40 * 64,)).astype(mx.bfloat16)
    x = mx.random.normal((4, 64)).astype(mx.bfloat16)
    mx.eval(flat, x)
    for shift in (0, 1, 3):
        w = flat[shift : shift + 40 * 64].reshape(40, 64)
        want = (x.astype(mx.float32)[:, None] * w.astype(mx.float32)).sum(-1)
        (got,) = products(x, [w])
        assert mx.allclose(got.astype(mx.float32), want, rtol=1e-2, atol=5e-2).item()
        quantised = packed(40, 64)
        words = mx.concatenate([mx.zeros((shift,), mx.uint32), quantised.words.flatten()])[shift:]
        mx.eval(words)
        moved = quantised._replace(words=words.reshape(quantised.words.shape))
        assert mx.array_equal(products(x, [moved])[0], products(x, [quantised])[0]).item()


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", narrow_matmul.DTYPES)
def test_products_with_quantised_matrices_on_a_gpu(dtype: mx.Dtype, bits: int) -> None:
    for tile in TILES:
        for body in BODIES:
            result = self_check(body, dtype, tile, bits)
            assert result.ok, result.reason
    mx.random.seed(0)
    for num_rows in (1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 100, 256):
        for width, depth, group_size in ((512, 2048, 64), (2048, 8192, 128), (100, 64, 32), (2051, 992, 32)):
            x = mx.random.normal((num_rows, 1, depth)).astype(dtype)
            w = packed(width, depth, bits, group_size, dtype)
            assert covers(x, [w])
            (got,) = products(x, [w])
            want = x.astype(mx.float32) @ w.values().astype(dtype).astype(mx.float32).T
            assert mx.sqrt(mx.square(got.astype(mx.float32) - want).mean()).item() < MAX_RMS, (num_rows, width, depth)
            assert all(mx.array_equal(got, again).item() for again in products(x, [w, w, w]))
    (whole,), (alone,) = products(x, [w]), products(x[5:7], [w])
    assert mx.array_equal(alone, whole[5:7]).item()
