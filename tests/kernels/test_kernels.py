"""Decode kernels, those over latents included: arguments, choice of variants, and results on a GPU."""

import random
import threading
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import self_check
from mlx_paged.kernels.launch_shape import shape_for
from mlx_paged.kernels.ops import variants_of
from mlx_paged.kernels.quantized import new_blocks
from mlx_paged.kv.new_tokens import NewTokens
from scripts.support.paged_decode import decode_variants, gather_blocks, paged_decode, write_slots
from tests.support.kernels.quantized_pages import page_shape
from tests.support.pools import pool_of

HAS_GPU = kernel_build.backend() is not None
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="MLX sees no GPU")
BITS = [None, (8, 8), (4, 4), (8, 4)]  # of keys and values


def pools(n_blocks, n_kv=2, block=16, dim=64, dtype=mx.bfloat16):
    return [mx.random.normal((n_blocks, n_kv, block, dim)).astype(dtype) for _ in "kv"]


@pytest.mark.skipif(HAS_GPU, reason="a GPU is here")
def test_without_a_gpu_nothing_is_built():
    k, v = pools(3)
    assert decode_variants(k, v, 4) == ()
    with pytest.raises(kernels.NoKernelError):
        paged_decode(
            mx.zeros((1, 4, 1, 64), mx.bfloat16), k, v, kernels.new_fence(), mx.array([[1]], mx.int32),
            mx.array([[3]], mx.int32), mx.array([[0]], mx.int32), scale=1.0,
        )  # fmt: skip
    with pytest.raises(kernels.NoKernelError):
        kernels.copy_blocks(k, v, kernels.new_fence(), [1], [2])
    assert kernel_build.build_kernel.cache_info().currsize == 0


def test_a_copy_of_a_block_has_a_thread_for_each_packet_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []

    def prepare(text, grid, threads, outputs):
        grids.append(grid)
        return lambda inputs: [mx.zeros(shape, dtype) for shape, dtype in outputs]

    monkeypatch.setattr(kernels, "prepare", prepare)
    kernels.copy_blocks(*pools(4, n_kv=2, block=16, dim=64), kernels.new_fence(), [1, 3], [2, 0])
    assert grids == [(2 * 16 * 64 // 4, 2, 1), (2 * 16 * 2 * 32, 1, 1)]  # a gather; a write with a simdgroup per row


@pytest.mark.parametrize(
    ("shape", "n_q_heads", "why"),
    [((3, 2, 16, 72), 4, "head_dim"), ((3, 2, 12, 64), 4, "block size"), ((3, 1, 16, 64), 17, "query heads"),
     ((3, 2, 16, 64), 5, "not a multiple")],
)  # fmt: skip
def test_unsupported_geometry_raises(shape, n_q_heads, why):
    with pytest.raises(ValueError, match=why):
        decode_variants(mx.zeros(shape), mx.zeros(shape), n_q_heads)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes in bytes of the arrays that the host sends, as if on CUDA."""
    sizes, make = [], mx.array
    monkeypatch.setattr(kernel_build, "backend", lambda: "cuda")
    kernel_build._gains_of.cache_clear()
    monkeypatch.setattr(kernel_build.mx, "array", lambda rows: sizes.append(rows.nbytes) or make(rows))
    yield sizes


@pytest.mark.parametrize("shape", [(0, 1), (1,), (1, 1), (2, 1), (1, 2), (3, 1), (1, 8), (40, 1)])
@pytest.mark.parametrize("dialect", [None, "metal", "cuda"])
def test_rows_of_a_step_are_never_small_arrays_on_cuda(shape, dialect, uploads, monkeypatch):
    monkeypatch.setattr(kernel_build, "backend", lambda: dialect)
    rows = np.arange(7, 7 + int(np.prod(shape)), dtype=np.int32).reshape(shape)
    found = kernel_build.DeviceRows().of(rows)
    assert found.dtype == mx.int32 and np.array_equal(np.array(found)[: len(rows)], rows)
    least = {"cuda": 16 if rows.nbytes <= 8 else 0, "metal": 32}.get(dialect or "", 0)
    assert uploads == [max(rows.nbytes, least if rows.size else 0)] and (dialect == "metal" or len(found) == len(rows))


@pytest.mark.parametrize("shape", [(1, 1), (3,), (40, 1)])
def test_rows_that_gain_a_token_are_counted_on_the_device(shape, uploads):
    array, rows = kernel_build.DeviceRows(), np.full(shape, 5, np.int32)
    grows = np.ones(shape, np.int32)
    grows[-1] = len(shape) == 2  # with one dimension, the last row is padding
    for _ in range(40):
        assert np.array_equal(np.array(array.of(rows)), rows)
        rows = rows + grows
    assert len(uploads) == 2  # the rows, and what a step adds
    array.of(rows - grows)  # the same step again
    assert len(uploads) == 2


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_positions_and_ends_are_counted_together(rows, uploads):
    array, positions, ends = (
        kernel_build.DeviceRows(),
        np.arange(rows, dtype=np.int32),
        np.arange(1, rows + 1, dtype=np.int32),
    )
    ends[-1] = rows == 1  # of several, the last row is padding
    for _ in range(5):
        first, second = array.tokens(positions, ends[:, None])
        assert np.array_equal(np.array(first), positions) and np.array_equal(np.array(second), ends[:, None])
        positions, ends = positions + 1, ends + (ends > 0).astype(np.int32)
    assert len(uploads) == 2 and min(uploads) > 8


def test_rows_of_random_steps_equal_those_of_the_host(uploads):
    rng, array = np.random.default_rng(0), kernel_build.DeviceRows()
    rows = rng.integers(0, 99, 2, dtype=np.int32)
    for _ in range(400):
        change = rng.integers(0, 6)
        if change == 0:
            rows = rng.integers(0, 99, rng.integers(1, 5), dtype=np.int32)
        elif change < 5:
            rows = rows + rng.integers(0, 2 if change < 4 else 4, rows.shape, dtype=np.int32)
        assert np.array_equal(np.array(array.of(rows)), rows)
    assert len(uploads) > 10


def test_unread_counted_rows_are_uploaded_again_after_a_limit(uploads):
    array, rows = kernel_build.DeviceRows(), np.ones((2, 1), np.int32)
    for step in range(2 * kernel_build.MAX_INCREMENTS + 2):
        found = array.of(rows + step)
    assert len(uploads) == 3 and found.tolist() == [[step + 1]] * 2


def test_rows_are_not_counted_from_another_threads_pending_rows(uploads):
    array, rows = kernel_build.DeviceRows(), np.ones((3, 1), np.int32)
    other = threading.Thread(target=lambda: array.of(rows))
    other.start()
    other.join()
    assert array.of(rows + 1).tolist() == [[2]] * 3 and len(uploads) == 2


def test_starts_are_shared_with_other_threads(monkeypatch):
    monkeypatch.setattr(kernel_build, "backend", lambda: "cuda")
    table, made = pool_of().new_table(), []
    table.length = 1
    table.block_ids[0].append(1)
    own = NewTokens([table], (1,))
    own.begin(0)
    maker = threading.Thread(target=lambda: made.append(own.visible(None)[2]))
    maker.start()
    maker.join()
    own.begin(1)
    assert own.visible(None)[2] is made[0] and made[0].tolist() == [[0]]


def filled(num_blocks, bits, dim=64, block=16, dtype=mx.bfloat16):
    """Return pools of noise for two heads, and the form of their pages; None if ``bits`` is None."""
    if bits is None:
        return pools(num_blocks, block=block, dim=dim, dtype=dtype), None
    pages = page_shape(dim, bits, 32, dtype)
    own = new_blocks(num_blocks, 2, block, (dim, dim), dtype, pages)
    k, v = (mx.random.normal((1, 2, num_blocks * block, dim)).astype(dtype) for _ in "kv")
    mx.eval(write_slots(*own, kernels.new_fence(), k, v, mx.arange(num_blocks * block, dtype=mx.int32), pages))
    return own, pages


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_self_check_passes(bits, dtype, extras, block):
    own, pages = filled(2, bits, 128, block, dtype)
    for variant in decode_variants(*own, 8, softcap=extras, sinks=extras, pages=pages):
        result = self_check(variant)
        assert result.ok, result


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", BITS[:3])
def test_bits_do_not_depend_on_batchmates(bits, dim):
    contexts = [1, 100, 130, 700, 3000, 9000, 40]
    blocks = [-(-n // 16) for n in contexts]
    own, pages = filled(sum(blocks) + 1, bits, dim)
    ids = iter((np.random.default_rng(0).permutation(sum(blocks)) + 1).tolist())
    tables = [[next(ids) for _ in range(n)] for n in blocks]
    q = mx.random.normal((len(contexts), 8, 1, dim)).astype(mx.bfloat16)

    def attend(rows, variant, run=None):
        width = max(blocks[b] for b in rows)
        table = mx.array([tables[b] + [0] * (width - blocks[b]) for b in rows], mx.int32)
        ends = mx.array([[contexts[b]] for b in rows], mx.int32)
        out, _ = paged_decode(
            q[mx.array(rows)], *own, kernels.new_fence(), table, ends, mx.zeros_like(ends), scale=0.1, variant=variant,
            launch_shape=shape_for(variant)._replace(run=run), pages=pages,
        )  # fmt: skip
        return np.array(out.view(mx.uint16))

    for variant in decode_variants(*own, 8, pages=pages):
        together = attend(list(range(len(contexts))), variant)
        for b in range(len(contexts)):
            np.testing.assert_array_equal(attend([b], variant)[0], together[b])
            np.testing.assert_array_equal(attend([5, b], variant)[1], together[b])
        for run in (1, 2, 4):
            np.testing.assert_array_equal(attend(list(range(len(contexts))), variant, run), together)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_rows_of_padding_append_nothing(dtype):
    mx.random.seed(1)
    k, v = pools(9, dtype=dtype)
    before = [np.array(x.view(mx.uint16)) for x in (k, v)]
    q = mx.random.normal((4, 4, 1, 64)).astype(dtype)
    new = [mx.random.normal((4, 2, 1, 64)).astype(dtype) for _ in "kv"]
    table = mx.array([[3, 5], [4, 2], [0, 0], [0, 0]], mx.int32)
    ends = mx.array([[20], [7], [0], [0]], mx.int32)
    for variant in decode_variants(k, v, 4):
        out, _ = paged_decode(
            q, k, v, kernels.new_fence(), table, ends, mx.zeros_like(ends), scale=0.125, append=new, variant=variant
        )
        mx.eval(out)
        assert not out[2:].any().item() and mx.isfinite(out[:2]).all().item()
    for pool, old, rows in zip((k, v), before, new, strict=True):
        got, added = np.array(pool.view(mx.uint16)), np.array(rows.view(mx.uint16))
        old[5, :, 3], old[4, :, 6] = added[0, :, 0], added[1, :, 0]
        np.testing.assert_array_equal(got, old)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bits", BITS)
def test_random_schedules_equal_sequential_runs(bits):
    """Writes, appends, forks, moved rows and reads of reused blocks, pipelined or evaluated one by one."""

    def run(seed, pipelined):
        rng = random.Random(seed)
        mx.random.seed(seed)
        (k, v), pages = filled(9, bits)
        mx.eval(k, v)
        fence, outs = kernels.new_fence(), []
        for _ in range(40):
            kind = rng.choice(["write", "rows", "copy", "read", "append", "gather"])
            slots = mx.array(rng.sample(range(16, 9 * 16), 3), mx.int32)
            if kind == "rows" and pages is not None:
                *rows, fence = kernels.prepare_gather(k, v, [3, 1], 5, 3, pages, stored=True)(k, v, fence)
                fence = kernels.prepare_write(k, v, slots, pages, stored=True)(k, v, fence, *rows)
            elif kind in ("write", "rows"):
                new = [mx.random.normal((3, 2, 64)).astype(mx.bfloat16) for _ in "kv"]
                fence = write_slots(k, v, fence, *new, slots, pages)
            elif kind == "copy":
                source, target = rng.sample(range(1, 9), 2)
                fence = kernels.copy_blocks(k, v, fence, [source], [target], pages)
            elif kind == "gather":
                got_k, got_v, fence = gather_blocks(k, v, fence, rng.sample(range(1, 9), 3), 5, 30, pages)
                outs += [got_k, got_v]
            else:
                q = mx.random.normal((2, 4, 1, 64)).astype(mx.bfloat16)
                new = [mx.random.normal((2, 2, 1, 64)).astype(mx.bfloat16) for _ in "kv"]
                ids = rng.sample(range(1, 9), 8)
                ends = mx.array([[rng.randint(1, 64)] for _ in "ab"], mx.int32)
                out, fence = paged_decode(
                    q, k, v, fence, mx.array([ids[:4], ids[4:]], mx.int32), ends, mx.zeros_like(ends), scale=0.125,
                    append=new if kind == "append" else None, pages=pages,
                )  # fmt: skip
                outs.append(out)
            if pipelined:
                mx.async_eval(fence, *outs[-2:])
            else:
                mx.eval(fence, *outs)
        return [np.array(x.view(mx.uint16)) for x in outs]

    for seed in range(100):
        for a, b in zip(run(seed, True), run(seed, False), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@needs_gpu
def test_a_large_pool_is_never_copied():
    layers, steps = 24, 200
    stacks = [pools(2049, n_kv=8, block=32, dim=64) for _ in range(layers)]  # 24 x 134 MB
    fences = [kernels.new_fence() for _ in range(layers)]
    mx.eval(stacks, fences)
    table = mx.arange(1, 65, dtype=mx.int32).reshape(1, 64)
    q = mx.random.normal((1, 32, 1, 64)).astype(mx.bfloat16)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for step in range(steps):
        slot = mx.array([32 + step], mx.int32)
        ends = mx.array([[step + 1]], mx.int32)
        x = q
        for i, (k, v) in enumerate(stacks):
            row = x[:, :8]
            fences[i] = write_slots(k, v, fences[i], row, row, slot)
            x, fences[i] = paged_decode(x, k, v, fences[i], table, ends, mx.zeros_like(ends), scale=0.125)
        mx.async_eval(x, *fences)
    mx.eval(x)
    assert mx.get_peak_memory() - before < 100 << 20


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize(("dtype", "rank", "heads"), [(mx.bfloat16, 512, 128), (mx.float16, 256, 20)])
def test_self_check_of_latents_passes(dtype, rank, heads, block):
    for variant in variants_of(dtype, rank, 64, heads, 1, block, use="latents"):
        result = self_check(variant)
        assert result.ok, result


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_prepared_launch_serves_a_pool_that_has_grown(dtype):
    """A launch is not limited to the size that the pool had when the launch was prepared."""
    block, rank, rope, heads, context = 32, 512, 64, 20, 700
    mx.random.seed(0)
    tables = mx.array([list(range(40, 40 + -(-context // block)))], mx.int32)
    ends, starts = mx.array([[context]], mx.int32), mx.zeros((1, 1), mx.int32)
    small = [mx.zeros((4, 1, block, dim), dtype) for dim in (rank, rope)]
    grown = [mx.random.normal((80, 1, block, dim)).astype(dtype) for dim in (rank, rope)]
    q = mx.random.normal((1, heads, 1, rank + rope)).astype(dtype)

    def launch(pools):
        return kernels.prepare_decode(*pools, (tables, ends, starts), n_q_heads=heads, scale=0.05, latent=True)

    early = launch(small)
    # Launches remember the shapes of their first call.
    mx.eval(early._replace(visible=(mx.zeros_like(tables), ends, starts))(q, *small, kernels.new_fence()))
    (again, _), (fresh, _) = (prepared(q, *grown, kernels.new_fence()) for prepared in (early, launch(grown)))
    assert fresh.abs().max().item() > 0
    np.testing.assert_array_equal(np.array(again.astype(mx.float32)), np.array(fresh.astype(mx.float32)))


@pytest.mark.gpu
@needs_gpu
def test_layers_read_their_own_pools_if_their_results_share_memory():
    """Each launch leaves maps of its pool in the memory of its results, which later launches reuse."""
    block, rank, rope, heads, contexts = 32, 512, 64, 128, [4000, 64, 1000]
    mx.random.seed(1)
    blocks = [-(-n // block) for n in contexts]
    width = max(blocks)
    ids = iter(mx.random.permutation(sum(blocks)).tolist())
    tables = mx.array([[next(ids) for _ in range(n)] + [0] * (width - n) for n in blocks], mx.int32)
    ends, starts = mx.array(contexts, mx.int32)[:, None], mx.zeros((3, 1), mx.int32)
    pools = [
        [mx.random.normal((sum(blocks), 1, block, dim)).astype(mx.bfloat16) for dim in (rank, rope)] for _ in range(8)
    ]
    q = mx.random.normal((3, heads, 1, rank + rope)).astype(mx.bfloat16)
    tensor, portable = (
        kernels.prepare_decode(
            *pools[0], (tables, ends, starts), n_q_heads=heads, scale=0.05, latent=True, variant=variant
        )
        for variant in variants_of(mx.bfloat16, rank, rope, heads, 1, block, use="latents")
    )
    expected = [portable(q, *pool, kernels.new_fence())[0].astype(mx.float32) for pool in pools]
    mx.eval(expected)
    fence, worst = kernels.new_fence(), mx.array(0.0)
    for i in range(200):
        out, fence = tensor(q, *pools[i % 8], fence)
        worst = mx.maximum(worst, mx.abs(out.astype(mx.float32) - expected[i % 8]).max())
    size = mx.sqrt(mx.square(expected[0]).mean()).item()
    assert worst.item() < 0.1 * max(size, 0.1)
    assert mx.abs(expected[0] - expected[1]).max().item() > 0.1 * max(size, 0.1)
