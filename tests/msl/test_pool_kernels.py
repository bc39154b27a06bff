# ruff: noqa: E501
"""Writes, gathers and copies of blocks on the emulator, one set of tests over dense and quantised pages, whose bytes
are those of MLX's kernels on a GPU."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.bodies import BODIES
from scripts.support.paged_decode import gather_blocks, write_slots
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.quantized_pages import dequantized, page_shape, pages_of, quantized, rows_of
from tests.support.msl import emulator
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import emulated, to_float

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
FENCE = mx.array([41], mx.uint32)
BLOCKS, HEADS, BLOCK = 6, 2, 8
IDS = [4, 1, 5, 2]
DENSE = (None, None)  # in place of the forms of keys and values


def values(shape, dtype, seed=5):
    """Return values of many sizes; groups of one sign, one value, zeros, and halves of a step of 4 bits or 8."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 8, (*shape[:-1], 1))
    kinds = rng.integers(0, 8, (*shape[:-1], 1))
    x = np.where(kinds == 0, np.abs(x), np.where(kinds == 1, -np.abs(x) - 3.0, x))
    x = np.where(kinds == 2, x[..., :1], np.where(kinds == 3, 0.0, x))
    for kind, most in ((4, 15), (5, 255)):
        halves = -rng.integers(0, 2 * most + 1, shape) / 2.0
        halves[..., ::32] = -most
        x = np.where(kinds == kind, halves, x)
    return mx.array(x.astype(np.float32)).astype(dtype)


def pools(forms, dims, dtype, seed=3):
    """Return pools full of values."""
    found = []
    for i, (form, dim) in enumerate(zip(forms, dims, strict=True)):
        x = values((BLOCKS, HEADS, BLOCK, dim), dtype, seed + i)
        found.append(x if form is None else mx.array(pages_of(quantized(to_float(x), form), form)))
    return found


def stored(pool, form):
    """Return what a pool's slots hold, ``[blocks, heads, block, dim or words]``."""
    return to_float(pool) if form is None else rows_of(np.asarray(pool), form)


def put(pool, rows, slots):
    """Put rows ``[B, heads, length, dim or words]`` at slots of a pool's contents, by NumPy."""
    result = pool.copy()
    for row, slot in zip(rows.swapaxes(1, 2).reshape(-1, HEADS, rows.shape[-1]), slots, strict=True):
        if slot >= 0:
            result[slot // BLOCK, :, slot % BLOCK] = row
    return result


def gathered(contents, start, length, ids=IDS):
    """Return positions of blocks' contents, by NumPy."""
    return contents[ids].swapaxes(0, 1).reshape(HEADS, len(ids) * BLOCK, -1)[:, start : start + length]


LAYOUTS = {  # of values [batch, heads, length, dim]
    "BHLD": lambda x: x,
    "NHD": lambda x: x.swapaxes(1, 2).reshape(-1, HEADS, x.shape[3]),
    "NH1D": lambda x: x.swapaxes(1, 2).reshape(-1, HEADS, 1, x.shape[3]),
}


def check_write(dims, dtype, pages=None, length=5, batch=2, layout="BHLD"):
    forms = pages or DENSE
    k_pool, v_pool = pools(forms, dims, dtype)
    k, v = (values((batch, HEADS, length, dim), dtype, 7 + i) for i, dim in enumerate(dims))
    slots = np.random.default_rng(1).permutation(BLOCKS * BLOCK)[: batch * length]
    slots = slots.astype(np.int32)
    if len(slots) > 1:
        slots[1] = -1
    with emulated() as fake:
        fence = write_slots(k_pool, v_pool, FENCE, *map(LAYOUTS[layout], (k, v)), mx.array(slots), pages)
    assert int(np.asarray(fence)[0]) == 42
    for name, pool, x, form in zip(("k_pool", "v_pool"), (k_pool, v_pool), (k, v), forms, strict=True):
        rows = to_float(x) if form is None else quantized(to_float(x), form)
        np.testing.assert_array_equal(stored(fake.written[name], form), put(stored(pool, form), rows, slots))


@pytest.mark.parametrize(
    ("dtype", "batch", "layout"),
    quick(crossed(DTYPES, [1, 2], list(LAYOUTS)), (mx.float32, 2, "NHD"), (mx.float16, 1, "BHLD"),
    (mx.bfloat16, 2, "NH1D"), (mx.float32, 2, "BHLD"))
)  # fmt: skip
def test_dense_writes(dtype, batch, layout):
    check_write((64, 80), dtype, batch=batch, layout=layout)


@pytest.mark.parametrize(
    ("dtype", "group_size", "bits"), quick(crossed(DTYPES, [32, 64, 128], [(8, 8), (4, 4), (8, 4)]),
    (mx.float32, 32, (8, 8)), (mx.float16, 64, (4, 4)), (mx.bfloat16, 128, (8, 4)))
)  # fmt: skip
def test_written_bytes_equal_mlxs(bits, group_size, dtype):
    check_write((128, 128), dtype, page_shape(128, bits, group_size, dtype))


@pytest.mark.parametrize(
    ("dim", "value_dim", "group_size"), [(64, 96, 32), (96, 96, 32), *slow((192, 128, 64), (256, 256, 128))]
)  # fmt: skip
def test_heads_of_other_sizes(dim, value_dim, group_size):
    check_write((dim, value_dim), mx.bfloat16, page_shape(dim, (8, 4), group_size, mx.bfloat16, value_dim))


@pytest.mark.parametrize(("length", "batch"), [(1, 1), (17, 1), *slow((3, 3))])
def test_odd_lengths_and_other_layouts(length, batch):
    for layout in ("BHLD", "NHD"):
        check_write((64, 64), mx.float16, page_shape(64, (8, 4), 32, mx.float16), length, batch, layout)


def test_write_slots_follows_strides():
    k_pool, v_pool = (np.array(p) for p in pools(DENSE, (64, 64), mx.float32))
    base = np.random.default_rng(0).standard_normal((1, 3, 2, 64)).astype(np.float32)
    k = base.swapaxes(1, 2)  # [1, heads, length, dim] over [1, length, heads, dim]
    body = BODIES["write_slots"]
    constants = (("T", mx.float32), ("D", 64), ("DV", 64), ("BS", 8))
    header, source = kernel_build.kernel_source("write_slots", "metal", constants)
    kernel = emulator.metal_kernel(
        "write_slots", list(body.inputs), list(body.outputs), source, header, ensure_row_contiguous=False
    )
    kernel(
        inputs=[k_pool, v_pool, np.array([0], np.uint32), k, k, np.array([9, 3, 47], np.int32)],
        grid=(3 * 64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(1,)], output_dtypes=["uint32"],
        checked=True, orders=(0, 1, 2), writes=("k_pool", "v_pool"),
    )  # fmt: skip
    for i, slot in enumerate((9, 3, 47)):
        np.testing.assert_array_equal(kernel.written["k_pool"][slot // 8, :, slot % 8], base[0, i])


def test_groups_with_infinities_or_nan_become_nan():
    pages = page_shape(64, (8, 4), 32)
    k_pool, v_pool = pools(pages, (64, 64), mx.float32)
    k = np.ones((1, HEADS, 3, 64), np.float32)
    k[0, 0, 0, 5], k[0, 1, 1, 40], k[0, :, 2] = np.inf, -np.inf, np.nan
    with emulated() as fake:
        write_slots(k_pool, v_pool, FENCE, mx.array(k), mx.array(k), mx.array([3, 9, 17], mx.int32), pages)
    for name, form in zip(("k_pool", "v_pool"), pages, strict=True):
        got = dequantized(rows_of(np.asarray(fake.written[name]), form), form)
        groups = np.stack([got[slot // BLOCK, :, slot % BLOCK] for slot in (3, 9, 17)]).reshape(3, HEADS, 2, 32)
        lost = np.zeros((3, HEADS, 2), bool)
        lost[0, 0, 0] = lost[1, 1, 1] = lost[2] = True
        assert np.isnan(groups[lost]).all() and (groups[~lost] == 1.0).all()


def test_model_of_a_gpu_differs_from_the_cpu_in_groups_of_one_sign():
    """Otherwise the tests above would compare the model with itself."""
    form = page_shape(64, (8, 8), 64).k
    x = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    cpu = np.array(form.quantize(mx.array(x)))
    same = (quantized(x, form) == cpu).mean()
    assert same > 0.99
    x = -np.abs(x) - 1.0  # the CPU's range ends at the greatest value, a GPU's at 0
    assert (quantized(x, form) != np.array(form.quantize(mx.array(x)))).any()


def check_gather(dims, dtype, start, length, pages=None):
    forms = pages or DENSE
    k_pool, v_pool = pools(forms, dims, dtype)
    with emulated():
        *found, fence = gather_blocks(k_pool, v_pool, FENCE, IDS, start, length, pages)
    assert int(np.asarray(fence)[0]) == 42
    # The compiler rounds a product and a sum once or twice; self-checks on a GPU require MLX's bits.
    tolerance = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype] if pages else 0.0
    for pool, got, form in zip((k_pool, v_pool), found, forms, strict=True):
        expected = gathered(stored(pool, form), start, length)
        expected = expected if form is None else dequantized(expected, form)
        assert to_float(got)[0].shape == expected.shape
        scale = np.abs(expected).max(-1, keepdims=True) + 1e-9
        np.testing.assert_allclose(to_float(got)[0] / scale, expected / scale, atol=tolerance, rtol=0.0)


SPANS = [(0, 32), (7, 2), (5, 1), (9, 20)]


@pytest.mark.parametrize(
    ("dtype", "span", "bits"), quick(crossed(DTYPES, SPANS, [None, (8, 8), (4, 4), (8, 4)]),
    (mx.float32, (0, 32), None), (mx.bfloat16, (7, 2), None), (mx.float16, (9, 20), None),
    (mx.float32, (0, 32), (8, 8)), (mx.float32, (9, 20), (8, 8)), (mx.float16, (7, 2), (4, 4)),
    (mx.bfloat16, (5, 1), (8, 4)))
)  # fmt: skip
def test_gathers(bits, span, dtype):
    check_gather((64, 96), dtype, *span, bits and page_shape(64, bits, 32, dtype, value_dim=96))


@pytest.mark.parametrize(
    ("dtype", "span"), quick(crossed(DTYPES, SPANS), (mx.float32, (0, 32)), (mx.float16, (7, 2)),
    (mx.bfloat16, (9, 20)))
)  # fmt: skip
def test_rows_are_gathered_as_they_are(span, dtype):
    pages = page_shape(96, (8, 4), 32, dtype, value_dim=64)
    k_pool, v_pool = pools(pages, (96, 64), dtype)
    with emulated():
        launch = kernels.prepare_gather(k_pool, v_pool, IDS, *span, pages, stored=True)
        *found, fence = launch(k_pool, v_pool, FENCE)
    assert int(np.asarray(fence)[0]) == 42
    for pool, got, form in zip((k_pool, v_pool), found, pages, strict=True):
        np.testing.assert_array_equal(np.asarray(got)[0], gathered(stored(pool, form), *span))


@pytest.mark.parametrize(
    ("dtype", "batch", "length"), quick([(a, *b) for a in DTYPES for b in [(1, 11), (3, 2)]], (mx.float32, 1, 11),
    (mx.float16, 3, 2))
)  # fmt: skip
def test_rows_are_written_as_they_are(batch, length, dtype):
    pages = page_shape(96, (8, 4), 32, dtype, value_dim=64)
    k_pool, v_pool = pools(pages, (96, 64), dtype)
    rng = np.random.default_rng(2)
    k, v = (rng.integers(0, 2**32, (batch, HEADS, length, f.num_words), np.uint32) for f in pages)
    slots = rng.permutation(BLOCKS * BLOCK)[: batch * length].astype(np.int32)
    slots[2] = -1
    with emulated() as fake:
        launch = kernels.prepare_write(k_pool, v_pool, mx.array(slots), pages, stored=True)
        fence = launch(k_pool, v_pool, FENCE, mx.array(k), mx.array(v))
    assert int(np.asarray(fence)[0]) == 42
    for name, pool, x, form in zip(("k_pool", "v_pool"), (k_pool, v_pool), (k, v), pages, strict=True):
        np.testing.assert_array_equal(stored(fake.written[name], form), put(stored(pool, form), x, slots))


# The last one has 33 and 17 words a row.
@pytest.mark.parametrize("dtype", [*DTYPES, "pages"])
def test_copies(dtype):
    pages = page_shape(128, (8, 4), 128, mx.bfloat16) if dtype == "pages" else None
    k_pool, v_pool = pools(pages or DENSE, (128, 128) if pages else (64, 80), mx.bfloat16 if pages else dtype)
    with emulated() as fake:
        fence = kernels.copy_blocks(k_pool, v_pool, FENCE, [1, 4], [3, 5], pages)
    assert int(np.asarray(fence)[0]) == 43
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        expected = np.array(pool) if pages else to_float(pool).copy()
        expected[[3, 5]] = expected[[1, 4]]
        got = fake.written[name]
        np.testing.assert_array_equal(np.asarray(got) if pages else to_float(got), expected)


@pytest.mark.parametrize("dims", [(24, 24), (32, 20)])
def test_head_sizes_that_no_attention_kernel_takes(dims):
    """MLX's attention serves them, over gathered blocks."""
    check_write(dims, mx.float32, length=3, batch=1, layout="NHD")
    check_gather(dims, mx.float32, 3, 12)
    k_pool, v_pool = pools(DENSE, dims, mx.float32)
    with emulated() as fake:
        kernels.copy_blocks(k_pool, v_pool, FENCE, [1], [3])
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        np.testing.assert_array_equal(fake.written[name][3], to_float(pool)[1])


def test_head_size_that_no_kernel_copies_raises():
    with emulated(), pytest.raises(ValueError, match="head size 6/64"):
        kernels.copy_blocks(*pools(DENSE, (6, 64), mx.float32), FENCE, [1], [2])


WRITE, GATHER, PUT, TAKE = "write_slots", "gather_blocks", "write_rows", "gather_rows"
WRITE_PAGES, GATHER_PAGES = "quantized_write", "quantized_gather"
MUTATIONS = {
    "write: every head to head 0": (WRITE, "(slot / BS * n_kv + head) * BS", "slot / BS * n_kv * BS"),
    "write: fence dropped": (WRITE, "fence_out[0] = fence[0] + 1u;", ""),
    "write: fence not read": (WRITE, "fence[0] + 1u", "1u"),
    "write: negative slots written": (WRITE, "if (slot >= 0)", "if (slot >= -1)"),
    "write: offset lost": (WRITE, "+ slot % BS;", ";"),
    "write: half a row": (WRITE, "dim < D; dim += 32", "dim < D / 2; dim += 32"),
    "write: past the pool": (WRITE, "k_target[at * D + dim]", "k_target[at * D + dim + 100000]"),
    "gather: wrong block": (GATHER, "blocks[position / BS]", "blocks[position / BS * 0]"),
    "gather: start ignored": (GATHER, "span[0] + i", "i"),
    "gather: past the table": (GATHER, "position / BS]", "position / BS + 3]"),
    "gather: range too long": (GATHER, "if (i < length)", "if (i <= length)"),
    "gather: fence dropped": (GATHER, "fence_out[0] = fence[0] + 1u;", ""),
    "pages, write: maximum not from 0": (WRITE_PAGES, "float high = 0.0f;", "float high = -float_of(0x7f800000u);"),
    "pages, write: halves to even": (WRITE_PAGES, "min(metal::round(", "min(metal::rint("),
    "pages, write: range one short": (WRITE_PAGES, "(high - low) / most", "(high - low) / (most + 1.0f)"),
    "pages, write: edge not met": (WRITE_PAGES, "is_zero ? scale : edge / steps", "scale"),
    "pages, write: codes swapped": (WRITE_PAGES, "lane % SHARERS * PER + i", "(SHARERS - 1 - lane % SHARERS) * PER + i"),
    "pages, write: words not joined": (WRITE_PAGES, "word |= simd_shuffle_xor", "word = simd_shuffle_xor"),
    "pages, write: every head to head 0": (WRITE_PAGES, "page = slot / BS * n_kv + head;", "page = slot / BS * n_kv;"),
    "pages, write: fence not read": (WRITE_PAGES, "fence[0] + 1u", "1u"),
    "pages, write: negative slots written": (WRITE_PAGES, "if (slot >= 0)", "if (slot >= -1)"),
    "pages, write: keys for values": (WRITE_PAGES, "(v + from, v_strides[3]", "(k + from, v_strides[3]"),
    "pages, write: one group": (WRITE_PAGES, "group < D / GS", "group < 1"),
    "pages, write: bias for scale": (WRITE_PAGES, "static_cast<T>(affine.scale)", "static_cast<T>(affine.bias)"),
    "pages, write: factors of another token": (WRITE_PAGES, "slot * (2 * DIM / GS)", "slot * (DIM / GS)"),
    "pages, gather: wrong block": (GATHER_PAGES, "blocks[position / BS]", "blocks[0]"),
    "pages, gather: start ignored": (GATHER_PAGES, "span[0] + i", "i"),
    "pages, gather: range too long": (GATHER_PAGES, "i < length", "i <= length"),
    "pages, gather: one group": (GATHER_PAGES, "factors[first / GS]", "factors[0]"),
    "pages, gather: fence not read": (GATHER_PAGES, "fence[0] + 1u", "1u"),
    "pages, gather: high codes": (GATHER_PAGES, "(first * bits % 32)", "0"),
    "pages, gather: bias dropped": (GATHER_PAGES, "static_cast<uint8_t>(code) + bias", "static_cast<uint8_t>(code)"),
    "put: codes alone": (PUT, "i < words; i += 32", "i < code_words; i += 32"),
    "put: planes mixed": (PUT, "BS * code_words + offset * (words - code_words)", "BS * code_words + offset"),
    "put: fence not read": (PUT, "fence[0] + 1u", "1u"),
    "take: planes mixed": (TAKE, "BS * code_words + offset * (dim - code_words)", "BS * code_words + offset"),
    "take: start ignored": (TAKE, "span[0] + i", "i"),
    "take: fence not read": (TAKE, "fence[0] + 1u", "1u"),
}  # fmt: skip
RUNS = {
    WRITE: lambda: test_dense_writes(mx.float32, 2, "NHD"),
    GATHER: lambda: test_gathers(None, (9, 20), mx.float32),
    WRITE_PAGES: lambda: check_write((128, 128), mx.float32, page_shape(128, (8, 4), 64)),
    GATHER_PAGES: lambda: test_gathers((8, 4), (9, 20), mx.float32),
    PUT: lambda: test_rows_are_written_as_they_are(1, 11, mx.float32),
    TAKE: lambda: test_rows_are_gathered_as_they_are((9, 20), mx.float32),
}


@pytest.mark.parametrize(
    "name", quick(MUTATIONS, "write: every head to head 0", "gather: start ignored", "pages, gather: one group")
)
def test_mutations_are_caught(name, monkeypatch):
    body, *edit = MUTATIONS[name]
    real = emulated
    monkeypatch.setitem(globals(), "emulated", lambda **options: real(edit={body: [edit]}, **options))
    with pytest.raises((EmuError, AssertionError)):
        RUNS[body]()
