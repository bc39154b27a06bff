"""Columns: rows of different lengths side by side, padded on the left, as mlx-lm's batch caches lay them out."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .kv.block_table import BlockTable
from .kv.pool import BlockPool
from .kv.step import Step


class Columns:
    """The visible tokens of B rows for their next tokens: the last column is the last new token's, padding included.

    Args:
        offsets: tokens each row has had.
        counts: real new tokens of each row.
        width: new tokens, padding included.
        window: sliding window of the layer, or None.
    """

    def __init__(self, offsets: Sequence[int], counts: Sequence[int], width: int, window: int | None) -> None:
        self.offsets = offsets
        self.counts = counts
        self.width = width
        before = max(offsets, default=0)
        if window is not None:
            before = min(before, window - 1)
        self.longest = before + width

    @property
    def is_padded(self) -> bool:
        """Whether some of the new tokens are padding."""
        return any(count < self.width for count in self.counts)

    def _positions(self) -> mx.array:
        """Position in its row of each column, int32 ``[B, longest]``; negative in the padding on the left."""
        ends = mx.array([offset + self.width for offset in self.offsets], mx.int32)[:, None]
        return ends + mx.arange(-self.longest, 0, dtype=mx.int32)

    def mask(self, window: int | None) -> mx.array:
        """What each new token sees, boolean ``[B, 1, width, longest]``."""
        keys = self._positions()[:, None, None]
        queries = mx.array(list(self.offsets), mx.int32)[:, None, None, None]
        queries = queries + mx.arange(self.width, dtype=mx.int32)[:, None]
        mask = (keys >= 0) & (keys <= queries)
        if window is not None:
            mask = mask & (keys > queries - window)
        if self.is_padded:
            ends = [offset + count for offset, count in zip(self.offsets, self.counts, strict=True)]
            mask = mask & (keys < mx.array(ends, mx.int32)[:, None, None, None])
        return mask

    def read(
        self, pool: BlockPool, layer: int, tables: Sequence[BlockTable], step: Step | None = None
    ) -> tuple[mx.array, mx.array]:
        """Keys ``[B, n_kv_heads, longest, k_head_dim]`` and values of a layer, with zeros where a row has nothing.

        Args:
            step: of these tables, one token each, if that is what was written: keeps what all layers share.
        """
        group_window = pool.groups[pool.group_of(layer)].spec.window
        key = ("columns", self.longest)
        known = None if step is None else step.launches.get(key)
        if known is None:
            if step is not None:
                block_ids = step.visible(tables, group_window)[0]
            else:
                most = max(1, *[len(table.block_ids) for table in tables])
                block_ids = mx.array([table.block_ids + [0] * (most - len(table.block_ids)) for table in tables])
            positions = self._positions()
            starts = mx.array([table.logical_start for table in tables], mx.int32)[:, None]
            ends = mx.array([table.length for table in tables], mx.int32)[:, None]
            held = (positions >= starts) & (positions < ends)
            known = block_ids, mx.where(held, positions, 0), held[:, None, :, None]
            if step is not None:
                step.launches[key] = known
        block_ids, positions, held = known
        k, v = pool.storage(layer).read_rows(block_ids, positions)
        # Not merely masked: a stale NaN times a weight of zero is NaN.
        return mx.where(held, k, mx.zeros((), k.dtype)), mx.where(held, v, mx.zeros((), v.dtype))
