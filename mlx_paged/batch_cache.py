"""PagedBatchKVCache: mlx-lm's batch cache protocol over the block tables of several sequences. Moves no keys."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx

from .attention import dispatch
from .cache import PagedKVCache, SequenceTables
from .errors import BlockStateError, GeometryError, PagedCacheError, PromptCacheError
from .kv.block_table import BlockTable
from .kv.pool import BlockPool
from .kv.storage import QueryHeads

T = TypeVar("T")


class OncePerBatch(Generic[T]):
    """mlx-lm calls filter, extend, extract and merge once for each layer; what they make is shared by all layers.

    The first layer makes it, each other layer gets the same, and a layer that comes by a second time begins anew.
    Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[weakref.ref[Any], tuple[weakref.ref[Any], ...], set[int]]] = {}

    def get(self, key: Hashable, sources: Sequence[Any], layer: int, make: Callable[[], T]) -> T:
        """What ``make`` made for this key and these very sources, unless the layer had it already."""
        known = self._made.get(key)
        if known is not None:
            made, refs, layers = known
            value: T | None = made()
            same = len(refs) == len(sources) and all(ref() is source for ref, source in zip(refs, sources, strict=True))
            if value is not None and same and layer not in layers:
                layers.add(layer)
                return value
        fresh = make()
        self._made[key] = (
            weakref.ref(fresh, lambda _: self._made.pop(key, None)),
            tuple(weakref.ref(source) for source in sources),
            {layer},
        )
        return fresh


class FailedRow(NamedTuple):
    """A row for which no block could be had."""

    row: int
    error: Exception


class BatchTables:
    """The sequences of a batch, in order. Shared by the caches of all layers; its members never change: a batch with
    others is another BatchTables over the same sequences.

    A decode step takes a token for every row at once: :meth:`reserve` (by whoever drives the batch, or by the first
    layer of a group to come by), then each layer writes it. Offsets are host integers; the device's copy is made once
    per step and group, from them, and depends on no other array.

    Args:
        pool: of all the sequences.
        rows: each at the same offset in all its layers.

    Raises:
        BlockStateError: a row stopped in the middle of a step, or is of another pool.
    """

    def __init__(self, pool: BlockPool, rows: Sequence[SequenceTables]) -> None:
        for row in rows:
            if row.pool is not pool:
                raise BlockStateError("a sequence of another pool cannot join a batch")
            for table, group in zip(row.tables, pool.groups, strict=True):
                if any(row.offsets[layer] != table.length for layer in group.spec.layers):
                    raise BlockStateError("a sequence whose layers are at different offsets cannot join a batch")
        self.pool = pool
        self.rows = tuple(rows)
        self.tables: list[list[BlockTable]] = [[row.tables[g] for row in rows] for g in range(len(pool.groups))]
        self._place = {layer: index for index, group in enumerate(pool.groups) for layer in group.spec.layers}
        # Decode steps since the rows' own offsets were last right: reserved for each group, written by each layer.
        self._reserved = [0] * len(pool.groups)
        self._written = dict.fromkeys(self._place, 0)
        self._offsets: dict[tuple[int, ...], mx.array] = {}
        self.selected: OncePerBatch[BatchTables] = OncePerBatch()
        self.joined: OncePerBatch[BatchTables] = OncePerBatch()
        self.extracted: OncePerBatch[SequenceTables] = OncePerBatch()

    def __len__(self) -> int:
        return len(self.rows)

    def offsets(self, layer: int) -> list[int]:
        """Tokens the layer has seen, for each row."""
        group = self._place[layer]
        if not self._reserved[group]:
            return [row.offsets[layer] for row in self.rows]
        behind = self._reserved[group] - self._written[layer]
        return [table.length - behind for table in self.tables[group]]

    def device_offsets(self, layer: int) -> mx.array:
        """The same as int32 ``[B]``; one array for all layers at the same place."""
        group = self._place[layer]
        key = (group, self._reserved[group], self._written[layer])
        if not self._reserved[group]:
            return mx.array(self.offsets(layer), mx.int32)
        known = self._offsets.get(key)
        if known is None:
            values = tuple(self.offsets(layer))
            # Another group's array serves as well if it says the same, as it does in every step.
            known = self._offsets.get(values)
            if known is None:
                self._offsets = {values: (known := mx.array(values, mx.int32))}
            self._offsets[key] = known
        return known

    # Decode steps ---------------------------------------------------------------------------------------------

    def reserve(self) -> FailedRow | None:
        """One more token for every row in every group.

        Returns:
            None; or the row for which a block was missing, and why. Nothing has been reserved then.
        """
        for group in range(len(self.tables)):
            failed = self._reserve_group(group)
            if failed is not None:
                for done in range(group):
                    self._take_back(done, len(self.rows))
                return failed
        return None

    def _reserve_group(self, group: int) -> FailedRow | None:
        append = self.pool.append_tokens
        for index, table in enumerate(self.tables[group]):
            try:
                append(table, 1)
            except Exception as error:
                for done in self.tables[group][:index]:
                    self.pool.trim(done, 1)
                return FailedRow(index, error)
        self._reserved[group] += 1
        return None

    def _take_back(self, group: int, count: int) -> None:
        for table in self.tables[group][:count]:
            self.pool.trim(table, 1)
        self._reserved[group] -= 1
        for layer in self.pool.groups[group].spec.layers:
            self._written[layer] = min(self._written[layer], self._reserved[group])

    def take_back(self) -> None:
        """Undo the latest :meth:`reserve`; what layers wrote for it is forgotten."""
        for group in range(len(self.tables)):
            self._take_back(group, len(self.rows))

    def take(self, layer: int) -> list[BlockTable]:
        """The tables with the layer's next token reserved, to write and read it."""
        group = self._place[layer]
        if self._written[layer] == self._reserved[group]:
            if not self._reserved[group]:
                self._check_level(group)
            failed = self._reserve_group(group)
            if failed is not None:
                raise failed.error
        elif self._written[layer] != self._reserved[group] - 1:
            raise BlockStateError(f"layer {layer} missed a step of its group")
        self._written[layer] += 1
        return self.tables[group]

    def _check_level(self, group: int) -> None:
        for row, table in zip(self.rows, self.tables[group], strict=True):
            if any(row.offsets[layer] != table.length for layer in self.pool.groups[group].spec.layers):
                raise BlockStateError("the layers of a group are at different offsets")

    def settle(self) -> None:
        """Make the rows' own offsets right, so that a row can be used outside the batch."""
        for group, tables in enumerate(self.tables):
            if not self._reserved[group]:
                continue
            for layer in self.pool.groups[group].spec.layers:
                behind = self._reserved[group] - self._written[layer]
                self._written[layer] = 0
                for row, table in zip(self.rows, tables, strict=True):
                    row.offsets[layer] = table.length - behind
            self._reserved[group] = 0
        self._offsets = {}

    # Other batches over the same sequences ---------------------------------------------------------------------

    def select(self, keep: Sequence[int]) -> BatchTables:
        self.settle()
        return BatchTables(self.pool, [self.rows[index] for index in keep])

    def join(self, other: BatchTables) -> BatchTables:
        self.settle()
        other.settle()
        return BatchTables(self.pool, [*self.rows, *other.rows])

    def fork(self, index: int) -> SequenceTables:
        """A row of its own: references to the same blocks."""
        self.settle()
        return copy.deepcopy(self.rows[index])

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchTables:
        self.settle()
        fork = BatchTables(self.pool, [copy.deepcopy(row, memo) for row in self.rows])
        memo[id(self)] = fork
        return fork


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

    @property
    def pool(self) -> BlockPool:
        return self.batch.pool

    @property
    def window(self) -> int | None:
        """Sliding window in tokens, or None."""
        return self.pool.groups[self.pool.group_of(self.layer)].spec.window

    @property
    def offset(self) -> mx.array:
        """Tokens this layer has seen of each row: the position of the next one; int32 ``[B]``."""
        return self.batch.device_offsets(self.layer)

    def _row(self, index: int) -> PagedKVCache:
        return self.row_type(self.batch.rows[index], self.layer)

    # Writing and reading --------------------------------------------------------------------------------------

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write the next tokens of every row and attend from them.

        Args:
            queries: ``[B, n_q_heads, n_new, head_dim]``, rotated.
            keys: ``[B, n_kv_heads, n_new, head_dim]``, rotated.
            values: ``[B, n_kv_heads, n_new, v_head_dim]``.
            scale: factor on the scores.
            mask: what :meth:`make_mask` gave; each row is masked by its own length.
            softcap, sinks: as for :func:`.attention.dispatch.paged_attention`.

        Returns:
            ``[B, n_q_heads, n_new, v_head_dim]``; zeros at padding.

        Raises:
            GeometryError: shapes differ from the batch, or the mask is one of the caller's own.
            PoolExhaustedError: the first row's for which there is no block; no layer has written anything then.
        """
        if queries.shape[0] != len(self.batch):
            raise GeometryError(f"queries {queries.shape} for {len(self.batch)} sequence(s)")
        if isinstance(mask, mx.array):
            raise GeometryError("rows of a batch are masked by their own lengths: an array mask cannot be used")
        if queries.shape[2] > 1 or self._unpadded is not None:
            return self._attend_rows(queries, keys, values, scale=scale, softcap=softcap, sinks=sinks)
        heads = QueryHeads(queries.shape[1], softcap is not None, sinks is not None)
        self.pool.set_geometry(self.layer, keys, values, batch=len(self.batch), heads=heads)
        tables = self.batch.take(self.layer)
        step = self.pool.step(self.layer, tables, 1)
        return dispatch.append_attention(
            queries, keys, values, self.pool, self.layer, tables, step, scale=scale, softcap=softcap, sinks=sinks
        )

    def _attend_rows(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        softcap: float | None,
        sinks: mx.array | None,
    ) -> mx.array:
        self.batch.settle()
        width = queries.shape[2]
        counts = [width] * len(self.batch)
        if self._unpadded is not None:
            counts = [min(width, left) for left in self._unpadded]
            self._unpadded = [left - count for left, count in zip(self._unpadded, counts, strict=True)]
        outputs = []
        for index, count in enumerate(counts):
            if count == 0:
                outputs.append(mx.zeros((1, queries.shape[1], width, values.shape[3]), queries.dtype))
                continue
            row = self._row(index)
            q, k, v = (x[index : index + 1, :, :count] for x in (queries, keys, values))
            mask = row.make_mask(count, window_size=self.window)
            output = row.attend(q, k, v, scale=scale, mask=mask, softcap=softcap, sinks=sinks)
            outputs.append(mx.pad(output, [(0, 0), (0, 0), (0, width - count), (0, 0)]) if count < width else output)
        return mx.concatenate(outputs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Not possible: rows of different lengths have no common dense form without padding."""
        raise PagedCacheError("a paged batch is read by attend(), which this model's attention does not call")

    # mlx-lm's protocol ----------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        """None for one new token per row, else "causal": :meth:`attend` masks each row by its own length and window.

        Raises:
            GeometryError: another window than the layer's is asked for.
        """
        if window_size not in (None, self.window):
            raise GeometryError(f"layer {self.layer} has window {self.window}, a mask for {window_size} was asked for")
        return None if N == 1 else "causal"

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
        """A batch of forks of single caches of one layer."""
        rows = [cache.sequence for cache in caches]
        layer, pool = caches[0].layer, caches[0].pool
        key = tuple(id(row) for row in rows)
        batch = _merged.get(key, rows, layer, lambda: BatchTables(pool, [copy.deepcopy(row) for row in rows]))
        return cls(batch, layer, type(caches[0]))

    @property
    def state(self) -> tuple[Any, ...]:
        """As :attr:`PagedKVCache.state`: an array that is ready when this layer's writes are, and the cache itself."""
        return (self.pool.fence(self.layer), self)

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
        return self.window is None or max(self.batch.offsets(self.layer), default=0) < self.window

    def trim(self, n: int) -> int:
        """Drop up to ``n`` tokens from the end of every row. Returns how many the longest row lost."""
        self.batch.settle()
        return max((self._row(index).trim(n) for index in range(len(self.batch))), default=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedBatchKVCache:
        fork = PagedBatchKVCache(copy.deepcopy(self.batch, memo), self.layer, self.row_type)
        fork._unpadded = None if self._unpadded is None else list(self._unpadded)
        return fork

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.layer}, rows={len(self.batch)})"
