"""NewTokens: the new tokens of some sequences in one group of layers, and their arrays, made when asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels.availability import on_metal
from ..kernels.build import DeviceRows, constant_rows, padded_for_metal
from ..kernels.shared_runs import Partitions, SharedCut, SharedRows, items_for, shared_rows
from .block_table import BlockTable
from .geometry import Window

ThreeArrays = tuple[mx.array, mx.array, mx.array]

_length_of = attrgetter("length")

SHORT_TABLE = 8  # blocks


class Padding(NamedTuple):
    """How rows are padded on the left to the longest.

    Attributes:
        longest: tokens of the longest row.
        mask: boolean ``[B, 1, 1, longest]``, which hides the padding; None if nothing is padded.
    """

    longest: int
    mask: mx.array | None


class NewTokens:
    """The last ``counts[b]`` reserved positions of each of B tables, in one group: T tokens, table by table. In a
    decode step all counts are 1.

    Arrays of the tokens are ``[T, n_heads, 1, head_dim]``, or, where all counts are n, ``[B, n_heads, n, head_dim]``.

    One object serves step after step: :meth:`begin` drops what was made for the step before. Block tables on the device
    are kept, and only rows that have changed are written again.

    Attributes:
        tables, counts, group: as given; the group's index in the pool.
        num_tokens: T, the sum of the counts.
        is_pack: whether some table has several new tokens.
        epoch: the group's epoch at :meth:`begin`; at another one nothing here may be used.
        lengths: length of each table, int32 ``[B]``.
        made: what layers have prepared for this step, such as kernel launches, for all of the group.
    """

    can_compute = True
    """Whether a layer's arrays can be computed while those of the next one are built: not in a trace."""

    def __init__(self, tables: Sequence[BlockTable], counts: Sequence[int], group: int = 0) -> None:
        self.tables = tables
        self.counts = counts
        self.group = group
        self.num_tokens = sum(counts)
        self.is_pack = self.num_tokens > len(counts)
        self.epoch = -1
        self.made: dict[Any, Any] = {}
        self.lengths = np.zeros(0, np.int32)
        self._token_rows, self._end_rows = DeviceRows(), DeviceRows()
        self._first_rows: defaultdict[Window, DeviceRows] = defaultdict(DeviceRows)
        # Block tables [B, width] on the host, the versions of their rows, and what the device has of them.
        self._host, self._versions = np.zeros((0, 0), np.int32), [-1] * len(counts)
        self._device: dict[tuple[int, bool], mx.array] = {}
        self._shared: SharedRows | None = None
        self._common: np.ndarray | None = None  # leading blocks that each row shares with another; None: not known
        self._items: tuple[Any, mx.array | None] = None, None

    def begin(self, epoch: int) -> None:
        """Begin a step in the group's present epoch: positions have been reserved, or a table has changed."""
        self.epoch, self.lengths = epoch, lengths_of(self.tables)
        self.made.clear()

    @cached_property
    def spans(self) -> list[slice]:
        """Slice of each table's tokens among the T."""
        ends = np.cumsum(self.counts).tolist()
        return [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]

    # Positions ------------------------------------------------------------------------------------------------

    def slots(self, num_rows: int | None = None) -> mx.array:
        """Return ``block_id * block_size + offset`` of each token, int32 ``[T]``. Padding up to ``num_rows``, and on
        Metal to 8, is -1, which is not written."""
        found: mx.array | None = self.made.get(("slots", num_rows))
        if found is None:
            slots = self.host_slots()
            if num_rows is not None:
                slots = np.concatenate([slots, np.full(num_rows - len(slots), -1, slots.dtype)])
            found = self.made["slots", num_rows] = mx.array(padded_for_metal(slots.astype(np.int32), -1))
        return found

    def host_slots(self) -> np.ndarray:
        """Return :meth:`slots` on the host: int64, not padded."""
        slots: np.ndarray | None = self.made.get("host slots")
        if slots is None:
            if self.is_pack:
                pairs = zip(self.tables, self.counts, strict=True)
                slots = np.concatenate([tail_slots(table, self.group, n) for table, n in pairs])
            else:
                size, last = self.tables[0].block_size, []
                for table in self.tables:  # not a comprehension, which is a call: the host's time limits decode steps
                    last.append(table.block_ids[self.group][-1])
                slots = np.array(last, np.int64) * size + (self.lengths - 1) % size
            self.made["host slots"] = slots
        return slots

    def _positions(self) -> np.ndarray:
        """Return the position of each token, int32 ``[T]``."""
        if not self.is_pack:
            return self.lengths - 1
        ends = zip(self.lengths.tolist(), self.counts, strict=True)
        return np.concatenate([np.arange(end - count, end, dtype=np.int32) for end, count in ends])

    def offsets(self, num_rows: int | None = None) -> mx.array:
        """Return the position of each token, int32 ``[T]``; padding up to ``num_rows`` is 0."""
        return self._tokens(num_rows or self.num_tokens)[0]

    def _tokens(self, num_rows: int) -> tuple[mx.array, mx.array]:
        """Return each token's position, int32 ``[num_rows]``, and the end of its visible ones, ``[num_rows, 1]``."""
        found: tuple[mx.array, mx.array] | None = self.made.get(("tokens", num_rows))
        if found is None:
            positions = self._positions()
            ends = padded(positions[:, None] + 1, num_rows)
            found = self.made["tokens", num_rows] = self._token_rows.tokens(padded(positions, num_rows), ends)
        return found

    # What tokens see ------------------------------------------------------------------------------------------

    def visible(
        self, window: Window | None, num_rows: int | None = None, shape: tuple[int, int] | None = None
    ) -> ThreeArrays:
        """Return what each new token sees: block tables ``[rows, max_blocks]``, and as int32 ``[rows, n]`` the end
        (exclusive: its own position + 1) and the start of its visible positions; on Metal of at least 8 elements.

        Args:
            window: window of the tokens.
            num_rows: B for rows of n tokens each; T, the default, for rows of one token, each with the table of its
                sequence.
            shape: shape to pad the block tables to; the rows that it adds see nothing.
        """
        num_rows = num_rows or self.num_tokens
        known: ThreeArrays | None = self.made.get(("visible", window, num_rows, shape))
        if known is not None:
            return known
        by_token = num_rows == self.num_tokens
        if by_token:
            ends = self._positions()[:, None] + 1
        else:
            ends = self.lengths[:, None] + np.arange(1 - self.counts[0], 1, dtype=np.int32)
        ends = padded(ends, None if shape is None else shape[0])
        if window is None or ends.max(initial=0) <= window.size:  # the window hides nothing
            starts = constant_rows(0, ends.shape)
        else:
            starts = self._first_rows[window].of(window.first_seen_by(ends - 1))
        of_tokens = self._tokens(len(ends))[1] if by_token else self._end_rows.of(ends)
        found = self.block_tables(shape, by_token=by_token), of_tokens, starts
        self.made["visible", window, num_rows, shape] = found
        return found

    def block_tables(self, shape: tuple[int, int] | None = None, *, by_token: bool = False) -> mx.array:
        """Return the block tables on the device, int32 ``[B, max_blocks]``, by absolute position; entries past a row's
        end have no meaning.

        Args:
            shape: shape to pad to.
            by_token: repeat each table for each of its tokens, ``[T, max_blocks]``.
        """
        self._update(table_width(self.tables, self.group) if shape is None else shape[1])
        by_token = by_token and self.is_pack
        num_rows = shape[0] if shape is not None else self.num_tokens if by_token else len(self.tables)
        known = self._device.get((num_rows, by_token))
        if known is None:
            host = np.repeat(self._host, self.counts, axis=0) if by_token else self._host
            known = self._device[num_rows, by_token] = mx.array(padded(host, num_rows))
        return known

    def _update(self, width: int) -> None:
        """Update the block tables on the host."""
        if self._host.shape[1] != width:
            self._host = np.zeros((len(self.tables), width), np.int32)
            self._versions = [-1] * len(self.tables)
            self._common = None
        for row, (table, known) in enumerate(zip(self.tables, self._versions, strict=True)):
            version = table.versions[self.group]
            if version != known:
                common = 0 if self._common is None else self._common[row]
                before = self._host[row, :common].copy()
                ids = table.block_ids[self.group]
                self._host[row, : len(ids)] = ids
                self._versions[row] = version
                self._device.clear()
                if common and not np.array_equal(before, self._host[row, :common]):
                    self._common = None

    def items(
        self, cut: SharedCut | None, window: Window | None = None, shape: tuple[int, int] | None = None
    ) -> mx.array | None:
        """Return the items of the kernel for common blocks (:mod:`..kernels.shared_runs`) in a decode step: partitions,
        each of which a thread group reads once for one or several rows. None if each row is to be read by itself.

        Args:
            cut: cut of the kernel for common blocks; None if there is none.
            window: window of the tokens.
            shape: shape to pad the block tables to, as for :meth:`visible`.
        """
        if cut is None or self.is_pack or len(self.tables) < 2:
            return None
        key = "items", cut, window, shape
        if key not in self.made:
            self._update(table_width(self.tables, self.group) if shape is None else shape[1])
            ends = padded(self.lengths, None if shape is None else shape[0])
            self.made[key] = self._items_for(cut, window, ends)
        found: mx.array | None = self.made[key]
        return found

    def _items_for(self, cut: SharedCut, window: Window | None, ends: np.ndarray) -> mx.array | None:
        if self._common is None:
            size = self.tables[0].block_size
            counts = [len(table.block_ids[self.group]) for table in self.tables]
            self._shared = shared = shared_rows(padded(self._host, len(ends)), counts, size)
            self._common = np.zeros(len(ends), np.int64) if shared is None else shared.common_by_row // size
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

    # What the tables' last tokens see -------------------------------------------------------------------------

    def padded_slots(self, *, among_own: bool = False) -> np.ndarray:
        """Return the slots that each table's last token sees, int64 ``[B, n]``, padded on the left to the longest.
        Padding repeats a row's first visible token, which a mask hides; it is finite if the row's own values are.

        Args:
            among_own: number the slots of the tables' own blocks, table by table.
        """
        rows, first = [], 0
        for table in self.tables:
            if among_own:
                rows.append(np.arange(first + table.starts[self.group], first + table.length))
                first += len(table.block_ids[self.group]) * table.block_size
            else:
                rows.append(visible_slots(table, self.group))
        slots = np.empty((len(rows), max(map(len, rows))), np.int64)
        for row, own in zip(slots, rows, strict=True):
            row[-len(own) :], row[: -len(own)] = own, own[0]
        return slots

    def padding(self, most: int) -> Padding:
        """Return the padding of :meth:`padded_slots`, its mask only for rows of up to ``most`` tokens."""
        visible = self.lengths - np.array([table.starts[self.group] for table in self.tables])
        longest, mask = int(visible.max()), None
        if longest <= most and (visible < longest).any():
            mask = mx.array(np.arange(longest) >= longest - visible[:, None, None, None])
        found = self.made["padding"] = Padding(longest, mask)
        return found

    def places(self) -> list[tuple[int, int] | None]:
        """Return the start and end of each table's visible tokens among the slots of all blocks; None where their
        blocks are not consecutive."""
        found: list[tuple[int, int] | None] = [table.place(self.group) for table in self.tables]
        self.made["places"] = found
        return found

    def single(self, index: int) -> NewTokens:
        """Return the tokens of one table alone, for attention sequence by sequence."""
        found: NewTokens | None = self.made.get(("single", index))
        if found is None:
            found = self.made["single", index] = NewTokens([self.tables[index]], (self.counts[index],), self.group)
            found.begin(self.epoch)
        return found

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


def lengths_of(tables: Sequence[BlockTable]) -> np.ndarray:
    """Return the length of each table, int32 ``[B]``."""
    return np.fromiter(map(_length_of, tables), np.int32, len(tables))


def table_width(tables: Sequence[BlockTable], group: int) -> int:
    """Return the width of the device array for these tables in a group, in blocks."""
    count = max([len(table.block_ids[group]) for table in tables])
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


def tail_slots(table: BlockTable, group: int, num_tokens: int) -> np.ndarray:
    """Return the slots of a table's last positions in a group, int64 ``[num_tokens]``."""
    size = table.block_size
    first = (table.length - num_tokens) // size
    positions = np.arange(table.length - num_tokens, table.length)
    ids = np.array(table.block_ids[group][first:], np.int64)
    slots: np.ndarray = ids[positions // size - first] * size + positions % size
    return slots


def visible_slots(table: BlockTable, group: int) -> np.ndarray:
    """Return the slots of a table's visible positions in a group, int64."""
    size, start = table.block_size, table.starts[group]
    first = start // size
    held = np.array(table.block_ids[group][first:], np.int64)[:, None] * size + np.arange(size)
    slots: np.ndarray = held.reshape(-1)[start - first * size : table.length - first * size]
    return slots
