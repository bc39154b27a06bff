"""BatchTables: the block tables of several sequences that decode together."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx

from ..errors import BlockStateError, without_frames
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.step import Step
from ..kv.storage.attention_params import Window
from .left_padding import LeftPadding
from .sequence import SequenceTables

T = TypeVar("T")


class OncePerBatch(Generic[T]):
    """mlx-lm calls filter, extend, extract and merge once for each layer; what they make is shared by all layers.

    The first layer makes it, each other layer gets the same, and a layer that comes by a second time begins anew.
    Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[weakref.ref[Any], tuple[weakref.ref[Any], ...], set[int]]] = {}

    def get(self, key: Hashable, sources: Sequence[Any], layer: int, make: Callable[[], T]) -> T:
        """Return what ``make`` made for this key and these very sources, unless the layer had it already."""
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
    """A row for which no block could be had, and why; the error has no frames."""

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
            if not row.is_level():
                raise BlockStateError("a sequence whose layers are at different offsets cannot join a batch")
        self.pool = pool
        self.rows = tuple(rows)
        self.tables: list[list[BlockTable]] = [[row.tables[g] for row in rows] for g in range(len(pool.groups))]
        self._place = {layer: index for index, group in enumerate(pool.groups) for layer in group.spec.layers}
        # Decode steps since the rows' own offsets were last right: reserved for each group, written by each layer.
        self._reserved = [0] * len(pool.groups)
        self._written = dict.fromkeys(self._place, 0)
        self._steps: list[weakref.ref[Step] | None] = [None] * len(pool.groups)
        self._offsets: dict[tuple[int, ...], mx.array] = {}
        self._columns: dict[int, tuple[tuple[int, int], LeftPadding]] = {}
        # The latest array mask made for each group, by which it is known when it comes back, and what it stands for.
        self.masks: dict[int, tuple[mx.array, Window]] = {}
        self.selected: OncePerBatch[BatchTables] = OncePerBatch()
        self.joined: OncePerBatch[BatchTables] = OncePerBatch()
        self.extracted: OncePerBatch[SequenceTables] = OncePerBatch()

    def __len__(self) -> int:
        return len(self.rows)

    def tables_of(self, layer: int) -> list[BlockTable]:
        """Return the block tables of the layer's group, one per row."""
        return self.tables[self._place[layer]]

    def offsets(self, layer: int) -> list[int]:
        """Tokens the layer has seen, for each row."""
        group = self._place[layer]
        if not self._reserved[group]:
            return [row.offsets[layer] for row in self.rows]
        behind = self._reserved[group] - self._written[layer]
        return [table.length - behind for table in self.tables[group]]

    def window_of(self, mask: mx.array | str | None) -> Window | None:
        """Return the window of a mask made for one of the groups: a window that leaves each row what the group does.
        None for others."""
        for made, window in self.masks.values():
            if made is mask:
                return window
        return None

    def device_offsets(self, layer: int) -> mx.array:
        """Return the offsets as int32 ``[B]``; one array for all layers at the same place."""
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

    def columns(self, layer: int) -> LeftPadding:
        """Return where the rows lie side by side for the next token of each; made once for all layers of a group."""
        group = self._place[layer]
        place = self._reserved[group], self._written[layer]
        known = self._columns.get(group)
        if known is None or known[0] != place or not place[0]:
            columns = LeftPadding(self.offsets(layer), [1] * len(self), 1, self.pool.groups[group].spec.sees)
            known = self._columns[group] = place, columns
        return known[1]

    # Decode steps ---------------------------------------------------------------------------------------------

    def reserve(self) -> FailedRow | None:
        """One more token for every row in every group.

        Returns:
            None; or the row for which a block was missing, and why. Nothing has been reserved then.
        """
        done = 0
        try:
            while done < len(self.tables):
                failed = self._reserve_group(done)
                if failed is not None:
                    return failed
                done += 1
        finally:
            if done < len(self.tables):
                for group in range(done):
                    self._take_back(group, len(self.rows))
            failed = None  # whose error's frames hold this one
        return None

    def _reserve_group(self, group: int) -> FailedRow | None:
        tables = self.tables[group]
        others = self.pool.append_token(group, tables)
        for place, index in enumerate(others):
            try:
                self.pool.append_tokens(tables[index], 1)
            except Exception as error:
                for undone in set(range(len(tables))).difference(others[place:]):
                    self.pool.trim(tables[undone], 1)
                return FailedRow(index, without_frames(error))
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

    def tables_for(self, layer: int) -> list[BlockTable]:
        """Return the tables with the layer's next token reserved, to write and read it."""
        group = self._place[layer]
        if self._written[layer] == self._reserved[group]:
            if not self._reserved[group]:
                self._check_level(group)
            failed = self._reserve_group(group)
            if failed is not None:
                try:
                    raise failed.error
                finally:
                    del failed  # the error's traceback has this frame
        elif self._written[layer] != self._reserved[group] - 1:
            raise BlockStateError(f"layer {layer} missed a step of its group")
        self._written[layer] += 1
        return self.tables[group]

    def step(self, layer: int) -> Step:
        """Return the step of the tables that :meth:`take` gave, made and checked once for all layers of the group."""
        group = self._place[layer]
        known = self._steps[group]
        step = None if known is None else known()
        if step is None or not self.pool.groups[group].is_current(step):
            step = self.pool.layer(layer).step(self.tables[group], 1)
            self._steps[group] = weakref.ref(step)
        return step

    def _check_level(self, group: int) -> None:
        layers = self.pool.groups[group].spec.layers
        for row, table in zip(self.rows, self.tables[group], strict=True):
            if not row.is_level() and any(row.offsets[layer] != table.length for layer in layers):
                raise BlockStateError("the layers of a group are at different offsets")

    def unreserve(self, layers: Iterable[int]) -> None:
        """Undo one :meth:`take` of each layer; the positions stay reserved, for the layers to take again."""
        for layer in layers:
            self._written[layer] -= 1

    @property
    def layers(self) -> Iterable[int]:
        """The layers of all groups."""
        return self._place

    @property
    def num_layers(self) -> int:
        return len(self._place)

    def commit(self) -> None:
        """Make the rows' own offsets right, so that a row can be used outside the batch."""
        if any(self._reserved):
            behind = {layer: self._reserved[group] - self._written[layer] for layer, group in self._place.items()}
            for row in self.rows:
                row.set_level()
                if any(behind.values()):  # a step was not done
                    for layer, num_tokens in behind.items():
                        row.offsets[layer] -= num_tokens
            self._written = dict.fromkeys(self._place, 0)
            self._reserved = [0] * len(self._reserved)
        self._offsets, self._columns = {}, {}

    # Other batches over the same sequences ---------------------------------------------------------------------

    def select(self, keep: Sequence[int]) -> BatchTables:
        self.commit()
        return BatchTables(self.pool, [self.rows[index] for index in keep])

    def join(self, other: BatchTables) -> BatchTables:
        self.commit()
        other.commit()
        return BatchTables(self.pool, [*self.rows, *other.rows])

    def fork(self, index: int) -> SequenceTables:
        """Return a row of its own: references to the same blocks."""
        self.commit()
        return copy.deepcopy(self.rows[index])

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchTables:
        self.commit()
        fork = BatchTables(self.pool, [copy.deepcopy(row, memo) for row in self.rows])
        memo[id(self)] = fork
        return fork
