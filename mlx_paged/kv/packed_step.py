"""PackedStep: the positions that one forward pass adds to some tables, not padded, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..kernels.ops import WriteLaunch
from ..kernels.prefill import PrefillLaunch
from .block_table import BlockTable
from .step import DeviceTables, Step, tail_slots

# Number of query heads, scale, window, softcap, whether there are sinks.
PrefillKey = tuple[int, float, int | None, float | None, bool]

_MAX_INT32 = (1 << 31) - 1


class PackedStep:
    """The last ``counts[b]`` reserved positions of each of B tables of one group: T tokens, table by table.

    Attributes:
        key: the tables' uids and ``counts``.
        epoch: state of the group this was made in; a step of another epoch must not be used.
        counts: new tokens of each table, at least one.
        num_tokens: T, all of them.
        spans: where each table's tokens are among the T.
        write_launch, prefill_launches: kernel launches prepared for this step, for all layers; of attention by what the
            layers ask for.
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
        self._num_blocks = num_blocks
        self._device_tables = device_tables
        self._slots: mx.array | None = None
        self._parts: dict[int, Step] = {}

    def slots(self, tables: Sequence[BlockTable]) -> mx.array:
        """``block_id * block_size + offset`` of each token, ``[T]``; int64 where int32 is too short."""
        if self._slots is None:
            slots = np.concatenate([tail_slots(table, n) for table, n in zip(tables, self.counts, strict=True)])
            wide = self._num_blocks * tables[0].block_size > _MAX_INT32
            self._slots = mx.array(slots if wide else slots.astype(np.int32))
        return self._slots

    def block_tables(self, tables: Sequence[BlockTable]) -> mx.array:
        """The tables on the device, int32 ``[B, max_blocks]``, by absolute position."""
        return self._device_tables.of(tables)

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
