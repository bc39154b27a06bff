# ruff: noqa: E501
"""The kernels for common blocks on the emulator: rows get the same bits as alone."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.bodies import kernel_text
from mlx_paged.kernels.launch_shape import SHARED_BODIES, shape_for
from mlx_paged.kernels.shared_runs import Partitions, shared_items, shared_rows
from scripts.support.paged_decode import decode_variants
from tests.support.cases import quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Case, emulated

# Few partitions before they double, so that short rows have some of several sizes.
CUT = {"partition": 128, "span": 4}


def case_of(contexts, shared, **options):
    """Return rows of ``contexts`` tokens; for each (row, other, tokens) in ``shared``, the row begins with the other's
    blocks."""
    case = Case(contexts, dtype=options.pop("dtype", mx.float16), **options)
    for row, other, tokens in shared:
        blocks = tokens // case.block_size
        case.tables[row, :blocks] = case.tables[other, :blocks]
        for own, theirs in zip(case._given[row], case._given[other], strict=True):
            own[:, : blocks * case.block_size] = theirs[:, : blocks * case.block_size]
        case.rows[row] = case._kept(*case._given[row])
    return case


def counts_of(case):
    return [-(-int(n) // case.block_size) for n in case.ends[:, 0]]


def run(case, edit=(), *, alone=False, orders=(0,), append=None, padding=0, backwards=False):
    """Return (out, pools afterwards, number of items) of the kernel for common blocks, or with ``alone`` of the plain
    one. ``backwards``: thread groups that read for several rows come last. ``edit``: mutations of its text, or of the
    one that joins partitions."""
    rows = shared_rows(case.tables, counts_of(case), case.block_size)
    body = SHARED_BODIES[case.pages is not None]
    _, source = kernel_text(body, "cuda")
    body = "join_partitions" if any(old not in source for old, _ in edit) else body
    with emulated("cuda", edit={body: edit}, orders=orders) as fake:
        extras = {"softcap": case.softcap is not None, "sinks": case.sinks is not None, "pages": case.pages}
        variant = decode_variants(case.k_pool, case.v_pool, case.n_q, **extras)[0]
        shape, items = shape_for(variant)._replace(**CUT), None
        if not alone:
            variant = kernels.shared_variant_of(variant)
            shape = shape_for(variant)._replace(**CUT)
            seen = Partitions.of(case.ends[:, 0], shape, case.starts[:, 0])
            items = shared_items(rows, seen, shape)[:: -1 if backwards else 1]
            items = mx.array(np.concatenate([items, np.zeros((padding, items.shape[1]), np.int32)]))
        out, fence = case.run(variant=variant, launch_shape=shape, append=append, items=items)
    assert int(np.asarray(fence)[0]) == 8
    return out, [np.asarray(fake.written[name]) for name in ("k_pool", "v_pool")], 0 if items is None else len(items)


CLASSES = {
    "all of one prefix": ([550, 560, 583], [(1, 0, 512), (2, 0, 512)], {}),
    "a tree": (
        [1200, 1100, 200, 1200, 1190],
        [(4, 0, 1090), (1, 0, 1024), (3, 0, 1024), (2, 0, 128)],
        {"dtype": mx.bfloat16, "sinks": True, "softcap": 5.0},
    ),
    "wide heads": ([300, 310, 290, 333, 700, 40], [(1, 0, 256), (2, 0, 256), (3, 0, 240)], {"head_dim": 128, "heads": (8, 2)}),
    "widest heads": ([300, 310], [(1, 0, 256)], {"head_dim": 256, "heads": (2, 1)}),
    "value_dim": (
        [300, 310, 290, 333, 300, 280], [(i, 0, 256) for i in range(1, 6)],
        {"head_dim": 96, "value_dim": 80, "heads": (6, 2)},
    ),
    "small blocks": ([300, 310], [(1, 0, 256)], {"block_size": 8}),
    "gqa 16": ([300, 310, 300], [(1, 0, 256), (2, 0, 256)], {"heads": (16, 1), "head_dim": 128}),
    "8-bit pages": (
        [550, 560, 583, 570, 300], [(i, 0, 512) for i in (1, 2, 3)] + [(4, 0, 256)],
        {"heads": (8, 2), "pages": page_shape(64, (8, 8), 64, mx.float16)},
    ),
    "4-bit pages": (
        [300, 310, 290, 333, 700, 40], [(1, 0, 256), (2, 0, 256), (3, 0, 240)],
        {"head_dim": 128, "heads": (8, 2), "pages": page_shape(128, (4, 4), 64, mx.bfloat16), "dtype": mx.bfloat16},
    ),
    "pages of wide heads": (
        [300, 310, 300, 300], [(i, 0, 256) for i in (1, 2, 3)],
        {"head_dim": 256, "heads": (4, 2), "pages": page_shape(256, (8, 4), 64, mx.float16), "sinks": True, "softcap": 5.0},
    ),
    "windows": (
        [750, 770, 745, 750, 730, 90], [(i, 0, 704) for i in (1, 2, 3)] + [(4, 0, 512)],
        {"heads": (8, 2), "starts": [60, 120, 100, 100, 64, 0], "sinks": True},
    ),
    "more rows than a group takes": ([200] * 10, [(i, 0, 128) for i in range(1, 10)], {"heads": (8, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(list(CLASSES), "value_dim", "a tree", "8-bit pages", "windows"))
def test_rows_have_the_same_bits_as_alone(name):
    contexts, shared, options = CLASSES[name]
    case = case_of(contexts, shared, **options)
    out, _, items = run(case, orders=(0, 2), padding=2)
    expected, _, _ = run(case, alone=True)
    assert out.tobytes() == expected.tobytes()
    assert run(case, backwards=True)[0].tobytes() == expected.tobytes()
    np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)
    lengths = [-(-n // (128 if n <= 512 else 256)) for n in contexts]
    assert items - 2 < sum(lengths)  # something was shared


DEFECTS = {
    "rows mistaken": ("wide heads", "own_item[2 + column / G])", "own_item[2 + metal::min(column / G, 1)])"),
    "head of another row": ("wide heads", "* G + column % G; };", "* G + column / G; };"),
    "a tile left out": ("more rows than a group takes", "if (tile >= columns) continue;", "if (tile + 16 >= columns) continue;"),
    "queries of the first column": ("wide heads", "const int column = first_column + e * 8;\n      x[e]", "const int column = first_column;\n      x[e]"),
    "the other half of wide values": ("widest heads", "warp / (SG / HALVES) * DW;", "0;"),
    "rescaled by the other column": ("wide heads", "*= shrink[u / U][j / 2 % 2];", "*= shrink[u / U][0];"),
    "copies not awaited": ("wide heads", "wait_for_all_but<STAGES - 2>", "wait_for_all_but<STAGES - 1>"),
    "copied where it is read": ("wide heads", "copy_next(stage == 0 ? STAGES - 1 : stage - 1);", "copy_next(stage);"),
    "other warps not awaited": ("wide heads", "      __syncthreads();\n      copy_next", "      copy_next"),
    "scores of the first chunk alone": ("wide heads", "s[j * U * 2 + k / 2]", "s[k / 2]"),
    "the first chunk's largest score": ("wide heads", "::fmaxf(m[e], tops[j])", "::fmaxf(m[e], tops[0])"),
    "chunks in another order": ("wide heads", "((next * CHUNKS + i) * SG + (next_warp + turned) % SG) * CHUNK", "((next_warp * of_warp + next) * CHUNKS + i) * CHUNK"),
    "only the last warp's chunks": ("wide heads", "if (other > 0) {", "if (other > SG) {"),
    "partial results of the first row": ("wide heads", "return line_of(column) * n_runs + run;", "return line_of(column % G) * n_runs + run;"),
    "what the first row sees": ("a tree", "const int row = line / n_heads;", "const int row = 0;"),
    "codes of rows mistaken": ("8-bit pages", "q + line_of(head) * D + dim);", "q + line_of(head % G) * D + dim);"),
    "heads of other rows left out": ("8-bit pages", "n_rows * G;", "metal::min(n_rows, 2) * G;"),
    "dims of codes in another order": ("4-bit pages", "place / 8 / VD * (VD * 8) + place % 8 * VD + place / 8 % VD", "place"),
    "sink of the first head": ("a tree", "sinks[line % n_heads]", "sinks[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(list(DEFECTS), "partial results of the first row", "what the first row sees"))
def test_planted_defects_are_seen(name):
    kind, *edit = DEFECTS[name]
    contexts, shared, options = CLASSES[kind]
    case = case_of(contexts, shared, **options)
    expected, _, _ = run(case, alone=True)
    try:
        out, _, _ = run(case, [tuple(edit)])
    except (EmuError, AssertionError):
        return
    assert out.tobytes() != expected.tobytes()


def test_newest_tokens_are_appended():
    contexts, shared, options = CLASSES["wide heads"]
    case = case_of(contexts, shared, **options)
    before, full, _ = run(case)
    out, written, _ = run(case, append=case.take_out_newest())
    assert out.tobytes() == before.tobytes()
    for got, expected in zip(written, full, strict=True):
        assert got.tobytes() == expected.tobytes()


def test_rows_of_padding_are_zero():
    case = case_of([140, 140], [(1, 0, 128)])
    rows = shared_rows(case.tables, counts_of(case), case.block_size)
    with emulated("cuda", orders=(0,)):
        plain = decode_variants(case.k_pool, case.v_pool, case.n_q)[0]
        variant = kernels.shared_variant_of(plain)
        shape = shape_for(variant)._replace(**CUT)
        case.q = mx.concatenate([case.q, case.q])
        case.tables, case.starts = np.vstack([case.tables, case.tables * 0]), np.zeros((4, 1), np.int32)
        case.ends = np.array([[140], [140], [0], [0]], np.int32)
        items = mx.array(shared_items(rows, Partitions.of(case.ends[:, 0], shape), shape))
        out, _ = case.run(variant=variant, launch_shape=shape, items=items)
    assert out[:2].any() and not out[2:].any()
