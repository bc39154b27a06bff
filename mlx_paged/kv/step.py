"""Step: the positions one forward pass adds to some tables, and their device indices, built once for all layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels.availability import on_metal
from ..kernels.build import DeviceRows
from ..kernels.ops import DecodeLaunch, WriteLaunch
from ..kernels.prefill import PrefillLaunch
from ..kernels.shared_runs import Partitions, SharedCut, SharedRows, items_for, shared_rows
from .attention_params import Window
from .block_table import BlockTable

# Key of a decode launch: shape and dtype of the queries, scale, window, softcap; and whether it has no sinks, attends
# over latents, appends nothing.
DecodeKey = tuple[tuple[int, ...], mx.Dtype, float, Window | None, float | None, bool, bool, bool]
# Key of a prefill launch: number of query heads, scale, window, softcap, and whether it has sinks.
PrefillKey = tuple[int, float, Window | None, float | None, bool]
ThreeArrays = tuple[mx.array, mx.array, mx.array]

MAX_INT32 = (1 << 31) - 1


class DeviceTables:
    """Block tables of a batch as one int32 array ``[B, max_blocks]``, by absolute position.

    Kept from step to step: only rows that changed are written again, and nothing is sent to the device if none did.
    Holds no reference to a table.

    Attributes:
        tokens: positions of the rows' tokens, and the ends of their visible positions.
        ends: those ends alone, for rows of several tokens.
        first_seen: the starts of their visible positions, by window.
    """

    def __init__(self) -> None:
        self.tokens, self.ends = DeviceRows(), DeviceRows()
        self.first_seen: defaultdict[Window, DeviceRows] = defaultdict(DeviceRows)
        self._uids: list[int] = []
        self._versions: list[int] = []
        self._host = np.zeros((0, 0), np.int32)
        self._device: mx.array | None = None
        self._starts: mx.array | None = None
        self._shared: SharedRows | None = None
        self._common: np.ndarray | None = None  # leading blocks that each row shares with another; None: not known
        self._items: tuple[Any, mx.array | None] = None, None

    def of(self, tables: Sequence[BlockTable], shape: tuple[int, int] | None = None) -> mx.array:
        """Return the array, padded to ``shape`` if given; entries past a row's end have no meaning."""
        uids = [table.uid for table in tables]
        versions = [table.version for table in tables]
        shape = shape or (len(tables), table_width(tables))
        if self._device is not None and (uids, versions, shape) == (self._uids, self._versions, self._host.shape):
            return self._device
        if uids != self._uids or shape != self._host.shape:
            self._host = np.zeros(shape, np.int32)
            self._versions = [-1] * len(tables)
            self._common = None
        for row, (table, known) in enumerate(zip(tables, self._versions, strict=True)):
            if table.version != known:
                common = 0 if self._common is None else self._common[row]
                before = self._host[row, :common].copy()
                self._host[row, : len(table.block_ids)] = table.block_ids
                if common and not np.array_equal(before, self._host[row, :common]):
                    self._common = None
        self._uids, self._versions = uids, versions
        self._device = mx.array(self._host)
        return self._device

    def items(
        self, tables: Sequence[BlockTable], ends: np.ndarray, cut: SharedCut, window: Window | None
    ) -> mx.array | None:
        """Return the items of the kernel for common blocks (:mod:`..kernels.shared_runs`): partitions, each of which a
        thread group reads once for one or several rows. None if each row is to be read by itself. Call :meth:`of` with
        these tables first.

        Args:
            tables: the step's tables.
            ends: tokens of each row; rows after the tables' are padding and have none.
            cut: the kernel's cut.
            window: window of the rows' newest tokens.
        """
        if self._common is None:
            size = tables[0].block_size
            self._shared = shared = shared_rows(self._host, [len(table.block_ids) for table in tables], size)
            self._common = np.zeros(len(tables), np.int64) if shared is None else shared.common_by_row // size
            self._items = None, None
        if self._shared is None:
            return None
        seen = Partitions.of(ends, cut.shape, None if window is None else window.first_seen_by(ends - 1))
        key = cut, seen.key  # the items stay the same until a row gets another partition
        if self._items[0] != key:
            items = items_for(self._shared, seen, cut)
            if items is not None:
                items = padded(items, rounded_up(len(items), 2 * SHORT_TABLE))
            self._items = key, None if items is None else mx.array(items)
        return self._items[1]

    def starts(self, shape: tuple[int, ...]) -> mx.array:
        """Return the starts of visible positions without a window: zeros, int32."""
        if self._starts is None or self._starts.shape != shape:
            self._starts = DeviceRows().of(np.zeros(shape, np.int32))
            mx.async_eval(self._starts)  # another thread's steps may read it
        return self._starts


class Step:
    """The last ``counts[b]`` reserved positions of each of B tables of one group: T tokens, table by table. In a decode
    step all counts are 1; a sequence alone is a step of one table.

    Arrays of its tokens are ``[T, n_heads, 1, head_dim]``, or, where all counts are n, ``[B, n_heads, n, head_dim]``.

    Attributes:
        key: ``counts`` and the tables' uids.
        epoch: the group's epoch when this was made; a step of another epoch must not be used.
        counts: new tokens of each table, at least 1.
        num_tokens: T, the sum of the counts.
        is_pack: whether some table has several new tokens.
        write_launch, decode_launches, prefill_launches: kernel launches prepared for this step, shared
            by all layers; those of attention by the layers' parameters.
        fetch_index: number of blocks, and the index at which all layers read the visible tokens of all rows, padded;
            None until it is needed.
    """

    def __init__(
        self,
        tables: Sequence[BlockTable],
        counts: Sequence[int],
        epoch: int,
        num_blocks: int,
        device_tables: DeviceTables,
    ) -> None:
        self.key = step_key(tables, counts)
        self.epoch = epoch
        self.counts = counts
        self.num_tokens = sum(counts)
        self.is_pack = self.num_tokens > len(counts)
        self.write_launch: WriteLaunch | None = None
        self.decode_launches: dict[DecodeKey, DecodeLaunch] = {}
        self.prefill_launches: dict[PrefillKey, PrefillLaunch] = {}
        self.fetch_index: tuple[int, mx.array] | None = None
        self._host_slots: np.ndarray | None = None
        self._num_blocks = num_blocks
        self._device_tables = device_tables
        self._lengths = np.array([table.length for table in tables], np.int32)
        self._slots: dict[int | None, mx.array] = {}  # by the number of rows
        self._of_tokens: dict[int, tuple[mx.array, mx.array]] = {}  # by the number of rows
        self._visible: dict[tuple[Window | None, int, tuple[int, int] | None], ThreeArrays] = {}
        self._items: dict[tuple[SharedCut, Window | None, tuple[int, int] | None], mx.array | None] = {}
        self._single_steps: dict[int, Step] = {}
        self._all_blocks: mx.array | None = None

    @cached_property
    def spans(self) -> list[slice]:
        """Slice of each table's tokens among the T."""
        ends = np.cumsum(self.counts).tolist()
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]

    def slots(self, tables: Sequence[BlockTable], num_rows: int | None = None) -> mx.array:
        """Return ``block_id * block_size + offset`` of each token, ``[T]``; int64 where int32 is too short. Padding up
        to ``num_rows`` is -1, which is not written."""
        found = self._slots.get(num_rows)
        if found is None:
            slots = self.host_slots(tables)
            if num_rows is not None:
                slots = np.concatenate([slots, np.full(num_rows - len(slots), -1, slots.dtype)])
            wide = self._num_blocks * tables[0].block_size > MAX_INT32
            found = self._slots[num_rows] = mx.array(slots if wide else slots.astype(np.int32))
        return found

    def host_slots(self, tables: Sequence[BlockTable]) -> np.ndarray:
        """Return :meth:`slots` on the host: int64, not padded."""
        if self._host_slots is None:
            if self.is_pack:
                slots = np.concatenate([tail_slots(table, n) for table, n in zip(tables, self.counts, strict=True)])
            else:
                size = tables[0].block_size
                slots = np.array([table.block_ids[-1] for table in tables], np.int64) * size
                slots += (self._lengths - 1) % size
            self._host_slots = slots
        return self._host_slots

    @cached_property
    def _positions(self) -> np.ndarray:
        """Position of each token, int32 ``[T]``."""
        if not self.is_pack:
            return self._lengths - 1
        ends = zip(self._lengths.tolist(), self.counts, strict=True)
        return np.concatenate([np.arange(end - count, end, dtype=np.int32) for end, count in ends])

    def offsets(self, num_rows: int | None = None) -> mx.array:
        """Return the position of each token, int32 ``[T]``; padding up to ``num_rows`` is 0."""
        return self._tokens(num_rows or self.num_tokens)[0]

    def _tokens(self, num_rows: int) -> tuple[mx.array, mx.array]:
        """Return each token's position, int32 ``[num_rows]``, and the end of its visible ones, ``[num_rows, 1]``."""
        found = self._of_tokens.get(num_rows)
        if found is None:
            positions = self._positions
            ends = padded(positions[:, None] + 1, num_rows)
            found = self._of_tokens[num_rows] = self._device_tables.tokens.tokens(padded(positions, num_rows), ends)
        return found

    def visible(
        self,
        tables: Sequence[BlockTable],
        window: Window | None,
        num_rows: int | None = None,
        shape: tuple[int, int] | None = None,
    ) -> ThreeArrays:
        """Return what each new token sees: block tables ``[rows, max_blocks]``, and as int32 ``[rows, n]`` the end
        (exclusive: its own position + 1) and the start of its visible positions.

        Args:
            tables: the step's tables.
            window: window of the tokens.
            num_rows: B for rows of n tokens each; T, the default, for rows of one token, each with the table of its
                sequence.
            shape: shape to pad the block tables to; the rows that it adds see nothing.
        """
        num_rows = num_rows or self.num_tokens
        known = self._visible.get((window, num_rows, shape))
        if known is not None:
            return known
        own = self._device_tables
        if num_rows == self.num_tokens:
            ends = self._positions[:, None] + 1
        else:
            ends = self._lengths[:, None] + np.arange(1 - self.counts[0], 1, dtype=np.int32)
        ends = padded(ends, None if shape is None else shape[0])
        of_tokens = self._tokens(len(ends))[1] if num_rows == self.num_tokens else own.ends.of(ends)
        if window is None or ends.max(initial=0) <= window.size:  # the window hides nothing
            starts = own.starts(ends.shape)
        else:
            starts = own.first_seen[window].of(window.first_seen_by(ends - 1))
        if num_rows == len(tables):
            each = tables
        else:
            each = [table for table, count in zip(tables, self.counts, strict=True) for _ in range(count)]
        found = (own.of(each, shape), of_tokens, starts)
        self._visible[window, num_rows, shape] = found
        return found

    def items(
        self,
        tables: Sequence[BlockTable],
        cut: SharedCut | None,
        window: Window | None = None,
        shape: tuple[int, int] | None = None,
    ) -> mx.array | None:
        """Return the items of the kernel for common blocks in a decode step, or None (see :meth:`DeviceTables.items`).

        Args:
            tables: the step's tables.
            cut: cut of the kernel for common blocks; None if there is none.
            window: window of the step's tokens.
            shape: shape to pad the block tables to, as for :meth:`visible`.
        """
        if cut is None or self.is_pack or len(tables) < 2:
            return None
        key = cut, window, shape
        if key not in self._items:
            self._device_tables.of(tables, shape)
            ends = padded(self._lengths, None if shape is None else shape[0])
            self._items[key] = self._device_tables.items(tables, ends, cut, window)
        return self._items[key]

    def block_tables(self, tables: Sequence[BlockTable]) -> mx.array:
        """Return the tables on the device, int32 ``[B, max_blocks]``, by absolute position."""
        return self._device_tables.of(tables)

    def all_blocks(self, tables: Sequence[BlockTable]) -> mx.array:
        """Return the ids of all blocks of the tables, table by table; int32."""
        if self._all_blocks is None:
            self._all_blocks = mx.array([block_id for table in tables for block_id in table.block_ids], mx.int32)
        return self._all_blocks

    @staticmethod
    def num_slots(tables: Sequence[BlockTable]) -> int:
        """Return the number of slots in all blocks of the tables."""
        return sum(len(table.block_ids) for table in tables) * tables[0].block_size

    def single_step(self, tables: Sequence[BlockTable], index: int) -> Step:
        """Return the step of one table alone, for attention sequence by sequence."""
        step = self._single_steps.get(index)
        if step is None:
            counts = (self.counts[index],)
            step = Step([tables[index]], counts, self.epoch, self._num_blocks, DeviceTables())
            self._single_steps[index] = step
        return step

    def split(self, x: mx.array) -> list[mx.array]:
        """Split the tokens' array into each table's ``[1, n_heads, counts[b], head_dim]``."""
        if len(self.counts) == 1 and x.shape[0] == 1:
            return [x]
        if x.shape[0] == len(self.counts):
            return [x[row : row + 1] for row in range(x.shape[0])]
        return [x[span].swapaxes(0, 2) for span in self.spans]

    @staticmethod
    def join(parts: Sequence[mx.array]) -> mx.array:
        """Join parts ``[1, n_heads, counts[b], head_dim]`` to ``[T, n_heads, 1, head_dim]``."""
        return mx.concatenate([part.swapaxes(0, 2) for part in parts])


SHORT_TABLE = 8  # blocks


def table_width(tables: Sequence[BlockTable]) -> int:
    """Return the width of the device array for these tables, in blocks."""
    count = max([len(table.block_ids) for table in tables])
    # On Metal half the width keeps short contexts in one partition, which saves the launch that merges partitions.
    return SHORT_TABLE if count <= SHORT_TABLE and on_metal() else rounded_up(count, 2 * SHORT_TABLE)


def rounded_up(count: int, least: int) -> int:
    """Round up, so that shapes change seldom: to a multiple of ``least`` or of an eighth of the next power of two,
    whichever is larger."""
    unit = max(least, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // unit) * unit


def padded(rows: np.ndarray, num_rows: int | None) -> np.ndarray:
    """Pad with rows of zeros up to ``num_rows``."""
    if num_rows is None or num_rows == len(rows):
        return rows
    return np.concatenate([rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)])


def step_key(tables: Sequence[BlockTable], counts: Sequence[int]) -> tuple[Sequence[int], ...]:
    """Return the key that identifies a step within an epoch."""
    return (tuple(counts), tuple([table.uid for table in tables]))


def tail_slots(table: BlockTable, num_tokens: int) -> np.ndarray:
    """Return the slots of a table's last positions, int64 ``[num_tokens]``."""
    size = table.block_size
    first = (table.length - num_tokens) // size
    positions = np.arange(table.length - num_tokens, table.length)
    ids = np.array(table.block_ids[first:], np.int64)
    slots: np.ndarray = ids[positions // size - first] * size + positions % size
    return slots


def visible_slots(table: BlockTable) -> np.ndarray:
    """Return the slots of a table's visible positions, int64."""
    size, first = table.block_size, table.logical_start // table.block_size
    held = np.array(table.block_ids[first:], np.int64)[:, None] * size + np.arange(size)
    slots: np.ndarray = held.reshape(-1)[table.logical_start - first * size : table.length - first * size]
    return slots


def padded_slots(tables: Sequence[BlockTable]) -> np.ndarray:
    """Return the slots of the visible tokens of rows, int64 ``[B, n]``, padded on the left to the longest. Padding
    repeats a row's first visible token, which a mask hides; it is finite if the row's own values are."""
    return _padded_left([visible_slots(table) for table in tables])


def padded_gathered_slots(tables: Sequence[BlockTable]) -> np.ndarray:
    """Return :func:`padded_slots` among the slots of :meth:`Step.all_blocks`."""
    rows, first = [], 0
    for table in tables:
        rows.append(np.arange(first + table.logical_start, first + table.length))
        first += len(table.block_ids) * table.block_size
    return _padded_left(rows)


def _padded_left(rows: Sequence[np.ndarray]) -> np.ndarray:
    padded_rows = np.empty((len(rows), max(map(len, rows))), np.int64)
    for row, own in zip(padded_rows, rows, strict=True):
        row[-len(own) :], row[: -len(own)] = own, own[0]
    return padded_rows
