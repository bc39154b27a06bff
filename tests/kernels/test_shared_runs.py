"""Which rows of a step read blocks together."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.availability import CudaLimits
from mlx_paged.kernels.launch_shape import SHARED_BODIES, Variant, shape_for
from mlx_paged.kernels.shared_runs import (
    HEADER,
    Partitions,
    cut_of,
    items_for,
    shared_items,
    shared_rows,
)
from tests.support.kernels.quantized_pages import page_shape

BLOCK = 32
VARIANT = Variant(SHARED_BODIES[0], "cuda", mx.bfloat16, 128, 128, 4, BLOCK)
SHAPE, CUT = shape_for(VARIANT), cut_of(VARIANT, 8)


def tables_of(lengths, common):
    """Return block tables of rows; for each (row, other, blocks) in ``common`` a row begins with another row's
    blocks."""
    counts = [-(-n // BLOCK) for n in lengths]
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    free = iter(range(1, sum(counts) + 1))
    for row, count in enumerate(counts):
        tables[row, :count] = [next(free) for _ in range(count)]
    for row, other, blocks in common:
        tables[row, :blocks] = tables[other, :blocks]
    return tables, counts


def seen_of(lengths, shape=SHAPE):
    return Partitions.of(np.array(lengths), shape)


def covered(items, seen):
    """Return the tokens of each row that its items read."""
    tokens = [[] for _ in seen.ends]
    for partition, count, *rows in items.tolist():
        for row in rows[:count]:
            size = int(seen.sizes[row])
            begin = int(seen.origins[row]) + partition * size
            tokens[row] += range(max(begin, int(seen.begins[row])), min(begin + size, int(seen.ends[row])))
    return tokens


@pytest.mark.parametrize("window", [None, 100, 1000, 3000])
@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_read_once_and_only_common_blocks_together(seed, window):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5000, 24).tolist()
    common = []
    for row in range(1, 24):
        other = int(rng.integers(0, row))
        common.append((row, other, int(rng.integers(0, min(lengths[row], lengths[other]) // BLOCK + 1))))
    tables, counts = tables_of(lengths, common)
    rows = shared_rows(tables, counts, BLOCK)
    if seed % 2:  # samples of one prompt have one length, so their windows begin at the same token
        lengths[1::2] = [lengths[0]] * 12
        tables, counts = tables_of(lengths, [(row, other, min(n, counts[0])) for row, other, n in common])
        rows = shared_rows(tables, counts, BLOCK)
    ends = np.array([*lengths, 0, 0])
    seen = Partitions.of(ends, SHAPE, np.maximum(ends - window, 0) if window else None)
    items = shared_items(rows, seen, SHAPE)
    read = covered(items, seen)
    assert [sorted(x) for x in read] == [list(range(a, b)) for a, b in zip(seen.begins, seen.ends, strict=True)]
    assert {24, 25} <= set(items[items[:, 1] == 1, HEADER].tolist())  # rows of padding have their zeros written
    for partition, count, *places in items.tolist():
        together = places[:count]
        assert 1 <= count <= SHAPE.rows
        if count > 1:
            cuts = {(int(seen.sizes[row]), int(seen.origins[row])) for row in together}
            assert len(cuts) == 1
            ((size, origin),) = cuts
            begin, last = origin + partition * size, origin + (partition + 1) * size
            assert all(last < lengths[row] for row in together)  # none of them stores its newest token there
            assert all(begin >= seen.begins[row] for row in together)  # a whole partition is seen
            blocks = slice(begin // BLOCK, last // BLOCK)
            assert len({tables[row, blocks].tobytes() for row in together}) == 1


@pytest.mark.parametrize(("common", "early"), [(8192, 16), (32768, 0)])
def test_half_of_the_unshared_items_may_come_early(common, early):
    lengths = np.full(32, common + 256)
    rows = shared_rows(*tables_of(lengths.tolist(), [(row, 0, common // BLOCK) for row in range(1, 32)]), BLOCK)
    items, plain = items_for(rows, seen_of(lengths), CUT), shared_items(rows, seen_of(lengths), SHAPE)
    assert sorted(items.tolist()) == sorted(plain.tolist())
    alone = items[:, 1] == 1
    assert not alone[: CUT.at_once].any() and alone[CUT.at_once : CUT.at_once + early].all()
    assert alone[CUT.at_once + early :].sum() == 32 - early and alone[-1]
    assert not alone[CUT.at_once + early : len(items) - 32 + early].any()


def test_rows_without_common_blocks_are_not_shared():
    assert shared_rows(*tables_of([500, 600], []), BLOCK) is None
    assert shared_rows(*tables_of([500], []), BLOCK) is None


def test_released_blocks_do_not_count_as_common():
    tables, counts = tables_of([500, 600, 600], [(2, 1, 10)])
    tables[:, :6] = 0
    rows = shared_rows(tables, counts, BLOCK)
    assert rows.order.tolist()[rows.common.argmax()] in (1, 2) and sorted(rows.common.tolist()) == [0, 0, 10 * BLOCK]
    tables[2, 6] = tables[0, 6] + 1000
    assert shared_rows(tables, counts, BLOCK) is None


@pytest.mark.parametrize(
    ("rows", "common", "own", "is_chosen"),
    [
        (32, 8192, 256, True),
        (8, 8192, 256, True),
        (8, 1024, 256, False),
        (32, 1024, 256, False),
        (16, 2048, 32, True),
        (2, 32768, 32, True),
        (16, 1024, 256, False),
        (4, 8192, 256, True),
    ],
)
def test_kernel_is_chosen_where_it_saves_enough(rows, common, own, is_chosen):
    lengths = [common + own] * rows
    tables, counts = tables_of(lengths, [(row, 0, common // BLOCK) for row in range(1, rows)])
    items = items_for(shared_rows(tables, counts, BLOCK), seen_of(lengths), CUT)
    assert (items is not None) == is_chosen


@pytest.mark.parametrize(("window", "is_chosen"), [(4096, True), (1024, False), (2048, False)])
def test_windows_are_shared_only_where_that_saves_enough(window, is_chosen):
    lengths = np.full(16, 3800)
    rows = shared_rows(*tables_of(lengths.tolist(), [(row, 0, 3200 // BLOCK) for row in range(1, 16)]), BLOCK)
    seen = Partitions.of(lengths, SHAPE, np.maximum(lengths - window, 0))
    assert (items_for(rows, seen, CUT) is not None) == is_chosen


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_pages_have_a_kernel_of_their_own(bits: int) -> None:
    pages = page_shape(64, (bits, bits), 64, mx.bfloat16)
    variant = Variant("quantized_decode_tensor", "cuda", mx.bfloat16, 64, 64, 4, BLOCK, pages=pages)
    shared = kernels.shared_variant_of(variant)
    assert shared is not None and shared.body == SHARED_BODIES[1]
    assert len({dict(shape_for(each).constants)["U"] for each in (shared, variant)}) == 1
    assert shape_for(shared).rows == 8


@pytest.mark.parametrize(
    ("head_dim", "gqa", "rows"), [(128, 4, 16), (64, 8, 8), (256, 2, 16), (128, 16, 4), (256, 8, 4), (256, 16, None)]
)
def test_kernel_takes_at_least_four_rows(head_dim, gqa, rows):
    variant = Variant("paged_decode_tensor", "cuda", mx.bfloat16, head_dim, head_dim, gqa, BLOCK)
    shared = kernels.shared_variant_of(variant)
    assert (None if shared is None else shape_for(shared).rows) == rows
    assert kernels.shared_variant_of(variant._replace(body="paged_decode")) is None


def test_kernel_needs_its_shared_memory(monkeypatch):
    variant = Variant("paged_decode_tensor", "cuda", mx.bfloat16, 128, 128, 4, BLOCK)
    assert kernels.shared_variant_of(variant) is not None
    monkeypatch.setattr(kernels, "cuda_limits", lambda: CudaLimits(40, 65_536, 66_560))
    assert kernels.shared_variant_of(variant) is None
