"""SequenceTables: the block tables of one sequence, and how far each of its layers is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import BlockStateError
from ..kv.attention_params import Window
from ..kv.block_table import BlockTable
from ..kv.new_tokens import NewTokens
from ..kv.pool import BlockPool


class KnownMasks:
    """The latest mask that each group's caches have made, with the window that it stands for: a kernel takes the window
    for a mask that comes back."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[mx.array], Window]] = {}

    def add(self, group: int, mask: mx.array, window: Window) -> None:
        """Note a mask of a group; a weak reference does not keep its memory."""
        self._made[group] = weakref.ref(mask), window

    def window_of(self, mask: mx.array | str | None) -> Window | None:
        """Return the window that a mask made here stands for; None for any other."""
        if mask is not None and not isinstance(mask, str):
            for made, window in self._made.values():
                if made() is mask:
                    return window
        return None


class SequenceTables:
    """The block tables of one sequence, one per group of layers. Shared by its layer caches.

    In a step the first layer of a group reserves its positions, and each of its layers writes them once. A layer that
    has not is behind the end of its table; between two steps none is.

    ``copy.deepcopy`` makes a fork: references to the same blocks, no bytes.

    Args:
        pool: the pool of the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._lay_out(pool, [pool.new_table(group) for group in range(len(pool.groups))])

    def _lay_out(self, pool: BlockPool, tables: Sequence[BlockTable]) -> None:
        self.pool = pool
        self.masks = KnownMasks()
        self.take_over(tables)

    def take_over(self, tables: Sequence[BlockTable]) -> None:
        """Continue these tables, one per group. Every layer is at their end."""
        self.tables = list(tables)
        self._behind: dict[int, int] = {}  # tokens by which layers are behind the end of their table
        # By group, the latest token alone and the latest several: a sequence with drafts alternates between them.
        self._tokens: dict[tuple[int, bool], NewTokens] = {}

    @classmethod
    def over(cls, pool: BlockPool, tables: Sequence[BlockTable]) -> SequenceTables:
        """Return a sequence that takes over these tables, one per group. Every layer is at their end."""
        sequence = object.__new__(cls)
        sequence._lay_out(pool, tables)
        return sequence

    @property
    def num_layers(self) -> int:
        """Number of layers of all groups."""
        return len(self.pool.places)

    def table(self, layer: int) -> BlockTable:
        """Return the block table of the layer's group."""
        return self.tables[self.pool.places[layer][0]]

    @property
    def length(self) -> int:
        """Number of tokens that all layers have seen."""
        ends = [table.length for table in self.tables]
        for layer in self._behind:
            group = self.pool.places[layer][0]
            ends[group] = min(ends[group], self.offset(layer))
        return min(ends)

    def offset(self, layer: int) -> int:
        """Return the number of tokens that the layer has seen."""
        return self.tables[self.pool.places[layer][0]].length - self._behind.get(layer, 0)

    def is_level(self) -> bool:
        """Return whether every layer is at the end of its table."""
        return not self._behind

    def _layers_behind(self, group: int) -> list[int]:
        if not self._behind:
            return []
        return [layer for layer in self.pool.groups[group].spec.layers if layer in self._behind]

    # Writing --------------------------------------------------------------------------------------------------

    def begin_layer(self, layer: int, num_tokens: int) -> NewTokens:
        """Return a layer's next tokens, which it writes now; in a step the first layer of a group reserves them.

        Raises:
            BlockStateError: other layers of the group have not finished the last step, or write another number.
            PoolExhaustedError: from :meth:`BlockPool.append_tokens`.
        """
        group = self.pool.places[layer][0]
        behind = self._behind.get(layer, 0)
        if not behind and not self._layers_behind(group):
            table = self.tables[group]
            if len(self.tables) > 1 and table.blocks_for(num_tokens):
                others = [other for other in self.tables if other is not table and other.length == table.length]
                self.pool.ensure_free_for([table, *others], num_tokens)
            self.pool.append_tokens(table, num_tokens)
            self._behind.update(dict.fromkeys(self.pool.groups[group].spec.layers, num_tokens))
        elif behind != num_tokens:
            raise BlockStateError(
                f"layer {layer} writes {num_tokens} tokens at {self.offset(layer)}, but its group ends at "
                f"{self.tables[group].length}: all layers of a group must write the same tokens"
            )
        del self._behind[layer]
        return self._tokens_of(group, num_tokens)

    def _tokens_of(self, group: int, num_tokens: int) -> NewTokens:
        key, own = (group, num_tokens > 1), self.pool.groups[group]
        tokens = self._tokens.get(key)
        if tokens is None or tokens.counts[0] != num_tokens:
            tokens = self._tokens[key] = NewTokens([self.tables[group]], (num_tokens,))
        if tokens.epoch != own.epoch:
            self.pool.begin(own, tokens)
        return tokens

    def latest_tokens(self, layer: int, num_tokens: int) -> NewTokens:
        """Return the last tokens that a layer has written.

        Raises:
            GeometryError, BlockStateError: from :meth:`BlockPool.begin`.
        """
        return self._tokens_of(self.pool.places[layer][0], num_tokens)

    def begin_all(self) -> list[NewTokens]:
        """Reserve one position, unless it is reserved, and return the new tokens of each group, which every layer
        writes now.

        Raises:
            BlockStateError: some layers have written it already, or more positions are reserved.
        """
        self.reserve(1)
        if len(self._behind) < self.num_layers or any(count != 1 for count in self._behind.values()):
            raise BlockStateError(f"a step must have one reserved token in each layer, got {self._behind}")
        self._behind.clear()
        return [self._tokens_of(group, 1) for group in range(len(self.tables))]

    def undo_begin(self) -> None:
        """Undo :meth:`begin_all`; the positions stay reserved."""
        self._behind = dict.fromkeys(self.pool.places, 1)

    def reserve(self, num_tokens: int) -> None:
        """Reserve positions for the next tokens, which :meth:`begin_layer` then takes, in the groups that have none.

        Raises:
            Exception: from :meth:`BlockPool.append_tokens`; nothing is reserved then.
        """
        level = [group for group in range(len(self.tables)) if not self._layers_behind(group)]
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
            self._behind.update(dict.fromkeys(self.pool.groups[group].spec.layers, num_tokens))

    # Cutting and loading --------------------------------------------------------------------------------------

    def cut(self, num_tokens: int) -> None:
        """Drop the last tokens of all layers, which must be at the end of their tables; or undo :meth:`reserve`."""
        if num_tokens:
            for table in self.tables:
                self.pool.trim(table, num_tokens)
        self._behind.clear()

    def trim(self, layer: int, num_tokens: int) -> None:
        """Drop the layer's last tokens; the table is trimmed with the last of its layers.

        Raises:
            BlockStateError: other layers of the group are being trimmed by another number, or are in a step.
        """
        group = self.pool.places[layer][0]
        table, behind = self.tables[group], self._layers_behind(group)
        if layer in behind or any(self._behind[other] != num_tokens for other in behind):
            raise BlockStateError(
                f"layer {layer}: all layers of a group must be trimmed by the same number of tokens, got {num_tokens}"
            )
        self.pool.check_trim(table, table.length - num_tokens)
        self._behind[layer] = num_tokens
        if len(behind) + 1 == len(self.pool.groups[group].spec.layers):
            self.pool.trim(table, num_tokens)
            for trimmed in (layer, *behind):
                del self._behind[trimmed]

    def load(self, layer: int, length: int, start: int) -> BlockTable:
        """Return the layer's table with ``length`` tokens for it to write, without blocks for those before ``start``.
        The first layer of a group makes the table, of an empty sequence.

        Raises:
            BlockStateError: the table has another length or start, or the layer has been loaded.
        """
        group = self.pool.places[layer][0]
        table = self.tables[group]
        if table.length == 0:
            table = self.pool.new_table(group, start=start)
            if length > start:
                self.pool.append_tokens(table, length - start)
            self.tables[group] = table
            self._tokens.clear()
            self._behind.update(dict.fromkeys(self.pool.groups[group].spec.layers, length))
        elif (table.length, table.logical_start) != (length, start):
            raise BlockStateError(
                f"layer {layer} holds positions {start} to {length}, the earlier layers of its group "
                f"{table.logical_start} to {table.length}"
            )
        if self._behind.pop(layer, None) is None:
            raise BlockStateError(f"layer {layer} has been loaded")
        return table

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceTables:
        fork = object.__new__(SequenceTables)
        memo[id(self)] = fork
        fork._lay_out(self.pool, [self.pool.fork(table) for table in self.tables])
        fork._behind = dict(self._behind)
        return fork
