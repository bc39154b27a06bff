"""narrow_matmul's text on the emulator: the CUDA body, with the tensor cores' fragments as PTX describes them."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.products import narrow_matmul
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import tensor_kernel, to_float

TILES = narrow_matmul.TILES
SHARED_MEMORY = 48 << 10  # what CUDA gives without asking


@pytest.fixture
def emulated(monkeypatch):
    """Runs the launch code on the emulator; calling the fixture's value with (old, new) plants a mutation."""
    edits, planted = [], set()

    def build(body, constants):
        kernel, outputs = tensor_kernel(body, constants, edits, planted)
        # Of two matrices, the third's output is not written.
        return partial(kernel, sparse=outputs[2:], checked=True, orders=(0, 2), tg_limit=SHARED_MEMORY)

    monkeypatch.setattr(narrow_matmul, "build_kernel", build)
    yield lambda *edit: edits.append(edit)
    assert planted == set(edits)


def factors(num_rows, width, depth, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, w, bias = (
        mx.array(rng.standard_normal(shape).astype(np.float32) * scale).astype(dtype)
        for shape, scale in (((num_rows, depth), 1), ((width, depth), depth**-0.5), ((width,), 1))
    )
    return x, w, bias


def run(x, w, bias, tile):
    body = narrow_matmul.PLAIN if bias is None else narrow_matmul.BIASED
    (out,) = narrow_matmul._launch(body, x[:, None], [w], bias, tile, [(x.shape[0], 1, w.shape[0])])
    assert out.shape == (x.shape[0], 1, w.shape[0])
    return to_float(out)[:, 0]


def expected(x, w, bias):
    product = to_float(x).astype(np.float64) @ to_float(w).astype(np.float64).T
    return product if bias is None else product + to_float(bias)


def close(got, want, dtype):
    digits = 8 if dtype == mx.bfloat16 else 11
    np.testing.assert_allclose(got, want, rtol=2.0**-digits, atol=2.0**-digits)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", narrow_matmul.DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("num_rows", "width", "depth"), [(1, 40, 8), (13, 33, 72), (37, 70, 1096)])
def test_products(emulated, dtype, tile, num_rows, width, depth):
    x, w, bias = factors(num_rows, width, depth, dtype)
    close(run(x, w, None, tile), expected(x, w, None), dtype)
    close(run(x, w, bias, tile), expected(x, w, bias), dtype)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("tile", TILES)
def test_a_row_does_not_depend_on_the_others(emulated, tile):
    # float16, which shows more of the sums, and enough of them that another order of adding would be seen.
    x, w, _ = factors(37, 130, 1096, mx.float16)
    whole = run(x, w, None, TILES[0])
    assert np.array_equal(run(x, w, None, tile), whole)
    for rows in ([3, 4], [36, 0, 12]):
        assert np.array_equal(run(x[mx.array(rows)], w, None, tile), whole[rows])


@pytest.mark.sample
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("widths", [(40, 33, 70), (5, 64), (32, 16, 1)])
def test_several_matrices(emulated, tile, widths):
    x, _, _ = factors(18, 1, 264, mx.bfloat16)
    weights = [factors(1, width, 264, mx.bfloat16, seed=width)[1] for width in widths]
    shapes = [(18, width) for width in widths]
    outs = narrow_matmul._launch(narrow_matmul.GROUPED, x, weights, None, tile, shapes)
    assert len(outs) == len(widths)
    for out, w in zip(outs, weights, strict=True):
        assert np.array_equal(to_float(out), run(x, w, None, tile))


def test_values_at_any_address(emulated):
    emulated("is_aligned(x) && is_aligned(matrix) && is_aligned(partner)", "false")
    x, w, _ = factors(9, 20, 264, mx.float16)
    close(run(x, w, None, TILES[0]), expected(x, w, None), mx.float16)


@pytest.mark.sample
@pytest.mark.parametrize("dtype", narrow_matmul.DTYPES)
@pytest.mark.parametrize("tile", TILES)
def test_a_residual_is_added_to_the_rounded_product(emulated, dtype, tile):
    x, w, _ = factors(37, 70, 1096, dtype)
    residual = mx.array(np.random.default_rng(1).standard_normal((37, 1, 70))).astype(dtype)
    heads = x.reshape(37, 8, 1, 137)  # in any shape
    (out,) = narrow_matmul._launch(narrow_matmul.ADDED, heads, [w], residual, tile, [residual.shape])
    product = mx.array(run(x, w, None, tile)[:, None]).astype(dtype)
    assert np.array_equal(to_float(out), to_float(residual + product))


@pytest.mark.sample
@pytest.mark.parametrize("dtype", narrow_matmul.DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("num_rows", "width", "depth"), [(1, 5, 8), (37, 70, 1096)])
def test_a_gate_is_rounded_where_mlx_rounds(emulated, dtype, tile, num_rows, width, depth):
    x, w, _ = factors(num_rows, width, depth, dtype)
    up = factors(1, width, depth, dtype, seed=1)[1]
    w = w * 4  # gates of -12 to 12
    (out,) = narrow_matmul._launch(narrow_matmul.GATED, x[:, None], [w, up], None, tile, [(num_rows, 1, width)])
    gate = mx.array(run(x, w, None, tile)).astype(dtype)
    one = mx.array(1, dtype)
    tail = one / (one + mx.exp(mx.abs(gate).astype(mx.float32)).astype(dtype))
    sigmoid = mx.where(gate < 0, tail, one - tail)
    expected = gate * sigmoid * mx.array(run(x, up, None, tile)).astype(dtype)
    assert np.array_equal(to_float(out)[:, 0], to_float(expected))
    silu = to_float(gate) / (1 + np.exp(-to_float(gate).astype(np.float64)))
    np.testing.assert_allclose(to_float(out)[:, 0], silu * run(x, up, None, tile), rtol=2e-2, atol=2e-2)


MUTATIONS = {
    "a share twice": ("k += (SG - 1) * SHARE", "k += (SG - 2) * SHARE"),
    "a warp's sum left out": ("s < SG", "s < SG - 1"),
    "fragments exchanged": ("low.x, high.x, low.y, high.y", "low.x, low.y, high.x, high.y"),
    "past the end of the rows": ("!live ? make_uint4(0, 0, 0, 0) : aligned ? stream_load", "aligned ? stream_load"),
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "bias left out": ("sum + static_cast<float>(bias[column])", "sum"),
    "columns exchanged": ("c * 2 + e % 2", "c * 2 + 1 - e % 2"),
    "past the last column": ("row < n_rows && column < width", "row < n_rows"),
}


def test_another_order_of_adding_is_seen(emulated):
    emulated("SHARE = 128", "SHARE = 64 * MT")
    with pytest.raises(AssertionError):
        test_a_row_does_not_depend_on_the_others(emulated, TILES[1])


def test_mutations_of_several_matrices_are_found(emulated):
    emulated("which == 1 ? tiles0", "which == 1 ? tiles1")
    with pytest.raises((EmuError, AssertionError)):
        test_several_matrices(emulated, TILES[0], (40, 70, 33))


def check_gate(emulated):
    test_a_gate_is_rounded_where_mlx_rounds(emulated, mx.bfloat16, TILES[1], 37, 70, 1096)


def check_residual(emulated):
    test_a_residual_is_added_to_the_rounded_product(emulated, mx.bfloat16, TILES[1])


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(
    ("check", "edit"),
    [
        (check_gate, ("i < HALVES ? matrix : partner", "matrix")),
        (check_gate, ("i % HALVES * 8", "i * 8")),
        (check_gate, ("s / SG * COLUMNS", "0")),
        (check_gate, ("gate < 0.0f ? tail", "gate > 0.0f ? tail")),
        (check_gate, ("rounded(gate * sigmoid)", "(gate * sigmoid)")),
        (check_residual, ("before + ", "")),
        (check_residual, ("(row) * width + column]);", "(row) * width + row]);")),
        (check_residual, ("static_cast<float>(static_cast<T>(sum))", "sum")),
    ],
)
def test_mutations_of_what_follows_a_product_are_found(emulated, check, edit):
    emulated(*edit)
    with pytest.raises((EmuError, AssertionError)):
        check(emulated)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found(emulated, name):
    emulated(*MUTATIONS[name])
    x, w, bias = factors(13, 40, 1096, mx.bfloat16)
    with pytest.raises((EmuError, AssertionError)):
        close(run(x, w, bias, TILES[1]), expected(x, w, bias), mx.bfloat16)
