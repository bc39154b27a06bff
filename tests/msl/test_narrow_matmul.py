# ruff: noqa: E501
"""narrow_matmul's and narrow_quantized's texts on the emulator, with the tensor cores' fragments as PTX describes them:
one set of tests over plain matrices (form None) and quantised ones (bits, group size)."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.cuda import narrow_matmul
from mlx_paged.cuda.narrow_matmul import BIASED, DTYPES, GATED, GROUPED, PLAIN, TILES, PackedWeight
from mlx_paged.kernels import build as kernel_build
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.scratch import launch_alone
from tests.support.msl import registers
from tests.support.msl.emulator import BF16, EmuError, as_np
from tests.support.msl.harness import tensor_kernel, to_float

SHARED_MEMORY = 48 << 10  # CUDA's limit without an opt-in
FORMS = [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128)]
SLOW = pytest.mark.slow
NO_COMPILER = pytest.mark.skipif(registers.compiler() is None, reason="nvcc is not here")


@pytest.fixture
def shifted():
    """Names of a kernel's inputs that begin one element after a multiple of 16 bytes, on the emulator."""
    return set()


@pytest.fixture
def emulated(monkeypatch, shifted):
    """Run the launch code on the emulator; calling the fixture's value with (old, new) plants a mutation."""
    edits, planted = [], set()

    def build(body, constants):
        kernel, outputs = tensor_kernel(body, constants, edits, planted)

        def launch(*, inputs, **call):
            inputs = [at_odd_address(x) if name in shifted else x for name, x in zip(kernel.inn, inputs, strict=True)]
            # With two matrices, the third output is not written.
            options = {"sparse": outputs[2:], "checked": True, "orders": (0, 2), "tg_limit": SHARED_MEMORY}
            return kernel(inputs=inputs, **options | call)

        return launch

    monkeypatch.setattr(kernel_build, "build_kernel", build)
    yield lambda *edit: edits.append(edit)
    assert planted == set(edits)


def at_odd_address(x):
    """Return a copy that begins one element after a multiple of 16 bytes."""
    values, _ = as_np(x)
    memory = np.empty(values.size + 16, values.dtype)
    start = -memory.ctypes.data % 16 // values.itemsize + 1
    copy = memory[start : start + values.size].reshape(values.shape)
    copy[...] = values
    return copy.view(BF16) if x.dtype == mx.bfloat16 else copy


def noise(shape, dtype, seed, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * scale
    return mx.array(values).astype(dtype)


def weight(width, depth, form, dtype, seed=0, scale=1.0):
    values = noise((width, depth), dtype, seed + 7, scale * depth**-0.5)
    return values if form is None else PackedWeight(*mx.quantize(values, form[1], form[0]), form[0])


def rows(num_rows, depth, dtype):
    return noise((num_rows, depth), dtype, 1)


def values_of(w, dtype):
    """Return a matrix's values, rounded once; a packed one is unpacked by NumPy."""
    if isinstance(w, mx.array):
        return to_float(w).astype(np.float64)
    words, scales, biases = np.array(w.words), to_float(w.scales), to_float(w.biases)
    shifts = np.arange(32 // w.bits, dtype=np.uint32) * w.bits
    q = (words[..., None] >> shifts & (1 << w.bits) - 1).reshape(w.shape).astype(np.float64)
    by, plus = (np.repeat(x, w.shape[1] // x.shape[1], 1) for x in (scales, biases))
    return to_float(mx.array((q * by + plus).astype(np.float32)).astype(dtype)).astype(np.float64)


def run(x, w, bias, tile):
    body = PLAIN if bias is None else BIASED
    (out,) = narrow_matmul.launch(body, x[:, None], [w], bias, tile, [(x.shape[0], 1, w.shape[0])])
    assert out.shape == (x.shape[0], 1, w.shape[0])
    return to_float(out)[:, 0]


def check(x, w, bias, tile):
    product = to_float(x).astype(np.float64) @ values_of(w, x.dtype).T
    want = product if bias is None else product + to_float(bias)
    precision = 2.0 ** -(8 if x.dtype == mx.bfloat16 else 11)
    np.testing.assert_allclose(run(x, w, bias, tile), want, rtol=precision, atol=precision)


PRODUCTS = [(None, dtype, tile) for dtype in DTYPES for tile in TILES]
PRODUCTS += [(form, *pair) for form in FORMS for pair in crossed(DTYPES, TILES)]
CHEAP = [(None, DTYPES[0], TILES[0]), (None, DTYPES[1], TILES[2]), ((4, 32), DTYPES[0], TILES[0])]
CHEAP += [((4, 64), DTYPES[1], TILES[1]), ((8, 128), DTYPES[0], TILES[2])]


@pytest.mark.parametrize(
    ("form", "dtype", "tile"), [pytest.param(*case, marks=() if case in CHEAP else SLOW) for case in PRODUCTS]
)
def test_products(emulated, form, dtype, tile):
    group = 72 if form is None else form[1]
    for num_rows, width, depth in ((1, 40, group), (13, 33, group), (37, 70, 1024 + group)):
        x, w = rows(num_rows, depth, dtype), weight(width, depth, form, dtype)
        check(x, w, None, tile)
        check(x, w, noise((width,), dtype, 2), tile)


@pytest.mark.parametrize("form", [None, pytest.param((4, 32), marks=SLOW), pytest.param((8, 32), marks=SLOW)])
def test_a_row_depends_neither_on_others_nor_on_the_tile(emulated, form):
    # float16 shows more of the sums; the depth is enough to show another order of adding.
    depth = 1096 if form is None else 2208
    x, w = rows(37, depth, mx.float16), weight(40, depth, form, mx.float16)
    whole = run(x, w, None, TILES[0])
    for tile in TILES:
        for some in ([3, 4], [36, 0, 12], list(range(37))):
            assert np.array_equal(run(x[mx.array(some)], w, None, tile), whole[some])


@pytest.mark.parametrize(
    ("form", "widths"),
    quick(crossed([None, (4, 64)], [(40, 33, 70), (5, 64), (32, 16, 1)]), (None, (40, 33, 70)), ((4, 64), (5, 64))),
)
def test_several_matrices(emulated, form, widths, tiles=TILES):
    x = rows(18, 264 if form is None else 256, mx.bfloat16)
    weights = [weight(width, x.shape[1], form, mx.bfloat16, seed=width) for width in widths]
    for tile in tiles:
        outs = narrow_matmul.launch(GROUPED, x, weights, None, tile, [(18, width) for width in widths])
        assert len(outs) == len(widths)
        for out, w in zip(outs, weights, strict=True):
            assert np.array_equal(to_float(out), run(x, w, None, tile))


def gated_rows(form):
    """Return what 9 rows get from two matrices and their activation."""
    depth = 264 if form is None else 256
    x, weights = rows(9, depth, mx.bfloat16), [weight(20, depth, form, mx.bfloat16, seed) for seed in (0, 1)]
    return to_float(narrow_matmul.launch(GATED, x, weights, None, TILES[0], [(9, 20)])[0])


@pytest.mark.parametrize(("form", "name"), crossed([None, (4, 64), (8, 32)], ["x", "w", "w1"]))
def test_values_may_begin_at_any_address(emulated, shifted, form, name):
    want = gated_rows(form)
    shifted.add(name)
    assert np.array_equal(gated_rows(form), want)


@pytest.mark.parametrize(("form", "name"), crossed([None, (4, 64)], ["x", "w", "w1"]))
def test_each_address_is_asked(emulated, shifted, form, name):
    emulated(f"is_aligned({ {'x': 'x', 'w': 'matrix', 'w1': 'partner'}[name] })", "true")
    shifted.add(name)
    with pytest.raises(EmuError, match="odd address"):
        gated_rows(form)


@pytest.mark.parametrize(
    ("form", "dtype"), [(None, mx.float16), ((4, 64), mx.bfloat16), *slow((None, mx.bfloat16), ((8, 64), mx.bfloat16))]
)
def test_a_gate_is_rounded_where_mlx_rounds(emulated, form, dtype, tiles=TILES):
    for num_rows, width, depth in ((1, 5, 64), (37, 70, 1096 if form is None else 1088)):
        x = rows(num_rows, depth, dtype)
        gate_w, up = (weight(width, depth, form, dtype, seed, 4) for seed in (0, 1))  # gates of -12 to 12
        for tile in tiles:
            (out,) = narrow_matmul.launch(GATED, x[:, None], [gate_w, up], None, tile, [(num_rows, 1, width)])
            gate, one = mx.array(run(x, gate_w, None, tile)).astype(dtype), mx.array(1, dtype)
            tail = one / (one + mx.exp(mx.abs(gate).astype(mx.float32)).astype(dtype))
            sigmoid = mx.where(gate < 0, tail, one - tail)
            want = gate * sigmoid * mx.array(run(x, up, None, tile)).astype(dtype)
            assert np.array_equal(to_float(out)[:, 0], to_float(want))
            silu = to_float(gate) / (1 + np.exp(-to_float(gate).astype(np.float64)))
            np.testing.assert_allclose(to_float(gate * sigmoid), silu, rtol=2e-2, atol=2e-2)


# Planted mutations: (old, new), and which check finds each. ---------------------------------------------------------


def check_product(emulated, form):
    depths = (1096,) if form is None else (1088, 2304)
    for depth, group in zip(depths, (64, 128), strict=False):
        own = None if form is None else (4, group)
        x, w = rows(13, depth, mx.bfloat16), weight(40, depth, own, mx.bfloat16)
        for tile in TILES[1:] if form is None else TILES:
            check(x, w, noise((40,), mx.bfloat16, 2), tile)


def check_order(emulated, form):
    test_a_row_depends_neither_on_others_nor_on_the_tile(emulated, form)


def check_grouped(emulated, form):
    test_several_matrices(emulated, form, (40, 70, 33), TILES[:2])


def check_gate(emulated, form):
    test_a_gate_is_rounded_where_mlx_rounds(emulated, form, mx.bfloat16, TILES[2:])


PACKED = (4, 64)
MUTATIONS = {
    "a share twice": (None, check_product, "k += (SG - 1) * SHARE", "k += (SG - 2) * SHARE"),
    "a warp's sum left out": (None, check_product, "s < SG", "s < SG - 1"),
    "fragments exchanged": (None, check_product, "low.x, high.x, low.y, high.y", "low.x, low.y, high.x, high.y"),
    "past the end of rows": (None, check_product, "= live ? load_matrix(source) : make_uint4(0, 0, 0, 0)", "= load_matrix(source)"),
    "no barrier": (None, check_product, "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "bias left out": (None, check_product, "sum + static_cast<float>(bias[column])", "sum"),
    "columns exchanged": (None, check_product, "c * 2 + e % 2", "c * 2 + 1 - e % 2"),
    "past the last column": (None, check_product, "row < n_rows && column < width", "row < n_rows"),
    "another order of adding": (None, check_order, "SHARE = 128", "SHARE = 64 * MT"),
    "tiles of another matrix": (None, check_grouped, "which == 1 ? tiles0", "which == 1 ? tiles1"),
    "the gate for both": (None, check_gate, "i < HALVES ? matrix : partner", "matrix"),
    "rows of one half": (None, check_gate, "i % HALVES * 8", "i * 8"),
    "sums of one half": (None, check_gate, "(MATRICES - 1) * COLUMNS + e", "e"),
    "the other tail": (None, check_gate, "gate < 0.0f ? tail", "gate > 0.0f ? tail"),
    "not rounded": (None, check_gate, "rounded(gate * sigmoid)", "(gate * sigmoid)"),
    "packed: a share twice": (PACKED, check_product, "(u + U) * SG * SHARE", "u * SG * SHARE"),
    "packed: a share twice, of 32 rows": (PACKED, check_product, "if (!AHEAD) parts[u] = load(first + u * SG * SHARE)", "if (!AHEAD && first < SG * SHARE) parts[u] = load(first)"),
    "packed: the first share for all": (PACKED, check_product, "load((warp + u * SG) * SHARE)", "load(warp * SHARE)"),
    "packed: the next group's scale": (PACKED, check_product, "row * groups + (at >> shift)", "row * groups + (at >> shift) + 1"),
    "packed: another size of groups": (PACKED, check_product, "depth == groups * 64 ? 6 : 7", "depth == groups * 64 ? 7 : 6"),
    "packed: the bits above": (PACKED, check_product, "& MASK * 0x10001u", "& (MASK << 1 | 1) * 0x10001u"),
    "packed: the power left in": (PACKED, check_product, "POWER | 0x80008000u", "0u"),
    "packed: the next value": (PACKED, check_product, "BITS * pair % 16", "BITS * (pair ^ 1) % 16"),
    "packed: values of another order": (PACKED, check_product, "word(x8, h / 2 + 2)", "word(x8, h / 2 + 1)"),
    "packed: halves exchanged": (PACKED, check_product, "b[j][h] = low_halves", "b[j][h] = high_halves"),
    "packed: past the end of rows": (PACKED, check_product, "x8 = live ? load_x(source) : make_uint4(0, 0, 0, 0)", "x8 = load_x(source)"),
    "packed: fragments exchanged": (PACKED, check_product, "a[0][0], a[0][1], a[1][0], a[1][1]", "a[0][0], a[1][0], a[0][1], a[1][1]"),
    "packed: the other row's values": (PACKED, check_product, "word(part.packed[i][h % 2]", "word(part.packed[i][0]"),
    "packed: past the last column": (PACKED, check_product, "row < n_rows && column < width", "row < n_rows"),
    "packed: no barrier": (PACKED, check_product, "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "packed: one matrix's scales": (PACKED, check_gate, "partner_scales = scales1", "partner_scales = scales"),
    "packed: one matrix's biases": (PACKED, check_gate, "partner_biases = biases1", "partner_biases = biases"),
    "packed: scales of another": (PACKED, check_grouped, "which == 0 ? scales : which == 1 ? scales1 : scales2", "which == 0 ? scales : scales1"),
    "packed: biases of another": (PACKED, check_grouped, "which == 0 ? biases : which == 1 ? biases1 : biases2", "which == 0 ? biases : biases1"),
}  # fmt: skip
QUICK = (
    "a share twice",
    "tiles of another matrix",
    "the gate for both",
    "packed: a share twice",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in MUTATIONS])
def test_planted_mutations_are_found(emulated, name):
    form, find, *edit = MUTATIONS[name]
    emulated(*edit)
    with pytest.raises((EmuError, AssertionError)):
        find(emulated, form)


@pytest.mark.parametrize("body", [PLAIN, *(pytest.param(b, marks=SLOW) for b in narrow_matmul.BODIES if b != PLAIN)])
def test_a_product_of_few_values_reads_nothing_out_of_bounds(emulated, body):
    for bits in (4, 8):
        key = narrow_matmul.kernel_key(body, mx.bfloat16, TILES[1], bits)
        outs = launch_alone(*key, lambda *kernel: partial(kernel_build.build_kernel(*kernel), sparse=()))
        assert all(not to_float(out).any() for out in outs)


@pytest.mark.parametrize("body", [PLAIN, *(pytest.param(b, marks=SLOW) for b in narrow_matmul.BODIES if b != PLAIN)])
def test_the_self_check_passes_and_finds_a_mutation(emulated, body, monkeypatch):
    build = kernel_build.build_kernel

    def arrays_of(body, constants):
        kernel = build(body, constants)
        return lambda **call: [mx.array(to_float(out)).astype(mx.bfloat16) for out in kernel(**call, orders=(0,))]

    monkeypatch.setattr(kernel_build, "build_kernel", arrays_of)
    result = narrow_matmul.self_check(body, mx.bfloat16, TILES[1], 4)
    assert result.ok, result.reason
    emulated("depth == groups * 64 ? 6 : 7", "7")
    assert not narrow_matmul.self_check(body, mx.bfloat16, TILES[1], 4).ok


@NO_COMPILER
@pytest.mark.parametrize("bits", [4, *slow(0, 8)])
def test_tiles_spill_little(bits):
    kernels = [(body, tile) for body in (GATED, GROUPED) for tile in TILES]
    texts = [narrow_matmul.kernel_key(body, mx.bfloat16, tile, bits) for body, tile in kernels]
    for kernel, found in zip(kernels, registers.registers_of_each(tuple(texts)), strict=True):
        most = 0 if bits == 0 else 80 if kernel[1] == narrow_matmul.LARGE else 32
        assert found.stored <= most and found.loaded <= most and found.used <= 128, (kernel, found)
