"""PagedBatchKVCache: mlx-lm's batch cache protocol over the block tables of several sequences. Moves no keys."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..attention import dispatch, gather
from ..attention.gather import window_under
from ..errors import GeometryError, PromptCacheError
from ..kv.block_table import BlockTable
from ..kv.layer import PoolLayer
from ..kv.pool import BlockPool
from ..kv.step import Step
from ..kv.storage.attention_params import AttentionParams, QueryHeads, Window
from ..kv.turn import in_turn
from .batch_tables import BatchTables, OncePerBatch
from .lazy_kv import Append, Fences, LazyKV, compute_rewound, hand_out
from .left_padding import LeftPadding
from .paged_kv_cache import PagedKVCache

_merged: OncePerBatch[BatchTables] = OncePerBatch()


class PagedBatchKVCache:
    """What one attention layer sees of a batch. Stands in for mlx-lm's ``BatchKVCache`` and, in a group with a sliding
    window, for its ``BatchRotatingKVCache``.

    Rows may differ in length; none is padded in the pool. Several new tokens at once are attended to row by row
    with the fused causal attention; what :meth:`prepare` declares as right padding is neither written nor read.

    Args:
        batch: the rows' tables, shared by the caches of all layers.
        layer: index of the model layer.
        row_type: class of the cache that :meth:`extract` gives.
    """

    def __init__(self, batch: BatchTables, layer: int, row_type: type[PagedKVCache] = PagedKVCache) -> None:
        self.batch = batch
        self.layer = layer
        self.row_type = row_type
        self._unpadded: list[int] | None = None
        self._latest: LeftPadding | None = None

    @property
    def pool(self) -> BlockPool:
        return self.batch.pool

    @property
    def is_padded(self) -> bool:
        """Return whether :meth:`prepare` has declared padding."""
        return self._unpadded is not None

    @property
    def _kv(self) -> PoolLayer:
        return self.batch.pool.layer(self.layer)

    @property
    def window(self) -> int | None:
        """Most tokens that one sees, itself included, or None."""
        return self._kv.window

    @property
    def offset(self) -> mx.array:
        """Tokens this layer has seen of each row: the position of the next one; int32 ``[B]``."""
        return self.batch.device_offsets(self.layer)

    def _row(self, index: int) -> PagedKVCache:
        return self.row_type(self.batch.rows[index], self.layer)

    # Writing and reading --------------------------------------------------------------------------------------

    @in_turn
    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        params: AttentionParams,
    ) -> mx.array:
        """Write the next tokens of every row and attend from them.

        Args:
            queries: ``[B, n_q_heads, n_new, head_dim]``, rotated.
            keys: ``[B, n_kv_heads, n_new, head_dim]``, rotated.
            values: ``[B, n_kv_heads, n_new, v_head_dim]``.
            params: its mask is what :meth:`make_mask` gave: each row is masked by its own length. With another array
                mask, over what :meth:`update_and_fetch` returns, the blocks are gathered.

        Returns:
            ``[B, n_q_heads, n_new, v_head_dim]``; zeros at padding.

        Raises:
            GeometryError: shapes differ from the batch.
            PoolExhaustedError: the first row's for which there is no block; no layer has written anything then.
        """
        if queries.shape[0] != len(self.batch):
            raise GeometryError(f"queries {queries.shape} for {len(self.batch)} sequence(s)")
        if isinstance(params.mask, mx.array) and self.batch.window_of(params.mask) is None:
            keys, values = self.update_and_fetch(keys, values)
            return gather.attention(queries, keys, values, params)
        if params.mask is not None:
            params = params._replace(mask=None)
        if queries.shape[2] > 1 or self._unpadded is not None:
            return self._attend_rows(queries, keys, values, params)
        keys, values = self._accepted(keys, values, params.heads(queries.shape[1]))
        tables = self.batch.tables_for(self.layer)
        step = self.batch.step(self.layer)
        return dispatch.append_attention(queries, keys, values, self.pool, self.layer, tables, step, params)

    def _accepted(self, keys: mx.array, values: mx.array, heads: QueryHeads | None) -> tuple[mx.array, mx.array]:
        """Return the keys and values, in the pool's dtype. Raises GeometryError if they do not fit otherwise."""
        kv = self._kv
        try:
            kv.set_geometry(keys, values, batch=len(self.batch), heads=heads)
        except GeometryError:
            keys, values = kv.fitted(keys, values)
            kv.set_geometry(keys, values, batch=len(self.batch), heads=heads)
        return keys, values

    def _attend_rows(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        params: AttentionParams,
    ) -> mx.array:
        width = queries.shape[2]
        counts = self._take_counts(width)
        if min(counts) > 0:
            pool, layer, rows = self.pool, self.layer, self.batch.rows
            keys, values = self._accepted(keys, values, params.heads(queries.shape[1]))
            longest = max(row.offsets[layer] + count for row, count in zip(rows, counts, strict=True))
            if dispatch.takes_rows(queries, pool, layer, longest, params):
                tables = [row.reserve(layer, count) for row, count in zip(rows, counts, strict=True)]
                return dispatch.ragged_attention(queries, keys, values, pool, layer, tables, counts, params)
        outputs = []
        for index, count in enumerate(counts):
            if count == 0:
                outputs.append(mx.zeros((1, queries.shape[1], width, values.shape[3]), queries.dtype))
                continue
            row = self._row(index)
            q, k, v = (x[index : index + 1, :, :count] for x in (queries, keys, values))
            mask = row.make_mask(count, window_size=self.window)
            output = row.attend(q, k, v, params._replace(mask=mask))
            outputs.append(mx.pad(output, [(0, 0), (0, 0), (0, width - count), (0, 0)]) if count < width else output)
        return mx.concatenate(outputs)

    @in_turn
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens of every row and return what the rows see, padded on the left to the longest, as
        mlx-lm's batch caches do; zeros there. Lazy, and recognised as in :meth:`PagedKVCache.update_and_fetch`.

        To be attended to under an array mask of :meth:`make_mask`, which knows the padding.
        """
        if keys.shape[0] != len(self.batch):
            raise GeometryError(f"keys {keys.shape} for {len(self.batch)} sequence(s)")
        pool, layer, width = self.pool, self.layer, keys.shape[2]
        compute_rewound(pool, layer)
        is_step = width == 1 and self._unpadded is None
        columns = self._latest = self.batch.columns(layer) if is_step else self._columns(width)
        keys, values = self._accepted(keys, values, None)
        if not is_step:
            for index, count in enumerate(self._take_counts(width)):
                if count:
                    self._row(index).update(keys[index : index + 1, :, :count], values[index : index + 1, :, :count])
            return columns.read(pool, layer, [row.table(layer) for row in self.batch.rows])
        tables = self.batch.tables_for(layer)
        kv = self._kv
        step = self.batch.step(layer)
        before = kv.storage.fence() if kv.in_place else None
        kv.write_step(tables, step, keys, values)
        return self._fetch(columns, tables, step, Append(keys, values, step), before)

    @in_turn
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what :meth:`update_and_fetch` returned last, for another layer that attends over it."""
        columns = self._latest
        if columns is None:
            raise PromptCacheError(f"layer {self.layer} has written nothing yet")
        tables = [row.table(self.layer) for row in self.batch.rows]
        if columns.width > 1 or columns.is_padded:
            return columns.read(self.pool, self.layer, tables)
        return self._fetch(columns, tables, self._kv.step(tables, 1), None, None)

    def _fetch(
        self,
        columns: LeftPadding,
        tables: list[BlockTable],
        step: Step,
        append: Append | None,
        before: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        kv = self._kv
        written = kv.storage.fence() if kv.in_place else None
        fetched = columns.read(self.pool, self.layer, tables, step)
        fences = None
        if written is not None:
            fences = Fences(written if before is None else before, written, kv.storage.fence())
        elif append is not None:
            fetched = kv.watch_read(*fetched)
        hand_out(*fetched, LazyKV(self.batch, self.layer, append, fences, batched=True))
        return fetched

    def _columns(self, width: int) -> LeftPadding:
        """Return where the rows lie when they are padded to one width, for the next ``width`` tokens."""
        counts = [width] * len(self.batch)
        if self._unpadded is not None:
            counts = [min(width, left) for left in self._unpadded]
        return LeftPadding(self.batch.offsets(self.layer), counts, width, self._kv.sees)

    def _take_counts(self, width: int) -> list[int]:
        """Real tokens of each row among the next ``width``, which are about to be written row by row."""
        self.batch.commit()
        counts = [width] * len(self.batch)
        if self._unpadded is not None:
            counts = [min(width, left) for left in self._unpadded]
            self._unpadded = [left - count for left, count in zip(self._unpadded, counts, strict=True)]
        return counts

    # mlx-lm's protocol ----------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Mask of the next ``N`` tokens of each row.

        Returns:
            For rows read by :meth:`attend`: None for one new token per row, else "causal": each row is masked by its
            own length and window. For rows read by :meth:`update_and_fetch`, on request, and for a window other than
            the layer's: a boolean array ``[B, 1, N, longest]`` over what that returns.
        """
        if not (return_array or self.row_type.masks_rows) and window_size in (None, self.window):
            return None if N == 1 else "causal"
        window = window_under(self._kv.spec, window_size and min(window_size, self.window or window_size))
        mask = self._columns(N).mask(window, [row.table(self.layer) for row in self.batch.rows])
        if window == self._kv.sees:
            self.batch.masks[self.pool.group_of(self.layer)] = mask, window or Window(1 << 30)
        return mask

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Declare the rows' numbers of new tokens until :meth:`finalize`; what comes after them is padding."""
        if left_padding is not None and any(left_padding):
            raise GeometryError("rows of a paged batch are not padded on the left")
        if lengths is not None:
            if len(lengths) != len(self.batch):
                raise GeometryError(f"{len(lengths)} lengths for {len(self.batch)} sequence(s)")
            self._unpadded = list(lengths)

    def finalize(self) -> None:
        """End of what :meth:`prepare` declared."""
        self._unpadded = None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these rows, in this order. The blocks of the others are released with their last holder."""
        keep = tuple(int(index) for index in batch_indices)
        batch = self.batch
        self.batch = batch.selected.get(keep, (), self.layer, lambda: batch.select(keep))

    def extend(self, other: PagedBatchKVCache) -> None:
        """Append the rows of another batch, which must not be used any more."""
        batch, others = self.batch, other.batch
        self.batch = batch.joined.get(0, (others,), self.layer, lambda: batch.join(others))

    def extract(self, index: int) -> PagedKVCache:
        """One row as a cache of its own, over the same blocks; whoever writes to a shared block copies it."""
        batch = self.batch
        return self.row_type(batch.extracted.get(index, (), self.layer, lambda: batch.fork(index)), self.layer)

    @classmethod
    def merge(cls, caches: Sequence[PagedKVCache]) -> PagedBatchKVCache:
        """Return a batch of forks of single caches of one layer."""
        rows = [cache.sequence for cache in caches]
        layer, pool = caches[0].layer, caches[0].pool
        key = tuple(id(row) for row in rows)
        batch = _merged.get(key, rows, layer, lambda: BatchTables(pool, [copy.deepcopy(row) for row in rows]))
        return cls(batch, layer, type(caches[0]))

    @property
    def state(self) -> tuple[Any, ...]:
        """Like :attr:`PagedKVCache.state`: an array that is ready when this layer's writes are, and the cache
        itself."""
        return (self._kv.fence(), self)

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        if len(value) != 2 or not isinstance(value[1], PagedBatchKVCache):
            raise PromptCacheError("not the state of a paged batch")
        self.batch, self.layer, self.row_type = value[1].batch, value[1].layer, value[1].row_type

    @property
    def nbytes(self) -> int:
        """Bytes of this layer in the blocks the rows hold; shared blocks count in each row."""
        return sum(self._row(index).nbytes for index in range(len(self.batch)))

    def size(self) -> int:
        """Visible tokens of the longest row."""
        longest = max(self.batch.offsets(self.layer), default=0)
        return longest if self.window is None else min(longest, self.window)

    def empty(self) -> bool:
        return self.size() == 0

    def is_trimmable(self) -> bool:
        ring = self._kv.spec.ring
        return ring is None or max(self.batch.offsets(self.layer), default=0) < ring

    def trim(self, n: int) -> int:
        """Drop up to ``n`` tokens from the end of every row. Returns how many the longest row lost."""
        self.batch.commit()
        return max((self._row(index).trim(n) for index in range(len(self.batch))), default=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedBatchKVCache:
        fork = PagedBatchKVCache(copy.deepcopy(self.batch, memo), self.layer, self.row_type)
        fork._unpadded = None if self._unpadded is None else list(self._unpadded)
        return fork

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.layer}, rows={len(self.batch)})"
