"""Which rows of a step read blocks together."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.launch_shape import SHARED_BODY, Variant, shape_for
from mlx_paged.kernels.shared_runs import (
    HEADER,
    SharedCut,
    items_for,
    partition_sizes,
    shared_items,
    shared_rows,
)

BLOCK = 32
SHAPE = shape_for(Variant(SHARED_BODY, "cuda", mx.bfloat16, 128, 128, 4, BLOCK))
CUT = SharedCut(SHAPE, 8, 132)


def tables_of(lengths, common):
    """Block tables of rows; each (row, other, blocks) of ``common`` begins with another's blocks."""
    counts = [-(-n // BLOCK) for n in lengths]
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    free = iter(range(1, sum(counts) + 1))
    for row, count in enumerate(counts):
        tables[row, :count] = [next(free) for _ in range(count)]
    for row, other, blocks in common:
        tables[row, :blocks] = tables[other, :blocks]
    return tables, counts


def covered(items, lengths):
    """Tokens that each item reads, and of each row those that all of its items read."""
    sizes, seen = partition_sizes(np.array(lengths), SHAPE), [[] for _ in lengths]
    for run, shift, count, *rows in items.tolist():
        for row in rows[:count]:
            begin = run * (int(sizes[row]) << shift)
            seen[row] += range(begin, min(begin + (int(sizes[row]) << shift), lengths[row]))
    return seen


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_read_once_and_only_common_blocks_together(seed, shift):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5000, 24).tolist()
    common = []
    for row in range(1, 24):
        other = int(rng.integers(0, row))
        common.append((row, other, int(rng.integers(0, min(lengths[row], lengths[other]) // BLOCK + 1))))
    tables, counts = tables_of(lengths, common)
    rows = shared_rows(tables, counts, BLOCK)
    items = shared_items(rows, np.array([*lengths, 0, 0]), SHAPE, shift)
    seen = covered(items, [*lengths, 0, 0])
    assert [sorted(tokens) for tokens in seen[:24]] == [list(range(n)) for n in lengths]
    assert {24, 25} <= set(items[items[:, 2] == 1, HEADER].tolist())  # rows of padding have their zeros written
    for run, _, count, *places in items.tolist():
        together = places[:count]
        assert 1 <= count <= SHAPE.rows
        if count > 1:
            sizes = {int(partition_sizes(np.array(lengths[row]), SHAPE)) << shift for row in together}
            assert len(sizes) == 1
            (size,) = sizes
            last = (run + 1) * size
            assert all(last < lengths[row] for row in together)  # none of them stores its newest token there
            blocks = slice(run * size // BLOCK, last // BLOCK)
            assert len({tables[row, blocks].tobytes() for row in together}) == 1


def test_rows_without_common_blocks_are_not_shared():
    assert shared_rows(*tables_of([500, 600], []), BLOCK) is None
    assert shared_rows(*tables_of([500], []), BLOCK) is None


@pytest.mark.parametrize(
    ("rows", "common", "own", "shift"),
    [(32, 8192, 256, 1), (8, 8192, 256, 0), (8, 1024, 256, None), (32, 1024, 4096, None), (2, 32768, 32, 0)],
)
def test_kernel_is_chosen_where_it_saves_enough(rows, common, own, shift):
    lengths = [common + own] * rows
    tables, counts = tables_of(lengths, [(row, 0, common // BLOCK) for row in range(1, rows)])
    items = items_for(shared_rows(tables, counts, BLOCK), np.array(lengths), CUT)
    assert (None if items is None else items[0, 1]) == shift


@pytest.mark.parametrize(
    ("head_dim", "gqa", "rows"), [(128, 4, 8), (64, 8, 4), (256, 2, 4), (128, 16, None), (256, 4, None)]
)
def test_kernel_takes_at_least_four_rows(head_dim, gqa, rows):
    variant = Variant("paged_decode_tensor", "cuda", mx.bfloat16, head_dim, head_dim, gqa, BLOCK)
    shared = kernels.shared_variant_of(variant)
    assert (None if shared is None else shape_for(shared).rows) == rows
    assert kernels.shared_variant_of(variant._replace(body="paged_decode")) is None
