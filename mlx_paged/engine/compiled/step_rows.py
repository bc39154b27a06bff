"""What a decode step takes its rows from: one sequence, a batch, or a pack, some of whose rows are of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ...cache.batch_cache import PagedBatchKVCache
from ...cache.batch_tables import BatchTables
from ...cache.pack import Pack
from ...cache.packed_cache import PackedKVCache
from ...cache.paged_kv_cache import PagedKVCache
from ...cache.sequence import SequenceTables
from ...kv.block_table import BlockTable
from ...kv.layer import PoolLayer


class GroupArrays(NamedTuple):
    """What the layers of a group share in a step.

    Attributes:
        visible: block tables, ends and starts, of :meth:`Step.visible`.
        offsets: position of each row's new token, int32 ``[B]``.
        slots: of a pack, where its tokens are written before any of them is attended to, ``[B]``; else nothing.
    """

    visible: tuple[mx.array, mx.array, mx.array]
    offsets: mx.array
    slots: tuple[mx.array, ...] = ()


class _Newest:
    """Rows of one new token for each table."""

    def arrays(self, layer: PoolLayer, tables: Sequence[BlockTable], shape: tuple[int, int]) -> GroupArrays:
        """What the layers of a group share, with block tables of the shape."""
        step = layer.step(tables, 1)
        return GroupArrays(step.visible(tables, layer.sees, shape), step.offsets(shape[0]))


class SequenceRows(_Newest):
    """The caches of one sequence's layers, as a batch of one."""

    def __init__(self, sequence: SequenceTables) -> None:
        self.sequence = sequence
        self.pool = sequence.pool

    def __len__(self) -> int:
        return 1

    def take(self, caches: Sequence[Any]) -> list[list[BlockTable]]:
        done = []
        try:
            for cache in caches:
                self.sequence.reserve(cache.layer, 1)
                done.append(cache.layer)
        except Exception:  # for want of blocks of another group
            for layer in done:
                self.sequence.offsets[layer] -= 1
            raise
        return [[table] for table in self.sequence.tables]

    def untake(self) -> None:
        for layer in self.sequence.offsets:
            self.sequence.offsets[layer] -= 1  # the position stays reserved, for the layers to take again


class BatchRows(_Newest):
    """The caches of a batch's layers."""

    def __init__(self, batch: BatchTables) -> None:
        self.batch = batch
        self.pool = batch.pool

    def __len__(self) -> int:
        return len(self.batch)

    def take(self, caches: Sequence[Any]) -> list[list[BlockTable]]:
        done: list[int] = []
        try:
            for cache in caches:
                self.batch.take(cache.layer)
                done.append(cache.layer)
        except Exception:
            self.batch.untake(done)
            raise
        return self.batch.tables

    def untake(self) -> None:
        self.batch.untake(self.batch.layers)


class PackRows:
    """The caches of a pack's layers: a row for each of its tokens."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.pool = pack.pool

    def __len__(self) -> int:
        return len(self.pack)

    def take(self, caches: Sequence[Any]) -> list[list[BlockTable]]:
        return self.pack.take()

    def untake(self) -> None:
        self.pack.untake()

    def arrays(self, layer: PoolLayer, tables: Sequence[BlockTable], shape: tuple[int, int]) -> GroupArrays:
        """What the layers of a group share, with block tables of the shape."""
        step = layer.packed_step(tables, self.pack.counts)
        visible = step.visible(tables, layer.sees, shape)
        return GroupArrays(visible, step.offsets(tables, shape[0]), (step.slots(tables, shape[0]),))


StepRows = SequenceRows | BatchRows | PackRows


def rows_of(caches: Sequence[Any]) -> StepRows | None:
    """The rows these caches belong to, if they are all paged, of the same rows, and cover the pool's layers."""
    first = caches[0] if caches else None
    if isinstance(first, PagedKVCache):
        sequence = first.sequence
        layers = len(sequence.offsets)
        if len(caches) == layers and all(isinstance(c, PagedKVCache) and c.sequence is sequence for c in caches):
            return SequenceRows(sequence)
    elif isinstance(first, PagedBatchKVCache):
        batch = first.batch
        if len(caches) == batch.num_layers and all(
            isinstance(c, PagedBatchKVCache) and c.batch is batch and not c.is_padded for c in caches
        ):
            return BatchRows(batch)
    elif isinstance(first, PackedKVCache):
        pack = first.pack
        if len(caches) == pack.num_layers and all(isinstance(c, PackedKVCache) and c.pack is pack for c in caches):
            return PackRows(pack)
    return None
