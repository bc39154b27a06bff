"""HostBlocks: bytes go in and come out unchanged, in every dtype; what was read before a write keeps its values."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.geometry import Geometry
from mlx_paged.kv.host_blocks import HostBlocks
from mlx_paged.kv.new_tokens import NewTokens
from tests.support.pools import DTYPES, bits, noise

SIZE, HEADS, KD, VD = 4, 3, 8, 16


def blocks_of(num_blocks: int, dtype: mx.Dtype = mx.float32, heads: int = HEADS) -> HostBlocks:
    return HostBlocks(Geometry(heads, KD, VD, dtype), SIZE, num_blocks)


def table_of(ids: list[int], length: int, start: int = 0) -> BlockTable:
    table = BlockTable(1, SIZE)
    table.block_ids[0][:], table.length, table.starts[0] = ids, length, start
    return table


def write(blocks: HostBlocks, tables: list[BlockTable], counts: tuple[int, ...], k: mx.array, v: mx.array) -> None:
    new = NewTokens(tables, counts)
    new.begin(0)
    blocks.write(new, k, v)


def read(blocks: HostBlocks, table: BlockTable) -> tuple[mx.array, mx.array]:
    (pair,) = blocks.read(NewTokens([table], (1,)))
    return pair


def tokens(seed: int, n: int, *, batch: int = 1, dtype: mx.Dtype = mx.float32, heads: int = HEADS) -> list[mx.array]:
    return [noise(seed + i, batch, heads, n, dim, dtype=dtype) for i, dim in enumerate((KD, VD))]


def everything(blocks: HostBlocks) -> list[np.ndarray]:
    last = blocks.num_blocks
    return [bits(x) for x in blocks.gather(table_of(list(range(last)), last * SIZE), 0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_round_trip_bit_for_bit_and_touch_nothing_else(dtype: mx.Dtype) -> None:
    blocks, ids = blocks_of(8, dtype), [6, 3, 4, 1]
    k, v = tokens(1, 14, dtype=dtype)
    k[0, 0, 0, :3] = mx.array([float("nan"), -0.0, float("inf")])
    write(blocks, [table_of(ids, 14)], (14,), k, v)
    for got, wrote in zip(blocks.gather(table_of(ids, 14), 0), (k, v), strict=True):
        assert got.dtype == dtype and (bits(got) == bits(wrote)).all()
    for got, wrote in zip(read(blocks, table_of(ids, 14, 5)), (k, v), strict=True):
        assert (bits(got) == bits(wrote[:, :, 5:])).all()
    for held in everything(blocks):
        kept = held.reshape(HEADS, 8, SIZE, -1)
        assert not kept[:, [0, 2, 5, 7]].any() and not kept[:, 1, 2:].any()


def test_a_step_of_rows_is_built_without_waiting_for_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, tables, waited = blocks_of(9), [table_of([5, 2], 8), table_of([7], 1), table_of([1, 4], 6)], []
    k, v = tokens(1, 1, batch=3)
    write(blocks, tables, (1, 1, 1), *tokens(5, 1, batch=3))  # a thread's first write is computed
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", lambda *arrays: waited.extend(x for x in arrays if isinstance(x, mx.array) or x))
        write(blocks, tables, (1, 1, 1), k, v)
    assert not waited
    for row, table in enumerate(tables):
        assert (bits(read(blocks, table)[1][:, :, -1:]) == bits(v[row : row + 1])).all()


@pytest.mark.parametrize("then", ["write", "copy", "resize and write", "blocks of another table"])
@pytest.mark.parametrize("ids", [[1, 2], [2, 1]], ids=["view", "gathered"])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_what_was_read_before_a_write_keeps_its_values(then: str, ids: list[int], heads: int) -> None:
    """A view is memory, not a value: what was built over it must be computed before the memory changes."""
    blocks, table = blocks_of(6, heads=heads), table_of(ids, 8)
    k, v = tokens(1, 8, heads=heads)
    write(blocks, [table], (8,), k, v)
    pending = [x + 1 for x in read(blocks, table)]
    blocks.pending += pending
    copied = blocks.gather(table, 0)
    if then == "copy":
        blocks.copy([4, 5], ids)
    else:
        if then == "resize and write":
            blocks.resize(9)
        target = table_of(ids[:1], 4) if then == "blocks of another table" else table
        write(blocks, [target], (target.length,), *tokens(9, target.length, heads=heads))
    for got, kept, wrote in zip(pending, copied, (k, v), strict=True):
        assert (bits(got) == bits(wrote + 1)).all() and (bits(kept) == bits(wrote)).all()
