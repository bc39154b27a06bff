# ruff: noqa: E501
"""What the decode texts for tensor cores have of their own, and planted defects; test_decode.py compares them with
float64."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cases import crossed, quick, slow
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import check_decode as check
from tests.support.msl.harness import decode_case, launch, to_float


def case_of(contexts, bits=(8, 8), **options):
    return decode_case(contexts, bits, "tensor", **options)


@pytest.mark.parametrize("bits", [(4, 4), *slow(None), *slow((8, 4), single=True)])
def test_bits_do_not_depend_on_runs(bits):
    case = case_of([100, 700], bits, starts=[0, 3], sinks=True)
    outs = [launch(case, "tensor", checked=False, orders=(0,), shape={"run": n})[0].tobytes() for n in (1, 2, 4)]
    assert outs[0] == outs[1] == outs[2]


@pytest.mark.parametrize(
    "shape", slow({"U": 2}, {"U": 4, "simdgroups": 8, "HR": 1}, {"partition": 64, "span": 1}),
    ids=str
)  # fmt: skip
def test_every_launch_shape_matches_reference(shape):
    for bits in ((8, 8), (4, 4)):
        check(case_of([100, 200, 330], bits, starts=[1, 20, 300], heads=(3, 1)), "tensor", orders=(0,), shape=shape)


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
    out, _ = launch(case, "tensor", orders=(0,))
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
    out, _ = launch(case, "tensor", orders=(0,), shape={"U": 1})
    expected = case.reference()
    np.testing.assert_allclose(out, expected, atol=1e-2 * np.abs(expected).max())
    edit = ("if (exponent > range) {", "if (exponent > range && range == 15) {")
    stuck, _ = launch(case, "tensor", edits=[edit], orders=(0,), shape={"U": 1})
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
    "no barrier before the join": ("__syncthreads();\n      for (int item = threadIdx.x; item < HR", "for (int item = threadIdx.x; item < HR"),
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


def differs(case, edit, newest):
    """Return whether a mutation is seen in the result or in the pool, if need be with threads in another order."""
    for orders in ((0,), (0, 1)):
        try:
            out, fake = launch(case, "tensor", edits=[edit], orders=orders, append=newest, shape={"run": 2})
        except (EmuError, AssertionError):
            return True
        if not case.is_full_again(fake.written) or not np.allclose(out, case.expected, atol=2e-3):
            return True
    return False


@functools.cache
def case_for_defects(bits, group_size):
    """Return a case in which defects show, with the result of the unchanged text, and its newest tokens."""
    case = case_of(
        [129, 300, 900], bits, group_size=group_size, head_dim=128, heads=(6, 2), sinks=True, starts=[10, 0, 7]
    )
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
    case.expected, _ = launch(case, "tensor", orders=(0,), shape={"run": 2})
    return case, case.take_out_newest()


@pytest.mark.parametrize(
    ("which", "name"), quick(WIDE, ("dense", "skip the rescale"), ("quantised", "first group's bias of keys"),
    ("quantised", "place of another dim"), ("quantised", "half a group appended"))
)  # fmt: skip
def test_planted_defects_are_seen(which, name):
    edit = (DENSE_DEFECTS if which == "dense" else QUANTIZED_DEFECTS)[name]
    # Groups of 32 have shorter chunks, of which a warp takes several in a partition.
    forms = [(None, 0)] if which == "dense" else [((8, 8), 64), ((4, 4), 64), ((8, 4), 32)]
    for form in forms:
        case, newest = case_for_defects(*form)
        if differs(case, edit, newest):
            return
    pytest.fail("nothing was wrong")


def test_reads_outside_a_window_are_caught():
    case = case_of([36, 90], (8, 4), starts=[28, 50], block_size=8)
    for old, new in (
        ("(chunk * CHUNK + i * 8) / BS, first_block)", "(chunk * CHUNK + i * 8) / BS, 0)"),
        ("first_block), last_block)]", "first_block), last_block + 1)]"),
    ):
        with pytest.raises(EmuError, match=r"wild load|out-of-bounds"):
            launch(case, "tensor", edits=[(old, new)])


def test_dense_weights_are_as_precise_as_quantised_ones():
    # A single column of weights, so that their rounding, to 2^-16 or finer, is the only error.
    for bits in (None, (8, 8)):
        case = case_of([300], bits, head_dim=64, heads=(1, 1))
        out, _ = launch(case, "tensor", orders=(0,))
        exact = case.reference()
        assert np.abs(out - to_float(mx.array(exact.astype(np.float32)).astype(case.dtype))).max() <= 2.0**-10
