"""LeftPadding: rows of different lengths side by side, padded on the left, as mlx-lm's batch caches lay them out."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..kv.block_table import BlockTable
from ..kv.layer import PoolLayer
from ..kv.step import Columns, Step
from ..kv.storage.attention_params import Window


class LeftPadding:
    """The visible tokens of B rows for their next token each, which lies in the last column.

    Args:
        offsets: tokens each row has had.
        window: of the layer, or None.
    """

    def __init__(self, offsets: Sequence[int], window: Window | None) -> None:
        self.offsets = offsets
        self.window = window
        # Visible tokens of each row before the new one.
        self.before = [offset if window is None else offset - window.first_seen(offset) for offset in offsets]
        self.longest = max(self.before, default=0) + 1
        self.is_even = min(self.before, default=0) + 1 == self.longest  # nothing is padded
        self.is_masked = False  # whether a mask was made, without which padding would be attended to

    def _indices(self) -> mx.array:
        """Return each column's number among its row's visible tokens, int32 ``[B, longest]``; negative in padding."""
        ends = mx.array(self.before, mx.int32)[:, None] + 1
        return ends + mx.arange(-self.longest, 0, dtype=mx.int32)

    def mask(self, window: Window | None) -> mx.array:
        """Return what each new token sees, boolean ``[B, 1, 1, longest]``.

        Args:
            window: of the mask, at most that of the layer.
        """
        self.is_masked = True
        if not (window and any(map(window.first_seen, self.before))):
            pads = np.array([self.longest - 1 - before for before in self.before], np.int32)
            return mx.arange(self.longest, dtype=mx.int32) >= mx.array(pads[:, None, None, None])
        first = window.first_seen_by(np.array(self.before, np.int32)[:, None, None, None])
        return self._indices()[:, None, None] >= mx.array(first)

    def read(self, kv: PoolLayer, tables: Sequence[BlockTable], step: Step) -> tuple[mx.array, mx.array]:
        """Keys ``[B, n_kv_heads, longest, k_head_dim]`` and values of a layer. Padding repeats a row's first visible
        token: a mask hides it, and it is a number if the row's own are.

        Args:
            kv: the layer.
            tables, step: of the rows, with the new token of each.
        """
        known = step.columns.get(self.longest)
        if known is None:
            positions = mx.maximum(self._indices(), 0)
            if self.window is not None:
                positions = positions + mx.array([table.logical_start for table in tables], mx.int32)[:, None]
            known = step.columns[self.longest] = Columns(step.block_tables(tables), positions)
        return kv.storage.read_rows(known)
