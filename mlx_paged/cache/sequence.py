"""SequenceTables: the block tables of one sequence, and how far each layer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..errors import BlockStateError
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.storage.attention_params import Window


class SequenceTables:
    """The block tables of one sequence, one per group of layers, and each layer's offset. Shared by its layer caches.

    ``copy.deepcopy`` makes a fork: references to the same blocks, no bytes.

    Args:
        pool: of the blocks.
        elsewhere: from a dtype of keys to a pool of the same groups that holds such keys, or None if there is none.
    """

    def __init__(self, pool: BlockPool, elsewhere: Callable[[mx.Dtype], BlockPool | None] | None = None) -> None:
        self.pool = pool
        self._elsewhere = elsewhere
        self.tables: list[BlockTable] = [pool.new_table(group) for group in range(len(pool.groups))]
        self._place = {layer: index for index, group in enumerate(pool.groups) for layer in group.spec.layers}
        # Each layer's, or None while all are so many tokens behind the ends of their tables, as between two steps: a
        # batch of many rows and layers then has nothing to write down.
        self._offsets: dict[int, int] | None = None
        self._behind = 0
        # The latest mask made for each group, with its window: a mask that comes back can then be told to a kernel.
        self.masks: dict[int, tuple[mx.array, Window]] = {}
        # Positions decoded one by one, for when they are computed again in chunks; matters with pinned tokens only.
        self.decoded = range(0)

    @property
    def offsets(self) -> dict[int, int]:
        """Tokens that each layer has seen, to read and to change."""
        if self._offsets is None:
            self._offsets = {layer: self.tables[group].length - self._behind for layer, group in self._place.items()}
        return self._offsets

    def set_level(self, behind: int = 0) -> None:
        """Have every layer end so many tokens before its table does."""
        self._offsets, self._behind = None, behind

    def is_level(self, behind: int = 0) -> bool:
        """Return whether every layer ends so many tokens before its table does."""
        if self._offsets is None:
            return self._behind == behind
        return all(self.tables[self._place[layer]].length == end + behind for layer, end in self._offsets.items())

    def move(self, dtype: mx.Dtype) -> bool:
        """Go to a pool for keys of this dtype, if there is one and nothing has been written yet."""
        if self._elsewhere is None or any(table.length for table in self.tables) or any(self.offsets.values()):
            return False
        pool = self._elsewhere(dtype)
        if pool is None or pool is self.pool:
            return False
        for table in self.tables:
            self.pool.release_table(table)
        self.pool = pool
        self.tables[:] = [pool.new_table(group) for group in range(len(pool.groups))]
        self.set_level()
        return True

    def table(self, layer: int) -> BlockTable:
        return self.tables[self._place[layer]]

    def tables_of(self, layer: int) -> list[BlockTable]:
        """Return the layer's table, as that of a batch of one."""
        return [self.tables[self._place[layer]]]

    def reserve(self, layer: int, num_tokens: int) -> BlockTable:
        """Positions for the layer's next tokens; the first layer of a group to come by in a step reserves them."""
        table = self.table(layer)
        missing = self.offsets[layer] + num_tokens - table.length
        if missing not in (0, num_tokens):
            raise BlockStateError(
                f"layer {layer} is at {self.offsets[layer]} while its group ends at {table.length}: "
                "all layers of a group must take the same tokens"
            )
        if missing:
            if len(self.tables) > 1 and table.blocks_for(missing):
                self.pool.ensure_free_for([table, *(other for other in self.tables if other is not table)], missing)
            self.pool.append_tokens(table, missing)
        self.offsets[layer] += num_tokens
        return table

    def reserve_all(self, num_tokens: int) -> None:
        """Positions for the next tokens in all groups, for :meth:`reserve` or a pack to find.

        Raises:
            Exception: as :meth:`BlockPool.append_tokens`; nothing is reserved then.
        """
        if len(self.tables) > 1:
            self.pool.ensure_free_for(self.tables, num_tokens)
        done = []
        try:
            for table in self.tables:
                self.pool.append_tokens(table, num_tokens)
                done.append(table)
        except Exception:
            for table in done:
                self.pool.trim(table, num_tokens)
            raise
        self._behind += num_tokens

    def take_back(self, num_tokens: int) -> None:
        """Undo :meth:`reserve_all`: no layer has taken the positions."""
        for table in self.tables:
            self.pool.trim(table, num_tokens)
        self._behind -= num_tokens

    def cut(self, num_tokens: int) -> None:
        """Drop the last tokens of all layers, which are all at the end of their tables."""
        if num_tokens:
            for table in self.tables:
                self.pool.trim(table, num_tokens)
            if self._offsets is not None:
                self._offsets = {layer: offset - num_tokens for layer, offset in self._offsets.items()}

    def window_of(self, mask: mx.array | str | None) -> Window | None:
        """Return the window of a mask made by :meth:`PagedKVCache.make_mask`; None for any other."""
        if mask is not None and not isinstance(mask, str):
            for made, window in self.masks.values():
                if made is mask:
                    return window
        return None

    def trim(self, layer: int, num_tokens: int) -> None:
        """Take the layer back; the table follows when its last layer has been trimmed."""
        table = self.table(layer)
        self.pool.check_trim(table, self.offsets[layer] - num_tokens)
        self.offsets[layer] -= num_tokens
        longest = max(self.offsets[other] for other in self.pool.groups[table.group].spec.layers)
        if longest < table.length:
            self.pool.trim(table, table.length - longest)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceTables:
        fork = object.__new__(SequenceTables)
        memo[id(self)] = fork
        has_tokens = any(table.length for table in self.tables)
        fork.pool, fork._elsewhere = self.pool, None if has_tokens else self._elsewhere
        fork.tables = [self.pool.fork(table) for table in self.tables]
        fork._place, fork._behind = self._place, self._behind
        fork._offsets = None if self._offsets is None else dict(self._offsets)
        fork.masks = {}
        fork.decoded = range(0)  # the fork goes on by itself
        return fork
