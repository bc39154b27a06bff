# ruff: noqa: E501
"""paged_decode and merge_partitions on the emulator: against float64, bit invariance, and planted defects."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.launch_shape import HEAD_DIMS, MAX_THREADGROUP_BYTES, shape_for
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Case, emulated, to_float
from tests.support.samples import each_pair

TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [1, 15, 16, 17, 150, 5, 6, 7, 33]  # 9 rows: inputs of 8 and more elements are in device memory
FEW = [17, 140]  # 2 rows: small inputs are in constant memory

CLASSES = {
    "f32": {},
    "bf16": {"dtype": mx.bfloat16},
    "f16 extras q_len 3": {"dtype": mx.float16, "q_len": 3, "softcap": 5.0, "sinks": True},
    "value_dim": {"head_dim": 96, "value_dim": 64, "dtype": mx.bfloat16},
    "gqa 16": {"heads": (16, 1), "head_dim": 128, "dtype": mx.bfloat16},
    "gqa 7": {"heads": (7, 1), "head_dim": 112, "dtype": mx.float16},
    "gqa 1": {"heads": (2, 2), "head_dim": 192},
    "block 8": {"block_size": 8, "dtype": mx.bfloat16},
    "block 128": {"block_size": 128},
}


def check(case, launch_shape=None, backend="metal", **options):
    with emulated(backend, **options) as fake:
        launch_shape = launch_shape or shape_for(case.variant())
        out, fence = case.run(launch_shape=launch_shape)
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    assert int(np.asarray(fence)[0]) == 8
    return out, fake


@pytest.mark.sample(every=6, keep="extras")
@pytest.mark.parametrize(("name", "contexts", "backend"), each_pair(list(CLASSES), [RAGGED, FEW], ["metal", "cuda"]))
def test_matches_reference(name, contexts, backend):
    check(Case(contexts, **CLASSES[name]), backend=backend)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(head_dim):
    check(Case([33, 3], head_dim=head_dim, heads=(4, 2), dtype=mx.bfloat16), orders=(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gqa", [1, 2, 3, 5, 8, 12, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sweep(head_dim, gqa, dtype):
    check(Case([130, 1, 31], head_dim=head_dim, heads=(gqa, 1), block_size=32, dtype=dtype), orders=(0, 1))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("starts", [[0, 1, 8, 60], [3, 14, 15, 149]])
def test_window(starts):
    # Tables are wild outside the window and stale slots are NaN: reading either would be seen.
    check(Case([5, 15, 16, 150], starts=starts, sinks=True))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero(sinks):
    for max_blocks in (2, 20):
        case = Case([4, 20], max_blocks=max_blocks, sinks=sinks)
        case.ends[0] = 0
        with emulated():
            out, _ = case.run()
        assert not out[0].any()
        np.testing.assert_allclose(out, case.reference(), atol=2e-6)


def test_partition_tiers():
    # Partitions of 64, 128 and 256 tokens in one launch, misaligned starts.
    case = Case([100, 200, 300, 330], starts=[1, 63, 20, 300])
    with emulated():
        launch_shape = shape_for(case.variant())._replace(partition=64, span=1)
    check(case, launch_shape=launch_shape)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("sinks", [False, True])
def test_bits_do_not_depend_on_batchmates(sinks):
    # Alone, row 0 takes the single-partition variant; beside a long row it goes through merge_partitions.
    case = Case([100, 700], sinks=sinks, dtype=mx.float32)
    with emulated(checked=False, orders=(0,)):
        together, _ = case.run()
        case.q, case.ends, case.starts = case.q[:1], case.ends[:1], case.starts[:1]
        case.tables = case.tables[:1, :7]
        alone, _ = case.run()
    assert alone[0].tobytes() == together[0].tobytes()


def test_max_visible_changes_nothing():
    case = Case([700, 650], starts=[600, 590])
    with emulated(checked=False, orders=(0,)) as fake:
        wide, _ = case.run()
        narrow, _ = case.run(max_visible=100)
    grids = [call["grid"][2] for body, call in fake.calls if body == "paged_decode"]
    assert grids[1] < grids[0] and wide.tobytes() == narrow.tobytes()


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("contexts", [[1, 16, 17, 150, 300], [64, 65]])
def test_append_writes_the_newest_token_and_attends_to_it(contexts, dtype):
    # Its slot holds NaN: reading it from the pool would be seen. 300 tokens: several partitions.
    case = Case(contexts, dtype=dtype, head_dim=80, value_dim=64, heads=(4, 2))
    reference, full = case.reference(), (to_float(case.k_pool), to_float(case.v_pool))
    append = case.take_out_newest()
    with emulated() as fake:
        out, _ = case.run(append=append)
    np.testing.assert_allclose(out, reference, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for name, expected in zip(("k_pool", "v_pool"), full, strict=True):
        np.testing.assert_array_equal(to_float(fake.written[name]), expected)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_rows_of_padding_append_nothing(backend):
    case = Case([5, 150], dtype=mx.float32)
    full = to_float(case.k_pool), to_float(case.v_pool)
    append = case.take_out_newest()
    with emulated(backend=backend):
        alone, _ = case.run(append=append)
    case.q, *append = (mx.concatenate([x, mx.full((2, *x.shape[1:]), mx.nan, x.dtype)]) for x in (case.q, *append))
    case.tables, case.ends, case.starts = (
        np.concatenate([x, np.zeros((2, x.shape[1]), np.int32)]) for x in (case.tables, case.ends, case.starts)
    )
    with emulated(backend=backend) as fake:
        out, _ = case.run(append=append)
    assert out[:2].tobytes() == alone.tobytes() and not out[2:].any()
    for name, expected in zip(("k_pool", "v_pool"), full, strict=True):
        np.testing.assert_array_equal(to_float(fake.written[name]), expected)


def test_append_changes_no_bit():
    case = Case([5, 150, 300], starts=[0, 3, 100], dtype=mx.float32)
    with emulated(checked=False, orders=(0,)):
        before, _ = case.run()
        after, _ = case.run(append=case.take_out_newest())
    assert before.tobytes() == after.tobytes()


def test_append_refuses_rows_that_do_not_fit():
    case = Case([5, 6])
    k, v = case.take_out_newest()
    with emulated():
        for bad in ((k[:1], v), (k, v[..., :32]), (k.astype(mx.float16), v)):
            with pytest.raises(ValueError, match="cannot append"):
                case.run(append=bad)
        case = Case([5, 6], q_len=2)
        with pytest.raises(ValueError, match="cannot append"):
            case.run(append=(k, v))


def test_threadgroup_memory_is_bounded():
    for dtype in TOLERANCE:
        for head_dim in HEAD_DIMS:
            for gqa in range(1, 17):
                for backend in ("metal", "cuda"):
                    for body in ("paged_decode", "paged_decode_tensor"):
                        variant = kernels.Variant(body, backend, dtype, head_dim, head_dim, gqa, 32)
                        assert shape_for(variant).threadgroup_bytes(gqa, head_dim) <= MAX_THREADGROUP_BYTES


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
APPEND_DEFECTS = {  # old, new: seen in the result or in the pool
    "reads the slot, not the new row": ("position == fresh ? k_new", "position == -1 ? k_new"),
    "writes to the wrong slot": ("* BS + fresh % BS;", "* BS + (fresh + 1) % BS;"),
    "writes half a row": ("dim < DV; dim += SG * 32", "dim < DV / 2; dim += SG * 32"),
    "one row for all": (
        "fresh_row = static_cast<int64_t>(row) * n_kv + kv_head",
        "fresh_row = static_cast<int64_t>(kv_head)",
    ),
    "never stores": ("if (fresh >= lo && fresh < hi) {", "if (fresh < -1) {"),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", list(APPEND_DEFECTS))
def test_planted_append_defects_are_caught(name):
    case = Case([17, 150], head_dim=64)
    reference, full = case.reference(), (to_float(case.k_pool), to_float(case.v_pool))
    append = case.take_out_newest()
    try:
        with emulated(edit={"paged_decode": [APPEND_DEFECTS[name]]}) as fake:
            out, _ = case.run(append=append)
    except EmuError:
        return
    same = all(
        np.array_equal(to_float(fake.written[n]), x, equal_nan=True)
        for n, x in zip(("k_pool", "v_pool"), full, strict=True)
    )
    assert not same or not np.allclose(out, reference, atol=1e-3)


CAUGHT = {  # body, old, new: the emulator itself objects
    "drop the barriers": ("paged_decode", BARRIER, "", "race: load"),
    "barrier without memory": ("paged_decode", BARRIER, "threadgroup_barrier(mem_flags::mem_none);", "race: load"),
    "block past the context": ("paged_decode", "(hi - 1) / BS)];", "(hi - 1) / BS + 1)];", "wild load|out-of-bounds"),
    "block before the window": (
        "paged_decode",
        "metal::max(chunk * CHUNK / BS + i, lo / BS)",
        "chunk * CHUNK / BS + i",
        "wild load|out-of-",
    ),
    "block ahead past the context": (
        "paged_decode",
        "(table, chunk + STRIPES, lo, hi, blocks)",
        "(table, chunk + STRIPES, lo, hi + BS, blocks)",
        "wild load|out-of-",
    ),
    "two heads, one line": (
        "paged_decode",
        "const int64_t line = line0 + head * q_len;",
        "const int64_t line = line0;",
        "race",
    ),
    "unwritten output": (
        "paged_decode",
        "item < HS * HR * DV; item += SG * 32",
        "item < HS * HR * DV - 1; item += SG * 32",
        "never written",
    ),
    "fence not passed on": ("paged_decode", "fence_out[0] = fence[0] + 1u;", "", "never written"),
    "shuffle in a branch": (
        "merge_partitions",
        "top = simd_max(top);",
        "if (lane < 16) { top = simd_max(top); }",
        "divergence",
    ),
    "merge writes out of range": ("merge_partitions", "if (dim < DV) {", "{", "out-of-bounds|race"),
}


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", list(CAUGHT))
def test_emulator_catches(name):
    body, old, new, want = CAUGHT[name]
    single = Case([36, 90], starts=[28, 50], block_size=8)  # chunks of two blocks, half of them dead
    split = Case([40, 300], starts=[20, 50], head_dim=80)
    case = split if body == "merge_partitions" else single
    with emulated(edit={body: [(old, new)]}), pytest.raises(EmuError, match=want):
        case.run()


WRONG = {  # body, old, new: the numbers come out wrong
    "fence input dropped": ("paged_decode", "fence[0] + 1u", "1u"),
    "wrong kv head": ("paged_decode", "blocks[u * TPS / BS]) * n_kv + kv_head)", "blocks[u * TPS / BS]) * n_kv + 0 * kv_head)"),
    "swapped query heads": ("paged_decode", "q[(line0 + (head0 + h) * q_len)", "q[(line0 + (G - 1 - head0 - h) * q_len)"),
    "skip the rescale": ("paged_decode", "acc[h * NV * VEC + i] *= factor;", ""),
    "skip the rescale of the sum": ("paged_decode", "metal::fma(l[j], shrink[j], score[j])", "l[j] + score[j]"),
    "window ignored": ("paged_decode", "metal::max(static_cast<int>(starts[row]), 0)", "0"),
    "stale tokens multiplied": ("paged_decode", "position = metal::min(metal::max(token + step_token, lo), hi - 1);", "position = token + step_token;"),
    "last token lost": ("paged_decode", "own_token < hi;", "own_token < hi - 1;"),
    "stripes not weighted": ("paged_decode", "const float weight = metal::fast::exp2(tg_m", "const float weight = 1.0f + 0.0f * metal::fast::exp2(tg_m"),
    "the other half kept": ("paged_decode", "(upper ? high : low)", "(upper ? low : high)"),
    "maximum of another head": ("paged_decode", "SCORE_OWNER(h / R, OWNERS)", "SCORE_OWNER(0, OWNERS)"),
    "weights of another step": ("paged_decode", "SCORE_OWNER((u * HP + h) / R, OWNERS)", "SCORE_OWNER(h / R, OWNERS)"),
    "block not read ahead": ("paged_decode", "(table, chunk + STRIPES, lo", "(table, chunk, lo"),
    "sink of another head": ("merge_partitions", "sinks[line / q_len % heads]", "sinks[0]"),
    "partitions not weighted": ("merge_partitions", "o[d] = metal::fma(ahead[i * ND + d], w, o[d]);", "o[d] += ahead[i * ND + d];"),
    "partition sizes disagree": ("merge_partitions", "int size = PART;", "int size = 2 * PART;"),
    "row of another query": ("merge_partitions", "+ line % q_len;", ";"),
}  # fmt: skip


@pytest.mark.sample(every=12)
@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_numbers_are_seen(name):
    body, old, new = WRONG[name]
    case = Case([129, 300], starts=[10, 0], heads=(4, 2), q_len=2, sinks=True)
    try:
        with emulated(edit={body: [(old, new)]}):
            out, fence = case.run()
    except EmuError:
        return
    same = np.allclose(out, case.reference(), atol=1e-4)
    assert not same or int(np.asarray(fence)[0]) != 8
