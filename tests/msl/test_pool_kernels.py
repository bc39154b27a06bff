"""write_slots, gather_blocks and copy_blocks on the emulator."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.bodies import BODIES
from scripts.support.paged_decode import gather_blocks, write_slots
from tests.support.cases import crossed, quick
from tests.support.msl import emulator
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import emulated, to_float

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
FENCE = mx.array([41], mx.uint32)


def pools(dtype=mx.float32, n_blocks=6, n_kv=2, block_size=8, dims=(64, 80)):
    rng = np.random.default_rng(3)
    return [
        mx.array(rng.standard_normal((n_blocks, n_kv, block_size, d)).astype(np.float32)).astype(dtype) for d in dims
    ]


def rows(shape, dims, dtype, seed=5):
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal((*shape, d)).astype(np.float32)).astype(dtype) for d in dims]


def written(fake):
    return [to_float(fake.written[name]) for name in ("k_pool", "v_pool")]


@pytest.mark.parametrize(
    ("dtype", "layout"), quick(crossed(DTYPES, ["NHD", "1HND", "NH1D", "BHLD"]), (mx.float32, "NHD"),
    (mx.float16, "1HND"), (mx.bfloat16, "NH1D"), (mx.float32, "BHLD"))
)  # fmt: skip
def test_write_slots(dtype, layout):
    k_pool, v_pool = pools(dtype)
    n, lead = 10, {"NHD": (10, 2), "1HND": (1, 2, 10), "NH1D": (10, 2, 1), "BHLD": (2, 2, 5)}[layout]
    k, v = rows(lead, (64, 80), dtype)
    slots = np.random.default_rng(1).permutation(48)[:n].astype(np.int64 if layout == "BHLD" else np.int32)
    slots[4] = -1
    with emulated() as fake:
        fence = write_slots(k_pool, v_pool, FENCE, k, v, mx.array(slots))
    assert int(np.asarray(fence)[0]) == 42
    for pool, x, got in zip((k_pool, v_pool), (k, v), written(fake), strict=True):
        expected, x = to_float(pool).copy(), to_float(x)
        flat = x if x.ndim == 3 else x.swapaxes(1, 2).reshape(n, 2, -1)
        for row, slot in zip(flat, slots, strict=True):
            if slot >= 0:
                expected[slot // 8, :, slot % 8] = row
        np.testing.assert_array_equal(got, expected)


def test_write_slots_follows_strides():
    k_pool, v_pool = (np.array(p) for p in pools(dims=(64, 64)))
    base = np.random.default_rng(0).standard_normal((1, 3, 2, 64)).astype(np.float32)
    k = base.swapaxes(1, 2)  # [1, heads, length, dim] over [1, length, heads, dim]
    body = BODIES["write_slots"]
    constants = (("T", mx.float32), ("D", 64), ("DV", 64), ("BS", 8), ("S", mx.int32))
    header, source = kernel_build.kernel_source("write_slots", "metal", constants)
    kernel = emulator.metal_kernel(
        "write_slots", list(body.inputs), list(body.outputs), source, header, ensure_row_contiguous=not body.strided
    )
    kernel(
        inputs=[k_pool, v_pool, np.array([0], np.uint32), k, k, np.array([9, 3, 47], np.int32)],
        grid=(3 * 64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(1,)], output_dtypes=["uint32"],
        checked=True, orders=(0, 1, 2), writes=("k_pool", "v_pool"),
    )  # fmt: skip
    for i, slot in enumerate((9, 3, 47)):
        np.testing.assert_array_equal(kernel.written["k_pool"][slot // 8, :, slot % 8], base[0, i])


@pytest.mark.parametrize(
    ("dtype", "start", "length"), quick([(a, *b) for a in DTYPES for b in [(0, 32), (7, 2), (5, 1), (9, 20)]],
    (mx.float32, 0, 32), (mx.bfloat16, 7, 2), (mx.float16, 9, 20))
)  # fmt: skip
def test_gather_blocks(dtype, start, length):
    k_pool, v_pool = pools(dtype)
    ids = [4, 1, 5, 2]
    with emulated():
        k, v, fence = gather_blocks(k_pool, v_pool, FENCE, ids, start, length)
    assert int(np.asarray(fence)[0]) == 42
    for pool, got in ((k_pool, k), (v_pool, v)):
        dense = to_float(pool)[ids].swapaxes(0, 1).reshape(2, 32, -1)
        np.testing.assert_array_equal(to_float(got)[0], dense[:, start : start + length])


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(dtype):
    k_pool, v_pool = pools(dtype)
    with emulated() as fake:
        fence = kernels.copy_blocks(k_pool, v_pool, FENCE, [1, 4], [3, 5])
    assert int(np.asarray(fence)[0]) == 42
    for pool, got in zip((k_pool, v_pool), written(fake), strict=True):
        expected = to_float(pool).copy()
        expected[[3, 5]] = expected[[1, 4]]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dims", [(24, 24), (32, 20)])
def test_head_sizes_that_no_attention_kernel_takes(dims):
    """MLX's attention serves them, over gathered blocks."""
    k_pool, v_pool = pools(dims=dims)
    k, v = rows((3, 2), dims, mx.float32)
    with emulated() as fake:
        write_slots(k_pool, v_pool, FENCE, k, v, mx.array([5, 17, 40], mx.int32))
        for pool, x, got in zip((k_pool, v_pool), (k, v), written(fake), strict=True):
            expected = to_float(pool).copy()
            for row, slot in zip(to_float(x), (5, 17, 40), strict=True):
                expected[slot // 8, :, slot % 8] = row
            np.testing.assert_array_equal(got, expected)
        gathered = gather_blocks(k_pool, v_pool, FENCE, [4, 1], 3, 12)
        for pool, got in zip((k_pool, v_pool), gathered, strict=False):
            dense = to_float(pool)[[4, 1]].swapaxes(0, 1).reshape(2, 16, -1)
            np.testing.assert_array_equal(to_float(got)[0], dense[:, 3:15])
        kernels.copy_blocks(k_pool, v_pool, FENCE, [1], [3])
        for pool, got in zip((k_pool, v_pool), written(fake), strict=True):
            np.testing.assert_array_equal(got[3], to_float(pool)[1])


def test_bad_arguments_raise():
    k_pool, v_pool = pools()
    with emulated():
        with pytest.raises(ValueError, match="positions"):
            gather_blocks(k_pool, v_pool, FENCE, [1, 2], 10, 7)
        with pytest.raises(ValueError, match="equally long"):
            kernels.copy_blocks(k_pool, v_pool, FENCE, [1], [2, 3])
        with pytest.raises(ValueError, match="head size 6/64"):
            kernels.copy_blocks(*pools(dims=(6, 64)), FENCE, [1], [2])


WRITE, GATHER, COPY = "write_slots", "gather_blocks", "copy_blocks"
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
    "copy: swapped": (COPY, "pairs[n_pairs + pair]", "pairs[pair]"),
    "copy: too far": (COPY, "if (at < k_size)", "if (at < 2 * k_size)"),
    "copy: half": (COPY, "if (at < v_size)", "if (at < v_size / 2)"),
    "copy: fence not read": (COPY, "fence[0] + 1u", "1u"),
}


@pytest.mark.parametrize("name", quick(list(MUTATIONS), "write: every head to head 0", "gather: start ignored"))
def test_mutations_are_caught(name):
    body, old, new = MUTATIONS[name]
    runs = {
        WRITE: lambda: test_write_slots(mx.float32, "NHD"),
        GATHER: lambda: test_gather_blocks(mx.float32, 9, 20),
        COPY: lambda: test_copy_blocks(mx.float32),
    }
    real = emulated

    def mutated(**options):
        return real(edit={body: [(old, new)]}, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "emulated", mutated)
        with pytest.raises((EmuError, AssertionError)):
            runs[body]()
