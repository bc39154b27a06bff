"""narrow_quantized's text on the emulator: narrow_matmul with quantised matrices."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.products import narrow_matmul
from mlx_paged.kernels.products.narrow_matmul import ADDED, BIASED, GATED, GROUPED, PLAIN, TILES, PackedWeight
from mlx_paged.kernels.trial import launch_alone
from tests.support.msl import registers
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import tensor_kernel, to_float

SHARED_MEMORY = 48 << 10  # what CUDA gives without asking
FORMS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]  # bits, group size


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


def weight(width, depth, form, dtype, seed=0, scale=1):
    values = np.random.default_rng(seed + 7).standard_normal((width, depth)).astype(np.float32) * depth**-0.5 * scale
    bits, group_size = form
    return PackedWeight(*mx.quantize(mx.array(values).astype(dtype), group_size, bits), bits)


def rows(num_rows, depth, dtype):
    return mx.array(np.random.default_rng(1).standard_normal((num_rows, depth)).astype(np.float32)).astype(dtype)


def bias_of(width, dtype):
    return mx.array(np.random.default_rng(2).standard_normal(width).astype(np.float32)).astype(dtype)


def values_of(w, dtype):
    """What a packed matrix stands for, rounded once; unpacked by NumPy."""
    words, scales, biases = np.array(w.words), to_float(w.scales), to_float(w.biases)
    shifts = np.arange(32 // w.bits, dtype=np.uint32) * w.bits
    q = (words[..., None] >> shifts & (1 << w.bits) - 1).reshape(w.shape).astype(np.float64)
    by, plus = (np.repeat(x, w.shape[1] // x.shape[1], 1) for x in (scales, biases))
    return to_float(mx.array((q * by + plus).astype(np.float32)).astype(dtype)).astype(np.float64)


def run(x, w, bias, tile):
    body = PLAIN if bias is None else BIASED
    (out,) = narrow_matmul._launch(body, x[:, None], [w], bias, tile, [(x.shape[0], 1, w.shape[0])])
    return to_float(out)[:, 0]


def expected(x, w, bias):
    product = to_float(x).astype(np.float64) @ values_of(w, x.dtype).T
    return product if bias is None else product + to_float(bias)


def close(got, want, dtype):
    digits = 8 if dtype == mx.bfloat16 else 11
    np.testing.assert_allclose(got, want, rtol=2.0**-digits, atol=2.0**-digits)


def test_the_reference_is_what_mlx_dequantizes():
    for form in FORMS:
        w = weight(5, 256, form, mx.float16)
        want = mx.dequantize(*w.arrays, form[1], form[0])
        np.testing.assert_allclose(values_of(w, mx.float16), to_float(want), rtol=2e-3, atol=1e-4)


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tile"), list(zip(narrow_matmul.DTYPES, TILES, strict=True)))
def test_products(emulated, dtype, form, tile):
    for num_rows, width, depth in ((1, 40, form[1]), (37, 33, 1024 + form[1])):
        x, w, bias = rows(num_rows, depth, dtype), weight(width, depth, form, dtype), bias_of(width, dtype)
        close(run(x, w, None, tile), expected(x, w, None), dtype)
        close(run(x, w, bias, tile), expected(x, w, bias), dtype)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_others_or_on_the_tile(emulated, bits):
    x, w = rows(37, 2208, mx.float16), weight(40, 2208, (bits, 32), mx.float16)
    whole = run(x, w, None, TILES[0])
    assert np.array_equal(run(x, w, None, TILES[1]), whole)
    for tile in TILES:
        assert np.array_equal(run(x[mx.array([36, 0, 12])], w, None, tile), whole[[36, 0, 12]])


@pytest.mark.sample
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("widths", [(40, 33, 70), (5, 64), (32, 16, 1)])
def test_several_matrices(emulated, tile, widths):
    x = rows(18, 256, mx.bfloat16)
    weights = [weight(width, 256, (4, 64), mx.bfloat16, seed=width) for width in widths]
    outs = narrow_matmul._launch(GROUPED, x, weights, None, tile, [(18, width) for width in widths])
    assert len(outs) == len(widths)
    for out, w in zip(outs, weights, strict=True):
        assert np.array_equal(to_float(out), run(x, w, None, tile))


@pytest.mark.sample
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", narrow_matmul.DTYPES)
def test_a_residual_is_added_to_the_rounded_product(emulated, dtype, bits):
    x, w = rows(19, 1024, dtype), weight(70, 1024, (bits, 64), dtype)
    residual = mx.array(np.random.default_rng(3).standard_normal((19, 1, 70))).astype(dtype)
    heads = x.reshape(19, 8, 1, 128)
    (out,) = narrow_matmul._launch(ADDED, heads, [w], residual, TILES[0], [residual.shape])
    product = mx.array(run(x, w, None, TILES[0])[:, None]).astype(dtype)
    assert np.array_equal(to_float(out), to_float(residual + product))


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tile", TILES)
def test_a_gate_is_rounded_where_mlx_rounds(emulated, tile, bits):
    dtype, num_rows, width, depth = mx.bfloat16, 37, 70, 1088
    x = rows(num_rows, depth, dtype)
    gate_w, up_w = (weight(width, depth, (bits, 64), dtype, seed, 4) for seed in (0, 1))
    (out,) = narrow_matmul._launch(GATED, x[:, None], [gate_w, up_w], None, tile, [(num_rows, 1, width)])
    gate, one = mx.array(run(x, gate_w, None, tile)).astype(dtype), mx.array(1, dtype)
    tail = one / (one + mx.exp(mx.abs(gate).astype(mx.float32)).astype(dtype))
    sigmoid = mx.where(gate < 0, tail, one - tail)
    want = gate * sigmoid * mx.array(run(x, up_w, None, tile)).astype(dtype)
    assert np.array_equal(to_float(out)[:, 0], to_float(want))


def test_values_at_any_address(emulated):
    emulated("is_aligned(matrix) && is_aligned(partner)", "false")
    emulated("is_aligned(x)", "false")
    x, w = rows(9, 256, mx.float16), weight(20, 256, (8, 32), mx.float16)
    close(run(x, w, None, TILES[0]), expected(x, w, None), mx.float16)


MUTATIONS = {
    "a share twice": ("u * SG * SHARE", "u * SHARE"),
    "the next group's scale": ("row * groups + (at >> shift)", "row * groups + (at >> shift) + 1"),
    "another size of groups": ("depth == groups * 64 ? 6 : 7", "depth == groups * 64 ? 7 : 6"),
    "the bits above": (" & MASK << place", " & (MASK << BITS | MASK) << place"),
    "the power left in": ("by * (1.0f / (1 << place))", "by"),
    "the next value": ("const int bit = (e + i) * BITS", "const int bit = (e + 1 - i) * BITS"),
    "past the end of the rows": ("b[j] = !live ? make_uint4(0, 0, 0, 0) : ", "b[j] = "),
    "fragments exchanged": ("a[0][0], a[0][1], a[1][0], a[1][1]", "a[0][0], a[1][0], a[0][1], a[1][1]"),
    "the other row's values": ("values(packed[u][i][h % 2]", "values(packed[u][i][0]"),
    "past the last column": ("row < n_rows && column < width", "row < n_rows"),
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
}  # fmt: skip


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_found(emulated, name):
    emulated(*MUTATIONS[name])
    for group_size, depth in ((64, 1088), (128, 1152)):
        x, w = rows(13, depth, mx.bfloat16), weight(40, depth, (4, group_size), mx.bfloat16)
        try:
            close(run(x, w, None, TILES[1]), expected(x, w, None), mx.bfloat16)
        except (EmuError, AssertionError):
            return
    pytest.fail("not found")


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    "edit",
    [("partner_scales = scales1", "partner_scales = scales"), ("partner_biases = biases1", "partner_biases = biases")],
)
def test_mutations_of_two_matrices_are_found(emulated, edit):
    emulated(*edit)
    with pytest.raises((EmuError, AssertionError)):
        test_a_gate_is_rounded_where_mlx_rounds(emulated, TILES[1], 4)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", ["scales", "biases"])
def test_mutations_of_several_matrices_are_found(emulated, name):
    emulated(f"which == 0 ? {name} : which == 1 ? {name}1 : {name}2", f"which == 0 ? {name} : {name}1")
    with pytest.raises((EmuError, AssertionError)):
        test_several_matrices(emulated, TILES[0], (40, 70, 33))


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("body", narrow_matmul.BODIES)
def test_a_trial_reads_nothing_astray(emulated, body, bits):
    for num_dims in (1, 2, 4):
        text = narrow_matmul.text_of(body, mx.bfloat16, TILES[0], num_dims, bits)
        outs = launch_alone(text, lambda *kernel: partial(narrow_matmul.build_kernel(*kernel), sparse=()))
        assert all(not to_float(out).any() for out in outs)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("body", narrow_matmul.BODIES)
def test_the_self_check_passes_and_finds_a_mutation(emulated, body, monkeypatch):
    build = narrow_matmul.build_kernel

    def arrays_of(body, constants):
        kernel = build(body, constants)
        return lambda **call: [mx.array(to_float(out)).astype(mx.bfloat16) for out in kernel(**call, orders=(0,))]

    monkeypatch.setattr(narrow_matmul, "build_kernel", arrays_of)
    result = narrow_matmul.self_check(body, mx.bfloat16, TILES[0], 4)
    assert result.ok, result.reason
    emulated("depth == groups * 64 ? 6 : 7", "7")
    assert not narrow_matmul.self_check(body, mx.bfloat16, TILES[0], 4).ok


@pytest.mark.sample(every=4)
@pytest.mark.skipif(registers.compiler() is None, reason="nvcc is not here")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("body", [GATED, GROUPED])
def test_the_largest_tile_does_not_spill(body, bits):
    text = narrow_matmul.text_of(body, mx.bfloat16, narrow_matmul.LARGE, 3, bits)
    found = registers.registers_of(text.body, text.constants)
    assert (found.stored, found.loaded) == (0, 0) and found.used <= 128, found
