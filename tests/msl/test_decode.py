# ruff: noqa: E501
"""paged_decode, quantized_decode and merge_partitions on the emulator, one set of tests over dense and quantised pages:
against float64 over what the pages hold, bit invariance, and planted defects."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.launch_shape import HEAD_DIMS, MAX_THREADGROUP_BYTES, Variant, shape_for
from tests.support.cases import crossed, quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Case, emulated

TOLERANCE = {mx.float32: 3e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [1, 15, 16, 17, 150, 5, 6, 7, 33]  # 9 rows: inputs of 8 and more elements are in device memory
FEW = [17, 140]  # 2 rows: small inputs are in constant memory
SLOW = pytest.mark.slow
DENSE, PAGES = None, (8, 4)
BOTH = pytest.mark.parametrize("bits", [DENSE, PAGES], ids=["dense", "quantised"])
SINKS = pytest.mark.parametrize(
    ("sinks", "bits"), quick(crossed([False, True], [DENSE, PAGES]), (False, PAGES), (True, DENSE))
)

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
    "8 bits f32": {"bits": (8, 8)},
    "4 bits bf16": {"bits": (4, 4), "dtype": mx.bfloat16, "group_size": 64},
    "8/4 f16 extras q_len 3": {"bits": PAGES, "dtype": mx.float16, "q_len": 3, "softcap": 5.0, "sinks": True},
    "8/4 value_dim": {"bits": PAGES, "head_dim": 96, "value_dim": 64, "dtype": mx.bfloat16},
    "8/4 gqa 16, one group": {"bits": PAGES, "heads": (16, 1), "head_dim": 128, "dtype": mx.bfloat16, "group_size": 128},
    "4 bits gqa 7": {"heads": (7, 1), "head_dim": 96, "dtype": mx.float16, "bits": (4, 4)},
    "8/4 gqa 1": {"bits": PAGES, "heads": (2, 2), "head_dim": 192, "group_size": 64},
    "8 bits block 8": {"block_size": 8, "dtype": mx.bfloat16, "bits": (8, 8)},
    "4 bits block 128": {"block_size": 128, "bits": (4, 4)},
}  # fmt: skip


def case_of(contexts, bits=DENSE, group_size=32, **options):
    dtype, head_dim = options.get("dtype", mx.float32), options.get("head_dim", 64)
    pages = bits and page_shape(head_dim, bits, group_size, dtype, options.get("value_dim") or 0)
    return Case(contexts, pages=pages, **options)


def body_of(case):
    return "paged_decode" if case.pages is None else "quantized_decode"


def check(case, launch_shape=None, backend="metal", **options):
    with emulated(backend, **options) as fake:
        # Short contexts are split, too; test_matrix_decode covers single partitions.
        out, fence = case.run(launch_shape=launch_shape or shape_for(case.variant())._replace(first=0))
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    assert int(np.asarray(fence)[0]) == 8 and {body for body, _ in fake.calls} <= {body_of(case), "merge_partitions"}
    return out


QUICK = [("f16 extras q_len 3", RAGGED, "metal"), ("4 bits bf16", FEW, "cuda")]
MATCHES = list(itertools.product(CLASSES, [RAGGED, FEW], ["metal", "cuda"]))


@pytest.mark.parametrize(
    ("name", "contexts", "backend"), [pytest.param(*case, marks=() if case in QUICK else SLOW) for case in MATCHES]
)
def test_matches_reference(name, contexts, backend):
    check(case_of(contexts, **CLASSES[name]), backend=backend)


@pytest.mark.parametrize(
    ("head_dim", "bits"), quick(crossed(HEAD_DIMS, [DENSE, (8, 8), (4, 4)]), (64, DENSE), (256, (4, 4)))
)
def test_every_head_dim(head_dim, bits):
    if bits is None or head_dim % 32 == 0:
        check(case_of([33, 3], bits, head_dim=head_dim, heads=(4, 2), dtype=mx.bfloat16), orders=(0, 2))


SWEPT = [(dim, 32, DENSE) for dim in HEAD_DIMS]
SWEPT += [
    (*form, bits)
    for form in [(64, 64), (96, 32), (128, 128), (256, 64), (512, 128)]
    for bits in [(8, 8), (4, 4), PAGES]
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gqa", [1, 2, 3, 5, 8, 12, 16])
@pytest.mark.parametrize(("head_dim", "group_size", "bits"), SWEPT)
def test_sweep(head_dim, group_size, bits, gqa, dtype):
    options = {"head_dim": head_dim, "heads": (gqa, 1), "block_size": 32, "dtype": dtype}
    check(case_of([130, 1, 31], bits, group_size, **options), orders=(0, 1))


@BOTH
@pytest.mark.parametrize("starts", [[0, 1, 8, 60], pytest.param([3, 14, 15, 149], marks=SLOW)])
def test_window(starts, bits):
    # Tables are wild outside the window and stale slots are NaN: reading either would be seen.
    check(case_of([5, 15, 16, 150], bits, starts=starts, sinks=True))


@SINKS
def test_rows_that_see_nothing_are_zero(sinks, bits):
    for max_blocks in (2, 20):
        case = case_of([4, 20], bits, max_blocks=max_blocks, sinks=sinks)
        case.ends[0] = 0
        with emulated():
            out, _ = case.run()
        assert not out[0].any()
        np.testing.assert_allclose(out, case.reference(), atol=3e-6)


@pytest.mark.parametrize("bits", quick([DENSE, PAGES], PAGES))
def test_partition_tiers(bits):
    # Partitions of 64, 128 and 256 tokens in one launch, misaligned starts.
    case = case_of([100, 200, 300, 330], bits, starts=[1, 63, 20, 300])
    with emulated():
        launch_shape = shape_for(case.variant())._replace(partition=64, span=1)
    check(case, launch_shape=launch_shape)


@SINKS
def test_bits_do_not_depend_on_batchmates(sinks, bits):
    # Alone, row 0 takes the single-partition variant; beside a long row it goes through merge_partitions.
    case = case_of([100, 700], bits, sinks=sinks)
    with emulated(checked=False, orders=(0,)):
        together, _ = case.run()
        case.q, case.ends, case.starts = case.q[:1], case.ends[:1], case.starts[:1]
        case.tables = case.tables[:1, :7]
        alone, _ = case.run()
    assert alone[0].tobytes() == together[0].tobytes()


def test_max_visible_does_not_change_the_result():
    case = case_of([700, 650], starts=[600, 590])
    with emulated(checked=False, orders=(0,)) as fake:
        wide, _ = case.run()
        narrow, _ = case.run(max_visible=100)
    grids = [call["grid"][2] for body, call in fake.calls if body == "paged_decode"]
    assert grids[1] < grids[0] and wide.tobytes() == narrow.tobytes()


@pytest.mark.parametrize(
    ("contexts", "bits", "dtype"),
    quick(
        crossed([[1, 16, 17, 150, 300], [64, 65]], [DENSE, PAGES, (8, 8), (4, 4)], [mx.float32, mx.bfloat16]),
        ([64, 65], DENSE, mx.float32),
        ([1, 16, 17, 150, 300], PAGES, mx.bfloat16),
    ),
)
def test_append_writes_the_newest_token_and_attends_to_it(contexts, bits, dtype):
    # Its slot holds NaN: reading it before it is written would be seen. 300 tokens: several partitions.
    case = case_of(contexts, bits, dtype=dtype, head_dim=128 if bits else 80, value_dim=64, heads=(4, 2))
    with emulated(checked=False, orders=(0,)):
        before, _ = case.run()
    append = case.take_out_newest()
    with emulated() as fake:
        out, _ = case.run(append=append)
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert out.tobytes() == before.tobytes() and case.is_full_again(fake.written)


@pytest.mark.parametrize(
    ("backend", "bits"), quick(crossed(["metal", "cuda"], [DENSE, PAGES]), ("metal", PAGES), ("cuda", DENSE))
)
def test_rows_of_padding_append_nothing(backend, bits):
    case = case_of([5, 150], bits)
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
    assert case.is_full_again(fake.written)


def test_threadgroup_memory_is_bounded():
    bodies = [
        ("paged_decode", DENSE),
        ("paged_decode_tensor", DENSE),
        ("quantized_decode", (8, 8)),
        ("quantized_decode", (4, 4)),
    ]
    for dtype, head_dim, (body, bits), gqa in itertools.product(TOLERANCE, HEAD_DIMS, bodies, range(1, 17)):
        if bits and head_dim % 32:
            continue
        pages = bits and page_shape(head_dim, bits, 32, dtype)
        for backend in ("metal", "cuda"):
            shape = shape_for(Variant(body, backend, dtype, head_dim, head_dim, gqa, 32, pages=pages))
            assert shape.threadgroup_bytes(gqa, head_dim) <= MAX_THREADGROUP_BYTES
            assert not bits or shape.vec == 8


# Planted defects ----------------------------------------------------------------------------------------------------

DEFECTS = {  # body, old, new: seen by the emulator, in the result, in the fence or in the pool
    "reads the slot, not the new row": ("paged_decode", "position == fresh ? k_new", "position == -1 ? k_new"),
    "writes to the wrong slot": ("paged_decode", "* BS + fresh % BS;", "* BS + (fresh + 1) % BS;"),
    "writes half a row": ("paged_decode", "dim < DV; dim += SG * 32", "dim < DV / 2; dim += SG * 32"),
    "one row for all": ("paged_decode", "fresh_row = static_cast<int64_t>(row) * n_kv + kv_head", "fresh_row = static_cast<int64_t>(kv_head)"),
    "never stores": ("paged_decode", "if (fresh >= lo && fresh < hi) {", "if (fresh < -1) {"),
    "quantised: attended to before it is written": ("quantized_decode", "threadgroup_barrier(mem_flags::mem_device);", ""),
    "quantised: barrier of other memory": ("quantized_decode", "threadgroup_barrier(mem_flags::mem_device);", "threadgroup_barrier(mem_flags::mem_threadgroup);"),
    "quantised: writes to the wrong slot": ("quantized_decode", "const int offset = fresh % BS;", "const int offset = (fresh + 1) % BS;"),
    "quantised: keys alone": ("quantized_decode", "task < K_GROUPS + V_GROUPS", "task < K_GROUPS"),
    "quantised: rounded scale": ("quantized_decode", "(x[i] - affine.bias) / affine.scale", "(x[i] - affine.bias) / (affine.scale * 1.01f)"),
    "drop the barriers": ("paged_decode", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "block past the context": ("paged_decode", "(hi - 1) / BS)];", "(hi - 1) / BS + 1)];"),
    "block before the window": ("paged_decode", "metal::max(chunk * CHUNK / BS + i, lo / BS)", "chunk * CHUNK / BS + i"),
    "block ahead past the context": ("paged_decode", "(table, chunk + STRIPES, lo, hi, blocks)", "(table, chunk + STRIPES, lo, hi + BS, blocks)"),
    "two heads, one line": ("paged_decode", "const int64_t line = line0 + head * q_len;", "const int64_t line = line0;"),
    "unwritten output": ("paged_decode", "item < HS * HR * DV; item += SG * 32", "item < HS * HR * DV - 1; item += SG * 32"),
    "fence not passed on": ("paged_decode", "fence_out[0] = fence[0] + 1u;", ""),
    "shuffle in a branch": ("merge_partitions", "top = simd_max(top);", "if (lane < 16) { top = simd_max(top); }"),
    "merge writes out of range": ("merge_partitions", "if (dim < DV) {", "{"),
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
    "quantised: wrong kv head": ("quantized_decode", "static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv + kv_head;", "static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv;"),
    "quantised: scale of another group": ("quantized_decode", "key_factors[dim / GS]", "key_factors[0]"),
    "quantised: bias of another group": ("quantized_decode", "key_factors[K_GROUPS + dim / GS]", "key_factors[K_GROUPS]"),
    "quantised: value scale of another group": ("quantized_decode", "value_factors[dim / GS]", "value_factors[0]"),
    "quantised: value bias of another group": ("quantized_decode", "value_factors[V_GROUPS + dim / GS]", "value_factors[V_GROUPS]"),
    "quantised: factors of another token": ("quantized_decode", "inside * 2 * K_GROUPS", "inside * K_GROUPS"),
    "quantised: factors of the codes' plane": ("quantized_decode", "key_page + BS * K_CODES", "key_page"),
    "quantised: key bias dropped": ("quantized_decode", "metal::fma(bias, query_sum[h * NK + i], score[u * HP + h])", "score[u * HP + h]"),
    "quantised: value bias dropped": ("quantized_decode", "metal::fma(p[h], bias, base[h * NV + i])", "base[h * NV + i]"),
    "quantised: biases not rescaled": ("quantized_decode", "base[h * NV + i] *= factor;", ""),
    "quantised: places of keys kept": ("quantized_decode", "1.0f / static_cast<float>(1 << PLACE(j * KBITS))", "1.0f"),
    "quantised: places of values kept": ("quantized_decode", "1.0f / static_cast<float>(1 << PLACE(i % VEC * VBITS))", "1.0f"),
    "quantised: high half of a word lost": ("quantized_decode", "word >> (bit / 16 * 16)", "word"),
    "quantised: offset kept": ("quantized_decode", " - 8388608.0f", ""),
    "quantised: codes of another packet": ("quantized_decode", "dim / VEC * KW", "dim / VEC"),
    "quantised: value codes of the first packet": ("quantized_decode", "dim / VEC * VW", "0"),
    "quantised: stale tokens multiplied": ("quantized_decode", "metal::min(metal::max(token + step_token, lo), hi - 1) % BS", "(token + step_token) % BS"),
}  # fmt: skip
QUICK_DEFECTS = (
    "writes to the wrong slot", "quantised: writes to the wrong slot", "drop the barriers", "skip the rescale",
    "partitions not weighted",
)  # fmt: skip


def cases_of(body):
    """Yield cases in which defects of a body show, with the newest tokens to append or None."""
    bits, head_dim = (PAGES, 128) if body.startswith("quantized") else (DENSE, 64)
    if body == "merge_partitions":
        yield case_of([40, 300], starts=[20, 50], head_dim=80), None
    else:
        yield case_of([36, 90], bits, starts=[28, 50], block_size=8), None  # chunks of two blocks, half of them dead
        case = case_of([17, 150], bits)
        yield case, case.take_out_newest()
    # One query of the first sequence has one partition, the other several.
    contexts = [257 if body == "merge_partitions" else 129, 300]
    yield case_of(contexts, bits, starts=[10, 0], heads=(4, 2), q_len=2, sinks=True, head_dim=head_dim), None


@pytest.mark.parametrize("name", quick(DEFECTS, *QUICK_DEFECTS))
def test_planted_defects_are_seen(name):
    body, *edit = DEFECTS[name]
    for case, append in cases_of(body):
        try:
            with emulated(edit={body: [edit]}) as fake:
                out, fence = case.run(append=append)
        except EmuError:
            return
        if int(np.asarray(fence)[0]) != 8 or not np.allclose(out, case.reference(), atol=1e-4):
            return
        if append and not case.is_full_again(fake.written):
            return
    pytest.fail("nothing was wrong")
