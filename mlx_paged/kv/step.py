"""Step: the positions one forward pass adds to some tables, and their device indices, built once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels.ops import DecodeLaunch, WriteLaunch
from .block_table import BlockTable
from .storage.scoring import Window

# Number of query heads, scale, window, softcap, whether there are no sinks, nothing is appended, it is over latents.
DecodeKey = tuple[int, float, Window | None, float | None, bool, bool, bool]
ThreeArrays = tuple[mx.array, mx.array, mx.array]

_MAX_INT32 = (1 << 31) - 1


class DeviceTables:
    """Block tables of a batch as one int32 array ``[B, max_blocks]``, by absolute position.

    Kept from step to step: only rows that changed are written again, and nothing is sent if none did. Holds no
    reference to a table.
    """

    def __init__(self) -> None:
        self._uids: list[int] = []
        self._versions: list[int] = []
        self._host = np.zeros((0, 0), np.int32)
        self._device: mx.array | None = None
        self._starts: mx.array | None = None

    def of(self, tables: Sequence[BlockTable], shape: tuple[int, int] | None = None) -> mx.array:
        """The array, of ``shape`` if that is larger; entries past a row's end are of no meaning."""
        uids = [table.uid for table in tables]
        versions = [table.version for table in tables]
        shape = shape or (len(tables), table_width(tables))
        if self._device is not None and (uids, versions, shape) == (self._uids, self._versions, self._host.shape):
            return self._device
        if uids != self._uids or shape != self._host.shape:
            self._host = np.zeros(shape, np.int32)
            self._versions = [-1] * len(tables)
        for row, (table, known) in enumerate(zip(tables, self._versions, strict=True)):
            if table.version != known:
                self._host[row, : len(table.block_ids)] = table.block_ids
        self._uids, self._versions = uids, versions
        self._device = mx.array(self._host)
        return self._device

    def starts(self, shape: tuple[int, ...]) -> mx.array:
        """Where what is visible begins without a window: zeros, int32."""
        if self._starts is None or self._starts.shape != shape:
            self._starts = mx.array(np.zeros(shape, np.int32))  # in memory already, not to be computed
        return self._starts


class Columns:
    """What all layers read of rows of one length, or padded on the left to one.

    Attributes:
        block_ids: int32 ``[B, max_blocks]``, by absolute position.
        positions: int32 ``[B, n]``; all lie in these blocks.
        held: boolean ``[B, 1, n, 1]``: where a row has something. None: everywhere.
        prepared: what a storage has made of them, for all layers.
    """

    __slots__ = ("block_ids", "held", "positions", "prepared")

    def __init__(self, block_ids: mx.array, positions: mx.array, held: mx.array | None = None) -> None:
        self.block_ids, self.positions, self.held = block_ids, positions, held
        self.prepared: Any = None

    def masked(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values ``[B, n_kv_heads, n, head_dim]``, zeros where a row has nothing."""
        if self.held is None:
            return k, v
        return mx.where(self.held, k, 0), mx.where(self.held, v, 0)


class RowsTogether(NamedTuple):
    """Rows that attention without a kernel computes together.

    Attributes:
        rows: their places in the step.
        columns: what their layers read; None: a row alone, which is read by its table.
    """

    rows: list[int]
    columns: Columns | None


class Step:
    """The last ``num_tokens`` reserved positions of each of B tables of one group; or, with ``counts``, so many of each
    table, padded on the right to ``num_tokens``.

    Attributes:
        key: the tables' uids, ``num_tokens`` and ``counts``.
        epoch: state of the group this was made in; a step of another epoch must not be used.
        write_launch, decode_launches: kernel launches prepared for this step, for all layers; of decoding by what the
            layers ask for.
        columns: what all layers read of rows padded to a length, by that length.
        together: how attention without a kernel takes the rows, in all layers; None: not asked for yet.
    """

    def __init__(
        self,
        tables: Sequence[BlockTable],
        num_tokens: int,
        epoch: int,
        num_blocks: int,
        device_tables: DeviceTables,
        counts: Sequence[int] | None = None,
    ) -> None:
        self.key = step_key(tables, num_tokens, counts)
        self.epoch = epoch
        self.num_tokens = num_tokens
        self.counts = counts
        self.write_launch: WriteLaunch | None = None
        self.decode_launches: dict[DecodeKey, DecodeLaunch] = {}
        self.columns: dict[int, Columns] = {}
        self.together: list[RowsTogether] | None = None
        self._device_tables = device_tables
        self._lengths = np.array([table.length for table in tables], np.int32)
        size = tables[0].block_size
        self._wide = num_blocks * size > _MAX_INT32
        self._rows: tuple[mx.array, mx.array] | None = None
        self._slots: mx.array | None = None
        self._visible: dict[tuple[Window | None, tuple[int, int] | None], ThreeArrays] = {}  # by window and shape

    def rows(self, tables: Sequence[BlockTable]) -> tuple[mx.array, mx.array]:
        """Block id and offset in the block, int32 ``[B]`` each, of the newest token of each table."""
        if self._rows is None:
            ids = [table.block_ids[-1] for table in tables]
            self._rows = (mx.array(ids, mx.int32), mx.array((self._lengths - 1) % tables[0].block_size))
        return self._rows

    def slots(self, tables: Sequence[BlockTable]) -> mx.array:
        """``block_id * block_size + offset`` of each position, ``[B * num_tokens]``; int64 where int32 is too short.
        Padding has the slot -1, which is not written."""
        if self._slots is None:
            size = tables[0].block_size
            if self.counts is not None:
                padded = np.full((len(tables), self.num_tokens), -1, np.int64)
                for row, (table, count) in enumerate(zip(tables, self.counts, strict=True)):
                    padded[row, :count] = tail_slots(table, count)
                slots = padded.reshape(-1)
            elif self.num_tokens == 1:
                slots = np.array([table.block_ids[-1] for table in tables], np.int64) * size
                slots += (self._lengths - 1) % size
            else:
                slots = np.concatenate([tail_slots(table, self.num_tokens) for table in tables])
            self._slots = mx.array(slots if self._wide else slots.astype(np.int32))
        return self._slots

    def offsets(self, num_rows: int | None = None) -> mx.array:
        """Position of the first of each row's new tokens, int32 ``[B]``; up to ``num_rows``, rows at position 0."""
        return mx.array(padded(self._lengths - np.array(self.counts or self.num_tokens, np.int32), num_rows))

    def visible(
        self, tables: Sequence[BlockTable], window: Window | None, shape: tuple[int, int] | None = None
    ) -> ThreeArrays:
        """What each new token sees: block tables ``[B, max_blocks]``, and as int32 ``[B, num_tokens]`` the end
        (exclusive: its own position + 1) and the start of its visible positions. With ``shape``, block tables of that
        shape. Padding sees nothing, and neither do the rows that the shape adds."""
        known = self._visible.get((window, shape))
        if known is not None:
            return known
        if self.counts is None:
            ends = self._lengths[:, None] + np.arange(1 - self.num_tokens, 1, dtype=np.int32)
        else:
            counts, index = np.array(self.counts, np.int32)[:, None], np.arange(self.num_tokens, dtype=np.int32)
            ends = np.where(index < counts, self._lengths[:, None] - counts + index + 1, 0)
        ends = padded(ends, None if shape is None else shape[0])
        own = self._device_tables
        starts = own.starts(ends.shape) if window is None else mx.array(window.first_seen_by(ends - 1))
        found = (own.of(tables, shape), mx.array(ends), starts)
        self._visible[window, shape] = found
        return found


def table_width(tables: Sequence[BlockTable]) -> int:
    """Width of the device's table for these."""
    return rounded_up(max(len(table.block_ids) for table in tables), 16)


def rounded_up(count: int, least: int) -> int:
    """A little more, so that shapes change seldom: a multiple of ``least`` or of an eighth of the next power of two."""
    unit = max(least, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // unit) * unit


def padded(rows: np.ndarray, num_rows: int | None) -> np.ndarray:
    """With rows of zeros up to ``num_rows``."""
    if num_rows is None or num_rows == len(rows):
        return rows
    return np.concatenate([rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)])


def step_key(tables: Sequence[BlockTable], num_tokens: int, counts: Sequence[int] | None = None) -> tuple[int, ...]:
    """What identifies a step within an epoch."""
    return (num_tokens, *[table.uid for table in tables], *(counts or ()))


def tail_slots(table: BlockTable, num_tokens: int) -> np.ndarray:
    """Slots of a table's last positions, int64 ``[num_tokens]``."""
    size = table.block_size
    first = (table.length - num_tokens) // size
    positions = np.arange(table.length - num_tokens, table.length)
    ids = np.array(table.block_ids[first:], np.int64)
    slots: np.ndarray = ids[positions // size - first] * size + positions % size
    return slots
