"""NewTokens: the positions that each new token sees, and which arrays are sent to the device again."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import shared_runs
from mlx_paged.kernels.launch_shape import SHARED_BODIES, Variant, shape_for
from mlx_paged.kernels.shared_runs import HEADER, SharedCut
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.geometry import Window
from mlx_paged.kv.new_tokens import NewTokens, rounded_up, tail_slots
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import kv, pool_of

LENGTHS = (3, 9, 4)


def tables_of(pool: BlockPool, lengths: tuple[int, ...] = LENGTHS) -> list[BlockTable]:
    tables = [pool.new_table() for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        if length:
            pool.append_tokens(table, length)
    return tables


def new(tables: list[BlockTable], counts: int | tuple[int, ...]) -> NewTokens:
    tokens = NewTokens(tables, (counts,) * len(tables) if isinstance(counts, int) else counts)
    tokens.begin(0)
    return tokens


def seen(tokens: NewTokens, *how: object) -> list[list[list[int]]]:
    """Return the positions that each new token sees."""
    _, ends, starts = tokens.visible(*how)  # type: ignore[arg-type]
    assert ends.dtype == starts.dtype == mx.int32 and ends.shape == starts.shape
    return [
        [list(range(start, end)) for start, end in zip(row_starts, row_ends, strict=True)]
        for row_starts, row_ends in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def test_new_token_sees_all_positions_up_to_itself() -> None:
    tables = tables_of(pool_of())
    assert seen(new(tables, 1), None) == [[list(range(n))] for n in LENGTHS]
    assert seen(new(tables, 2), None, 3) == [[list(range(n - 1)), list(range(n))] for n in LENGTHS]
    assert seen(new(tables, 2), Window(3), 3) == [[[*range(n - 1)][-3:], [*range(n)][-3:]] for n in LENGTHS]


def test_tokens_of_a_pack_are_rows_and_padding_sees_nothing() -> None:
    tables = tables_of(pool_of())
    pack = new(tables, (1, 3, 2))
    assert seen(pack, None) == [[list(range(n))] for n in (3, 7, 8, 9, 3, 4)]
    assert pack.offsets().tolist() == [2, 6, 7, 8, 2, 3]
    assert pack.visible(None)[0].shape[0] == 6
    more = new(tables, 1)
    assert seen(more, None, None, (5, 8)) == [*([list(range(n))] for n in LENGTHS), [[]], [[]]]
    assert more.offsets(5).tolist() == [2, 8, 3, 0, 0]
    assert more.visible(None, None, (5, 8))[0].shape == (5, 8)


COUNTS = (6, 1, 9, 3)


def pack() -> tuple[list[BlockTable], NewTokens]:
    """Return tables whose blocks are scattered, and their last COUNTS tokens."""
    pool = pool_of()
    tables = tables_of(pool, (0, 5, 8, 2))
    for table, count in zip(tables, COUNTS, strict=True):
        pool.append_tokens(table, count)
    return tables, pool.tokens_of(0, tables, COUNTS)


def test_every_token_has_the_slot_of_its_position() -> None:
    tables, step = pack()
    expected = [
        table.block_ids[0][position // 4] * 4 + position % 4
        for table, count in zip(tables, COUNTS, strict=True)
        for position in range(table.length - count, table.length)
    ]
    slots = step.slots()
    assert slots.tolist() == expected and slots.dtype == mx.int32
    assert step.num_tokens == sum(COUNTS) == len(set(expected))
    on_device = step.block_tables().tolist()
    assert [row[: len(table.block_ids[0])] for row, table in zip(on_device, tables, strict=True)] == [
        table.block_ids[0] for table in tables
    ]
    assert [step.single(i).num_tokens for i in range(4)] == list(COUNTS)
    assert step.single(2) is step.single(2)
    assert step.single(2).slots().tolist() == expected[7:16]


def test_rows_are_split_by_table_and_joined_again() -> None:
    _, step = pack()
    x = kv(1, 1, batch=sum(COUNTS))[0]
    parts = step.split(x)
    assert [part.shape for part in parts] == [(1, 2, count, 8) for count in COUNTS]
    assert mx.array_equal(parts[2][0, 1, 4], x[7 + 4, 1, 0])
    assert mx.array_equal(step.join(parts), x)


@pytest.mark.parametrize("shape", [None, (4, 16)])
def test_unchanged_arrays_are_not_sent_to_the_device_again(shape: tuple[int, int] | None) -> None:
    pool = pool_of()
    tables = tables_of(pool)
    own = new(tables, 1)
    ids, ends, starts = own.visible(None, None, shape)
    pool.append_tokens(tables[0], 1)  # in its block
    own.begin(1)
    ids1, ends1, starts1 = own.visible(None, None, shape)
    assert ids1 is ids and starts1 is starts and ends1[0].item() == ends[0].item() + 1
    pool.append_tokens(tables[0], 1)  # in the next one
    own.begin(2)
    ids2, _, starts2 = own.visible(None, None, shape)
    assert ids2 is not ids and starts2 is starts
    assert ids2[0, :2].tolist() == tables[0].block_ids[0]
    windowed = own.visible(Window(2), None, shape)
    assert windowed[2][0].item() == tables[0].length - 2


def test_tokens_see_only_their_chunk() -> None:
    tables = tables_of(pool_of())
    assert seen(new(tables, 3), Window(4, 4), 3) == [
        [[0], [0, 1], [0, 1, 2]],
        [[4, 5, 6], [4, 5, 6, 7], [8]],
        [[0, 1], [0, 1, 2], [0, 1, 2, 3]],
    ]


def test_widths_are_rounded_up_coarsely() -> None:
    assert [rounded_up(n, 16) for n in (1, 16, 17, 128, 129, 200, 257)] == [16, 16, 32, 128, 160, 224, 320]


def test_tail_slots_are_the_slots_of_the_last_positions() -> None:
    (table,) = tables_of(pool_of(), (9,))
    size = table.block_size
    expected = [table.block_ids[0][p // size] * size + p % size for p in range(4, 9)]
    assert np.array_equal(tail_slots(table, 0, 5), expected)


VARIANT = Variant(SHARED_BODIES[0], "cuda", mx.bfloat16, 64, 64, 4, 4)
CUT = SharedCut(VARIANT, shape_for(VARIANT)._replace(partition=64), at_once=1)


@pytest.fixture(autouse=True)
def few_tokens_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_runs, "LEAST_COMMON", 64)
    monkeypatch.setattr(shared_runs, "LEAST_SAVED", 64)


def together(own: NewTokens, shape: tuple[int, int] | None = None) -> list[list[int]] | None:
    """Return the indices of the rows that share a partition, for each thread group that reads one for several rows."""
    own.begin(own.epoch + 1)
    items = own.items(CUT, None, shape)
    return None if items is None else [row[HEADER : HEADER + row[1]] for row in items.tolist() if row[1] > 1]


def test_forks_are_read_together_until_their_blocks_differ() -> None:
    pool = pool_of()
    (first, other) = tables_of(pool, (150, 10))
    fork = pool.fork(first)
    tables = [first, other, fork]
    for table in tables:
        pool.append_tokens(table, 1)
    own = new(tables, 1)
    found = together(own)
    assert found and all(sorted(rows) == [0, 2] for rows in found)
    sent = own.items(CUT)
    own.begin(9)
    assert own.items(CUT) is sent  # sent once
    padded = together(own, (5, 64))
    assert padded and all(sorted(rows) == [0, 2] for rows in padded)
    del tables, own
    pool.trim(fork, fork.length - 2)
    pool.append_tokens(fork, first.length - fork.length)
    assert together(new([first, other, fork], 1)) is None


def test_windows_with_the_same_start_are_read_together() -> None:
    pool = pool_of()
    (first,) = tables_of(pool, (400,))
    tables = [first, *(pool.fork(first) for _ in range(6))]
    for table in tables:
        pool.append_tokens(table, 70 if table is tables[-1] else 1)
    own = new(tables, 1)

    def places(window: Window | None) -> list[tuple[int, list[int]]]:
        items = own.items(CUT, window)
        assert items is not None
        return [(row[0], sorted(row[HEADER : HEADER + row[1]])) for row in items.tolist() if row[1] > 1]

    everything = [(partition, list(range(7))) for partition in range(6)]
    assert places(None) == places(Window(471)) == everything
    # Rows of one length see the same blocks. Each reads the first partition, inside which its window begins, alone.
    assert places(Window(300)) == [(partition, list(range(6))) for partition in (1, 2, 3, 4)]
    assert own.items(CUT, Window(60)) is None


def test_packs_and_kernels_without_a_cut_are_not_read_together() -> None:
    pool = pool_of()
    (first,) = tables_of(pool, (150,))
    tables = [first, pool.fork(first)]
    for table in tables:
        pool.append_tokens(table, 2)
    assert new(tables, 1).items(None) is None
    assert new(tables, 2).items(CUT) is None
    assert new(tables[:1], 1).items(CUT) is None
