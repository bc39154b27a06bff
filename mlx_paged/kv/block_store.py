"""BlockStore: the groups of layers, their blocks, and the memory they may take."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress

import mlx.core as mx

from ..errors import ConfigError, PoolExhaustedError
from .group import BlockGroup, ChooseStorage, LayerGroup, check_layout, functional_storage
from .holder import BlockHolder
from .storage.base import Geometry, QueryHeads
from .turn import Turn

UNLIMITED = 1 << 62
# Free blocks of other groups are taken before cached ones are given up where they are this part of the pool or more:
# taking them copies those groups' tensors.
WORTH_MOVING = 8


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
        # By identity, the lists of block ids of all tables that have not given them back, with their group: also of
        # those that are just being dropped, in whatever thread.
        self._lists: dict[int, tuple[int, list[int]]] = {}
        self._lock = threading.RLock()
        self.turn = Turn(self._lock, self.groups)
        self._holders: list[weakref.ref[BlockHolder]] = []
        self.shrinks = 0  # how often a group's tensors were made smaller

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
        blocks: list[int] = []
        try:
            with self.turn:
                self._collect_abandoned()
                block_group = self.groups[group]
                if count > block_group.allocator.num_free:
                    self._grow(block_group, count)
                blocks = block_group.allocator.allocate(count)
        except Exception:  # with blocks: what was built could not be computed at the turn's end, and nobody gets them
            self.release(group, blocks)
            raise
        return blocks

    def retain(self, group: int, block_ids: Sequence[int]) -> None:
        """Add one reference to each block. Raises BlockStateError if one is free."""
        with self._lock:
            self.groups[group].touch()
            self.groups[group].allocator.retain(block_ids)

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

    # Room -----------------------------------------------------------------------------------------------------
    # The budget is the pool's. A group that must grow takes what is not reserved; then what is free in other groups,
    # whose tensors are made smaller; and of prefix caches what it needs. See docs/adr/0012.

    @property
    def unheld_bytes(self) -> int:
        """Bytes of the budget that no held block takes: any group can have them."""
        return self.memory_budget - sum(g.bytes_per_block * (g.allocator.num_live + 1) for g in self.groups)

    @property
    def unreserved_bytes(self) -> int:
        """Bytes of the budget that no tensor takes."""
        return self.memory_budget - sum(group.bytes_reserved for group in self.groups)

    def reclaimable_bytes(self) -> int:
        """Bytes of held blocks that prefix caches would give up."""
        return sum(self._reclaimable(index) * group.bytes_per_block for index, group in enumerate(self.groups))

    def _reclaimable(self, group: int) -> int:
        return sum(holder.reclaimable(group) for holder in self.holders())

    def _reclaim(self, group: int, num_blocks: int) -> None:
        """Have the holders free ``num_blocks`` blocks, or as many as they can."""
        for holder in self.holders():
            if num_blocks > 0:
                num_blocks -= holder.reclaim(group, num_blocks)

    def make_free(self, counts: Sequence[int], most: Sequence[int] | None = None) -> None:
        """Have so many blocks of each group free, growing tensors within the budget; with ``most`` so that no more than
        that many are free then. None of them is taken for another group. Does nothing for a group whose blocks do not
        fit: allocating them says so."""
        with self.turn:
            self._collect_abandoned()
            for index, group in enumerate(self.groups):
                if counts[index] > group.allocator.num_free:
                    with suppress(PoolExhaustedError):
                        self._grow(group, counts[index], None if most is None else most[index], counts)

    def _grow(self, group: BlockGroup, count: int, most: int | None = None, kept: Sequence[int] | None = None) -> None:
        """Have ``count`` blocks of the group free, if need be at the cost of others' free blocks beyond ``kept``."""
        allocator, per_block = group.allocator, group.bytes_per_block
        target = group.growth(count, self.memory_budget)
        if most is not None:
            target = min(target, allocator.num_blocks - allocator.num_free + max(count, most))
        if group.geometry is not None:
            if (count - allocator.num_free) * per_block > self.unreserved_bytes:
                step = (target - allocator.num_blocks) * per_block
                self._make_way(group, count, step, kept or [0] * len(self.groups))
            missing = count - allocator.num_free
            if missing <= 0:
                return
            # Beyond the need, at most half of what is left: another group may need the rest.
            target = min(target, allocator.num_blocks + max(missing, self.unreserved_bytes // per_block // 2))
        self.turn.is_dirty = True
        group.grow(target)

    def _make_way(self, group: BlockGroup, count: int, step: int, kept: Sequence[int]) -> None:
        """Have bytes unreserved for what is missing of ``count`` free blocks, or free blocks that were cached.

        Args:
            group: that grows.
            count: free blocks it must have.
            step: bytes it would like to grow by: taken at once where other groups must give them, since each time their
                tensors are copied.
            kept: free blocks of each group that are not to be taken.

        Raises:
            PoolExhaustedError: there is not so much; nothing was given up.
        """
        own = self.groups.index(group)
        others = [index for index in range(len(self.groups)) if index != own]

        def short() -> int:
            return (count - group.allocator.num_free) * group.bytes_per_block - self.unreserved_bytes

        def spare() -> int:
            return sum(self._spare(index, kept) * self.groups[index].bytes_per_block for index in others)

        cached, elsewhere = self._reclaimable(own) * group.bytes_per_block, 0
        if short() > spare() + cached:
            elsewhere = sum(self._reclaimable(index) * self.groups[index].bytes_per_block for index in others)
            if short() > spare() + cached + elsewhere:
                missing = count - group.allocator.num_free
                raise self._exhausted(missing, missing * group.bytes_per_block)
        if spare() * WORTH_MOVING >= self.memory_budget - self.unreserved_bytes:
            self._take(others, max(short(), min(step - self.unreserved_bytes, spare() // 2)), kept)
        if short() > 0 and cached:
            self._reclaim(own, -(-short() // group.bytes_per_block))
        if short() > 0:
            wanted = max(short(), min(step - self.unreserved_bytes, (spare() + elsewhere) // 2))
            for index in others:
                if elsewhere and wanted > spare():
                    self._reclaim(index, -(-(wanted - spare()) // self.groups[index].bytes_per_block))
            self._take(others, wanted, kept)
        if short() > 0:  # caches gave less than they said
            missing = count - group.allocator.num_free
            raise self._exhausted(missing, missing * group.bytes_per_block)

    def _spare(self, group: int, kept: Sequence[int]) -> int:
        """Free blocks of a group that others may have."""
        return max(0, self.groups[group].allocator.num_free - kept[group])

    def _take(self, groups: Sequence[int], num_bytes: int, kept: Sequence[int]) -> None:
        """Make the tensors of groups smaller by so many bytes, or by all they can spare; the largest part first."""
        for index in sorted(groups, key=lambda i: -self._spare(i, kept) * self.groups[i].bytes_per_block):
            group = self.groups[index]
            if num_bytes <= 0 or not group.bytes_per_block:
                continue
            blocks = min(self._spare(index, kept), -(-num_bytes // group.bytes_per_block))
            if blocks:
                self._shrink(index, group.allocator.num_blocks - blocks)
                num_bytes -= blocks * group.bytes_per_block

    def _shrink(self, index: int, num_blocks: int) -> None:
        """Move the blocks held from id ``num_blocks`` on into free ones before it, and make the tensors smaller."""
        group = self.groups[index]
        moves = group.allocator.moves(num_blocks)
        self.turn.is_dirty = True
        group.move(moves)
        self._renumber(index, moves)  # whoever holds ids
        self.shrinks += 1
        group.renumber(moves, num_blocks)

    def _renumber(self, group: int, moves: Mapping[int, int]) -> None:
        for holder in self.holders():
            holder.renumber(group, moves)
        others = [entry for entry in list(self._abandoned) if id(entry[1]) not in self._lists]
        for own, block_ids in [*self._lists.values(), *others]:
            if own == group:
                block_ids[:] = [moves.get(block_id, block_id) for block_id in block_ids]

    def return_memory(self) -> None:
        """Give memory of free blocks back to the system, but for one growth step of each group. For the thread that
        computes, between steps, when nothing has needed it for a while: blocks are moved together, tensors copied.
        """
        with self.turn:
            self._collect_abandoned()
            for index, group in enumerate(self.groups):
                if group.geometry is not None:
                    size = group.idle_size(self.memory_budget)
                    if size < group.allocator.num_blocks:
                        self._shrink(index, size)
            mx.clear_cache()

    def _exhausted(self, blocks: int, num_bytes: int, apart: int = 0) -> PoolExhaustedError:
        return PoolExhaustedError(
            blocks_needed=blocks,
            bytes_needed=num_bytes,
            budget_bytes=self.memory_budget,
            bytes_reserved=sum(g.bytes_reserved for g in self.groups) + apart,
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
                # The null block is nobody's need.
                raise self._exhausted(known - 1, (known - 1) * per_block, apart=per_block)
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
            group, block_ids = self._abandoned[0]
            self.groups[group].allocator.release(block_ids)
            self._abandoned.popleft()  # not before: whoever fails in between is followed by another
            self._lists.pop(id(block_ids), None)
