"""PoolMemory: the budget of bytes that a pool's groups divide (docs/adr/0099)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

from ..errors import ConfigError, PoolExhaustedError
from .allocator import NULL_BLOCK, SPACING
from .geometry import Geometry, QueryHeads
from .group import Group
from .lock import PoolLock

UNLIMITED = 1 << 62
MOST_SLOTS = (1 << 31) - 1  # of a group: kernels take slots and positions as int32
# Layers with a sliding window may take what this many sequences need, each while it takes this many tokens at a time:
# mlx-lm's defaults for batches and for prompts.
WINDOW_ROWS, WINDOW_CHUNK = 32, 2048
# A full group evicts at least 1/512 of its blocks, as in-place tensors grow: searching costs more than freeing.
EVICTED_SHARE = 512
STATES_SHARE = 1 / 4  # of the budget, for checkpoints, if requests share prefixes of a model with states


def divided(groups: Sequence[Group], budget: int) -> list[int]:
    """Divide a budget. A group never gets more, so what is accepted runs whatever other groups' tensors hold.

    Groups with a window get together what WINDOW_ROWS sequences need, but at most half of the budget, or up to three
    quarters if a single sequence needs more. The others share the rest: the same number of blocks each, as their
    sequences have the same lengths.

    Returns:
        The most blocks of each group, null block included, of up to MOST_SLOTS tokens; larger budgets give no fewer.
        Those of a group whose geometry is not known are not counted.
    """
    sizes = [group.bytes_per_block for group in groups]
    budget -= 2 * sum(sizes)  # of each group the null block and one more
    rows = [group.spec.most_blocks(0, UNLIMITED, WINDOW_CHUNK, group.block_size) for group in groups]
    windowed = [group.spec.window is not None for group in groups]
    others = sum(size for size, is_windowed in zip(sizes, windowed, strict=True) if not is_windowed)
    one = sum(row * size for row, size, is_windowed in zip(rows, sizes, windowed, strict=True) if is_windowed)
    of_windows = budget if one else 0
    if one and others:
        of_windows = min(WINDOW_ROWS * one, max(budget // 2, min(one, budget * 3 // 4)))
    shares = [
        2 + (of_windows * row // one if is_windowed else (budget - of_windows) // others) if size else UNLIMITED
        for row, size, is_windowed in zip(rows, sizes, windowed, strict=True)
    ]
    return [min(share, MOST_SLOTS // group.block_size) for share, group in zip(shares, groups, strict=True)]


class BlockHolder(Protocol):
    """A cache that counts in a pool's budget and frees blocks on request (see :meth:`PoolMemory.add_holder`). Called
    under the pool's lock.

    Attributes:
        evictions: blocks this holder has freed so far, to make room, by age or by a limit.
        hit_tokens: tokens that sequences took from it instead of computing them.
    """

    evictions: int
    hit_tokens: int

    def held(self, group: int) -> Iterable[Sequence[int]]:
        """Return the blocks of the group that it holds, each once per reference."""

    def reclaimable(self, group: int, enough: int | None = None) -> int:
        """Return how many blocks of the group :meth:`evict` could free now; counting may stop at ``enough``."""

    def evict(self, group: int, num_blocks: int) -> int:
        """Drop references so that ``num_blocks`` blocks of the group become free. Returns how many did."""

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states that it holds and :meth:`evict_states` could free."""

    def evict_states(self, num_bytes: int) -> int:
        """Drop states of at least ``num_bytes`` bytes. Returns how many bytes were freed."""


class PoolMemory:
    """The budget that a pool's groups divide, the sizes of their tensors, and the prefix caches that free blocks.
    Tensors grow, and are dropped as a whole when no block is held (:class:`.lock.PoolLock`); blocks never move.

    Call :meth:`grow` and :meth:`fix_geometry` only with the lock, after :meth:`PoolLock.collect`.

    Args:
        groups: the groups that share the budget.
        budget: most bytes that their tensors, and states, may take.
        lock: the pool's lock.

    Attributes:
        spare: most bytes to reserve ahead of need; None: what the budget allows.
        keeps_states: whether STATES_SHARE of the budget is for checkpoints of states only.

    Raises:
        ConfigError: the budget is not positive.
    """

    def __init__(self, groups: Sequence[Group], budget: int, lock: PoolLock) -> None:
        if budget <= 0:
            raise ConfigError(f"the memory budget must be positive, not {budget} bytes")
        self.groups = groups
        self.budget = budget
        self.spare: int | None = None
        self.keeps_states = False
        self.lock = lock
        self._holders: list[weakref.ref[BlockHolder]] = []
        self._divided: tuple[Any, list[int]] = None, []

    @property
    def unreserved_bytes(self) -> int:
        """Bytes of the budget that neither tensors nor states take."""
        return self.budget - self.state_nbytes - sum(group.bytes_reserved for group in self.groups)

    def capacities(self, budget: int | None = None) -> list[int]:
        """Return the most blocks of each group, null block included, in a budget, by default the pool's."""
        budget = self.budget if budget is None else budget
        if self.keeps_states:
            budget -= int(budget * STATES_SHARE)
        known = budget, [group.geometry for group in self.groups]
        if self._divided[0] != known:
            self._divided = known, divided(self.groups, budget)
        return self._divided[1]

    def room(self) -> list[int]:
        """Return how many blocks each group can provide, made or not, without evicting any."""
        most = zip(self.capacities(), self.groups, strict=True)
        return [blocks - 1 - group.allocator.num_live for blocks, group in most]

    def can_provide(self, counts: Sequence[int]) -> bool:
        """Return whether each group can provide so many blocks if cached blocks are evicted."""
        for index, (count, group) in enumerate(zip(counts, self.groups, strict=True)):
            if count > group.allocator.num_free:  # in few steps
                missing = count - self.room()[index]
                if missing > 0 and self._reclaimable(index, missing) < missing:
                    return False
        return True

    def fix_geometry(self, group: Group, geometry: Geometry, heads: QueryHeads | None) -> None:
        """Fix a group's geometry (:meth:`Group.set_geometry`). Raises PoolExhaustedError if the null block and one
        more of each group, or the blocks handed out so far, do not fit."""
        in_pages, _ = geometry.in_format(group.page_format, group.spec.always_dense_reason)
        per_block = group.block_size * in_pages.bytes_per_token() * len(group.spec.layers)
        per_layer = per_block // len(group.spec.layers)  # an estimate for groups whose geometry is not known yet
        least = sum(2 * (each.bytes_per_block or per_layer * len(each.spec.layers)) for each in self.groups)
        if self.budget < least:
            raise PoolExhaustedError.too_small(self.budget, least)
        known = group.allocator.num_blocks
        if known * per_block > self.unreserved_bytes:
            raise PoolExhaustedError(
                blocks_needed=known - 1,  # besides the null block
                bytes_needed=(known - 1) * per_block,
                budget_bytes=self.budget,
                bytes_reserved=self.budget - self.unreserved_bytes + per_block,
            )
        self.lock.use()
        group.set_geometry(geometry, heads)

    # Prefix caches --------------------------------------------------------------------------------------------

    def add_holder(self, holder: BlockHolder) -> None:
        """Register a cache that is asked for blocks before an allocation fails; held weakly."""
        with self.lock:
            self._holders = [*(ref for ref in self._holders if ref() is not None), weakref.ref(holder)]

    def holders(self) -> list[BlockHolder]:
        """Return the prefix caches over the pool that are alive."""
        return [holder for ref in self._holders if (holder := ref()) is not None]

    def cached_references(self, group: int) -> Counter[int]:
        """Return how many references prefix caches have on each block of a group."""
        return Counter(chain.from_iterable(ids for holder in self.holders() for ids in holder.held(group)))

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states that prefix caches hold."""
        return sum(holder.state_nbytes for holder in self.holders())

    def _reclaimable(self, group: int, enough: int) -> int:
        """Return how many blocks of the group prefix caches could free now; counting may stop at ``enough``."""
        count = 0
        for holder in self.holders():
            if count < enough:
                count += holder.reclaimable(group, enough - count)
        return count

    def _evict(self, group: int, num_blocks: int) -> None:
        """Make the prefix caches free ``num_blocks`` blocks of the group, or as many as they can."""
        for holder in self.holders():
            if num_blocks > 0:
                num_blocks -= holder.evict(group, num_blocks)

    def _evict_states(self, num_bytes: int) -> None:
        """Make the prefix caches drop states of ``num_bytes`` bytes, or as many as they can."""
        for holder in self.holders():
            if num_bytes > 0:
                num_bytes -= holder.evict_states(num_bytes)

    # Growing --------------------------------------------------------------------------------------------------

    def ensure_free(self, counts: Sequence[int]) -> None:
        """Grow tensors, and evict cached blocks, until each group has its number of free blocks. Skips a group whose
        blocks do not fit: allocating them will raise."""
        with self.lock:
            self.lock.collect()
            for index, count in enumerate(counts):
                with suppress(PoolExhaustedError):
                    self.grow(index, count)

    def grow(self, index: int, count: int) -> None:
        """Grow a group so that ``count`` blocks are free, or evict cached blocks if it is as large as it may become.

        Raises:
            PoolExhaustedError: they do not fit. Nothing was changed, unless caches free less than they said.
        """
        group = self.groups[index]
        allocator, per_block = group.allocator, group.bytes_per_block
        most = self.capacities()[index]
        short = allocator.num_blocks + count - allocator.num_free - most
        if short > 0:
            if self._reclaimable(index, short) < short:
                raise self.exhausted({index: count})
            # More than is missing, so that the next steps find free blocks.
            self._evict(index, max(short, most // EVICTED_SHARE))
        missing = count - allocator.num_free
        if missing <= 0:
            return
        target = least = allocator.num_blocks + missing
        if group.geometry is not None:
            left = self.unreserved_bytes + group.bytes_reserved
            if least * per_block > left:
                self._evict_states(least * per_block - left)
                left = self.unreserved_bytes + group.bytes_reserved
            ahead = max(least, left // per_block) if self.spare is None else least + self.spare // per_block
            target = max(least, min(group.next_size(least, self.budget), most, ahead))
            if least > most or least * per_block > left:
                raise self.exhausted({index: count})
        self.lock.use()
        group.grow(target)

    def provide(self, index: int, count: int, after: int | None) -> int | None:
        """Make ``count`` blocks of a group free, as :meth:`grow` does. On a CPU, whose attention reads consecutive
        blocks without a copy, return the first of consecutive ones; see :meth:`BlockAllocator.find`. For a new sequence
        tensors grow for them, but nothing is evicted. None: there are none, or any will do, as on a GPU or if ``after``
        is None."""
        group = self.groups[index]
        allocator = group.allocator
        if group.geometry is None or group.in_place:
            after = None
        first = None if after is None else allocator.find(count, after)
        if first is not None:
            return first
        if after == NULL_BLOCK and allocator.num_live and self._needs_room(index, count + 2 * SPACING):
            self.grow(index, allocator.num_free + count + 2 * SPACING)
        elif count > allocator.num_free:
            self.grow(index, count)
        if after is None:
            return None
        first = allocator.find(count, after)
        return allocator.find(count, after, SPACING // 4) if first is None and after == NULL_BLOCK else first

    def _needs_room(self, index: int, count: int) -> bool:
        """Return whether a group lacks ``count`` free blocks for each sequence, and can get as many more ahead of need
        while nothing is evicted. Room that is there, but not in one place, lies between prefixes, which do not grow."""
        group, left = self.groups[index], self.unreserved_bytes
        left = left if self.spare is None else min(left, self.spare)
        is_within = group.allocator.num_blocks + count <= self.capacities()[index]
        fits = is_within and count * group.bytes_per_block <= left
        return fits and group.allocator.num_free < count * len(self.lock.tables())

    def evict(self, num_bytes: int) -> None:
        """Evict prefixes and checkpoints of ``num_bytes`` bytes, or all. Their blocks become free, and the tensors are
        dropped if nothing else holds any. Call it in the compute thread, between steps."""
        with self.lock:
            self.lock.collect()
            for index, group in enumerate(self.groups):
                if num_bytes > 0 and group.bytes_per_block:
                    wanted = -(-num_bytes // group.bytes_per_block)
                    freed = min(wanted, self._reclaimable(index, wanted))
                    self._evict(index, freed)
                    num_bytes -= freed * group.bytes_per_block
            if num_bytes > 0:
                self._evict_states(num_bytes)

    def exhausted(self, counts: Mapping[int, int]) -> PoolExhaustedError:
        """Return the error for blocks that groups lack: ``counts`` by group, those that are free included."""
        missing = {index: max(0, n - self.groups[index].allocator.num_free) for index, n in counts.items()}
        budget, reserved = self.budget, self.budget - self.unreserved_bytes
        if len(counts) < len(self.groups):  # what these groups may take
            most = self.capacities()
            budget = sum(most[index] * self.groups[index].bytes_per_block for index in counts)
            reserved = sum(self.groups[index].bytes_reserved for index in counts)
        return PoolExhaustedError(
            blocks_needed=sum(missing.values()),
            bytes_needed=sum(n * self.groups[index].bytes_per_block for index, n in missing.items()),
            budget_bytes=budget,
            bytes_reserved=reserved,
        )
