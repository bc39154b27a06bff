"""LayerCache: what the paged caches of one attention layer have in common. LazyKV: keys and values that one has handed
out, recognised when an attention function is given them."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx

from ..attention import dispatch
from ..kv.device_blocks import DeviceBlocks
from ..kv.geometry import AttentionParams, QueryHeads
from ..kv.group import Group
from ..kv.host_blocks import HostBlocks
from ..kv.lock import locked
from ..kv.new_tokens import NewTokens
from ..kv.pool import BlockPool
from .batch import Batch
from .sequence import SequenceTables


class LayerCache:
    """A paged cache of one attention layer, for one sequence or for the rows of a batch.

    Args:
        rows: the sequence's tables or the batch, shared by the caches of all layers.
        layer: index of the model layer.

    Attributes:
        rows: as given.
        pool: the pool of the blocks.
        group: the layer's group.
        group_index, position: index of the group in the pool, and of the layer in the group.
        window: most tokens that a token sees, itself included; None: all.
        sees: the same as a Window.
    """

    def __init__(self, rows: SequenceTables | Batch, layer: int) -> None:
        self.rows = rows
        self.layer = layer
        self.pool: BlockPool = rows.pool
        self.group_index, self.position = self.pool.places[layer]
        self.group: Group = self.pool.groups[self.group_index]
        self.window, self.sees = self.group.spec.window, self.group.sees

    def _fitted(
        self, keys: mx.array, values: mx.array, batch: int, heads: QueryHeads | None
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values in the group's dtype; the first ones of a group fix its geometry, and its kind of
        blocks by the queries' ``heads``.

        Raises:
            GeometryError, PoolExhaustedError, KernelUnavailableError: before anything is changed.
        """
        geometry, dtype = self.group.geometry, keys.dtype
        if geometry is not None and dtype == values.dtype != geometry.dtype and mx.issubdtype(dtype, mx.floating):
            keys, values = keys.astype(geometry.dtype), values.astype(geometry.dtype)  # as mlx-lm's caches do
        self.pool.set_geometry(self.layer, keys, values, batch=batch, heads=heads)
        return keys, values

    def _hand_out(self, tokens: NewTokens) -> tuple[mx.array, mx.array]:
        """Return lazily what the tables of the sequence or the batch hold, as arrays that :func:`lazy_kv_of`
        recognises. ``tokens``: their latest ones."""
        blocks = self.group.blocks[self.position]
        if isinstance(blocks, HostBlocks):
            # Outputs of one operation are computed together: the third, of one element, is ready when the others are.
            keys, values, read = mx.depends([*blocks.fetch(tokens), mx.zeros(())], [])
            blocks.pending.append(read)
            hand_out(keys, values, LazyKV(self.rows, self.layer, read=read))
            return keys, values
        assert isinstance(blocks, DeviceBlocks)
        written = blocks.fence
        if isinstance(self.rows, Batch):
            keys, values = blocks.fetch(tokens)
        else:
            keys, values = blocks.gather(tokens.tables[0], self.group_index)
        hand_out(keys, values, LazyKV(self.rows, self.layer, fences=(written, blocks.fence)))
        return keys, values


class LazyKV:
    """How to attend over the blocks that a pair of arrays was gathered from, instead of over the arrays.

    The arrays are real, lazy copies, equal to what mlx-lm's cache would return. If both come back together to an
    attention function, :meth:`attend` reads the blocks instead. The gather is then no longer among a host's pending
    reads or in a device's chain of fences, drops out of the graph and is never computed, unless the arrays are still
    held at the next write (:meth:`PoolLock.hold`).

    It lives as long as the arrays, so it holds tables and pool weakly. Without them, the arrays are ordinary ones.

    Args:
        rows, layer: where the keys and values are, those of the new tokens included.
        fences: of a device's blocks, before the gather and after it.
        read: the array that stands for the pair in the pending reads of the host's blocks.
    """

    def __init__(
        self,
        rows: Batch | SequenceTables,
        layer: int,
        fences: tuple[mx.array, mx.array] | None = None,
        read: mx.array | None = None,
    ) -> None:
        self.layer = layer
        self._rows = weakref.ref(rows)
        self._fences = fences
        self._read = read
        self._batched = isinstance(rows, Batch)  # masked by their own lengths: only a mask's window matters
        self._epoch = rows.pool.group_of(layer).epoch

    @property
    def pool(self) -> BlockPool:
        """Pool of the blocks; read it only if :meth:`can_attend` returns True."""
        rows = self._rows()
        assert rows is not None
        return rows.pool

    def can_attend(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        """Return whether :meth:`attend` gives what attention over the arrays would."""
        rows, shape = self._rows(), queries.shape
        if rows is None or len(shape) != 4 or shape[0] != (len(rows) if isinstance(rows, Batch) else 1):
            return False
        if rows.pool.group_of(self.layer).epoch != self._epoch:
            return False  # tokens were written or dropped since: the arrays are not what the blocks hold
        if self._batched:  # any other mask is for the arrays
            return shape[2] == 1 and (mask is None or rows.masks.window_of(mask) is not None)
        # Without a mask each of several queries would see all keys, those after its own included.
        return shape[2] == 1 or mask is not None

    @locked
    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        params: AttentionParams,
    ) -> mx.array:
        """Attend from queries ``[B, n_q_heads, n, head_dim]``, the last n tokens of each table; ``keys`` and ``values``
        are the arrays themselves. Call it only if :meth:`can_attend` returns True."""
        rows, layer, num_tokens = self._rows(), self.layer, queries.shape[2]
        assert rows is not None
        if params.mask is not None:
            window = rows.masks.window_of(params.mask)
            params = params._replace(mask=None if self._batched else params.mask, window=window)
        pool = rows.pool
        index, position = pool.places[layer]
        group = pool.groups[index]
        tokens = rows.tokens_of(layer) if isinstance(rows, Batch) else rows.latest_tokens(index, num_tokens)
        is_fresh = (
            not self._batched and tokens.tables[0].num_visible(tokens.group) == num_tokens and not group.is_quantized
        )
        if not is_fresh:  # else the arrays hold all tokens, and are attended over
            self._forget_gather(pool, keys, values)
        new = (keys, values) if is_fresh else None
        return dispatch.attend(queries, new, group, position, tokens, params, is_written=True)

    def _forget_gather(self, pool: BlockPool, keys: mx.array, values: mx.array) -> None:
        """Take the gather from a host's pending reads, or from a device's chain of fences if it is the latest there."""
        blocks = pool.blocks_of(self.layer)
        if self._read is not None:
            blocks.pending[:] = [array for array in blocks.pending if array is not self._read]
            self._read = None
            pool.lock.hold(keys, values)
        elif self._fences is not None and isinstance(blocks, DeviceBlocks) and blocks.rewind(*self._fences):
            pool.lock.hold(keys, values)


# By id of the keys. Entries are dropped with their arrays: a gather kept alive would keep the pool's buffer.
_handed_out: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], LazyKV]] = {}


def hand_out(keys: Any, values: Any, fetched: LazyKV) -> None:
    """Register the LazyKV of a pair of arrays, or of their placeholders while a step is traced, as long as the keys
    live."""
    key, registry = id(keys), _handed_out

    def forget(ref: weakref.ref[Any]) -> None:  # the module's globals are gone when the interpreter exits
        entry = registry.get(key)
        if entry is not None and entry[0] is ref:
            del registry[key]

    registry[key] = (weakref.ref(keys, forget), weakref.ref(values), fetched)


def lazy_kv_of(keys: object, values: object) -> LazyKV | None:
    """Return the LazyKV of exactly this pair of arrays, or None."""
    entry = _handed_out.get(id(keys))
    if entry is None or entry[0]() is not keys or entry[1]() is not values:
        return None
    return entry[2]
