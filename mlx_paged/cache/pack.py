"""Pack: the block tables of several sequences that take the next tokens of their prompts in one model call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import BlockStateError
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.step import PackedStep
from .sequence import SequenceTables


class NotPackableError(Exception):
    """The model does something with its caches that packs have no answer to. Requests go through it one by one."""


class Pack:
    """T new tokens of B sequences, for a model a batch of T rows of one token each. Shared by the caches of all layers.

    For the model's own code each token is a row at its own position, as in a decode step; what it sees of the tokens
    before it, those of the pack included, only attention knows. So nothing is padded.

    Args:
        rows: the sequences, of one pool, with ``counts`` positions reserved in all groups
            (:meth:`SequenceTables.reserve_all`).
        counts: new tokens of each, at least one.
        as_rows: they are few behind many, so they are attended to like the rows of a decode step.

    Raises:
        BlockStateError: a sequence is of another pool, or its positions are not reserved.
    """

    def __init__(self, rows: Sequence[SequenceTables], counts: Sequence[int], *, as_rows: bool = False) -> None:
        self.pool: BlockPool = rows[0].pool
        for row, count in zip(rows, counts, strict=True):
            if row.pool is not self.pool:
                raise BlockStateError("a sequence of another pool cannot join a pack")
            if not row.is_level(behind=count):
                raise BlockStateError(f"{count} positions of a sequence in a pack are not reserved")
        self.rows = tuple(rows)
        self.counts = tuple(counts)
        self.as_rows = as_rows
        self.tables: list[list[BlockTable]] = [[row.tables[g] for row in rows] for g in range(len(self.pool.groups))]
        self._place = {layer: index for index, group in enumerate(self.pool.groups) for layer in group.spec.layers}
        self.written: set[int] = set()  # layers
        self._attended: Counter[int] = Counter()
        ends = [table.length for table in self.tables[0]]
        spans = [np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, counts, strict=True)]
        self._positions = mx.array(np.concatenate(spans))
        self._behind: mx.array | None = None
        self._masks: dict[int, mx.array] = {}  # by the window they stand for

    def __len__(self) -> int:
        return sum(self.counts)

    def tables_of(self, layer: int) -> list[BlockTable]:
        """Return the block tables of the layer's group, one per sequence."""
        return self.tables[self._place[layer]]

    def step(self, layer: int) -> PackedStep:
        """Return the pack's positions in the layer's group."""
        return self.pool.layer(layer).packed_step(self.tables_of(layer), self.counts)

    def offsets(self, layer: int) -> mx.array:
        """Position of each token, int32 ``[T]``; of the one behind it once the layer is written. One array for all
        layers."""
        if layer not in self.written:
            return self._positions
        if self._behind is None:
            self._behind = self._positions + 1
        return self._behind

    def mask(self, window: int) -> mx.array:
        """Return an array that stands for a window narrower than the layer's, to be recognised when it comes back."""
        made = self._masks.get(window)
        if made is None:
            made = self._masks[window] = mx.ones((len(self), 1, 1, 1), mx.bool_)
        return made

    def window_of(self, mask: mx.array | str | None) -> int | None:
        """Return the window that a mask of :meth:`mask` stands for; None for any other."""
        return next((window for window, made in self._masks.items() if made is mask), None)

    def wrote(self, layer: int) -> None:
        """Note that the layer has written its tokens."""
        if layer in self.written:
            raise NotPackableError(f"layer {layer} writes twice")
        self.written.add(layer)

    def attended(self, layer: int) -> None:
        """Note that what the layer has written has been attended to."""
        self._attended[layer] += 1

    def write_all(self) -> list[list[BlockTable]]:
        """Every layer writes and attends to its tokens in one go. Returns the tables of each group."""
        for layer in self._place:
            self.wrote(layer)
            self.attended(layer)
        return self.tables

    def unwrite_all(self) -> None:
        """Undo :meth:`take`; the layers do it one by one."""
        self.written.clear()
        self._attended.clear()

    @property
    def num_layers(self) -> int:
        return len(self._place)

    def commit(self) -> None:
        """Check, after the model call, that the sequences' layers are where their tables are.

        Raises:
            NotPackableError: a layer's keys have not been written or not been attended to. No sequence has changed.
        """
        for layer in self._place:
            if layer not in self.written or not self._attended[layer]:
                raise NotPackableError(f"layer {layer} does not attend to what it has written")
        for row in self.rows:
            row.set_level()
