"""Packs: new tokens of several tables are written together without padding, and read back."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.new_tokens import NewTokens
from mlx_paged.kv.pool import BlockPool
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels
from tests.support.pools import assert_holds, joined, kv, pool_of, put

BEFORE, COUNTS = (0, 5, 8, 2), (6, 1, 9, 3)


def tables_of(pool: BlockPool) -> tuple[list[BlockTable], list[tuple[mx.array, mx.array] | None]]:
    """Return tables that hold BEFORE tokens in scattered blocks and reserve COUNTS more, and the keys and values they
    hold."""
    tables = [pool.new_table() for _ in BEFORE]
    held = [put(pool, table, 10 + n, n) if n else None for table, n in zip(tables, BEFORE, strict=True)]
    for table, count in zip(tables, COUNTS, strict=True):
        pool.append_tokens(table, count)
    return tables, held


def packed(parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Turn each table's ``[1, heads, n, dim]`` into rows of one token."""
    k, v = (mx.concatenate([part[i].swapaxes(0, 2) for part in parts]) for i in (0, 1))
    return k, v


def test_every_token_has_the_slot_of_its_position() -> None:
    pool = pool_of()
    tables, _ = tables_of(pool)
    step = pool.tokens_of(0, tables, COUNTS)
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


def test_slots_are_int64_when_int32_overflows() -> None:
    table = BlockTable(1, 4)
    table.block_ids[0].append(1 << 29)
    table.length = 2
    step = NewTokens([table], (2,))
    step.begin(0, (1 << 29) + 1)
    assert step.slots().dtype == mx.int64
    assert step.slots().tolist() == [1 << 31, (1 << 31) + 1]


def test_rows_are_split_by_table_and_joined_again() -> None:
    pool = pool_of()
    tables, _ = tables_of(pool)
    step = pool.tokens_of(0, tables, COUNTS)
    x = kv(1, 1, batch=sum(COUNTS))[0]
    parts = step.split(x)
    assert [part.shape for part in parts] == [(1, 2, count, 8) for count in COUNTS]
    assert mx.array_equal(parts[2][0, 1, 4], x[7 + 4, 1, 0])
    assert mx.array_equal(step.join(parts), x)


@pytest.fixture
def stand_ins() -> Iterator[FakeKernels]:
    """Use fake kernels: no real kernel takes blocks and heads this small."""
    with fake_kernels() as fake:
        yield fake


@pytest.mark.parametrize("form", ["functional", "in place"])
def test_packed_write_is_read_back_by_each_table(form: str, stand_ins: FakeKernels) -> None:
    pool = pool_of(choose_blocks=blocks_choice(form == "in place"))
    tables, held = tables_of(pool)
    parts = [kv(50 + i, count) for i, count in enumerate(COUNTS)]
    k, v = packed(parts)
    step = pool.tokens_of(0, tables, COUNTS)
    calls = stand_ins.calls["write_slots"]
    with pool.lock:
        group = pool.set_geometry(0, k, v, batch=sum(COUNTS))
        group.write(0, step, k, v)
    if form == "in place":
        assert stand_ins.calls["write_slots"] == calls + 1, "one launch for all tables"
    for table, before, part in zip(tables, held, parts, strict=True):
        assert_holds(pool, table, *(part if before is None else joined(before, part)))
    assert group.in_place == (form == "in place")
    pool.check_integrity()
