"""PackedStep: the positions that one forward pass adds to some tables, not padded, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..kernels.latent.prompts import PromptLaunch
from ..kernels.ops import DecodeLaunch, WriteLaunch
from ..kernels.prefill import PrefillLaunch
from .block_table import BlockTable
from .step import DecodeKey, DeviceTables, Step, ThreeArrays, padded, table_width, tail_slots
from .storage.scoring import LatentHeads, Window

# Number of query heads, scale, window, softcap, whether there are sinks.
PrefillKey = tuple[int, float, Window | None, float | None, bool]

_MAX_INT32 = (1 << 31) - 1


class PackedStep:
    """The last ``counts[b]`` reserved positions of each of B tables of one group: T tokens, table by table.

    Attributes:
        key: the tables' uids and ``counts``.
        epoch: state of the group this was made in; a step of another epoch must not be used.
        counts: new tokens of each table, at least one.
        num_tokens: T, all of them.
        spans: where each table's tokens are among the T.
        write_launch, prefill_launches, decode_launches, prompt_launches: kernel launches prepared for this step, for
            all layers; of attention by what the layers ask for.
    """

    def __init__(
        self,
        tables: Sequence[BlockTable],
        counts: Sequence[int],
        epoch: int,
        num_blocks: int,
        device_tables: DeviceTables,
    ) -> None:
        self.key = packed_key(tables, counts)
        self.epoch = epoch
        self.counts = list(counts)
        self.num_tokens = sum(counts)
        ends = np.cumsum(self.counts).tolist()
        self.spans = [slice(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        self.write_launch: WriteLaunch | None = None
        self.prefill_launches: dict[PrefillKey, PrefillLaunch] = {}
        self.decode_launches: dict[DecodeKey, DecodeLaunch] = {}
        self.prompt_launches: dict[tuple[LatentHeads, float], PromptLaunch] = {}
        self._num_blocks = num_blocks
        self._device_tables = device_tables
        self._slots: dict[int | None, mx.array] = {}  # by the number of rows
        self._visible: dict[tuple[Window | None, tuple[int, int] | None], ThreeArrays] = {}  # by window and shape
        self._parts: dict[int, Step] = {}
        self._all_blocks: mx.array | None = None
        self._gathered_tables: mx.array | None = None

    def slots(self, tables: Sequence[BlockTable], num_rows: int | None = None) -> mx.array:
        """``block_id * block_size + offset`` of each token, ``[T]``; int64 where int32 is too short. Up to
        ``num_rows``, -1, which is not written."""
        found = self._slots.get(num_rows)
        if found is None:
            slots = np.concatenate([tail_slots(table, n) for table, n in zip(tables, self.counts, strict=True)])
            if num_rows is not None:
                slots = np.concatenate([slots, np.full(num_rows - len(slots), -1, slots.dtype)])
            wide = self._num_blocks * tables[0].block_size > _MAX_INT32
            found = self._slots[num_rows] = mx.array(slots if wide else slots.astype(np.int32))
        return found

    def block_tables(self, tables: Sequence[BlockTable]) -> mx.array:
        """The tables on the device, int32 ``[B, max_blocks]``, by absolute position."""
        return self._device_tables.of(tables)

    def offsets(self, tables: Sequence[BlockTable], num_rows: int | None = None) -> mx.array:
        """Position of each token, int32 ``[T]``; up to ``num_rows``, rows at position 0."""
        return mx.array(padded(self._positions(tables), num_rows))

    def _positions(self, tables: Sequence[BlockTable]) -> np.ndarray:
        spans = [
            np.arange(table.length - count, table.length, dtype=np.int32)
            for table, count in zip(tables, self.counts, strict=True)
        ]
        return np.concatenate(spans)

    def all_blocks(self, tables: Sequence[BlockTable]) -> mx.array:
        """The ids of all blocks of the tables, one table's after the other's; int32."""
        if self._all_blocks is None:
            self._all_blocks = mx.array([block_id for table in tables for block_id in table.block_ids], mx.int32)
        return self._all_blocks

    @staticmethod
    def num_slots(tables: Sequence[BlockTable]) -> int:
        """Of all their blocks."""
        return sum(len(table.block_ids) for table in tables) * tables[0].block_size

    def gathered_tables(self, tables: Sequence[BlockTable]) -> mx.array:
        """Where each table's blocks are among :meth:`all_blocks`, int32 ``[B, max_blocks]``, by absolute position."""
        if self._gathered_tables is None:
            found = np.zeros((len(tables), table_width(tables)), np.int32)
            first = 0
            for row, table in enumerate(tables):
                count = len(table.block_ids)
                found[row, :count] = np.arange(first, first + count)
                first += count
            self._gathered_tables = mx.array(found)
        return self._gathered_tables

    def visible(
        self, tables: Sequence[BlockTable], window: Window | None, shape: tuple[int, int] | None = None
    ) -> ThreeArrays:
        """What each token sees, as a row of a decode step: block tables ``[T, max_blocks]``, that of a sequence for
        each of its tokens, and as int32 ``[T, 1]`` the end and the start of its visible positions. With ``shape``,
        block tables of that shape; the rows that it adds see nothing."""
        known = self._visible.get((window, shape))
        if known is None:
            if shape is None:
                shape = (self.num_tokens, table_width(tables))
            ends = padded(self._positions(tables)[:, None] + 1, shape[0])
            starts = np.zeros_like(ends) if window is None else window.first_seen_by(ends - 1)
            each = [table for table, count in zip(tables, self.counts, strict=True) for _ in range(count)]
            known = (self._device_tables.of(each, shape), mx.array(ends), mx.array(starts))
            self._visible[window, shape] = known
        return known

    def part(self, tables: Sequence[BlockTable], index: int) -> Step:
        """The step of one table alone, for attention sequence by sequence."""
        step = self._parts.get(index)
        if step is None:
            table, count = tables[index], self.counts[index]
            step = self._parts[index] = Step([table], count, self.epoch, self._num_blocks, DeviceTables())
        return step

    def split(self, x: mx.array) -> list[mx.array]:
        """From ``[T, n_heads, 1, head_dim]`` to each table's ``[1, n_heads, counts[b], head_dim]``."""
        return [x[span].swapaxes(0, 2) for span in self.spans]

    @staticmethod
    def join(parts: Sequence[mx.array]) -> mx.array:
        """What :meth:`split` gave, together again."""
        return mx.concatenate([part.swapaxes(0, 2) for part in parts])


def packed_key(tables: Sequence[BlockTable], counts: Sequence[int]) -> tuple[int, ...]:
    """What identifies a packed step within an epoch."""
    return (*[table.uid for table in tables], *counts)
