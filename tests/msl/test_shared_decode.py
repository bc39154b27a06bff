# ruff: noqa: E501
"""shared_decode_tensor on the emulator: rows with common blocks get the bits they get by themselves."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import self_check
from mlx_paged.kernels.launch_shape import SHARED_BODY, Variant, shape_for
from mlx_paged.kernels.shared_runs import shared_items, shared_rows
from tests.support.cases import crossed, quick, slow
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Case, emulated

# Small partitions, so that short rows have many.
CUT = {"partition": 64, "span": 4}


def case_of(contexts, shared, **options):
    """Rows of so many tokens; each (row, other, tokens) of ``shared`` has the leading blocks of another."""
    case = Case(contexts, dtype=options.pop("dtype", mx.float16), **options)
    for row, other, tokens in shared:
        blocks = tokens // case.block_size
        case.tables[row, :blocks] = case.tables[other, :blocks]
        for own, theirs in zip(case._given[row], case._given[other], strict=True):
            own[:, : blocks * case.block_size] = theirs[:, : blocks * case.block_size]
    return case


def counts_of(case):
    return [-(-int(n) // case.block_size) for n in case.ends[:, 0]]


def run(case, edit=(), *, alone=False, shift=0, orders=(0,), append=None, padding=0, backwards=False):
    """(out, pools afterwards, number of items) by the kernel for common blocks, or ``alone``; ``backwards``: thread
    groups that read for several rows come last, and join these."""
    rows = shared_rows(case.tables, counts_of(case), case.block_size)
    with emulated("cuda", edit={SHARED_BODY: edit}, orders=orders) as fake:
        extras = {"softcap": case.softcap is not None, "sinks": case.sinks is not None}
        variant = kernels.decode_variants(case.k_pool, case.v_pool, case.n_q, **extras)[0]
        shape, items = shape_for(variant)._replace(**CUT), None
        if not alone:
            variant = variant._replace(body=SHARED_BODY)
            shape = shape_for(variant)._replace(**CUT)
            items = shared_items(rows, case.ends[:, 0], shape, shift)[:: -1 if backwards else 1]
            items = mx.array(np.concatenate([items, np.zeros((padding, items.shape[1]), np.int32)]))
        out, fence = case.run(variant=variant, launch_shape=shape, append=append, items=items)
    assert int(np.asarray(fence)[0]) == 8
    assert not np.asarray(fake.written["arrivals"]).any()
    return out, [np.asarray(fake.written[name]) for name in ("k_pool", "v_pool")], 0 if items is None else len(items)


CLASSES = {
    "all of one prefix": ([300, 310, 333], [(1, 0, 256), (2, 0, 256)], {}),
    "a tree": (
        [700, 640, 200, 700, 690],
        [(4, 0, 640), (1, 0, 512), (3, 0, 512), (2, 0, 128)],
        {"dtype": mx.bfloat16, "sinks": True, "softcap": 5.0},
    ),
    "wide heads": ([300, 310, 600, 290, 40], [(1, 0, 256), (2, 0, 256), (3, 0, 240)], {"head_dim": 128, "heads": (8, 2)}),
    "widest heads": ([300, 310], [(1, 0, 256)], {"head_dim": 256, "heads": (2, 1)}),
    "value_dim": (
        [300, 310, 290, 333, 300, 280], [(i, 0, 256) for i in range(1, 6)],
        {"head_dim": 96, "value_dim": 80, "heads": (6, 2)},
    ),
    "gqa 16": ([300, 310, 300], [(1, 0, 256), (2, 0, 256)], {"heads": (16, 1), "head_dim": 128}),
    "more rows than a group takes": ([140] * 5, [(i, 0, 128) for i in range(1, 5)], {"heads": (8, 1)}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "shift"), quick(crossed(list(CLASSES), [0, 1]), ("value_dim", 1)))
def test_rows_have_the_bits_they_have_alone(name, shift):
    contexts, shared, options = CLASSES[name]
    case = case_of(contexts, shared, **options)
    out, _, items = run(case, shift=shift, orders=(0, 2), padding=2)
    expected, _, _ = run(case, alone=True)
    assert out.tobytes() == expected.tobytes()
    assert run(case, shift=shift, backwards=True)[0].tobytes() == expected.tobytes()
    np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)
    lengths = [-(-n // (64 if n <= 256 else 128 if n <= 1024 else 256) >> shift) for n in contexts]
    assert items - 2 < sum(lengths)  # something was shared


def variant_of(head_dim=64, gqa=4, **extras):
    return Variant(SHARED_BODY, "cuda", mx.float16, head_dim, head_dim, gqa, 32, **extras)


def checked(variant, edit=()):
    with emulated("cuda", checked=False, orders=(0,), edit={SHARED_BODY: edit}, in_place=True):
        return self_check(variant)


@pytest.mark.parametrize("options", slow({}, {"head_dim": 128, "sinks": True}, {"softcap": True, "gqa": 1}), ids=str)
def test_self_check_passes(options):
    result = checked(variant_of(**options))
    assert result.ok, result.reason


DEFECTS = {
    "rows mistaken": ("static_cast<int>(own_item[3 + i]); }", "static_cast<int>(own_item[3 + metal::min(i, 1)]); }"),
    "head of another row": ("return column % G; }", "return column / G; }"),
    "a tile left out": ("columns > 8) {", "columns > 16) {"),
    "queries of another tile": ("tg_q[(n * KT + kt) * 32 + opaque(lane)]", "tg_q[kt * 32 + opaque(lane)]"),
    "only the first row arrives": ("if (threadIdx.x < n_rows) {", "if (threadIdx.x < 1) {"),
    "arrivals of the first row": ("live_before(static_cast<int>(ends[row_of(i)]))", "n_live"),
    "rescale where the last tile grows": ("grown = grown || shrink", "grown = shrink"),
    "partial results of the first row": ("(unit_of(head / G) * n_runs + run)", "(unit * n_runs + run)"),
}


@pytest.mark.parametrize("name", quick(list(DEFECTS), "only the first row arrives"))
def test_planted_defects_are_seen(name):
    contexts, shared, options = CLASSES["wide heads"]
    case = case_of(contexts, shared, **options)
    expected, _, _ = run(case, alone=True)
    for backwards in (False, True):
        try:
            out, _, _ = run(case, [DEFECTS[name]], shift=1, backwards=backwards)
        except (EmuError, AssertionError):
            return
        if out.tobytes() != expected.tobytes():
            return
    pytest.fail("nothing was wrong")


def test_newest_tokens_are_appended():
    contexts, shared, options = CLASSES["wide heads"]
    case = case_of(contexts, shared, **options)
    before, full, _ = run(case)
    out, written, _ = run(case, shift=1, append=case.take_out_newest())
    assert out.tobytes() == before.tobytes()
    for got, expected in zip(written, full, strict=True):
        assert got.tobytes() == expected.tobytes()


def test_rows_of_padding_are_zero():
    case = case_of([140, 140], [(1, 0, 128)])
    rows = shared_rows(case.tables, counts_of(case), case.block_size)
    with emulated("cuda", orders=(0,)):
        plain = kernels.decode_variants(case.k_pool, case.v_pool, case.n_q)[0]
        variant = kernels.shared_variant_of(plain)
        shape = shape_for(variant)._replace(**CUT)
        case.q = mx.concatenate([case.q, case.q])
        case.tables, case.starts = np.vstack([case.tables, case.tables * 0]), np.zeros((4, 1), np.int32)
        case.ends = np.array([[140], [140], [0], [0]], np.int32)
        items = mx.array(shared_items(rows, case.ends[:, 0], shape, 0))
        out, _ = case.run(variant=variant, launch_shape=shape, items=items)
    assert out[:2].any() and not out[2:].any()
