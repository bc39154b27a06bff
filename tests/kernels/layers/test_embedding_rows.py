"""embedding_rows: when its kernel is used, what happens if it does not work, and its results on a GPU.

Its text is tested on the emulator in tests/msl/test_layers.py.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import embedding_rows as module
from mlx_paged.kernels.embedding_rows import DTYPES, MAX_TOKENS, TOKEN_DTYPES, embedding_rows, passes_check
from mlx_paged.kernels.products.inference import Inference


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    passes_check.cache_clear()
    yield
    passes_check.cache_clear()


def test_kernel_is_used_only_in_inference_with_supported_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "passes_check", lambda dtype, token_dtype: True)
    monkeypatch.setattr(module, "_launch", lambda table, tokens: tokens)
    table, tokens = mx.ones((3, 8), mx.bfloat16), mx.zeros((2, 1), mx.uint32)
    assert embedding_rows(table, tokens) is None
    with Inference():
        assert embedding_rows(table, tokens) is tokens
        assert embedding_rows(table[None], tokens) is None and embedding_rows(table, tokens[:0]) is None
        assert embedding_rows(table, mx.zeros((MAX_TOKENS + 1,), mx.uint32)) is None


@pytest.mark.skipif(kernel_build.backend() == "cuda", reason="CUDA is here")
def test_without_cuda_mlx_copies() -> None:
    with Inference():
        assert embedding_rows(mx.ones((3, 8)), mx.zeros((2,), mx.uint32)) is None


def test_which_dtypes_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "build_kernel", lambda *_: lambda inputs, **_: [inputs[0][inputs[1]]])
    assert all(passes_check(dtype, token_dtype) for dtype in DTYPES for token_dtype in TOKEN_DTYPES)
    assert not passes_check(mx.int8, mx.int32) and not passes_check(mx.float16, mx.int64)


def test_a_kernel_that_fails_its_check_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_available", lambda: True)

    def wrong(*_: Any) -> Any:
        return lambda inputs, **_: [inputs[0][inputs[1]] * mx.array([1] * (inputs[0].shape[1] - 1) + [2], mx.float16)]

    monkeypatch.setattr(module, "build_kernel", wrong)
    with (
        Inference(),
        pytest.warns(UserWarning, match="embedding_rows .* is off, using MLX's operations: RMS .* is not below"),
    ):
        assert embedding_rows(mx.ones((3, 8), mx.float16), mx.zeros((2,), mx.int32)) is None


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_on_a_gpu(dtype: mx.Dtype) -> None:
    with Inference():
        for width in (1, 9, 64, 2048, 2051):
            table = (mx.random.normal((300, width)) * 1000).astype(dtype)
            for token_dtype in TOKEN_DTYPES:
                for shape in ((1, 1), (7, 1), (1, 4096), (33,)):
                    tokens = mx.random.randint(0, 300, shape).astype(token_dtype)
                    got = embedding_rows(table, tokens)
                    assert got is not None and mx.array_equal(got, table[tokens]).item()
