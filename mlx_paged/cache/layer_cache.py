"""LayerCache: what the paged caches of one attention layer have in common."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..errors import GeometryError
from ..kv.attention_params import QueryHeads, Window
from ..kv.block_table import BlockTable
from ..kv.group import Group
from ..kv.new_tokens import NewTokens
from ..kv.pool import BlockPool
from .batch import Batch
from .lazy_kv import Fences, LazyKV, hand_out
from .sequence import SequenceTables


class LayerCache:
    """A paged cache of one attention layer, for one sequence or for the rows of a batch.

    Args:
        rows: the sequence's tables or the batch, shared by the caches of all layers.
        layer: index of the model layer.

    Attributes:
        rows: as given.
        group_index, position: index of the layer's group in the pool, and of the layer in the group.
    """

    def __init__(self, rows: SequenceTables | Batch, layer: int) -> None:
        self.rows = rows
        self.layer = layer
        self.group_index, self.position = rows.pool.places[layer]

    @property
    def pool(self) -> BlockPool:
        """The pool of the blocks."""
        return self.rows.pool

    @property
    def group(self) -> Group:
        """The layer's group."""
        return self.rows.pool.groups[self.group_index]

    @property
    def window(self) -> int | None:
        """Most tokens that a token sees, itself included; None: all."""
        return self.group.spec.window

    @property
    def sees(self) -> Window | None:
        """Return the window of earlier tokens that a token sees; None: all."""
        return self.group.sees

    def _fitted(
        self, keys: mx.array, values: mx.array, batch: int, heads: QueryHeads | None
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values in the group's dtype; the first ones of a group fix its geometry, and its kind of
        blocks by the queries' ``heads``.

        Raises:
            GeometryError, PoolExhaustedError, KernelUnavailableError: before anything is changed.
        """
        try:
            self.pool.set_geometry(self.layer, keys, values, batch=batch, heads=heads)
        except GeometryError:
            keys, values = self.group.fitted(keys, values)
            self.pool.set_geometry(self.layer, keys, values, batch=batch, heads=heads)
        return keys, values

    def _write(self, tokens: NewTokens, keys: mx.array, values: mx.array) -> mx.array | None:
        """Write new tokens. Return the fence before the write, if the blocks are a device's."""
        group = self.group
        before = group.device(self.position).fence() if group.in_place else None
        group.write(self.position, tokens, keys, values)
        return before

    def _hand_out(
        self,
        tables: Sequence[BlockTable],
        tokens: NewTokens | None,
        append: tuple[mx.array, mx.array] | None,
        before: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """Return lazily what the tables hold, as arrays that :func:`.lazy_kv.lazy_kv_of` recognises.

        Args:
            tables: of the sequence or the batch.
            tokens: the tables' new tokens, for what all layers share; None: of no step.
            append: new keys and values that a kernel may still write itself.
            before: the fence before their write.
        """
        group = self.group
        if not group.in_place:
            made = None if tokens is None else tokens.made
            keys, values, read = group.fetch(self.position, tables, made)
            hand_out(keys, values, LazyKV(self.rows, self.layer, read=read))
            return keys, values
        blocks = group.device(self.position)
        written = blocks.fence()
        if isinstance(self.rows, Batch):
            assert tokens is not None
            keys, values = blocks.fetch(tokens)
        else:
            keys, values = blocks.gather(tables[0], self.group_index)
        fences = Fences(written if before is None else before, written, blocks.fence())
        hand_out(keys, values, LazyKV(self.rows, self.layer, append, fences))
        return keys, values
