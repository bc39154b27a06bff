"""The kernels of layers, silu_product and embedding_rows, on the emulator."""

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import embedding_rows, silu_product
from tests.support.cases import crossed, quick, slow
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import tensor_kernel, to_float


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the launch code on the emulator; calling the fixture's value with (old, new) plants a mutation."""
    edits: list[tuple[str, str]] = []

    def build(body: str, constants: Any) -> Any:
        kernel, _ = tensor_kernel(body, constants, edits)
        return partial(kernel, checked=True, orders=(0, 2))

    for module in (silu_product, embedding_rows):
        monkeypatch.setattr(module, "build_kernel", build)
    return lambda *edit: edits.append(edit)


@pytest.mark.parametrize(
    ("dtype", "shape"), quick(crossed(silu_product.DTYPES, [(1, 1, 5), (3, 1, 704), (2, 1033)]),
    (mx.bfloat16, (1, 1, 5)), (mx.float16, (3, 1, 704)), (mx.bfloat16, (2, 1033)))
)  # fmt: skip
def test_silu_product_rounds_where_mlx_does(emulated: Any, dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    gate, up = (mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i in range(2))
    gate *= 4
    one = mx.array(1, dtype)
    tail = one / (one + mx.exp(mx.abs(gate).astype(mx.float32)).astype(dtype))
    expected = gate * mx.where(gate < 0, tail, one - tail) * up
    got = to_float(silu_product._launch(gate, up))
    assert got.shape == shape
    assert np.array_equal(got, to_float(expected))


@pytest.mark.parametrize(
    ("dtype", "token_dtype", "width", "ids"), quick([(*a, *b) for a in [(mx.bfloat16, mx.uint32), (mx.float16,
    mx.int32), (mx.float32, mx.int32), (mx.uint32, mx.uint32)] for b in [(9, [[4, 0, 3, 3]]), (1064, [[2], [4]]), (4,
    [[1]])]], (mx.bfloat16, mx.uint32, 9, [[4, 0, 3, 3]]), (mx.uint32, mx.uint32, 9, [[4, 0, 3, 3]]),
    (mx.float16, mx.int32, 1064, [[2], [4]]), (mx.float32, mx.int32, 4, [[1]]))
)  # fmt: skip
def test_embedding_rows(
    emulated: Any, width: int, ids: list[list[int]], dtype: mx.Dtype, token_dtype: mx.Dtype
) -> None:
    table = mx.random.normal((5, width), key=mx.random.key(width))
    table = table.view(mx.uint32) if dtype == mx.uint32 else table.astype(dtype)
    got = embedding_rows._launch(table, mx.array(ids, token_dtype))
    want = table[mx.array(ids)]
    assert got.shape == want.shape
    assert np.array_equal(to_float(got), to_float(want))


def test_negative_id_counts_from_the_end(emulated: Any) -> None:
    table = mx.random.normal((5, 12)).astype(mx.float16)
    got = embedding_rows._launch(table, mx.array([-1, -5], mx.int32))
    assert np.array_equal(to_float(got), to_float(table[mx.array([4, 0])]))


def silu(emulated: Any) -> None:
    test_silu_product_rounds_where_mlx_does(emulated, mx.bfloat16, (2, 1033))


def rows(emulated: Any) -> None:
    test_embedding_rows(emulated, 9, [[4, 0, 3, 3]], mx.bfloat16, mx.uint32)
    test_embedding_rows(emulated, 1064, [[2], [4]], mx.float16, mx.int32)


@pytest.mark.parametrize(
    ("check", "old", "new"), [(silu, "rounded(1.0f + power)", "(1.0f + power)"), (silu, "&& i < size", "&& i <= size"),
    (rows, "* EACH + thread_position", "+ thread_position"), *slow((silu, "packet_value(r, 2 * i + 1)",
    "packet_value(r, 2 * i)"), (silu, "at + 8 <= size", "at <= size"), (rows, "i < whole;", "i <= whole;"))]
)  # fmt: skip
def test_mutations_are_found(emulated: Any, check: Any, old: str, new: str) -> None:
    emulated(old, new)
    with pytest.raises((EmuError, AssertionError)):
        check(emulated)
