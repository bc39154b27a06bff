"""Writes and reads of quantised pages on the emulator give the bytes of MLX's kernels on a GPU."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.quantized import PageShape, new_blocks
from scripts.support.paged_decode import gather_blocks, write_slots
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.quantized_pages import Words, dequantized, page_shape, pages_of, quantized, rows_of
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import emulated, to_float

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
FENCE = mx.array([41], mx.uint32)
BLOCKS, HEADS, BLOCK = 6, 2, 8


def values(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 5) -> mx.array:
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


def pools(pages: PageShape, seed: int = 3) -> tuple[mx.array, mx.array]:
    """Return pools full of values."""
    k, v = (
        mx.array(pages_of(quantized(to_float(values((BLOCKS, HEADS, BLOCK, f.dim), f.dtype, seed + i)), f), f))
        for i, f in enumerate(pages)
    )
    return k, v


def put(pool: Words, rows: Words, slots: Any) -> Words:
    """Put rows [B, heads, length, words] at slots of pages, by NumPy."""
    result = pool.copy()
    for row, slot in zip(rows.swapaxes(1, 2).reshape(-1, HEADS, rows.shape[-1]), slots, strict=True):
        if slot >= 0:
            result[slot // BLOCK, :, slot % BLOCK] = row
    return result


def check_write(pages: PageShape, length: int = 5, batch: int = 2, flat: bool = False) -> None:
    k_pool, v_pool = pools(pages)
    k, v = (values((batch, HEADS, length, f.dim), f.dtype, 7 + i) for i, f in enumerate(pages))
    slots = (
        np.random.default_rng(1).permutation(BLOCKS * BLOCK)[: batch * length].astype(np.int64 if flat else np.int32)
    )
    if len(slots) > 1:
        slots[1] = -1
    given = [x.swapaxes(1, 2).reshape(-1, HEADS, x.shape[3]) for x in (k, v)] if flat else [k, v]
    with emulated() as fake:
        fence = write_slots(k_pool, v_pool, FENCE, *given, mx.array(slots), pages)
    assert int(np.asarray(fence)[0]) == 42
    for name, pool, x, form in zip(("k_pool", "v_pool"), (k_pool, v_pool), (k, v), pages, strict=True):
        expected = put(rows_of(np.array(pool), form), quantized(to_float(x), form), slots)
        np.testing.assert_array_equal(rows_of(np.asarray(fake.written[name]), form), expected)


@pytest.mark.parametrize(
    ("dtype", "group_size", "bits"), quick(crossed(DTYPES, [32, 64, 128], [(8, 8), (4, 4), (8, 4)]),
    (mx.float32, 32, (8, 8)), (mx.float16, 64, (4, 4)), (mx.bfloat16, 128, (8, 4)))
)  # fmt: skip
def test_written_bytes_equal_mlxs(bits: tuple[int, int], group_size: int, dtype: mx.Dtype) -> None:
    check_write(page_shape(128, bits, group_size, dtype))


@pytest.mark.parametrize(
    ("dim", "value_dim", "group_size"), [(64, 96, 32), (96, 96, 32), *slow((192, 128, 64), (256, 256, 128))]
)  # fmt: skip
def test_heads_of_other_sizes(dim: int, value_dim: int, group_size: int) -> None:
    check_write(page_shape(dim, (8, 4), group_size, mx.bfloat16, value_dim))


@pytest.mark.parametrize(("length", "batch"), [(1, 1), (17, 1), *slow((3, 3))])
def test_odd_lengths_and_other_layouts(length: int, batch: int) -> None:
    check_write(page_shape(64, (8, 4), 32, mx.float16), length, batch)
    check_write(page_shape(64, (8, 4), 32, mx.float16), length, batch, flat=True)


def test_groups_with_infinities_or_nan_become_nan() -> None:
    pages = page_shape(64, (8, 4), 32)
    k_pool, v_pool = pools(pages)
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


def test_model_of_a_gpu_differs_from_the_cpu_in_groups_of_one_sign() -> None:
    """Otherwise the tests above would compare the model with itself."""
    form = page_shape(64, (8, 8), 64).k
    x = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    cpu = np.array(form.quantize(mx.array(x)))
    same = (quantized(x, form) == cpu).mean()
    assert same > 0.99
    x = -np.abs(x) - 1.0  # the CPU's range ends at the greatest value, a GPU's at 0
    assert (quantized(x, form) != np.array(form.quantize(mx.array(x)))).any()


@pytest.mark.parametrize(
    ("dtype", "start", "length", "bits"), quick([(a, *b, c) for a in DTYPES for b in [(0, 32), (7, 2), (5, 1), (9,
    20)] for c in [(8, 8), (4, 4), (8, 4)]], (mx.float32, 0, 32, (8, 8)), (mx.float32, 9, 20, (8, 8)),
    (mx.float16, 7, 2, (4, 4)), (mx.bfloat16, 5, 1, (8, 4)))
)  # fmt: skip
def test_gathers_dequantise(bits: tuple[int, int], start: int, length: int, dtype: mx.Dtype) -> None:
    pages = page_shape(64, bits, 32, dtype, value_dim=96)
    k_pool, v_pool = pools(pages)
    ids = [4, 1, 5, 2]
    with emulated():
        k, v, fence = gather_blocks(k_pool, v_pool, FENCE, ids, start, length, pages)
    assert int(np.asarray(fence)[0]) == 42
    # The compiler rounds a product and a sum once or twice; self-checks on a GPU require MLX's bits.
    tolerance = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    for pool, got, form in ((k_pool, k, pages.k), (v_pool, v, pages.v)):
        rows = rows_of(np.array(pool), form)[ids].swapaxes(0, 1).reshape(HEADS, 32, -1)[:, start : start + length]
        expected = dequantized(rows, form)
        assert to_float(got)[0].shape == expected.shape
        scale = np.abs(expected).max(-1, keepdims=True) + 1e-9
        np.testing.assert_allclose(to_float(got)[0] / scale, expected / scale, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "start", "length"), quick([(a, *b) for a in DTYPES for b in [(0, 32), (7, 2), (9, 20)]],
    (mx.float32, 0, 32), (mx.float16, 7, 2), (mx.bfloat16, 9, 20))
)  # fmt: skip
def test_rows_are_gathered_as_they_are(start: int, length: int, dtype: mx.Dtype) -> None:
    pages = page_shape(96, (8, 4), 32, dtype, value_dim=64)
    k_pool, v_pool = pools(pages)
    ids = [4, 1, 5, 2]
    with emulated():
        launch = kernels.prepare_gather(k_pool, v_pool, ids, start, length, pages, stored=True)
        k, v, fence = launch(k_pool, v_pool, FENCE)
    assert int(np.asarray(fence)[0]) == 42
    for pool, got, form in ((k_pool, k, pages.k), (v_pool, v, pages.v)):
        rows = rows_of(np.array(pool), form)[ids].swapaxes(0, 1).reshape(HEADS, 32, -1)
        np.testing.assert_array_equal(np.asarray(got)[0], rows[:, start : start + length])


@pytest.mark.parametrize(
    ("dtype", "batch", "length"), quick([(a, *b) for a in DTYPES for b in [(1, 11), (3, 2)]], (mx.float32, 1, 11),
    (mx.float16, 3, 2))
)  # fmt: skip
def test_rows_are_written_as_they_are(batch: int, length: int, dtype: mx.Dtype) -> None:
    pages = page_shape(96, (8, 4), 32, dtype, value_dim=64)
    k_pool, v_pool = pools(pages)
    rng = np.random.default_rng(2)
    k, v = (rng.integers(0, 2**32, (batch, HEADS, length, f.num_words), np.uint32) for f in pages)
    slots = rng.permutation(BLOCKS * BLOCK)[: batch * length].astype(np.int32)
    slots[2] = -1
    with emulated() as fake:
        fence = kernels.write_rows(k_pool, v_pool, FENCE, mx.array(k), mx.array(v), mx.array(slots), pages)
    assert int(np.asarray(fence)[0]) == 42
    for name, pool, x, form in zip(("k_pool", "v_pool"), (k_pool, v_pool), (k, v), pages, strict=True):
        expected = put(rows_of(np.array(pool), form), x, slots)
        np.testing.assert_array_equal(rows_of(np.asarray(fake.written[name]), form), expected)


def test_whole_pages_are_copied() -> None:
    pages = page_shape(128, (8, 4), 128, mx.bfloat16)  # 33 and 17 words a row
    k_pool, v_pool = pools(pages)
    with emulated() as fake:
        kernels.copy_blocks(k_pool, v_pool, FENCE, [1, 4], [3, 5])
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        expected = np.array(pool)
        expected[[3, 5]] = expected[[1, 4]]
        np.testing.assert_array_equal(np.asarray(fake.written[name]), expected)


def test_bad_arguments_raise() -> None:
    pages = page_shape(64, (8, 4), 32)
    k_pool, v_pool = new_blocks(3, HEADS, BLOCK, (64, 64), mx.float32, pages)
    k, v = (mx.zeros((1, HEADS, 2, f.num_words), mx.uint32) for f in pages)
    slots = mx.array([1, 2], mx.int32)
    with emulated():
        with pytest.raises(ValueError, match="do not fit"):
            kernels.write_rows(k_pool, v_pool, FENCE, v, k, slots, pages)
        with pytest.raises(ValueError, match="do not agree"):
            kernels.write_rows(k_pool, v_pool, FENCE, k, v, slots[:1], pages)
        with pytest.raises(ValueError, match="positions"):
            kernels.prepare_gather(k_pool, v_pool, slots, 10, 7, pages, stored=True)
        with pytest.raises(ValueError, match="positions"):
            gather_blocks(k_pool, v_pool, FENCE, slots, 10, 7, pages)


WRITE, GATHER, PUT, TAKE = "quantized_write", "quantized_gather", "write_rows", "gather_rows"
MUTATIONS = {
    "write: maximum not from 0": (WRITE, "float high = 0.0f;", "float high = -float_of(0x7f800000u);"),
    "write: halves to even": (WRITE, "min(metal::round(", "min(metal::rint("),
    "write: range one short": (WRITE, "(high - low) / most", "(high - low) / (most + 1.0f)"),
    "write: edge not met": (WRITE, "is_zero ? scale : edge / steps", "scale"),
    "write: codes swapped": (WRITE, "lane % sharers * PER + i", "(sharers - 1 - lane % sharers) * PER + i"),
    "write: words not joined": (WRITE, "word |= simd_shuffle_xor", "word = simd_shuffle_xor"),
    "write: every head to head 0": (WRITE, "(slot / BS * n_kv + head) * page_words", "slot / BS * n_kv * page_words"),
    "write: fence not read": (WRITE, "fence[0] + 1u", "1u"),
    "write: negative slots written": (WRITE, "if (slot >= 0)", "if (slot >= -1)"),
    "write: keys for values": (WRITE, "is_value ? v : k;", "is_value ? k : k;"),
    "write: one group": (WRITE, "group < groups", "group < 1"),
    "write: bias for scale": (WRITE, "static_cast<T>(affine.scale)", "static_cast<T>(affine.bias)"),
    "write: factors of another token": (WRITE, "offset * 2 * groups", "offset * groups"),
    "gather: wrong block": (GATHER, "blocks[position / BS]", "blocks[0]"),
    "gather: start ignored": (GATHER, "span[0] + i", "i"),
    "gather: range too long": (GATHER, "i < length", "i <= length"),
    "gather: one group": (GATHER, "factors[first / GS]", "factors[0]"),
    "gather: fence not read": (GATHER, "fence[0] + 1u", "1u"),
    "gather: high codes": (GATHER, "(first * bits % 32)", "0"),
    "gather: bias dropped": (GATHER, "static_cast<uint8_t>(code) + bias", "static_cast<uint8_t>(code)"),
    "put: codes alone": (PUT, "i < words; i += 32", "i < code_words; i += 32"),
    "put: planes mixed": (PUT, "BS * code_words + offset * (words - code_words)", "BS * code_words + offset"),
    "put: fence not read": (PUT, "fence[0] + 1u", "1u"),
    "take: planes mixed": (TAKE, "BS * code_words + offset * (words - code_words)", "BS * code_words + offset"),
    "take: start ignored": (TAKE, "span[0] + i", "i"),
    "take: fence not read": (TAKE, "fence[0] + 1u", "1u"),
}  # fmt: skip
RUNS: dict[str, Callable[[], None]] = {
    WRITE: lambda: check_write(page_shape(128, (8, 4), 64)),
    GATHER: lambda: test_gathers_dequantise((8, 4), 9, 20, mx.float32),
    PUT: lambda: test_rows_are_written_as_they_are(1, 11, mx.float32),
    TAKE: lambda: test_rows_are_gathered_as_they_are(9, 20, mx.float32),
}


@pytest.mark.parametrize("name", quick(list(MUTATIONS), "write: maximum not from 0", "gather: one group"))
def test_mutations_are_caught(name: str) -> None:
    body, old, new = MUTATIONS[name]
    real = emulated

    def mutated(**options: Any) -> Any:
        return real(edit={body: [(old, new)]}, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "emulated", mutated)
        with pytest.raises((EmuError, AssertionError)):
            RUNS[body]()
