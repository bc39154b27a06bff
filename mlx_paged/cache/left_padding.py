"""LeftPadding: rows of different lengths side by side, padded on the left, as mlx-lm's batch caches lay them out."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.step import Columns, Step
from ..kv.storage.attention_params import Window


class LeftPadding:
    """The visible tokens of B rows for their next tokens: the last column is the last new token's, padding included.

    Args:
        offsets: tokens each row has had.
        counts: real new tokens of each row.
        width: new tokens, padding included.
        window: of the layer, or None.
    """

    def __init__(self, offsets: Sequence[int], counts: Sequence[int], width: int, window: Window | None) -> None:
        self.offsets = offsets
        self.counts = counts
        self.width = width
        self.window = window
        # Visible tokens of each row before the new ones.
        self.before = [offset if window is None else offset - window.first_seen(offset) for offset in offsets]
        self.longest = max(self.before, default=0) + width

    @property
    def is_padded(self) -> bool:
        """Return whether some of the new tokens are padding."""
        return any(count < self.width for count in self.counts)

    def _indices(self) -> mx.array:
        """Number of each column among its row's visible tokens, int32 ``[B, longest]``; negative in the padding on the
        left."""
        ends = mx.array([before + self.width for before in self.before], mx.int32)[:, None]
        return ends + mx.arange(-self.longest, 0, dtype=mx.int32)

    def _positions(self, pinned: int) -> mx.array:
        """Position in its row of each column, int32 ``[B, longest]``; negative in the padding on the left. The first
        visible tokens are the ``pinned`` ones."""
        indices = self._indices()
        behind = mx.array([o - b for o, b in zip(self.offsets, self.before, strict=True)], mx.int32)[:, None]
        positions = mx.where(indices < 0, indices, indices + behind)
        return mx.where(indices < pinned, indices, positions) if pinned else positions

    def mask(self, window: Window | None, tables: Sequence[BlockTable]) -> mx.array:
        """Return what each new token sees, boolean ``[B, 1, width, longest]``.

        Args:
            window: of the mask, at most that of the layer.
            tables: of the rows.
        """
        if self.width == 1 and window is not None and window != self.window and tables and tables[0].pinned:
            return self._narrow_mask(window.size, tables)
        if self.width == 1 and not self.is_padded and not (window and any(map(window.first_seen, self.before))):
            pads = np.array([self.longest - 1 - before for before in self.before], np.int32)
            return mx.arange(self.longest, dtype=mx.int32) >= mx.array(pads[:, None, None, None])
        # By number, not by position: as in mlx-lm, tokens behind the window count neither for it nor for pinned ones.
        keys = self._indices()[:, None, None]
        queries = np.array(self.before, np.int32)[:, None, None, None] + np.arange(self.width, dtype=np.int32)[:, None]
        mask = (keys >= 0) & (keys <= mx.array(queries))
        if window is not None:
            mask = mask & (keys >= mx.array(window.first_seen_by(queries)))
        if self.is_padded:
            ends = [before + count for before, count in zip(self.before, self.counts, strict=True)]
            mask = mask & (keys < mx.array(ends, mx.int32)[:, None, None, None])
        return mask

    def _narrow_mask(self, window: int, tables: Sequence[BlockTable]) -> mx.array:
        """Return the mask of one new token over a window narrower than the layer's, and pinned tokens: mlx-lm goes back
        from the newest slot of its buffer, pinned ones included, and takes the first slot for it where the ring begins
        anew."""
        assert self.window is not None
        size = self.window.size
        pinned, ring = tables[0].pinned, size - tables[0].pinned
        offsets = mx.array(list(self.offsets), mx.int32)[:, None]
        origins = mx.array([pinned + table.ring_origin for table in tables], mx.int32)[:, None]
        indices, newest = self._indices(), pinned + (offsets - origins) % ring
        slots = mx.where(indices < pinned, indices, pinned + (self._positions(pinned) - origins) % ring)
        newest = mx.where((newest == pinned) & (offsets >= size), 0, newest)
        newest = mx.where(offsets < pinned, offsets, newest)
        return ((indices >= 0) & ((newest - slots) % size < window))[:, None, None]

    def read(
        self, pool: BlockPool, layer: int, tables: Sequence[BlockTable], step: Step | None = None
    ) -> tuple[mx.array, mx.array]:
        """Keys ``[B, n_kv_heads, longest, k_head_dim]`` and values of a layer, with zeros where a row has nothing.

        Args:
            step: of these tables, one token each, if that is what was written: keeps what all layers share.
        """
        spec = pool.layer(layer).spec
        known = None if step is None else step.columns.get(self.longest)
        if known is None:
            if step is not None:
                block_ids = step.visible(tables, spec.sees)[0]
            else:
                most = max(1, *[len(table.block_ids) for table in tables])
                block_ids = mx.array([table.block_ids + [0] * (most - len(table.block_ids)) for table in tables])
            known = Columns(block_ids, *self._held(spec.pinned, tables))
            if step is not None:
                step.columns[self.longest] = known
        return pool.layer(layer).storage.read_rows(known)

    def _held(self, pinned: int, tables: Sequence[BlockTable]) -> tuple[mx.array, mx.array]:
        """Position of each column, 0 where a row has nothing, and where it has something."""
        ends = [offset + self.width for offset in self.offsets]
        if self.window is None and not self.is_padded and ends == [table.length for table in tables]:
            positions = self._indices()
            held = positions >= 0
        else:
            positions = self._positions(pinned)
            starts = mx.array([table.logical_start for table in tables], mx.int32)[:, None]
            lengths = mx.array([table.length for table in tables], mx.int32)[:, None]
            held = (positions >= starts) & (positions < lengths)
            if pinned:
                held = held | ((positions >= 0) & (positions < mx.minimum(lengths, pinned)))
        return mx.where(held, positions, 0), held[:, None, :, None]
