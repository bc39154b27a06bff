# ruff: noqa: E501
"""prefill_matrix's texts, dense and quantised, on the emulator: against float64, row independence, planted defects, types, and its trial."""

import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import prefill
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.check import checked, self_check
from mlx_paged.kernels.launch_shape import BLOCK_SIZES, HEAD_DIMS, MAX_TENSOR_HEAD_DIM, MAX_THREADGROUP_BYTES, Variant
from mlx_paged.kernels.prefill import (
    MATRIX_BODY,
    QUANTIZED_MATRIX_BODY,
    prefill_constants_of,
    shape_of,
)
from mlx_paged.kernels.trial import MIN_DEVICE_ELEMENTS, KernelKey, launch_alone
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl import prefill_harness
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import to_mlx
from tests.support.msl.prefill_harness import Pack

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [5, 40, 1, 130], [0, 30, 64, 3]
VARIANT = Variant(MATRIX_BODY, "metal", mx.bfloat16, 64, 64, 4, 32)

CLASSES = {
    "bf16": {},
    "f16 128": {"dtype": mx.float16, "head_dim": 128},
    "window": {"window": 20, "dtype": mx.float16},
    "window of one": {"window": 1},
    "window of 45, 128": {"window": 45, "head_dim": 128},
    "softcap and sinks": {"softcap": 5.0, "sinks": True, "dtype": mx.float16},
    "chunks": {"window": 20, "stride": 20},
    "chunks longer than a tile": {"window": 96, "stride": 96, "heads": (16, 1)},
    "value_dim": {"head_dim": 80, "value_dim": 64},
    "96": {"head_dim": 96, "window": 33},
    "gqa 16": {"heads": (16, 1), "head_dim": 128, "window": 100},
    "gqa 7": {"heads": (7, 1), "head_dim": 112, "dtype": mx.float16},
    "gqa 1": {"heads": (2, 2), "head_dim": 192, "sinks": True},
    "256": {"head_dim": 256, "heads": (2, 1), "softcap": 20.0},
    "block 8": {"block_size": 8, "window": 37},
    "block 128": {"block_size": 128, "head_dim": 128},
}


def pack_of(counts, prefixes, bits=(8, 8), group_size=64, *, head_dim=64, value_dim=0, dtype=mx.float16, **options):
    pages = page_shape(head_dim, bits, group_size, dtype, value_dim)
    return Pack(counts, prefixes, head_dim=head_dim, value_dim=value_dim or None, dtype=dtype, pages=pages, **options)


def emulated(*edit, **options):
    return prefill_harness.emulated(edit, backend="metal", **options)


def check_pack(pack, orders=(0, 2), **options):
    with emulated(orders=orders):
        out, fence = pack.run(**options)
    tolerance = TOLERANCE[pack.dtype] * (2 if pack.pages else 1)  # dequantised values are rounded
    np.testing.assert_allclose(out, pack.reference(), atol=tolerance, rtol=tolerance)
    assert fence == 8


@pytest.mark.parametrize("name", quick(list(CLASSES), "bf16", "window of one", "chunks", "96"))
def test_matches_reference(name):
    check_pack(Pack(*RAGGED, **CLASSES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gqa", [1, 2, 3, 5, 8, 12, 16])
@pytest.mark.parametrize("head_dim", [dim for dim in HEAD_DIMS if dim <= MAX_TENSOR_HEAD_DIM])
def test_sweep(head_dim, gqa, dtype):
    for n, block_size in enumerate(BLOCK_SIZES):
        options = {"head_dim": head_dim, "heads": (gqa, 1), "block_size": block_size, "dtype": dtype}
        check_pack(Pack([3, 70], [99, 0], window=(None, 33)[n % 2], sinks=n % 3 == 0, **options), orders=(0,))


@pytest.mark.parametrize("options", [{}, *slow({"window": 50, "sinks": True, "head_dim": 128})])
def test_bits_do_not_depend_on_the_pack(options):
    pack = Pack([90, 1, 33], [10, 200, 64], dtype=mx.float16, **options)
    with emulated(checked=False, orders=(0,)):
        together, _ = pack.run()
        first = 0
        for s, count in enumerate(pack.counts):
            alone, _ = pack.alone(s).run()
            assert alone.tobytes() == together[first : first + count].tobytes()
            first += count


def test_a_launch_is_one_text():
    """Inputs of fewer than 8 elements would be in another address space and need another text."""
    for sinks in (False, True):
        pack = Pack([1], [0], heads=(2, 2), sinks=sinks)
        with emulated(orders=(0,)):
            launch = pack.prepare()
            kernel = launch.kernel
            spy = mock.Mock(side_effect=kernel)
            launch = launch._replace(kernel=spy)
            launch(pack.q, pack.k_pool, pack.v_pool, mx.array([7], mx.uint32), pack.sinks)
        sizes = {
            name: x.size for name, x in zip(BODIES[MATRIX_BODY].inputs, spy.call_args.kwargs["inputs"], strict=True)
        }
        assert sizes["fence"] == 1 and sizes["params"] == 4 and (not sinks or sizes["sinks"] >= MIN_DEVICE_ELEMENTS)
        assert all(sizes[name] >= MIN_DEVICE_ELEMENTS for name in ("q", "k_pool", "v_pool", "tables", "tiles"))
        check_pack(pack, orders=(0,))


@pytest.mark.parametrize("sinks", [False, True])
def test_trial_launches_the_text(sinks):
    variant = VARIANT._replace(value_dim=80, sinks=sinks)
    with emulated():
        key = KernelKey(MATRIX_BODY, prefill_constants_of(variant, shape_of(variant)))
        with pytest.raises(EmuError, match=r"output out: .* never written"):
            launch_alone(key, prefill.build_kernel)


@pytest.mark.parametrize("head_dim", quick([64, 128, 192, 256], 128, 256))
def test_threadgroup_memory_is_what_the_text_declares(head_dim):
    for pack in (Pack([3], [0], head_dim=head_dim), pack_of([3], [0], head_dim=head_dim)):
        with emulated(checked=False, orders=(0,)):
            launch = pack.prepare()
            launch(pack.q, pack.k_pool, pack.v_pool, mx.array([7], mx.uint32))
            (variant,) = prefill.prefill_variants(pack.k_pool, pack.v_pool, pack.n_q, pages=pack.pages)
        size = shape_of(variant).shared_bytes(head_dim, head_dim, pack.pages)
        assert launch.kernel.func.stats["tg_bytes"] == size <= MAX_THREADGROUP_BYTES


QUANTIZED = {
    "8 bits bf16": {"dtype": mx.bfloat16},
    "4 bits bf16": {"bits": (4, 4), "dtype": mx.bfloat16},
    "f16 extras": {"bits": (8, 4), "softcap": 5.0, "sinks": True},
    "window": {"bits": (4, 8), "window": 20, "sinks": True},
    "window of one": {"window": 1},
    "value_dim": {"bits": (4, 8), "group_size": 32, "head_dim": 96, "value_dim": 64},
    "gqa 16": {"dtype": mx.bfloat16, "heads": (16, 1), "head_dim": 128, "window": 100},
    "gqa 7": {"bits": (4, 4), "group_size": 128, "heads": (7, 1), "head_dim": 128},
    "256": {"group_size": 32, "head_dim": 256, "heads": (2, 1), "block_size": 32, "softcap": 20.0},
    "block 8": {"bits": (8, 4), "block_size": 8},
}


@pytest.mark.parametrize("name", quick(list(QUANTIZED), "window"))
def test_quantised_pages_match_reference(name):
    check_pack(pack_of(*RAGGED, **QUANTIZED[name]))


VALUES = "  for (int i = TOGETHER ? sg * 32 + lane : lane; i < KEYS * (DV / 8);"
QUANTIZED_WRONG = {
    "no barriers": ("stage_barrier<TOGETHER>();", ""),
    "values over keys that are read": ("  stage_barrier<TOGETHER>();\n" + VALUES, VALUES),
    "dead slots are read": ("lo), hi - 1);", "0), 1 << 30);"),
    "another slot": ("position % BS, i", "0, i"),
    "another head": ("* n_kv + kv_head;\n    stage_codes", "* n_kv;\n    stage_codes"),
    "scale of another group": ("factors[at * 8 / GS]", "factors[0]"),
    "bias of another group": ("factors[GROUPS + at * 8 / GS]", "factors[GROUPS]"),
    "codes of another place": ("j * BITS % 32", "0"),
    "what one simdgroup sees": ("const int low = TOGETHER ? origin : ", "const int low = "),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(list(QUANTIZED_WRONG), "no barriers", "another slot", "bias of another group"))
def test_planted_defects_over_quantised_pages_are_seen(name):
    pack = pack_of([30, 50], [80, 40], bits=(8, 4), group_size=32, window=37, block_size=16)
    try:
        with emulated(QUANTIZED_WRONG[name], orders=(0, 2)):
            out, _ = pack.run()
    except EmuError:
        return
    assert not np.allclose(out, pack.reference(), atol=4e-3)


BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
CAUGHT = {  # old, new, what the emulator says
    "no barriers": (BARRIER, "", "race"),
    "barrier without memory": (BARRIER, "simdgroup_barrier(mem_flags::mem_none);", "race"),
    "block past the context": ("(hi - 1) / 8 * 8);", "(hi + 200) / 8 * 8);", "out-of-bounds|wild"),
    "block before the window": ("lo / 8 * 8), (hi", "0), (hi", "out-of-bounds|wild"),
    "values past the context": ("&& token < hi) {", ") {", "out-of-bounds|wild"),
    "fence not passed on": ("fence_out[0] = fence[0] + 1u;", "", "never written"),
    "rows past the last token": ("if (first_line + row < n_tokens * G) {", "{", "race|out-of-bounds"),
    "half a row": ("if (at < DV)", "if (at < DV / 2)", "never written"),
    "two heads, one line": ("* G + (first_line + row) % G;", "* G;", "race|never written"),
    "matrices in a branch": ("if (whole) {", "if (whole && lane < 9) {", "divergence"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(list(CAUGHT), "no barriers", "values past the context", "two heads, one line"))
def test_emulator_catches_planted_defects(name):
    old, new, want = CAUGHT[name]
    pack = Pack([30, 90], [80, 40], window=37, block_size=8, heads=(3, 1))
    with emulated((old, new)), pytest.raises(EmuError, match=want):
        pack.run()


WRONG = {  # the numbers come out wrong
    "fence input dropped": ("fence[0] + 1u", "1u"),
    "wrong kv head of keys": ("k_pages + static_cast<int64_t>(kv_head)", "k_pages + static_cast<int64_t>(0)"),
    "wrong kv head of values": ("v_pages + static_cast<int64_t>(kv_head)", "v_pages + static_cast<int64_t>(0)"),
    "a token sees the next": ("token > own ||", "token > own + 1 ||"),
    "a token does not see itself": ("token > own ||", "token >= own ||"),
    "window one longer": ("token < from)", "token < from - 1)"),
    "keys not transposed": ("ulong2(0), true)", "ulong2(0), false)"),
    "keys of another slot": ("+ token % BS * D;", "+ token % 8 * D;"),
    "values of another slot": ("+ token % BS * DV;", "+ token % 8 * DV;"),
    "dead slots are read": ("const bool live = token + row >= lo && token + row < hi;", "const bool live = true;"),
    "edges taken for whole": ("const bool whole = token >= lo && token + 8 <= hi;", "const bool whole = true;"),
    "eight values left out": ("if (token + 8 > lo && token < hi) {", "if (token > lo && token < hi) {"),
    "skip the rescale": ("if (simd_any(grows)) {", "if (false) {"),
    "rescale by the other side": ("simdgroup_multiply(scaled, shrinks, acc[r * (DV / 8) + v])", "simdgroup_multiply(scaled, acc[r * (DV / 8) + v], shrinks)"),
    "skip the rescale of the sum": ("metal::fma(l[r], shrink, sum)", "l[r] + sum"),
    "diagonal not cleared": ("diagonal[lane * 2] = 0.0f;", "diagonal[lane * 2] = 1.0f;"),
    "maximum of half a row": ("top = metal::max(top, simd_shuffle_xor(top, 2));", ""),
    "sum of half a row": ("l[0] += simd_shuffle_xor(l[0], 2);", ""),
    "nothing seen yet": ("top == NOTHING ? 0.0f : top * gain", "top * gain"),
    "weights of other tokens": ("own_weights + r * 8 * KEYS + j * 8, KEYS)", "own_weights + r * 8 * KEYS, KEYS)"),
    "queries of another row": ("own_queries[row * D + i + j]", "own_queries[(7 - row) * D + i + j]"),
    "softcap left out": ("} else if (SOFTCAP) {", "} else if (false) {"),
    "sink of another head": ("sinks[kv_head * G + (first_line + row) % G]", "sinks[kv_head * G]"),
    "sink not weighed": ("divide(weight, metal::fma(", "divide(1.0f, metal::fma("),
    "another table": ("static_cast<int64_t>(tile[0])", "static_cast<int64_t>(0)"),
    "another first token": ("(metal::max(low - window", "(metal::max(low + 30 - window"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", quick(list(WRONG), "fence input dropped", "values of another slot", "maximum of half a row",
    "another table")
)  # fmt: skip
def test_defects_that_change_numbers_are_seen(name):
    for pack in (
        Pack([30, 70], [50, 40], window=37, block_size=8, softcap=3.0, sinks=True, dtype=mx.float16),
        Pack([50, 30], [64, 150], block_size=128, dtype=mx.float16, sinks=True, heads=(6, 2)),
        Pack([40], [130], window=10, dtype=mx.float16),
    ):
        pack.scale = 0.5  # scores that differ much
        if pack.softcap:
            pack.sinks = pack.sinks + pack.softcap  # larger than some scores
        try:
            with emulated(WRONG[name], orders=(0,)):
                out, fence = pack.run()
        except EmuError:
            return
        if fence != 8 or not np.allclose(out, pack.reference(), atol=4e-3):
            return
    pytest.fail("no number was wrong")


# The self-check, over the text on the emulator.


@pytest.fixture
def planted() -> Iterator[Callable[[tuple[str, str]], None]]:
    """Run the kernel on the emulator, as on a Mac, with fake writes; the fixture's value plants a mutation."""

    def arrays_of(kernel, options):
        assert np.isnan(options["init_value"])
        return [to_mlx(out) for out in kernel(strict=False, **options)]  # fast functions take NaN

    with prefill_harness.emulated_self_check(arrays_of, "metal") as plant:
        yield plant


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"softcap": True, "sinks": True, "dtype": mx.float16},
        *slow({"head_dim": 128, "value_dim": 128, "dtype": mx.float16}, {"gqa": 3, "head_dim": 80, "block_size": 8}),
        {"body": QUANTIZED_MATRIX_BODY, "pages": page_shape(64, (8, 4), 32, mx.bfloat16)},
    ],
)
def test_the_self_check_passes(planted, change):
    result = self_check(VARIANT._replace(**change))
    # When it dequantises, MLX rounds differently on the CPU and on Metal.
    assert result.ok and result.rms < (4e-3 if "pages" in change else 2e-3), result.reason


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *map(WRONG.get, ("a token sees the next", "keys not transposed", "wrong kv head of keys")),
        *slow(
            *map(WRONG.get, ("window one longer", "dead slots are read", "edges taken for whole")),
            *map(WRONG.get, ("rescale by the other side", "skip the rescale of the sum", "values of another slot")),
            ("if (at < DV)", "if (at < DV - 1)"),  # what is not written stays NaN
        ),
    ],
)
def test_the_self_check_finds_planted_defects(planted, old, new):
    planted((old, new))
    assert not self_check(VARIANT).ok


def test_a_failed_self_check_switches_the_kernel_off(planted):
    planted(WRONG["a token sees the next"])
    with pytest.warns(UserWarning, match="failed its self-check"):
        assert not checked(VARIANT).ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not checked(VARIANT).ok
    pools = [mx.zeros((3, 1, 32, 64), mx.bfloat16)] * 2
    with pytest.raises(prefill.NoKernelError, match=r"is not below|not finite"):
        prefill.prepare_prefill(*pools, mx.array([[1]], mx.int32), [3], [3], n_q_heads=4, scale=1.0)


# Types.

checker = pytest.importorskip("tests.support.msl.checker")


def problems(dtype, edit=None, head_dim=128, extras=True, pages=None):
    variant = VARIANT._replace(dtype=dtype, head_dim=head_dim, value_dim=head_dim, softcap=extras, sinks=extras)
    if pages is not None:
        variant = variant._replace(body=QUANTIZED_MATRIX_BODY, pages=pages)
    header, source = kernel_build.kernel_source(variant.body, "metal", prefill_constants_of(variant, shape_of(variant)))
    if edit:
        assert edit[0] in source
        source = source.replace(*edit)
    name = str(dtype).split(".")[-1]
    pool = (4, 99999, name if pages is None else "uint32")
    inputs = [(4, 9999, name), pool, pool, (1, 1, "uint32"), (2, 99, "int32"), (2, 8, "int32")]
    inputs += [(1, 4, "float32"), (1, 8 if extras else 4, "float32")]
    body = BODIES[MATRIX_BODY]
    return checker.check_kernel(body.inputs, body.outputs, source, header, [(inputs, [name, "uint32"], [])])


@pytest.mark.parametrize(
    ("dtype", "head_dim"), quick(crossed(list(TOLERANCE), [dim for dim in HEAD_DIMS if dim <= MAX_TENSOR_HEAD_DIM]),
    (mx.float16, 64), (mx.bfloat16, 80), (mx.float16, 112), (mx.bfloat16, 128), (mx.float16, 256))
)  # fmt: skip
def test_types_are_clean(head_dim, dtype):
    assert problems(dtype, head_dim=head_dim) == []
    assert problems(dtype, head_dim=head_dim, extras=False) == []
    if head_dim % 32 == 0:
        assert problems(dtype, head_dim=head_dim, pages=page_shape(head_dim, (8, 4), 32, dtype)) == []


@pytest.mark.parametrize(
    "edit",
    [
        ("threadgroup T* const edge", "device T* const edge"),
        ("simdgroup_load(query[r], own_queries", "simdgroup_load(query[r], own_scores"),
        ("simdgroup_matrix<float, 8, 8>", "simdgroup_matrix<float, 8, 16>"),
        ("const int64_t line", "const int line"),
        ("own_weights[at + i] = static_cast<T>(weight)", "own_weights[at + i] = weight"),
    ],
)  # fmt: skip
def test_the_checker_finds_wrong_types(edit):
    assert problems(mx.bfloat16, edit)
