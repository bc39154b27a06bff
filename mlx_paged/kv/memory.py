"""PoolMemory: the budget of bytes that the tensors of a pool's groups share (docs/adr/0012)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from ..errors import BlockStateError, ConfigError, PoolExhaustedError
from .attention_params import QueryHeads
from .geometry import Geometry
from .group import Group
from .lock import PoolLock
from .owners import BlockOwners


class StateSlot:
    """A reservation for one sequence's states: convolution tails and recurrent states of its layers without blocks.

    It counts in the pool's budget from the moment it is taken until it is dropped.

    Attributes:
        nbytes: size of the states.
        caches: the states, which are never written to, or caches from which they can be made; None if the states are in
            a batch or in a request's own caches.
    """

    __slots__ = ("__weakref__", "caches", "nbytes")

    def __init__(self, nbytes: int, caches: Any = None) -> None:
        self.nbytes = nbytes
        self.caches = caches


class StateSlots:
    """The state slots of one pool. Take them under the pool's lock; any thread may drop them."""

    def __init__(self) -> None:
        # Bytes of the slots in use, by number. Finalizers in other threads remove entries, so it is copied in one
        # operation before it is summed.
        self._held: dict[int, int] = {}
        self._taken = 0

    def take(self, nbytes: int, caches: Any = None) -> StateSlot:
        """Return a slot that counts until it is dropped. The caller must have made room for it."""
        slot = StateSlot(nbytes, caches)
        self._taken += 1
        self._held[self._taken] = nbytes
        release: Callable[..., Any] = self._held.pop
        weakref.finalize(slot, release, self._taken, None).atexit = False
        return slot

    @property
    def nbytes(self) -> int:
        """Bytes of all slots held."""
        return sum(list(self._held.values())) if self._held else 0

    def __len__(self) -> int:
        return len(self._held)

    def check_integrity(self, known: int) -> None:
        """Raise BlockStateError if prefix caches hold more bytes than there are slots for."""
        if known > self.nbytes:
            raise BlockStateError(f"prefix caches hold {known} bytes of states, but slots count only {self.nbytes}")


# Free blocks of other groups are taken before cached blocks are evicted only if they are at least 1/8 of the reserved
# bytes: taking them copies those groups' tensors.
WORTH_MOVING = 8
# A full group evicts at least 1/512 of its blocks, as in-place tensors grow: searching costs more than freeing.
EVICTED_SHARE = 512
# Room for states is made of free blocks in steps of at least 1/32 of the budget, since each time tensors are copied.
STATES_TAKEN_SHARE = 32


class PoolMemory:
    """The budget that a pool's groups share, and the sizes of their tensors. A group that must grow takes unreserved
    bytes, then free blocks of other groups, whose tensors shrink, and evicts what it needs from prefix caches.

    Call :meth:`grow`, :meth:`shrink` and :meth:`fix_geometry` only with the lock, after :meth:`BlockOwners.collect`.

    Args:
        groups: the groups that share the budget.
        budget: most bytes that their tensors, and states, may take.
        owners: the owners of their blocks.
        lock: the pool's lock.

    Raises:
        ConfigError: the budget is not positive.
    """

    def __init__(self, groups: Sequence[Group], budget: int, owners: BlockOwners, lock: PoolLock) -> None:
        if budget <= 0:
            raise ConfigError(f"the memory budget must be positive, not {budget} bytes")
        self.groups = groups
        self.budget = budget
        self.shrinks = 0  # how often a group's tensors were made smaller
        self.spare: int | None = None  # most bytes to reserve ahead of need; None: what the budget allows
        self.owners = owners
        self.states = StateSlots()
        self.lock = lock

    @property
    def unheld_bytes(self) -> int:
        """Bytes of the budget that neither live and null blocks nor states take: any group can use them."""
        blocks = sum(g.bytes_per_block * (g.allocator.num_live + 1) for g in self.groups)
        return self.budget - self.states.nbytes - blocks

    @property
    def unreserved_bytes(self) -> int:
        """Bytes of the budget that neither tensors nor states take."""
        return self.budget - self.states.nbytes - sum(group.bytes_reserved for group in self.groups)

    @property
    def _ahead_bytes(self) -> int:
        """Bytes of the budget that may be reserved before they are needed."""
        return self.unreserved_bytes if self.spare is None else min(self.unreserved_bytes, self.spare)

    def can_reclaim(self, num_bytes: int) -> bool:
        """Return whether prefix caches could free blocks and states of ``num_bytes`` bytes. Counts no further than
        that takes."""
        num_bytes -= self.owners.state_nbytes
        for index, group in enumerate(self.groups):
            if num_bytes > 0 and group.bytes_per_block:
                enough = -(-num_bytes // group.bytes_per_block)
                num_bytes -= self.owners.reclaimable(index, enough) * group.bytes_per_block
        return num_bytes <= 0

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes of held blocks and states that prefix caches could free."""
        return self.owners.state_nbytes + sum(
            self.owners.reclaimable(i) * group.bytes_per_block for i, group in enumerate(self.groups)
        )

    # Growing --------------------------------------------------------------------------------------------------

    def fix_geometry(self, group: Group, geometry: Geometry, heads: QueryHeads | None) -> None:
        """Fix a group's geometry (:meth:`Group.set_geometry`). Raises PoolExhaustedError if the null block and one
        more of each group, or the blocks handed out so far, do not fit."""
        group.allocator.shrink()
        in_pages, _ = geometry.in_format(group.page_format, group.spec.always_dense_reason)
        per_block = group.block_size * in_pages.bytes_per_token() * len(group.spec.layers)
        per_layer = per_block // len(group.spec.layers)  # an estimate for groups whose geometry is not known yet
        least = sum(2 * (each.bytes_per_block or per_layer * len(each.spec.layers)) for each in self.groups)
        if self.budget < least:
            raise PoolExhaustedError.too_small(self.budget, least)
        known = group.allocator.num_blocks
        if known * per_block > self.unreserved_bytes:
            # The null block is not counted in the error's need.
            raise self.exhausted(known - 1, (known - 1) * per_block, apart=per_block)
        self.lock.is_dirty = True
        group.set_geometry(geometry, heads)

    def ensure_free(self, counts: Sequence[int], in_all: Sequence[int] | None = None) -> None:
        """Grow tensors within the budget until each group has its number of free blocks. None of these is taken for
        another group. Skips a group whose blocks do not fit: allocating them will raise.

        Args:
            counts: free blocks that each group must have.
            in_all: blocks of each group that will be taken in all. A group that must grow grows once, by all it needs,
                or by its share of what is left if not all of them fit.
        """
        with self.lock:
            self.owners.collect()
            share = 1.0 if in_all is None else min(1.0, self._ahead_bytes / max(1, self._missing_bytes(in_all)))
            for index, group in enumerate(self.groups):
                count, num_free = counts[index], group.allocator.num_free
                if count <= num_free:
                    continue
                most = None if in_all is None else in_all[index]
                if most is not None and group.geometry is not None:
                    count = max(count, num_free + int((most - num_free) * share))
                with suppress(PoolExhaustedError):
                    self.grow(group, count, most, counts)

    def _missing_bytes(self, counts: Sequence[int]) -> int:
        """Return the bytes to reserve so that each group has ``counts`` blocks free."""
        return sum(group.bytes_to_free(count) for count, group in zip(counts, self.groups, strict=True))

    def grow(self, group: Group, count: int, most: int | None = None, kept: Sequence[int] | None = None) -> None:
        """Grow the group so that ``count`` blocks are free, if necessary at the cost of cached blocks and of other
        groups' free blocks beyond ``kept``. ``most`` limits the number of free blocks afterwards.

        Raises:
            PoolExhaustedError: they do not fit; nothing was changed.
        """
        allocator, per_block = group.allocator, group.bytes_per_block
        target = group.growth(count, self.budget)
        if most is not None:
            target = min(target, allocator.num_blocks - allocator.num_free + max(count, most))
        if group.geometry is not None:
            if group.bytes_to_free(count) > self.unreserved_bytes:
                step = (target - allocator.num_blocks) * per_block
                self._make_room_for_blocks(group, count, step, kept or [0] * len(self.groups))
            missing = count - allocator.num_free
            if missing <= 0:
                return
            # Beyond the need, at most half of what is left: another group may need the rest.
            target = min(target, allocator.num_blocks + max(missing, self._ahead_bytes // per_block // 2))
        self.lock.is_dirty = True
        group.grow(target)

    def _make_room_for_blocks(self, group: Group, count: int, step: int, kept: Sequence[int]) -> None:
        """Make room for the blocks that the group lacks: free up bytes to grow by, or evict cached blocks of the group.

        Args:
            group: the group that grows.
            count: free blocks it must have.
            step: bytes it would like to grow by: taken at once if other groups must give them, since each time their
                tensors are copied.
            kept: free blocks of each group that must not be taken.

        Raises:
            PoolExhaustedError: too little can be freed. Nothing was evicted, unless caches free less than they said.
        """
        own = self.groups.index(group)
        others = [index for index in range(len(self.groups)) if index != own]

        def short() -> int:
            return group.bytes_to_free(count) - self.unreserved_bytes

        def spare() -> int:
            return sum(self._spare_blocks(index, kept) * self.groups[index].bytes_per_block for index in others)

        def too_few() -> PoolExhaustedError:
            missing = count - group.allocator.num_free
            return self.exhausted(missing, missing * group.bytes_per_block)

        enough = max(1, -(-short() // group.bytes_per_block))
        cached, elsewhere = self.owners.reclaimable(own, enough) * group.bytes_per_block, 0
        in_states = self.owners.state_nbytes
        if short() > spare() + cached:
            elsewhere = sum(self.owners.reclaimable(i) * self.groups[i].bytes_per_block for i in others)
            if short() > spare() + cached + elsewhere + in_states:
                raise too_few()
        if spare() * WORTH_MOVING >= self.budget - self.unreserved_bytes:
            self._shrink_groups(others, max(short(), min(step - self.unreserved_bytes, spare() // 2)), kept)
        if short() > 0 and cached:
            # More than is missing, so that the next steps find free blocks.
            num_blocks = -(-short() // group.bytes_per_block)
            self.owners.evict(own, max(num_blocks, group.allocator.num_blocks // EVICTED_SHARE))
        if short() > 0 and in_states:
            self.owners.evict_states(short())
        if short() > 0:
            wanted = max(short(), min(step - self.unreserved_bytes, (spare() + elsewhere) // 2))
            for index in others:
                if elsewhere and wanted > spare():
                    self.owners.evict(index, -(-(wanted - spare()) // self.groups[index].bytes_per_block))
            self._shrink_groups(others, wanted, kept)
        if short() > 0:  # caches freed less than they said
            raise too_few()

    def make_room_for_state(self, num_bytes: int) -> bool:
        """Unreserve ``num_bytes`` for a state, at the cost of free blocks, then of cached ones. Call it in the compute
        thread, between steps. Returns whether there is room."""
        with self.lock:
            self.owners.collect()
            if num_bytes <= self.unreserved_bytes:
                return True
            everything = range(len(self.groups))
            missing = num_bytes - self.unheld_bytes
            for index in everything:
                if missing > 0 and self.groups[index].bytes_per_block:
                    wanted = -(-missing // self.groups[index].bytes_per_block)
                    self.owners.evict(index, min(wanted, self.owners.reclaimable(index, wanted)))
                    missing = num_bytes - self.unheld_bytes
            short = num_bytes - self.unreserved_bytes
            if missing <= 0 < short:
                # More than is missing, since tensors are copied for it.
                self._shrink_groups(everything, max(short, self.budget // STATES_TAKEN_SHARE), [0] * len(self.groups))
            return num_bytes <= self.unreserved_bytes

    def exhausted(self, blocks: int, num_bytes: int, apart: int = 0) -> PoolExhaustedError:
        """Return the error for blocks that do not fit; ``apart``: reserved bytes that are not counted yet."""
        return PoolExhaustedError(
            blocks_needed=blocks,
            bytes_needed=num_bytes,
            budget_bytes=self.budget,
            bytes_reserved=self.budget - self.unreserved_bytes + apart,
        )

    # Shrinking ------------------------------------------------------------------------------------------------

    def _spare_blocks(self, group: int, kept: Sequence[int]) -> int:
        """Return how many free blocks of a group others may take."""
        return max(0, self.groups[group].allocator.num_free - kept[group])

    def _shrink_groups(self, groups: Sequence[int], num_bytes: int, kept: Sequence[int]) -> None:
        """Shrink the tensors of groups by ``num_bytes``, or by all they can spare; those with most to spare first."""
        for index in sorted(groups, key=lambda i: -self._spare_blocks(i, kept) * self.groups[i].bytes_per_block):
            group = self.groups[index]
            if num_bytes <= 0 or not group.bytes_per_block:
                continue
            blocks = min(self._spare_blocks(index, kept), -(-num_bytes // group.bytes_per_block))
            if blocks:
                self.shrink(index, group.allocator.num_blocks - blocks)
                num_bytes -= blocks * group.bytes_per_block

    def shrink(self, index: int, num_blocks: int) -> None:
        """Move the blocks held from id ``num_blocks`` on to free ids below it, and shrink the tensors."""
        group = self.groups[index]
        moves = group.allocator.moves(num_blocks)
        self.lock.is_dirty = True
        group.move(moves)
        self.owners.renumber(index, moves)
        self.shrinks += 1
        group.renumber(moves, num_blocks)

    def give_back(self, num_bytes: int) -> None:
        """Return unused memory to the system, ``num_bytes`` if possible: evict from prefix caches if free blocks are
        not enough. Call it in the compute thread, between steps."""
        with self.lock:
            self.owners.collect()
            missing = num_bytes - (self.unheld_bytes - self.unreserved_bytes)
            reclaimable = self.reclaimable_bytes
            if missing > 0 and reclaimable:
                share = min(1.0, missing / reclaimable)
                self.owners.evict_states(math.ceil(self.owners.state_nbytes * share))
                for index in range(len(self.groups)):
                    self.owners.evict(index, math.ceil(self.owners.reclaimable(index) * share))
            if self.unheld_bytes > self.unreserved_bytes:
                self.return_unused()

    def return_unused(self) -> None:
        """Return memory of free blocks to the system (see :meth:`BlockPool.return_memory`)."""
        with self.lock:
            self.owners.collect()
            if not any(group.allocator.num_live for group in self.groups):
                self.drop()
                return
            for index, group in enumerate(self.groups):
                if group.geometry is not None:
                    size = group.idle_size(self.budget)
                    if size < group.allocator.num_blocks:
                        self.shrink(index, size)
            mx.clear_cache()

    def drop(self) -> None:
        """Drop the tensors of all groups; no block may be in use."""
        for group in self.groups:
            if group.blocks:
                group.drop()
                self.shrinks += 1
        mx.clear_cache()
