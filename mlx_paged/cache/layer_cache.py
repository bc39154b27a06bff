"""LayerCache: what the paged caches of one attention layer have in common. LazyKV: keys and values that one has handed
out, recognised when an attention function is given them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

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
        geometry = self.group.geometry
        if geometry is not None and not keys.dtype == values.dtype == geometry.dtype:
            keys, values = self.group.fitted(keys, values)
        self.pool.set_geometry(self.layer, keys, values, batch=batch, heads=heads)
        return keys, values

    def _write(self, tokens: NewTokens, keys: mx.array, values: mx.array) -> mx.array | None:
        """Write new tokens. Return the fence before the write, if the blocks are a device's."""
        group = self.group
        before = group.device(self.position).fence if group.in_place else None
        group.blocks[self.position].write(tokens, keys, values)
        return before

    def _hand_out(
        self,
        tokens: NewTokens,
        append: tuple[mx.array, mx.array] | None,
        before: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """Return lazily what the tables hold, as arrays that :func:`lazy_kv_of` recognises.

        Args:
            tokens: of the sequence or the batch.
            append: new keys and values that a kernel may still write itself.
            before: the fence before their write.
        """
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
        fences = Fences(written if before is None else before, written, blocks.fence)
        hand_out(keys, values, LazyKV(self.rows, self.layer, append, fences))
        return keys, values


class Fences(NamedTuple):
    """Fences of a device's blocks: before a write, after it, and after the gather that follows."""

    before: mx.array
    written: mx.array
    gathered: mx.array


class LazyKV:
    """How to attend over the blocks that a pair of arrays was gathered from, instead of over the arrays.

    The arrays are real, lazy copies, equal to what mlx-lm's cache would return. If both come back together to an
    attention function, :meth:`attend` reads the blocks instead. The gather is then no longer among a host's pending
    reads or in a device's chain of fences, drops out of the graph and is never computed, unless the arrays are still
    held at the next write (:meth:`PoolLock.hold`).

    It lives as long as the arrays, so it holds tables and pool weakly. Without them, the arrays are ordinary ones.

    Args:
        rows, layer: where the keys and values are, those of the new tokens included.
        append: new keys and values, one per table, that the attention kernel may still write itself.
        fences: fences of a device's blocks.
        read: the array that stands for the pair in the pending reads of the host's blocks.
    """

    def __init__(
        self,
        rows: Batch | SequenceTables,
        layer: int,
        append: tuple[mx.array, mx.array] | None = None,
        fences: Fences | None = None,
        read: mx.array | None = None,
    ) -> None:
        pool = rows.pool
        self.layer = layer
        self._rows = weakref.ref(rows)
        self._pool = weakref.ref(pool)
        self._append = append
        self._fences = fences
        self._read = read
        self._batched = isinstance(rows, Batch)  # masked by their own lengths: only a mask's window matters
        self._epoch = pool.group_of(layer).epoch

    @property
    def pool(self) -> BlockPool:
        """Pool of the blocks; read it only if :meth:`can_attend` returns True."""
        pool = self._pool()
        assert pool is not None
        return pool

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
        if num_tokens == 1 and self._append is not None and self._forget(pool, keys, values, to_write=True):
            return dispatch.attend(queries, self._append, group, position, tokens, params)
        is_fresh = (
            not self._batched and tokens.tables[0].num_visible(tokens.group) == num_tokens and not group.is_quantized
        )
        if not is_fresh:  # else the arrays hold all tokens, and are attended over
            self._forget(pool, keys, values, to_write=False)
        new = (keys, values) if is_fresh else None
        return dispatch.attend(queries, new, group, position, tokens, params, is_written=True)

    def _forget(self, pool: BlockPool, keys: mx.array, values: mx.array, *, to_write: bool) -> bool:
        """Forget the gather, and with ``to_write`` a device's write before it. Return whether a device has."""
        if self._read is not None:
            pending = pool.blocks_of(self.layer).pending
            pending[:] = [array for array in pending if array is not self._read]
            self._read = None
            pool.lock.hold(keys, values)
        if self._fences is None:
            return False
        before, written, gathered = self._fences
        is_forgotten = (
            pool.group_of(self.layer)
            .device(pool.places[self.layer][1])
            .rewind(before if to_write else written, gathered)
        )
        if is_forgotten:
            pool.lock.hold(keys, values)
        return is_forgotten


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
