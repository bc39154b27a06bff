"""BlockStore: the groups of layers, their blocks, and the memory they may take."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import mlx.core as mx

from ..errors import ConfigError, PoolExhaustedError
from .group import BlockGroup, ChooseStorage, LayerGroup, check_layout, functional_storage
from .holder import BlockHolder
from .storage import Geometry, QueryHeads
from .turn import Turn

UNLIMITED = 1 << 62


class BlockStore:
    """Hands out blocks, counts references to them and grows the tensors behind them within a budget.

    What :class:`.pool.BlockPool` is built on; it knows nothing of sequences.

    Args:
        groups: the groups of layers. Each layer index belongs to exactly one group.
        block_size: tokens per block, a power of two from 4 to 128.
        memory_budget: most bytes the tensors of all groups may take.
        choose_storage: the form of a group's storage, asked once, at its first keys and values.

    Raises:
        ConfigError: block size, budget or groups are unusable.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        block_size: int = 32,
        memory_budget: int = UNLIMITED,
        choose_storage: ChooseStorage = functional_storage,
    ) -> None:
        check_layout(groups, block_size)
        if memory_budget <= 0:
            raise ConfigError(f"the memory budget must be positive, not {memory_budget} bytes")
        self.block_size = block_size
        self.memory_budget = memory_budget
        self.groups = [BlockGroup(spec, block_size, choose_storage) for spec in groups]
        self._place = {
            layer: (index, position) for index, spec in enumerate(groups) for position, layer in enumerate(spec.layers)
        }
        # Tables dropped by their owner put their blocks here from whatever thread collects them.
        self._abandoned: deque[tuple[int, list[int]]] = deque()
        self._lock = threading.RLock()
        self.turn = Turn(self._lock, self.groups)
        self._holders: list[weakref.ref[BlockHolder]] = []

    def group_of(self, layer: int) -> int:
        """Index of the group a model layer belongs to."""
        return self._place[layer][0]

    @property
    def pins_tokens(self) -> bool:
        """Whether some group keeps its first tokens. Beyond its window keys then depend on how the tokens came: in a
        chunk, as in mlx-lm, pinned tokens leave the window before others do."""
        return any(group.spec.pinned for group in self.groups)

    def allocate(self, group: int, count: int) -> list[int]:
        """Take ``count`` blocks of a group, growing its tensors within the budget.

        Raises:
            PoolExhaustedError: they do not fit; nothing was changed.
        """
        with self.turn:
            self._collect_abandoned()
            block_group = self.groups[group]
            if count > block_group.allocator.num_free:
                self._grow(block_group, count)
            return block_group.allocator.allocate(count)

    def retain(self, group: int, block_ids: Sequence[int]) -> None:
        """Add one reference to each block. Raises BlockStateError if one is free."""
        with self._lock:
            self.groups[group].allocator.retain(block_ids)
            self.groups[group].touch()

    def release(self, group: int, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block. Raises BlockStateError if one is free already."""
        with self._lock:
            self.groups[group].allocator.release(block_ids)

    # Holders --------------------------------------------------------------------------------------------------

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """Guards every change; a holder takes it for its own changes, so that the two cannot wait for each other."""
        return self.turn

    def add_holder(self, holder: BlockHolder) -> None:
        """Ask ``holder`` for blocks before an allocation fails, and count what it holds. Kept weakly."""
        with self._lock:
            self._holders = [*(ref for ref in self._holders if ref() is not None), weakref.ref(holder)]

    def holders(self) -> list[BlockHolder]:
        return [holder for ref in self._holders if (holder := ref()) is not None]

    def _reclaim(self, group: BlockGroup, num_blocks: int) -> bool:
        """Have the holders free ``num_blocks`` blocks; False, and nothing is given up, if they cannot."""
        index, holders = self.groups.index(group), self.holders()
        if sum(holder.reclaimable(index) for holder in holders) < num_blocks:
            return False
        for holder in holders:
            if num_blocks > 0:
                num_blocks -= holder.reclaim(index, num_blocks)
        return num_blocks <= 0

    def make_free(self, group: int, count: int, most: int) -> None:
        """Have ``count`` blocks of a group free, growing its tensors within the budget, but so that no more than
        ``most`` are free then. Does nothing if that many do not fit: allocating them says so."""
        with self.turn:
            self._collect_abandoned()
            block_group = self.groups[group]
            if count > block_group.allocator.num_free:
                with suppress(PoolExhaustedError):
                    self._grow(block_group, count, most)

    def _grow(self, group: BlockGroup, count: int, most: int | None = None) -> None:
        total = group.allocator.num_blocks
        missing = count - group.allocator.num_free
        target = group.growth(count, self.memory_budget)
        if most is not None:
            target = min(target, total - group.allocator.num_free + max(count, most))
        if group.geometry is not None:
            others = sum(g.bytes_reserved for g in self.groups if g is not group)
            affordable = (self.memory_budget - others) // group.bytes_per_block
            excess = total + missing - affordable
            if excess > 0:
                if not self._reclaim(group, excess):
                    raise self._exhausted(missing, missing * group.bytes_per_block)
                missing = count - group.allocator.num_free
                if missing <= 0:
                    return
            # Beyond the need, at most half of what is left: another group may need the rest.
            target = min(target, total + max(missing, (affordable - total) // 2))
        self.turn.is_dirty = True
        group.grow(target)

    def _exhausted(self, blocks: int, num_bytes: int) -> PoolExhaustedError:
        return PoolExhaustedError(
            blocks_needed=blocks,
            bytes_needed=num_bytes,
            budget_bytes=self.memory_budget,
            bytes_reserved=sum(g.bytes_reserved for g in self.groups),
        )

    def set_geometry(
        self, layer: int, k: mx.array, v: mx.array, *, batch: int, heads: QueryHeads | None = None
    ) -> BlockGroup:
        """Fix the geometry and storage of the layer's group by its first keys and values; later calls only validate.

        Args:
            layer: model layer.
            k, v: keys and values about to be written.
            batch: sequences they must hold.
            heads: the queries that will attend over them, for the choice of a kernel.

        Returns:
            The layer's group.

        Raises:
            GeometryError: rank, number of sequences, heads, head dimension or dtype are not as they must be.
            PoolExhaustedError: not even the blocks handed out so far fit the budget.
            KernelUnavailableError: a kernel is demanded and there is none for this geometry.
        """
        group = self.groups[self.group_of(layer)]
        geometry = group.validate(k, v, batch)
        if group.geometry is None:
            self._fix_geometry(group, geometry, heads)
        return group

    def fitted(self, layer: int, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values in the dtype that the layer holds, as mlx-lm's caches take them; as they are if it is not
        known yet."""
        geometry = self.groups[self.group_of(layer)].geometry
        if geometry is None or not mx.issubdtype(k.dtype, mx.floating) or k.dtype != v.dtype:
            return k, v
        return k.astype(geometry.dtype), v.astype(geometry.dtype)

    def _fix_geometry(self, group: BlockGroup, geometry: Geometry, heads: QueryHeads | None) -> None:
        with self.turn:
            self._collect_abandoned()
            group.allocator.shrink()
            per_block = self.block_size * geometry.bytes_per_token() * len(group.spec.layers)
            known = group.allocator.num_blocks
            others = sum(g.bytes_reserved for g in self.groups)
            if others + known * per_block > self.memory_budget:
                raise self._exhausted(known, known * per_block)
            self.turn.is_dirty = True
            group.set_geometry(geometry, heads)

    def abandon(self, group: int, block_ids: list[int]) -> None:
        """Drop one reference of each block, soon; for finalizers, which may run anywhere in this very class."""
        self._abandoned.append((group, block_ids))

    def collect(self) -> None:
        """Release what tables held that their owners have dropped; for whoever is going to count free blocks."""
        if self._abandoned:
            with self._lock:
                self._collect_abandoned()

    def _collect_abandoned(self) -> None:
        while self._abandoned:
            group, block_ids = self._abandoned.popleft()
            self.groups[group].allocator.release(block_ids)
