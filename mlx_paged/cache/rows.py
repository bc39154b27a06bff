"""Rows: the block tables of sequences in a model call, and which layers have written its tokens. LeftPadding: how such
rows are padded in mlx-lm's batch caches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import BlockStateError, without_frames
from ..kv.block_table import BlockTable
from ..kv.layer import PoolLayer
from ..kv.pool import BlockPool
from ..kv.step import Columns, Step, padded_slots
from ..kv.storage.attention_params import Window
from .kept_states import KeptStates


class LeftPadding:
    """Layout of B rows of different lengths, padded on the left; the last column is each row's new token.

    Args:
        offsets: tokens of each row before the new one.
        window: the layer's window, or None.
    """

    def __init__(self, offsets: Sequence[int], window: Window | None) -> None:
        self.offsets = offsets
        self.window = window
        # Visible tokens of each row before the new one.
        self.before = [offset if window is None else offset - window.first_seen(offset) for offset in offsets]
        self.longest = max(self.before, default=0) + 1
        self.is_even = min(self.before, default=0) + 1 == self.longest  # nothing is padded
        self.is_masked = False  # whether a mask was made, without which padding would be attended to

    def _indices(self) -> mx.array:
        """Return each column's number among its row's visible tokens, int32 ``[B, longest]``; negative in padding."""
        ends = mx.array(self.before, mx.int32)[:, None] + 1
        return ends + mx.arange(-self.longest, 0, dtype=mx.int32)

    def mask(self, window: Window | None) -> mx.array:
        """Return the mask of the new tokens, boolean ``[B, 1, 1, longest]``.

        Args:
            window: the mask's window, at most the layer's.
        """
        self.is_masked = True
        if not (window and any(map(window.first_seen, self.before))):
            pads = np.array([self.longest - 1 - before for before in self.before], np.int32)
            return mx.arange(self.longest, dtype=mx.int32) >= mx.array(pads[:, None, None, None])
        first = window.first_seen_by(np.array(self.before, np.int32)[:, None, None, None])
        return self._indices()[:, None, None] >= mx.array(first)

    def read(self, kv: PoolLayer, tables: Sequence[BlockTable], step: Step) -> tuple[mx.array, mx.array]:
        """Return the keys ``[B, n_kv_heads, longest, k_head_dim]`` and values of a layer. Padding repeats a row's first
        visible token: a mask hides it, and it is no NaN unless the row has one itself.

        Args:
            kv: the layer.
            tables, step: the rows' tables and step, with the new token of each.
        """
        known = step.columns.get(self.longest)
        if known is None and not kv.in_place:
            known = step.columns[self.longest] = Columns.of_slots(padded_slots(tables))
        elif known is None:
            positions = mx.maximum(self._indices(), 0)
            if self.window is not None:
                positions = positions + mx.array([table.logical_start for table in tables], mx.int32)[:, None]
            known = step.columns[self.longest] = Columns(step.block_tables(tables), positions)
        return kv.storage.read_rows(known)


# Reason of a NotPackableError.
OWN_MASK = "the model's attention makes a mask of its own"


class NotPackableError(Exception):
    """The model uses its caches in a way that packs do not support. Its requests are then computed one by one."""


class FailedRow(NamedTuple):
    """A row for which no block could be allocated, and the error, without its traceback."""

    row: int
    error: Exception


class Reservations:
    """The positions reserved for the current step, and which layers have written them.

    In a step each group reserves its positions once, and each of its layers takes them once. Between two steps every
    layer is at the end of its table.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._lay_out(pool)

    def _lay_out(self, pool: BlockPool) -> None:
        self.pool = pool
        self._place = {layer: index for index, group in enumerate(pool.groups) for layer in group.spec.layers}
        self.mark_level()
        # The latest mask of each group, with its window: a kernel takes the window for a mask that comes back.
        self.masks: dict[int, tuple[weakref.ref[mx.array], Window]] = {}
        self._steps: list[weakref.ref[Step] | None] = [None] * len(pool.groups)  # the latest of each group

    def _step_of(self, group: int, tables: Sequence[BlockTable], counts: Sequence[int] | int) -> Step:
        """Return the step of a group's tables, made and checked once for all its layers."""
        known = self._steps[group]
        step = None if known is None else known()
        if step is None or not self.pool.groups[group].is_current(step):
            step = self.pool.layer(self.pool.groups[group].spec.layers[0]).step(tables, counts)
            self._steps[group] = weakref.ref(step)
        return step

    @property
    def num_layers(self) -> int:
        """Number of layers of all groups."""
        return len(self._place)

    def mark_level(self) -> None:
        """Mark every layer as being at the end of its table."""
        # Layers of each group that have not taken the reserved positions.
        self._behind: list[set[int]] = [set() for _ in self.pool.groups]

    def is_level(self) -> bool:
        """Return whether every layer is at the end of its table."""
        return not any(self._behind)

    def is_behind(self, layer: int) -> bool:
        """Return whether positions are reserved that the layer has not taken."""
        return layer in self._behind[self._place[layer]]

    def _note_reserved(self, group: int) -> None:
        self._behind[group] = set(self.pool.groups[group].spec.layers)

    def take(self, layer: int) -> None:
        """Record that a layer writes its reserved positions. Raises BlockStateError if there are none."""
        try:
            self._behind[self._place[layer]].remove(layer)
        except KeyError:
            raise self._not_reserved(layer) from None

    def _take_all(self) -> None:
        """Record that every layer writes its reserved positions. Raises like :meth:`take`, and records nothing then."""
        for group, behind in zip(self.pool.groups, self._behind, strict=True):
            if len(behind) < len(group.spec.layers):
                raise self._not_reserved(next(layer for layer in group.spec.layers if layer not in behind))
        self.mark_level()

    def _not_reserved(self, layer: int) -> Exception:
        return BlockStateError(f"layer {layer} writes without reserved positions")

    def undo_takes(self) -> None:
        """Undo :meth:`take` of every layer. The positions stay reserved, and the layers can take them again."""
        for group in range(len(self._behind)):
            self._note_reserved(group)

    def window_of(self, mask: mx.array | str | None) -> Window | None:
        """Return the window that a mask made here stands for; None for any other."""
        if mask is not None and not isinstance(mask, str):
            for made, window in self.masks.values():
                if made() is mask:
                    return window
        return None


class SequenceTables(Reservations):
    """The block tables of one sequence, one per group of layers. Shared by its layer caches.

    ``copy.deepcopy`` makes a fork: references to the same blocks, no bytes.

    Args:
        pool: the pool of the blocks.
        pool_of_dtype: returns the pool of the same groups for keys of a dtype, or None if there is none.

    Attributes:
        kept: if layers have states, copies of these to which the sequence can be trimmed; None in a fork.
    """

    kept: KeptStates | None = None

    def __init__(self, pool: BlockPool, pool_of_dtype: Callable[[mx.Dtype], BlockPool | None] | None = None) -> None:
        super().__init__(pool)
        self._pool_of_dtype = pool_of_dtype
        self.tables: list[BlockTable] = [pool.new_table(group) for group in range(len(pool.groups))]
        self._counts = [0] * len(self.tables)  # new tokens of each group in the current step

    @classmethod
    def over(cls, pool: BlockPool, tables: Sequence[BlockTable]) -> SequenceTables:
        """Return a sequence that takes over these tables, one per group. Every layer is at their end."""
        sequence = object.__new__(cls)
        sequence._lay_out(pool)
        sequence._pool_of_dtype = None
        sequence.tables = list(tables)
        sequence._counts = [0] * len(sequence.tables)
        return sequence

    def move(self, dtype: mx.Dtype) -> bool:
        """Move to the pool for keys of this dtype, if nothing has been written yet. Return whether it moved."""
        if self._pool_of_dtype is None or any(table.length for table in self.tables):
            return False
        pool = self._pool_of_dtype(dtype)
        if pool is None or pool is self.pool:
            return False
        for table in self.tables:
            self.pool.release_table(table)
        self._lay_out(pool)
        self.tables[:] = [pool.new_table(group) for group in range(len(pool.groups))]
        return True

    def table(self, layer: int) -> BlockTable:
        """Return the block table of the layer's group."""
        return self.tables[self._place[layer]]

    def tables_of(self, layer: int) -> list[BlockTable]:
        """Return a list of the layer's table, as a batch of one."""
        return [self.tables[self._place[layer]]]

    @property
    def length(self) -> int:
        """Number of tokens that all layers have seen."""
        counts = zip(self.tables, self._behind, self._counts, strict=True)
        return min(table.length - bool(behind) * count for table, behind, count in counts)

    def offset(self, layer: int) -> int:
        """Return the number of tokens that the layer has seen."""
        group = self._place[layer]
        length = self.tables[group].length
        return length - self._counts[group] if layer in self._behind[group] else length

    def take_next(self, layer: int, num_tokens: int) -> BlockTable:
        """Take positions for the layer's next tokens; in a step the first layer of a group reserves them.

        Raises:
            BlockStateError: other layers of the group have not finished the last step, or take another number.
        """
        group = self._place[layer]
        table, behind = self.tables[group], self._behind[group]
        if not behind:
            if len(self.tables) > 1 and table.blocks_for(num_tokens):
                others = [other for other in self.tables if other is not table and other.length == table.length]
                self.pool.ensure_free_for([table, *others], num_tokens)
            self.pool.append_tokens(table, num_tokens)
            self._counts[group] = num_tokens
            self._note_reserved(group)
        elif layer not in behind or self._counts[group] != num_tokens:
            raise BlockStateError(
                f"layer {layer} writes {num_tokens} tokens at {self.offset(layer)}, but its group ends at "
                f"{table.length}: all layers of a group must write the same tokens"
            )
        self.take(layer)
        return table

    def take_all(self) -> list[list[BlockTable]]:
        """Reserve one position, unless it is reserved, and take it for every layer. Return a list of each group's
        table, as batches of one.

        Raises:
            BlockStateError: some layers have taken it already, or more positions are reserved.
        """
        self.reserve(1)
        if any(count != 1 for count in self._counts):
            raise BlockStateError(f"a step must have one reserved token, got {max(self._counts)}")
        self._take_all()
        return [[table] for table in self.tables]

    def begin_layer(self, layer: int, num_tokens: int) -> tuple[list[BlockTable], Step]:
        """Call :meth:`take_next`. Return a list of the layer's table, as a batch of one, and the step, made and checked
        once for all layers of a group."""
        tables = [self.take_next(layer, num_tokens)]
        return tables, self._step_of(self._place[layer], tables, num_tokens)

    def reserve(self, num_tokens: int) -> None:
        """Reserve positions for the next tokens, which :meth:`take_next` then takes, in the groups that have none.

        Raises:
            Exception: from :meth:`BlockPool.append_tokens`; nothing is reserved then.
        """
        level = [group for group, behind in enumerate(self._behind) if not behind]
        if len(level) > 1:
            self.pool.ensure_free_for([self.tables[group] for group in level], num_tokens)
        done = []
        try:
            for group in level:
                self.pool.append_tokens(self.tables[group], num_tokens)
                done.append(self.tables[group])
        except Exception:
            for table in done:
                self.pool.trim(table, num_tokens)
            raise
        for group in level:
            self._counts[group] = num_tokens
            self._note_reserved(group)

    def cut(self, num_tokens: int) -> None:
        """Drop the last tokens of all layers, which must be at the end of their tables; or undo :meth:`reserve`."""
        if num_tokens:
            for table in self.tables:
                self.pool.trim(table, num_tokens)
        self.mark_level()
        if self.kept is not None:
            self.kept.forget_behind(self.length)

    def trim(self, layer: int, num_tokens: int) -> None:
        """Drop the layer's last tokens; the table is trimmed with the last of its layers.

        Raises:
            BlockStateError: other layers of the group are being trimmed by another number, or are in a step.
        """
        group = self._place[layer]
        table, behind = self.tables[group], self._behind[group]
        if behind and (layer in behind or self._counts[group] != num_tokens):
            raise BlockStateError(
                f"layer {layer}: all layers of a group must be trimmed by the same number of tokens, got {num_tokens}"
            )
        self.pool.check_trim(table, table.length - num_tokens)
        self._counts[group] = num_tokens
        behind.add(layer)
        if len(behind) == len(self.pool.groups[group].spec.layers):
            self.pool.trim(table, num_tokens)
            behind.clear()
            if self.kept is not None:
                self.kept.forget_behind(table.length)

    def load(self, layer: int, length: int, start: int) -> BlockTable:
        """Return the layer's table with ``length`` tokens for it to write, without blocks for those before ``start``.
        The first layer of a group makes the table, of an empty sequence.

        Raises:
            BlockStateError: the table has another length or start, or the layer has been loaded.
        """
        group = self._place[layer]
        table = self.tables[group]
        if table.length == 0:
            table = self.pool.new_table(group, start=start)
            if length > start:
                self.pool.append_tokens(table, length - start)
            self.tables[group] = table
            self._counts[group] = length
            self._note_reserved(group)
        elif (table.length, table.logical_start) != (length, start):
            raise BlockStateError(
                f"layer {layer} holds positions {start} to {length}, the earlier layers of its group "
                f"{table.logical_start} to {table.length}"
            )
        self.take(layer)
        return table

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceTables:
        fork = object.__new__(SequenceTables)
        memo[id(self)] = fork
        fork._lay_out(self.pool)
        fork._pool_of_dtype = None if any(table.length for table in self.tables) else self._pool_of_dtype
        fork.tables = [self.pool.fork(table) for table in self.tables]
        fork._counts = list(self._counts)
        fork._behind = [set(layers) for layers in self._behind]
        return fork


class Rows(Reservations):
    """The T new tokens of B sequences in a model call; to the model they are a batch of T rows of one token. Shared by
    the caches of all layers; its sequences never change.

    In a decode step each sequence has one token, and the same object serves step after step. In a pack some have
    several: for the model's own code each token is a row at its own position, and only attention knows which tokens it
    sees, in the pack and before it. So nothing is padded.

    Args:
        pool: the pool of all sequences.
        sequences: each at the end of its tables in all layers.
        counts: new tokens of each sequence, at least one; None: one each.
        as_rows: attend with the decode kernel: few tokens after long contexts.

    Raises:
        BlockStateError: a sequence is in the middle of a step, or of another pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        sequences: Sequence[SequenceTables],
        counts: Sequence[int] | None = None,
        *,
        as_rows: bool = False,
    ) -> None:
        for sequence in sequences:
            if sequence.pool is not pool:
                raise BlockStateError("all sequences of a batch must be of one pool")
            if any(sequence._behind):  # one that is not level
                raise BlockStateError("a sequence whose layers are at different offsets cannot join a batch")
        super().__init__(pool)
        self.sequences = tuple(sequences)
        self.counts = (1,) * len(sequences) if counts is None else tuple(counts)
        self.num_tokens = sum(self.counts)
        self.is_pack = self.num_tokens > len(self.sequences)  # some sequence has several new tokens
        self.as_rows = as_rows
        self.tables: list[list[BlockTable]] = [[each.tables[g] for each in sequences] for g in range(len(pool.groups))]
        self.is_reserved = False
        self._attended: set[int] = set()
        self._offsets: dict[bool, mx.array] = {}
        self._left_paddings: dict[int, LeftPadding] = {}
        self._narrow_masks: dict[int, mx.array] = {}

    def __len__(self) -> int:
        """Return the number of rows that the model sees, one per token."""
        return self.num_tokens

    def tables_of(self, layer: int) -> list[BlockTable]:
        """Return the block tables of the layer's group, one per sequence."""
        return self.tables[self._place[layer]]

    def step(self, layer: int) -> Step:
        """Return the step of the layer's group, made and checked once for all its layers."""
        group = self._place[layer]
        return self._step_of(group, self.tables[group], self.counts)

    def begin_layer(self, layer: int) -> tuple[list[BlockTable], Step]:
        """Record that a layer writes its tokens and attends to them. Return :meth:`tables_of` and :meth:`step`."""
        group = self._place[layer]
        tables = self.tables[group]
        step = self._step_of(group, tables, self.counts)
        self.take(layer)
        if self.is_pack:  # only commit() of a pack checks this
            self._attended.add(layer)
        return tables, step

    # Reserving ------------------------------------------------------------------------------------------------

    def reserve(self) -> FailedRow | None:
        """Reserve the new tokens of every sequence in every group.

        Returns:
            None; or the sequence for which a block was missing, and the error. Nothing has been reserved then.

        Raises:
            BlockStateError: a layer has not written its last reserved tokens.
        """
        if not self.is_level():
            raise BlockStateError("a layer has not written the tokens of the previous step")
        self._offsets, self._left_paddings, self._attended = {}, {}, set()
        if self.is_pack and len(self.tables) > 1:
            for sequence, count in zip(self.sequences, self.counts, strict=True):
                self.pool.ensure_free_for(sequence.tables, count)
        done = 0
        try:
            while done < len(self.tables):
                failed = self._reserve_group(done)
                if failed is not None:
                    return failed
                done += 1
            for group in range(done):
                self._note_reserved(group)
        finally:
            if done < len(self.tables):
                for group in range(done):
                    self._trim(group)
        self.is_reserved = True
        return None

    def _reserve_group(self, group: int) -> FailedRow | None:
        tables = self.tables[group]
        others: Sequence[int] = range(len(tables)) if self.is_pack else self.pool.append_token(group, tables)
        for place, index in enumerate(others):
            try:
                self.pool.append_tokens(tables[index], self.counts[index])
            except Exception as error:
                self._trim(group, set(range(len(tables))).difference(others[place:]))
                return FailedRow(index, without_frames(error))
        return None

    def _trim(self, group: int, indices: set[int] | None = None) -> None:
        for index in range(len(self.counts)) if indices is None else indices:
            self.pool.trim(self.tables[group][index], self.counts[index])

    def undo_reserve(self) -> None:
        """Undo the latest :meth:`reserve`; what layers have written for it is dropped."""
        if self.is_reserved:
            for group in range(len(self.tables)):
                self._trim(group)
        self.is_reserved = False
        self._offsets, self._left_paddings = {}, {}
        self.mark_level()

    def _not_reserved(self, layer: int) -> Exception:
        return (
            NotPackableError(f"layer {layer} writes twice in a step") if self.is_pack else super()._not_reserved(layer)
        )

    def take_all(self) -> list[list[BlockTable]]:
        """Record that every layer writes its tokens and attends to them. Return the tables of each group."""
        self._take_all()
        self._attended.update(self._place)
        return self.tables

    def undo_takes(self) -> None:
        """Undo :meth:`take` of every layer, and forget which have attended to their tokens."""
        super().undo_takes()
        self._attended.clear()

    def note_attended(self, layer: int) -> None:
        """Record that a layer has attended to what it has written."""
        self._attended.add(layer)

    def commit(self) -> None:
        """Check, after the call of a pack, that every layer has written its tokens and attended to them.

        Raises:
            NotPackableError: one has not.
        """
        for layer in self._place:
            if self.is_behind(layer) or (self.is_pack and layer not in self._attended):
                raise NotPackableError(f"layer {layer} does not write its tokens, or does not attend to them")

    # What layers see ------------------------------------------------------------------------------------------

    def offsets(self, layer: int) -> mx.array:
        """Return the position of each token, int32 ``[T]``; of the next token once the layer has written it. All layers
        share the array."""
        behind = self.is_behind(layer)
        known = self._offsets.get(behind)
        if known is None:
            ends = [table.length for table in self.tables_of(layer)]
            if behind and self.is_pack:
                spans = [np.arange(end - n, end, dtype=np.int32) for end, n in zip(ends, self.counts, strict=True)]
                known = mx.array(np.concatenate(spans))
            elif self.is_pack:
                known = self._offsets.get(True)
                known = mx.array(ends, mx.int32) if known is None else known + 1
            else:
                known = mx.array(np.array(ends, np.int32) - behind)
            self._offsets[behind] = known
        return known

    def lengths(self, layer: int) -> list[int]:
        """Return the number of tokens of each sequence that the layer has seen."""
        behind = self.is_behind(layer)
        return [table.length - behind * n for table, n in zip(self.tables_of(layer), self.counts, strict=True)]

    def left_padding(self, layer: int) -> LeftPadding:
        """Return the left-padded layout of a decode step's rows, made once for all layers of a group."""
        group = self._place[layer]
        known = self._left_paddings.get(group)
        if known is None:
            known = LeftPadding(self.lengths(layer), self.pool.groups[group].spec.sees)
            self._left_paddings[group] = known
        return known

    def narrow_mask(self, window: int) -> mx.array:
        """Return the placeholder mask of a pack for a window narrower than the layer's; :meth:`window_of` recognises
        it."""
        made = self._narrow_masks.get(window)
        if made is None:
            made = self._narrow_masks[window] = mx.ones((len(self), 1, 1, 1), mx.bool_)
        return made

    def window_of(self, mask: mx.array | str | None) -> Window | None:
        """Return the window that a mask made here stands for; None for any other."""
        for window, made in self._narrow_masks.items():
            if made is mask:
                return Window(window)
        return super().window_of(mask)
