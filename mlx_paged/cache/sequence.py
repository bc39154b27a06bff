"""SequenceTables: the block table of one sequence, and how far each of its layers is."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import mlx.core as mx

from ..errors import BlockStateError
from ..kv.allocator import NULL_BLOCK
from ..kv.block_table import BlockTable
from ..kv.geometry import Window
from ..kv.new_tokens import NewTokens
from ..kv.pool import BlockPool


class KnownMasks:
    """The latest masks that caches have made, with the windows that they stand for: a kernel takes the window for a
    mask that comes back."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[weakref.ref[mx.array], Window]] = {}

    def add(self, name: Hashable, mask: mx.array, window: Window) -> None:
        """Note a mask in place of the one with the same name; a weak reference does not keep its memory."""
        self._made[name] = weakref.ref(mask), window

    def window_of(self, mask: mx.array | str | None) -> Window | None:
        """Return the window that a mask made here stands for; None for any other."""
        if mask is not None and not isinstance(mask, str):
            for made, window in self._made.values():
                if made() is mask:
                    return window
        return None


class SequenceTables:
    """The block table of one sequence, shared by its layer caches.

    In a step the first layer reserves the positions, and each layer writes them once. A layer that has not is behind
    the end of the table; between two steps none is.

    ``copy.deepcopy`` makes a fork: references to the same blocks, no bytes.

    Args:
        pool: the pool of the blocks.
        table: a table of the pool to take over, at whose end every layer is; None: a new one.
    """

    def __init__(self, pool: BlockPool, table: BlockTable | None = None) -> None:
        self.pool = pool
        self.masks = KnownMasks()
        self.take_over(pool.new_table() if table is None else table)

    def take_over(self, table: BlockTable) -> None:
        """Continue this table. Every layer is at its end."""
        self.table = table
        self._behind: dict[int, int] = {}  # tokens by which layers are behind the end of the table
        # By group, the latest token alone and the latest several: a sequence with drafts alternates between them.
        self._tokens: dict[tuple[int, bool], NewTokens] = {}

    @property
    def length(self) -> int:
        """Number of tokens that all layers have seen."""
        return self.table.length - max(self._behind.values(), default=0)

    def offset(self, layer: int) -> int:
        """Return the number of tokens that the layer has seen."""
        return self.table.length - self._behind.get(layer, 0)

    def is_level(self) -> bool:
        """Return whether every layer is at the end of the table."""
        return not self._behind

    # Writing --------------------------------------------------------------------------------------------------

    def begin_layer(self, layer: int, num_tokens: int) -> NewTokens:
        """Return a layer's next tokens, which it writes now; in a step the first layer reserves them.

        Raises:
            BlockStateError: other layers have not finished the last step, or write another number.
            PoolExhaustedError: from :meth:`BlockPool.append_tokens`.
        """
        self.reserve(num_tokens)
        if self._behind.get(layer) != num_tokens:
            raise BlockStateError(
                f"layer {layer} writes {num_tokens} tokens at {self.offset(layer)}, but its sequence ends at "
                f"{self.table.length}: all layers must write the same tokens"
            )
        del self._behind[layer]
        return self.latest_tokens(self.pool.places[layer][0], num_tokens)

    def latest_tokens(self, group: int, num_tokens: int) -> NewTokens:
        """Return the last tokens that a group's layers have written.

        Raises:
            GeometryError, BlockStateError: from :meth:`BlockPool.begin`.
        """
        key, own = (group, num_tokens > 1), self.pool.groups[group]
        tokens = self._tokens.get(key)
        if tokens is None or tokens.counts[0] != num_tokens:
            tokens = self._tokens[key] = NewTokens([self.table], (num_tokens,), group)
        if tokens.epoch != own.epoch:
            self.pool.begin(own, tokens)
        return tokens

    def begin_all(self) -> list[NewTokens]:
        """Reserve one position, unless it is reserved, and return the new tokens of each group, which every layer
        writes now.

        Raises:
            BlockStateError: some layers have written it already, or more positions are reserved.
        """
        self.reserve(1)
        if len(self._behind) < len(self.pool.places) or any(count != 1 for count in self._behind.values()):
            raise BlockStateError(f"a step must have one reserved token in each layer, got {self._behind}")
        self._behind.clear()
        return [self.latest_tokens(group, 1) for group in range(len(self.pool.groups))]

    def undo_begin(self) -> None:
        """Undo :meth:`begin_all`; the positions stay reserved."""
        self._behind = dict.fromkeys(self.pool.places, 1)

    def reserve(self, num_tokens: int) -> None:
        """Reserve positions for the next tokens, which :meth:`begin_layer` then takes, unless some are reserved.

        Raises:
            Exception: from :meth:`BlockPool.append_tokens`; nothing is reserved then.
        """
        if not self._behind:
            self.pool.append_tokens(self.table, num_tokens)
            self._behind.update(dict.fromkeys(self.pool.places, num_tokens))

    # Cutting and loading --------------------------------------------------------------------------------------

    def cut(self, num_tokens: int) -> None:
        """Drop the last tokens of all layers, which must be at the end of the table; or undo :meth:`reserve`."""
        if num_tokens:
            self.pool.trim(self.table, num_tokens)
        self._behind.clear()

    def trim(self, layer: int, num_tokens: int) -> None:
        """Drop the layer's last tokens; the table is trimmed with the last of its layers.

        Raises:
            BlockStateError: other layers are being trimmed by another number, or are in a step.
        """
        if layer in self._behind or any(count != num_tokens for count in self._behind.values()):
            raise BlockStateError(
                f"layer {layer}: all layers must be trimmed by the same number of tokens, got {num_tokens}"
            )
        self.pool.check_trim(self.table, self.table.length - num_tokens)
        self._behind[layer] = num_tokens
        if len(self._behind) == len(self.pool.places):
            self.cut(num_tokens)

    def load(self, layer: int, length: int, start: int) -> None:
        """Make ``length`` tokens, without blocks for those before ``start``, the layer's to write. The first layer
        makes the table, of an empty sequence, and the first of each group its blocks.

        Raises:
            BlockStateError: the table has another length or start, or the layer has been loaded.
        """
        group, table, pool = self.pool.places[layer][0], self.table, self.pool
        is_first = table.length == 0
        if is_first:
            ids = [NULL_BLOCK] * (length // pool.block_size)
            table = pool.table_over([ids] * len(pool.groups), length, [length] * len(pool.groups))
        layers = pool.groups[group].spec.layers
        is_first_of_group = is_first or all(self._behind.get(each) == length for each in layers)
        if is_first_of_group and start < length == table.length:
            pool.fill(table, group, start)
        if is_first:
            self.take_over(table)
            self._behind.update(dict.fromkeys(pool.places, length))
        if (table.length, table.starts[group]) != (length, start):
            raise BlockStateError(
                f"layer {layer} holds positions {start} to {length}, the earlier layers {table.starts[group]} to "
                f"{table.length}"
            )
        if self._behind.pop(layer, None) is None:
            raise BlockStateError(f"layer {layer} has been loaded")

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceTables:
        fork = memo[id(self)] = SequenceTables(self.pool, self.pool.fork(self.table))
        fork._behind = dict(self._behind)
        return fork
