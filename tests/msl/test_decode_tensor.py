# ruff: noqa: E501
"""The decode texts for tensor cores on the emulator, over dense and over quantised pages: against float64, bit invariance,
and planted defects."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.launch_shape import shape_for
from scripts.support.paged_decode import decode_variants
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Case, emulated, to_float

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [1, 15, 16, 17, 150, 33]


def case_of(contexts, bits=(8, 8), group_size=64, *, head_dim=64, value_dim=0, dtype=mx.float16, **options):
    """Return a case over quantised pages, or over dense ones if ``bits`` is None."""
    pages = None if bits is None else page_shape(head_dim, bits, group_size, dtype, value_dim)
    return Case(contexts, head_dim=head_dim, value_dim=value_dim or None, dtype=dtype, pages=pages, **options)


def variant_of(case):
    extras = {"softcap": case.softcap is not None, "sinks": case.sinks is not None}
    return decode_variants(case.k_pool, case.v_pool, case.n_q, pages=case.pages, **extras)[0]


def run(case, edit=(), orders=(0, 2), append=None, checked=True, **shape):
    """Return the output, and the contents of the pools afterwards."""
    body = "paged_decode_tensor" if case.pages is None else "quantized_decode_tensor"
    with emulated("cuda", edit={body: edit}, orders=orders, checked=checked) as fake:
        variant = variant_of(case)
        assert variant.body == body
        launch_shape = shape_for(variant)._replace(**shape)
        out, fence = case.run(variant=variant, launch_shape=launch_shape, append=append)
    assert int(np.asarray(fence)[0]) == 8
    return out, [np.asarray(fake.written[name]) for name in ("k_pool", "v_pool")]


def check(case, **options):
    out, _ = run(case, **options)
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    return out


CLASSES = {
    "dense": {"bits": None},
    "dense bf16 extras": {"bits": None, "dtype": mx.bfloat16, "q_len": 3, "softcap": 5.0, "sinks": True},
    "dense value_dim": {"bits": None, "head_dim": 96, "value_dim": 80, "heads": (16, 1)},
    "8 bits": {},
    "4 bits": {"bits": (4, 4)},
    "bf16": {"bits": (8, 4), "dtype": mx.bfloat16, "head_dim": 128},
    "f16 extras q_len 3": {"bits": (4, 8), "q_len": 3, "softcap": 5.0, "sinks": True},
    "groups of 32": {"bits": (8, 4), "group_size": 32, "head_dim": 96},
    "groups of 32, the other way": {"bits": (4, 8), "group_size": 32, "head_dim": 128, "value_dim": 64},
    "four groups side by side": {"bits": (8, 4), "group_size": 32, "head_dim": 128, "heads": (4, 2)},
    "four groups of 64": {"bits": (4, 4), "head_dim": 256, "heads": (1, 1), "dtype": mx.bfloat16},
    "eight bits of wide heads": {"head_dim": 256, "heads": (4, 2)},
    "groups of 128": {"bits": (8, 4), "group_size": 128, "head_dim": 128, "value_dim": 256},
    "one group of 4 bits": {"bits": (4, 8), "group_size": 128, "head_dim": 128},
    "gqa 16": {"bits": (8, 4), "heads": (16, 1), "head_dim": 128},
    "gqa 7": {"bits": (4, 8), "heads": (7, 1), "head_dim": 192, "dtype": mx.bfloat16},
    "gqa 1": {"heads": (2, 2), "block_size": 8},
    "block 128": {"bits": (4, 4), "block_size": 128},
}


@pytest.mark.parametrize("name", quick(list(CLASSES), "four groups of 64"))
def test_matches_reference(name):
    check(case_of(RAGGED, **CLASSES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4), (4, 8)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_sweep(head_dim, bits, group_size):
    if head_dim % group_size:
        pytest.skip("groups do not divide it")
    for heads in ((4, 2), (12, 1)):
        for dtype in TOLERANCE:
            check(case_of([130, 1, 31], bits, group_size, head_dim=head_dim, heads=heads, dtype=dtype), orders=(0,))


@pytest.mark.parametrize("bits", [None, *slow((8, 4), single=True)])
def test_window(bits):
    # Tables are wild outside the window, and stale slots have scales of NaN: reading either would be seen.
    check(case_of([5, 15, 16, 150], bits, starts=[3, 14, 15, 130], sinks=True))


@pytest.mark.parametrize("sinks", [False, *slow(True)])
def test_rows_that_see_nothing_are_zero(sinks):
    case = case_of([4, 20], sinks=sinks)
    case.ends[0] = 0
    assert not check(case)[0].any()


@pytest.mark.parametrize("bits", [(4, 4), *slow(None), *slow((8, 4), single=True)])
def test_bits_depend_neither_on_batchmates_nor_on_runs(bits):
    case = case_of([100, 700], bits, starts=[0, 3], sinks=True)
    expected, _ = run(case, checked=False, orders=(0,), run=1)
    for length in (2, 4):
        again, _ = run(case, checked=False, orders=(0,), run=length)
        assert again.tobytes() == expected.tobytes()
    np.testing.assert_allclose(expected, case.reference(), atol=2e-3, rtol=2e-3)
    case.q, case.ends, case.starts, case.tables = case.q[1:], case.ends[1:], case.starts[1:], case.tables[1:]
    alone, _ = run(case, checked=False, orders=(0,))
    assert alone[0].tobytes() == expected[1].tobytes()


@pytest.mark.parametrize(
    "shape", slow({"unroll": 2}, {"unroll": 4, "simdgroups": 8, "head_round": 1}, {"partition": 64, "span": 1}),
    ids=str
)  # fmt: skip
def test_every_launch_shape_matches_reference(shape):
    for bits in ((8, 8), (4, 4)):
        check(case_of([100, 200, 330], bits, starts=[1, 20, 300], heads=(3, 1)), orders=(0,), **shape)


@pytest.mark.parametrize(
    ("dtype", "bits", "group_size"),
    quick([(a, *b) for a in list(TOLERANCE) for b in [(None, 64), ((8, 4), 64), ((4, 8), 32), ((4, 8), 128)]],
    (mx.float16, None, 64), (mx.bfloat16, (8, 4), 64), (mx.float16, (4, 8), 128))
)  # fmt: skip
def test_append_quantises_the_newest_token_and_attends_to_it(bits, group_size, dtype):
    # Its slot holds NaN: reading it before would be seen. 300 tokens: several partitions.
    case = case_of([1, 16, 17, 150, 300], bits, group_size, head_dim=128, dtype=dtype, heads=(4, 2))
    before, full = run(case, orders=(0,))
    out, written = run(case, append=case.take_out_newest())
    assert out.tobytes() == before.tobytes()
    for got, expected in zip(written, full, strict=True):
        assert got.tobytes() == expected.tobytes()


def scaled(case, by):
    """Scale the keys, queries or values of the case."""
    k, v = case._dense
    for pool, given, factor in ((k, 0, by.get("k")), (v, 1, by.get("v"))):
        if factor is not None:
            pool *= factor
            for pair in case._given:
                pair[given][:] *= factor
    case.rows = [case._kept(*pair) for pair in case._given]
    case.q = case.q * by.get("q", 1.0)
    case._fill()
    return case


SIZES = [{"v": 2.0**-20}, {"v": 2.0**30}, {"q": 2.0**-30, "k": 2.0**30}, {"q": 2.0**40, "k": 2.0**-40}]


@pytest.mark.parametrize(("bits", "by"), quick(crossed([(8, 8), (4, 4)], SIZES), ((4, 4), SIZES[2])), ids=str)
def test_values_beyond_the_range_of_float16_match_reference(bits, by):
    case = scaled(case_of([40, 150], bits, dtype=mx.bfloat16), by)
    out, _ = run(case, orders=(0,))
    unit = by.get("v", 1.0)
    np.testing.assert_allclose(out / unit, case.reference() / unit, atol=2e-2, rtol=2e-2)


def test_tokens_of_very_different_sizes():
    # The first token's values are tiny and the last one's large, so that the range of the weights grows on the way.
    case = case_of([300], (8, 4), dtype=mx.bfloat16, heads=(2, 1))
    (pair,) = case._given
    sizes = (2.0 ** np.linspace(-50, 10, 300)).astype(np.float32)[:, None]
    v = case._dense[1]
    for t in range(300):
        v[case.tables[0, t // 16], :, t % 16] *= sizes[t]
    pair[1][:] *= sizes
    case.rows = [case._kept(*pair)]
    case._fill()
    out, _ = run(case, orders=(0,), unroll=1)
    expected = case.reference()
    np.testing.assert_allclose(out, expected, atol=1e-2 * np.abs(expected).max())
    stuck, _ = run(case, [("if (exponent > range) {", "if (exponent > range && range == 15) {")], orders=(0,), unroll=1)
    assert not np.allclose(stuck, expected, atol=1e-2 * np.abs(expected).max())


DENSE_DEFECTS = {  # of code shared with quantised pages, too
    "skip the rescale": ("acc[n][i / 16][i / 4 % 4][i % 4] *= shrink[n][i % 2];", ""),
    "remainder of weights left out": ("p[1] - high_of<T>(rounded)", "p[1] - p[1]"),
    "dead tokens count": ("token >= lo && token < hi ? s", "token >= lo ? s"),
    "a partition lost": ("if (part % 2 == 1) join(wait[0][head], wait_o[0][head][at], whole, o);", ""),
    "runs not joined": ("join_if(p + i < n, whole, o, leaf[i], leaf_o[i]);", "join_if(p + i == 0, whole, o, leaf[i], leaf_o[i]);"),
    "partitions of a tree not joined": ("join_if(p + i + width < n, ", "join_if(false, "),
    "runs that are not there joined": ("join_if(p + i < n, ", "join_if(true, "),
    "states joined wrong": ("b = {m, ::fmaf(b.l, wb, a.l * wa)};", "b = {m, b.l * wb + a.l};"),
    "sink of another head": ("sinks[first_head + head]", "sinks[first_head]"),
    "no barrier before the join": ("__syncthreads();\nfor (int item = threadIdx.x; item < HR", "for (int item = threadIdx.x; item < HR"),
    "never appended": ("if (fresh >= lo && fresh < hi", "if (fresh < -1 && fresh < hi"),
    "fence input dropped": ("fence[0] + 1u", "1u"),
}  # fmt: skip
QUANTIZED_DEFECTS = {
    "offset of keys": ("-OFFSET * sums", "-OFFSET * 0.99f * sums"),
    "bias of keys left out": ("::fmaf(bias, sums[n][g][i], score)", "score"),
    "first group's bias of keys": ("g == 0 ? bias * sums[n][g][i]", "g == 0 ? 0.0f"),
    "scale of another group": ("value_of<T>(factors[g / 2], g % 2), bias = value_of<T>(factors[(KG + g)", "value_of<T>(factors[0], 0), bias = value_of<T>(factors[(KG + g)"),
    "biases of values left out": ("::fmaf(p[i], bias, plus[n][g][i])", "plus[n][g][i]"),
    "offset of values": ("if constexpr (BITS == 8) {\n    const unsigned low", "if constexpr (BITS == 7) {\n    const unsigned low"),
    "offsets of other weights": ("+= value_of<Half>(rounded, i)", "+= p[i] * ranged"),
    "range not left again": ("from_half_range(range), plus", "1.0f, plus"),
    "sums not rescaled": ("plus[n][i / 2][i % 2] *= shrink[n][i % 2];", ""),
    "offsets' sums not rescaled": ("added[n][i / 2][i % 2] *= shrink[n][i % 2];", ""),
    "outputs not rescaled": ("acc[n][i / 4][i % 4] *= shrink[n][i % 2];", "acc[n][i / 4][i % 4] *= 1.0f;"),
    "sums of half the lanes": ("lanes < 32; lanes *= 2) {", "lanes < 16; lanes *= 2) {"),
    "tokens exchanged": ("values[u][0][g][w], values[u][1][g][w]", "values[u][1][g][w], values[u][0][g][w]"),
    "dims exchanged": ("a[j * 2], a[j * 2 + 1], b[j * 2], b[j * 2 + 1], weight", "a[j * 2 + 1], a[j * 2], b[j * 2 + 1], b[j * 2], weight"),
    "place of another dim": ("place / 8 / VD * (VD * 8) + place % 8 * VD + place / 8 % VD", "place"),
    "columns of another group": ("c * 2 / COLUMNS == r * PG / 8 && ", ""),
    "scale of the first group": ("factor_of<T, PG>(factors, 0, g, c)", "factor_of<T, PG>(factors, 0, g, 0)"),
    "bias of the first group": ("factor_of<T, PG>(factors, VG, g, c)", "factor_of<T, PG>(factors, VG, g, 0)"),
    "heads of one group only": ("r % COLUMNS", "r"),
    "dead tokens count": ("token >= lo && token < hi ? s", "token >= lo ? s"),
    "another slot": ("metal::min(metal::max(token, lo), hi - 1) % BS", "token % BS"),
    "appended to another slot": ("fresh % BS, lane", "(fresh + 1) % BS, lane"),
    "never appended": ("if (fresh >= lo && fresh < hi", "if (fresh < -1 && fresh < hi"),
    "appended without the barrier": ("__syncwarp();", ""),
    "maximum below zero": ("high = 0.0f;", "high = -3.0e38f;"),
    "codes of the rounded scale": ("/ affine.scale), MOST", "/ static_cast<float>(static_cast<T>(affine.scale))), MOST"),
    "half a group appended": ("i < SHARE; i += 4) {\n        unsigned codes", "i < SHARE / 2; i += 4) {\n        unsigned codes"),
    "one gain for all": ("simd_shuffle(own_gain, c * 8 + i * 4)", "own_gain"),
}  # fmt: skip
WIDE = [("dense", name) for name in DENSE_DEFECTS] + [("quantised", name) for name in QUANTIZED_DEFECTS]


def differs(case, edit, before, written):
    """Return whether a mutation is seen in the result or in the pool, if need be with threads in another order."""
    for orders in ((0,), (0, 1)):
        try:
            out, pools = run(case, [edit], orders=orders, append=case.newest, run=2)
        except (EmuError, AssertionError):
            return True
        same = all(a.tobytes() == b.tobytes() for a, b in zip(pools, written, strict=True))
        if not same or not np.allclose(out, before, atol=2e-3):
            return True
    return False


@functools.cache
def case_for_defects(bits, group_size):
    """Return a case in which defects show, without its newest tokens, and the result and pools of the unchanged
    text."""
    case = case_of([129, 300, 900], bits, group_size, head_dim=128, heads=(6, 2), sinks=True, starts=[10, 0, 7])
    # Scores, sizes of values and queries that differ much; some groups are negative.
    case = scaled(case, {"q": 3.0})
    k, v = case._dense
    for pool, index in ((k, 0), (v, 1)):
        pool[..., :64] = -np.abs(pool[..., :64])
        for pair in case._given:
            pair[index][..., :64] = -np.abs(pair[index][..., :64])
    grow = (2.0 ** np.arange(16)).astype(np.float32)[:, None] / 2.0**8
    v *= grow
    for pair in case._given:
        pair[1][:] *= grow[np.arange(pair[1].shape[1]) % 16]
    case.q = case.q * mx.array([1.0, 4.0, 0.25, 1.0, 1.0, 2.0])[:, None, None].astype(case.dtype)
    case.rows = [case._kept(*pair) for pair in case._given]
    case._fill()
    before, _ = run(case, orders=(0,), run=2)
    _, written = run(case, orders=(0,))
    case.newest = case.take_out_newest()
    return case, before, written


@pytest.mark.parametrize(
    ("which", "name"), quick(WIDE, ("dense", "skip the rescale"), ("quantised", "first group's bias of keys"),
    ("quantised", "place of another dim"), ("quantised", "half a group appended"))
)  # fmt: skip
def test_planted_defects_are_seen(which, name):
    edit = (DENSE_DEFECTS if which == "dense" else QUANTIZED_DEFECTS)[name]
    # Groups of 32 have shorter chunks, of which a warp takes several in a partition.
    forms = [(None, 0)] if which == "dense" else [((8, 8), 64), ((4, 4), 64), ((8, 4), 32)]
    for form in forms:
        case, before, written = case_for_defects(*form)
        if differs(case, edit, before, written):
            return
    pytest.fail("nothing was wrong")


def test_reads_outside_a_window_are_caught():
    case = case_of([36, 90], (8, 4), starts=[28, 50], block_size=8)
    for old, new in (
        ("(chunk * CHUNK + i * 8) / BS, first_block)", "(chunk * CHUNK + i * 8) / BS, 0)"),
        ("first_block), last_block)]", "first_block), last_block + 1)]"),
    ):
        with pytest.raises(EmuError, match=r"wild load|out-of-bounds"):
            run(case, [(old, new)])


def test_dense_weights_are_as_precise_as_quantised_ones():
    # A single column of weights, so that their rounding, to 2^-16 or finer, is the only error.
    for bits in (None, (8, 8)):
        case = case_of([300], bits, head_dim=64, heads=(1, 1))
        out, _ = run(case, orders=(0,))
        exact = case.reference()
        assert np.abs(out - to_float(mx.array(exact.astype(np.float32)).astype(case.dtype))).max() <= 2.0**-10
