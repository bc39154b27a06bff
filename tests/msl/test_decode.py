# ruff: noqa: E501
"""The decode bodies and merge_partitions on the emulator, one set of tests over portable bodies, those for matrices and
those for tensor cores, over dense and quantised pages: against float64 over what the pages hold, bit invariance, and
planted defects in the portable ones."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.launch_shape import HEAD_DIMS, Variant, shape_for
from mlx_paged.kernels.ops import variants_of
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import KINDS, MAX_THREADGROUP_BYTES, TOLERANCE, emulated, launch, threadgroup_bytes
from tests.support.msl.harness import check_decode as check
from tests.support.msl.harness import decode_case as case_of

RAGGED = [1, 15, 16, 17, 150, 5, 6, 300, 33]  # 9 rows: inputs of 8 and more elements are in device memory
FEW = [17, 140]  # 2 rows: small inputs are in constant memory
DENSE, PAGES = None, (8, 4)
FORMS = crossed(KINDS, [DENSE, PAGES])

CLASSES = {
    ("portable", "f32"): {},
    ("portable", "bf16"): {"dtype": mx.bfloat16},
    ("portable", "f16 extras q_len 3"): {"dtype": mx.float16, "q_len": 3, "softcap": 5.0, "sinks": True},
    ("portable", "value_dim"): {"head_dim": 96, "value_dim": 64, "dtype": mx.bfloat16},
    ("portable", "gqa 16"): {"heads": (16, 1), "head_dim": 128, "dtype": mx.bfloat16},
    ("portable", "gqa 7"): {"heads": (7, 1), "head_dim": 112, "dtype": mx.float16},
    ("portable", "gqa 1"): {"heads": (2, 2), "head_dim": 192},
    ("portable", "block 8"): {"block_size": 8, "dtype": mx.bfloat16},
    ("portable", "block 128"): {"block_size": 128},
    ("portable", "8 bits f32"): {"bits": (8, 8)},
    ("portable", "4 bits bf16"): {"bits": (4, 4), "dtype": mx.bfloat16, "group_size": 64},
    ("portable", "8/4 f16 extras q_len 3"): {"bits": PAGES, "dtype": mx.float16, "q_len": 3, "softcap": 5.0, "sinks": True},
    ("portable", "8/4 value_dim"): {"bits": PAGES, "head_dim": 96, "value_dim": 64, "dtype": mx.bfloat16},
    ("portable", "8/4 gqa 16, one group"): {"bits": PAGES, "heads": (16, 1), "head_dim": 128, "dtype": mx.bfloat16, "group_size": 128},
    ("portable", "4 bits gqa 7"): {"heads": (7, 1), "head_dim": 96, "dtype": mx.float16, "bits": (4, 4)},
    ("portable", "8/4 gqa 1"): {"bits": PAGES, "heads": (2, 2), "head_dim": 192, "group_size": 64},
    ("portable", "8 bits block 8"): {"block_size": 8, "dtype": mx.bfloat16, "bits": (8, 8)},
    ("portable", "4 bits block 128"): {"block_size": 128, "bits": (4, 4)},
    ("matrix", "bf16"): {},
    ("matrix", "f16 extras q_len 3"): {"dtype": mx.float16, "q_len": 3, "softcap": 5.0, "sinks": True},
    ("matrix", "value_dim"): {"head_dim": 96, "value_dim": 64},
    ("matrix", "gqa 16"): {"heads": (16, 1), "head_dim": 128},
    ("matrix", "gqa 12, two kv heads"): {"heads": (24, 2), "head_dim": 80, "dtype": mx.float16},
    ("matrix", "gqa 5, 256"): {"heads": (5, 1), "head_dim": 256},
    ("matrix", "gqa 6, block 8"): {"heads": (12, 2), "block_size": 8},
    ("matrix", "block 128"): {"block_size": 128},
    ("matrix", "8/4 bits q_len 2"): {"bits": (8, 4), "q_len": 2, "sinks": True},
    ("matrix", "4 bits gqa 16"): {"bits": (4, 4), "heads": (16, 1), "head_dim": 128, "group_size": 64, "dtype": mx.float16},
    ("matrix", "8 bits gqa 7, 192, softcap"): {"bits": (8, 8), "heads": (7, 1), "head_dim": 192, "softcap": 9.0},
    ("matrix", "4/8 bits value_dim"): {"bits": (4, 8), "head_dim": 96, "value_dim": 64, "block_size": 8},
    ("tensor", "dense"): {},
    ("tensor", "dense bf16 extras"): {"dtype": mx.bfloat16, "q_len": 3, "softcap": 5.0, "sinks": True},
    ("tensor", "dense value_dim"): {"head_dim": 96, "value_dim": 80, "heads": (16, 1)},
    ("tensor", "8 bits"): {"bits": (8, 8)},
    ("tensor", "4 bits"): {"bits": (4, 4)},
    ("tensor", "bf16"): {"bits": (8, 4), "dtype": mx.bfloat16, "head_dim": 128},
    ("tensor", "f16 extras q_len 3"): {"bits": (4, 8), "q_len": 3, "softcap": 5.0, "sinks": True},
    ("tensor", "groups of 32"): {"bits": (8, 4), "group_size": 32, "head_dim": 96},
    ("tensor", "groups of 32, the other way"): {"bits": (4, 8), "group_size": 32, "head_dim": 128, "value_dim": 64},
    ("tensor", "four groups side by side"): {"bits": (8, 4), "group_size": 32, "head_dim": 128, "heads": (4, 2)},
    ("tensor", "four groups of 64"): {"bits": (4, 4), "head_dim": 256, "heads": (1, 1), "dtype": mx.bfloat16},
    ("tensor", "eight bits of wide heads"): {"bits": (8, 8), "head_dim": 256, "heads": (4, 2)},
    ("tensor", "groups of 128"): {"bits": (8, 4), "group_size": 128, "head_dim": 128, "value_dim": 256},
    ("tensor", "one group of 4 bits"): {"bits": (4, 8), "group_size": 128, "head_dim": 128},
    ("tensor", "gqa 16"): {"bits": (8, 4), "heads": (16, 1), "head_dim": 128},
    ("tensor", "gqa 7"): {"bits": (4, 8), "heads": (7, 1), "head_dim": 192, "dtype": mx.bfloat16},
    ("tensor", "gqa 1"): {"bits": (8, 8), "heads": (2, 2), "block_size": 8},
    ("tensor", "block 128"): {"bits": (4, 4), "block_size": 128},
}  # fmt: skip


WAYS = {
    "portable": list(itertools.product([RAGGED, FEW], [{"backend": "metal"}, {"backend": "cuda"}])),
    "matrix": [
        (RAGGED, {"cores": n, "orders": (0, 2)}) for n in (8, 38)
    ],  # partitions of 128 tokens, and of the fewest
    "tensor": [(RAGGED, {"orders": (0, 2)})],
}
MATCHES = [(*key, *way) for key in CLASSES for way in WAYS[key[0]]]
QUICK = [
    ("portable", "f16 extras q_len 3", RAGGED, {"backend": "metal"}),
    ("portable", "4 bits bf16", FEW, {"backend": "cuda"}),
    ("tensor", "four groups of 64", RAGGED, {"orders": (0, 2)}),
]
QUICK += [
    ("matrix", name, RAGGED, {"cores": n, "orders": (0, 2)})
    for name, n in (("f16 extras q_len 3", 8), ("gqa 5, 256", 38), ("4 bits gqa 16", 8))
]


@pytest.mark.parametrize(("kind", "name", "contexts", "options"), quick(MATCHES, *QUICK), ids=str)
def test_matches_reference(kind, name, contexts, options):
    check(case_of(contexts, kind=kind, **CLASSES[kind, name]), kind, **options)


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
    check(case_of([130, 1, 31], bits, group_size=group_size, **options), orders=(0, 1))


@pytest.mark.parametrize(
    ("kind", "bits", "starts"),
    [*((*form, [0, 1, 8, 60]) for form in FORMS), *slow(*((*form, [3, 14, 15, 149]) for form in FORMS))],
)
def test_window(kind, bits, starts):
    # Tables are wild outside the window and stale slots are NaN: reading either would be seen.
    check(case_of([5, 15, 16, 150], bits, kind, starts=starts, sinks=True), kind)


STARTS = [0, 31, 32, 40, 63]
EVERY_START = crossed(["portable", "matrix"], [DENSE, PAGES], [64, 128, 320, 512, 1024], [list(range(64))])


@pytest.mark.parametrize(
    ("kind", "bits", "window", "starts"),
    [("portable", PAGES, 128, STARTS), ("portable", PAGES, 320, STARTS), *slow(*EVERY_START)],
)  # fmt: skip
def test_windows_that_begin_inside_a_partition(kind, bits, window, starts):
    """GPUs of different numbers of cores have partitions of 128, 64 and 32 tokens. The merge reads no unwritten one."""
    options = {"dtype": mx.bfloat16, "block_size": 32, "sinks": True, "heads": (8 if kind == "matrix" else 2, 1)}
    for cores in (20, 32, 38):
        case = case_of([start + window for start in starts], bits, kind, starts=starts, **options)
        out, _ = launch(case, kind, cores=cores, checked=False, orders=(0,), max_visible=window)
        np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)


def test_a_first_partition_without_a_visible_token_is_caught():
    edit = {body: [("PART < 64 ? PART : 64", "64")] for body in ("paged_decode", "merge_partitions")}
    case = case_of([360], starts=[40], heads=(2, 1), dtype=mx.bfloat16, block_size=32)
    with pytest.raises((EmuError, AssertionError)):
        out, _ = launch(case, cores=38, checked=False, orders=(0,), edit=edit, max_visible=320)
        np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("sinks", "kind", "bits"), quick([(x, *form) for x in (False, True) for form in FORMS], (False, "portable", PAGES),
    (True, "portable", DENSE), (False, "matrix", PAGES), (False, "tensor", PAGES))
)  # fmt: skip
def test_rows_that_see_nothing_are_zero(sinks, kind, bits):
    for max_blocks in (2, 20):
        case = case_of([4, 20], bits, kind, max_blocks=max_blocks, sinks=sinks)
        case.ends[0] = 0
        assert not check(case, kind, orders=(0, 2))[0].any()


@pytest.mark.parametrize("kind", ["portable", "matrix"])
def test_padded_ends_and_starts_add_no_rows(kind):
    case = case_of([300, 20], DENSE, kind)
    expected = check(case, kind, orders=(0,))
    case.ends, case.starts = (np.concatenate([x, np.zeros((6, 1), np.int32)]) for x in (case.ends, case.starts))
    out, _ = launch(case, kind, orders=(0,), shape={"first": 0})
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("bits", quick([DENSE, PAGES], PAGES))
def test_partition_tiers(bits):
    # Partitions of 64, 128 and 256 tokens in one launch, misaligned starts.
    case = case_of([100, 200, 300, 330], bits, starts=[1, 63, 20, 300])
    check(case, shape={"partition": 64, "span": 1})


@pytest.mark.parametrize(
    ("sinks", "kind", "bits"), quick([(x, *form) for x in (False, True) for form in FORMS], (False, "portable", PAGES),
    (True, "portable", DENSE), (True, "matrix", DENSE), (True, "tensor", PAGES))
)  # fmt: skip
def test_bits_do_not_depend_on_batchmates(sinks, kind, bits):
    # Alone, row 0 takes the single-partition variant; beside a long row it goes through merge_partitions.
    case = case_of([100, 700], bits, kind, sinks=sinks, starts=[0, 3])
    together, _ = launch(case, kind, checked=False, orders=(0,))
    whole = {name: getattr(case, name) for name in ("q", "tables", "ends", "starts")}
    for b, blocks in enumerate((7, None)):
        for name, x in whole.items():
            setattr(case, name, x[b : b + 1, :blocks] if name == "tables" else x[b : b + 1])
        alone, _ = launch(case, kind, checked=False, orders=(0,))
        assert alone[0].tobytes() == together[b].tobytes()


@pytest.mark.parametrize(("gqa", "bits"), quick(crossed([4, 8], [DENSE, PAGES]), (4, DENSE), (8, PAGES)))
def test_partitions_of_one_kv_head(gqa, bits):
    """Rows of one partition, of several, and of several sizes, alone and behind a window."""
    contexts, options = [1, 64, 65, 300, 700], {"heads": (gqa, 1), "dtype": mx.bfloat16, "block_size": 32}
    for starts in ([0] * 5, [0, 33, 40, 7, 500]):
        case = case_of(contexts, bits, starts=starts, **options)
        with emulated(checked=False, orders=(0,)) as fake:
            variant = variants_of(mx.bfloat16, 64, 64, gqa, 1, 32, False, False, case.pages)[0]
            out, _ = case.run(variant=variant, launch_shape=shape_for(variant, 10))
        np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)
        assert variant.groups == 1 and [body for body, _ in fake.calls][1:] == ["merge_partitions"]
    with emulated(checked=False, orders=(0,)) as fake:
        case = case_of(contexts[:2], bits, **options)
        out, _ = case.run(variant=variant, launch_shape=shape_for(variant, 10), max_visible=33)
    np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)
    assert len(fake.calls) == 1


def test_max_visible_does_not_change_the_result():
    case = case_of([700, 650], starts=[600, 590])
    wide, every = launch(case, checked=False, orders=(0,))
    narrow, few = launch(case, checked=False, orders=(0,), max_visible=100)
    assert few.calls[0][1]["grid"][2] < every.calls[0][1]["grid"][2] and wide.tobytes() == narrow.tobytes()


APPENDED = {"bits": [DENSE, PAGES, (8, 8), (4, 4)], "tensor": [DENSE, PAGES, (4, 8)]}


@pytest.mark.parametrize(
    ("kind", "contexts", "bits", "dtype"),
    quick(
        [
            *crossed(["portable"], [RAGGED, [64, 65]], APPENDED["bits"], [mx.float32, mx.bfloat16]),
            *crossed(["matrix"], [RAGGED], [DENSE, PAGES], [mx.bfloat16]),
            *crossed(["tensor"], [RAGGED], APPENDED["tensor"], [mx.float16, mx.bfloat16]),
        ],
        ("portable", [64, 65], DENSE, mx.float32),
        ("portable", RAGGED, PAGES, mx.bfloat16),
        ("matrix", RAGGED, PAGES, mx.bfloat16),
        ("tensor", RAGGED, DENSE, mx.float16),
        ("tensor", RAGGED, PAGES, mx.bfloat16),
    ),
    ids=str,
)
def test_append_writes_the_newest_token_and_attends_to_it(kind, contexts, bits, dtype):
    # Its slot holds NaN: reading it before it is written would be seen. 300 tokens: several partitions.
    heads = (8, 1) if kind == "matrix" else (4, 2)
    case = case_of(contexts, bits, kind, dtype=dtype, head_dim=128 if bits else 80, value_dim=64, heads=heads)
    before, _ = launch(case, kind, checked=False, orders=(0,))
    out, fake = launch(case, kind, append=case.take_out_newest())
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert out.tobytes() == before.tobytes() and case.is_full_again(fake.written)


@pytest.mark.parametrize(
    ("backend", "bits"), quick(crossed(["metal", "cuda"], [DENSE, PAGES]), ("metal", PAGES), ("cuda", DENSE))
)
def test_rows_of_padding_append_nothing(backend, bits):
    case = case_of([5, 150], bits)
    append = case.take_out_newest()
    alone, _ = launch(case, backend=backend, append=append)
    case.q, *append = (mx.concatenate([x, mx.full((2, *x.shape[1:]), mx.nan, x.dtype)]) for x in (case.q, *append))
    case.tables, case.ends, case.starts = (
        np.concatenate([x, np.zeros((2, x.shape[1]), np.int32)]) for x in (case.tables, case.ends, case.starts)
    )
    out, fake = launch(case, backend=backend, append=append)
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
            assert threadgroup_bytes(shape, gqa, head_dim) <= MAX_THREADGROUP_BYTES
            assert not bits or body.endswith("tensor") or dict(shape.constants)["VEC"] == 8


# Planted defects ----------------------------------------------------------------------------------------------------

DEFECTS = {  # body, old, new: seen by the emulator, in the result, in the fence or in the pool
    "reads the slot, not the new row": ("paged_decode", "position == fresh ? k_new", "position == -1 ? k_new"),
    "writes to the wrong slot": ("paged_decode", "* BS + fresh % BS;", "* BS + (fresh + 1) % BS;"),
    "writes half a row": ("paged_decode", "dim < DV; dim += SG * 32", "dim < DV / 2; dim += SG * 32"),
    "one row for all": ("paged_decode", "fresh_row = static_cast<int64_t>(row) * n_kv + kv_head", "fresh_row = static_cast<int64_t>(kv_head)"),
    "never stores": ("paged_decode", "if (fresh >= lo && fresh < hi) {", "if (fresh < -1) {"),
    "quantised: attended to before it is written": ("quantized_decode", "threadgroup_barrier(mem_flags::mem_device);", ""),
    "quantised: barrier of other memory": ("quantized_decode", "threadgroup_barrier(mem_flags::mem_device);", "threadgroup_barrier(mem_flags::mem_threadgroup);"),
    "quantised: writes to the wrong slot": ("quantized_decode", "fresh % BS, group, lane", "(fresh + 1) % BS, group, lane"),
    "quantised: keys alone": ("quantized_decode", "group < K_GROUPS + V_GROUPS", "group < K_GROUPS"),
    "quantised: rounded scale": ("quantized_decode", "(x[i] - affine.bias) / affine.scale", "(x[i] - affine.bias) / (affine.scale * 1.01f)"),
    "drop the barriers": ("paged_decode", "threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "block past the context": ("paged_decode", "(hi - 1) / BS)];", "(hi - 1) / BS + 1)];"),
    "block before the window": ("paged_decode", "metal::max(chunk * CHUNK / BS + i, lo / BS)", "chunk * CHUNK / BS + i"),
    "block ahead past the context": ("paged_decode", "(table, chunk + STRIPES, lo, hi, blocks)", "(table, chunk + STRIPES, lo, hi + BS, blocks)"),
    "two heads, one line": ("paged_decode", "(line0 + head * q_len) * n_partitions + partition;\n        store", "line0 * n_partitions + partition;\n        store"),
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
    "partition sizes disagree": ("merge_partitions", "partitions.size = PART;", "partitions.size = 2 * PART;"),
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
