"""BlockPool: every sequence's keys and values, in blocks of one shared set of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from ..errors import BlockStateError, GeometryError, TrimError
from .allocator import NULL_BLOCK
from .attention_params import QueryHeads
from .block_table import BlockTable
from .blocks import Blocks, ChooseBlocks
from .choice import host_blocks
from .geometry import PageFormat
from .group import Group, LayerGroup, check_layout
from .held import HeldArrays
from .lock import PoolLock
from .memory import UNLIMITED, PoolMemory
from .new_tokens import NewTokens
from .owners import BlockHolder
from .stats import PagedCacheStats, check_group


class BlockPool:
    """All blocks of a model: allocated, counted by references, written, and gathered back.

    A step of a sequence calls :meth:`append_tokens` once, which reserves positions for all layers of the group, then
    for each layer :meth:`write_prefill`, or :meth:`write` for several sequences, which write the positions reserved
    last.

    Args:
        groups: the groups of layers. Each layer index belongs to exactly one group. Empty: the pool holds states only.
        block_size: tokens per block, a power of two from 4 to 128.
        memory_budget: most bytes that the tensors of all groups, and states, may take.
        choose_blocks: chooses the kind of a group's blocks, once, at its first keys and values.
        page_format: how keys and values are quantised when they are written, in the groups that can be (see
            :meth:`PageFormat.unsupported_reason`); None: they are not.

    Raises:
        ConfigError: block size, budget or groups are unusable.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        *,
        block_size: int = 32,
        memory_budget: int = UNLIMITED,
        choose_blocks: ChooseBlocks = host_blocks,
        page_format: PageFormat | None = None,
    ) -> None:
        check_layout(groups, block_size)
        self.block_size = block_size
        self.page_format = page_format
        held = HeldArrays()
        self.groups = [Group(spec, block_size, choose_blocks, page_format, held) for spec in groups]
        # Guards every change. Holders of blocks use it for their own changes, which avoids deadlocks.
        self.lock = PoolLock(self.groups, held)
        self._owners = self.lock.owners
        self.memory = PoolMemory(self.groups, memory_budget, self._owners, self.lock)
        # Of each model layer: the index of its group, and its own index in the group.
        self.places = {
            layer: (index, position)
            for index, group in enumerate(self.groups)
            for position, layer in enumerate(group.spec.layers)
        }
        self.cow_forks = 0
        self.traces = 0  # compiled steps traced; a trace slows its step down
        # Counted by the scheduler of the pool's sequences.
        self.preemptions = self.drafted = self.accepted = self.draft_steps = self.draft_depth = self.draft_ms_saved = 0

    @property
    def memory_budget(self) -> int:
        """Most bytes that the tensors of all groups, and states, may take."""
        return self.memory.budget

    @property
    def is_on_host(self) -> bool:
        """Whether blocks lie on the host; False before the first write."""
        for group in self.groups:
            if group.geometry is not None:
                return not group.in_place
        return False

    @property
    def is_lost(self) -> bool:
        """Whether the device has failed since the pool was made: what needs its keys and values raises DeviceError, but
        tables can still be released."""
        return self.lock.device.is_lost

    # Blocks ---------------------------------------------------------------------------------------------------

    def allocate(self, group: int, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` blocks of a group, growing its tensors within the budget.

        Args:
            group: index of the group.
            count: number of blocks.
            after: the last block of the table that gets them, NULL_BLOCK if it has none; see
                :meth:`PoolMemory.provide`. None: they need not follow another.

        Raises:
            PoolExhaustedError: they do not fit; nothing was changed.
        """
        blocks: list[int] = []
        try:
            with self.lock:
                self._owners.collect()
                first = self.memory.provide(group, count, after)
                blocks = self.groups[group].allocator.allocate(count, first)
        except Exception:  # if blocks were taken, computing failed when the lock was released
            self.release(group, blocks)
            raise
        return blocks

    def retain(self, group: int, block_ids: Sequence[int]) -> None:
        """Add one reference to each block. Raises BlockStateError if one is free."""
        with self.lock.even_if_lost:
            self.groups[group].touch()
            self.groups[group].allocator.retain(block_ids)

    def release(self, group: int, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block. Raises BlockStateError if one is free already."""
        with self.lock.even_if_lost:
            self.groups[group].allocator.release(block_ids)

    def abandon(self, group: int, block_ids: list[int]) -> None:
        """Drop one reference of each block; for finalizers, which may run at any point."""
        self._owners.abandon(group, block_ids)

    def collect(self) -> None:
        """Release the blocks of dropped tables; call it before counting free blocks."""
        self._owners.collect()

    def add_holder(self, holder: BlockHolder) -> None:
        """Register a cache that is asked for blocks before an allocation fails; held weakly."""
        with self.lock.even_if_lost:
            self._owners.add_cache(holder)

    def holders(self) -> list[BlockHolder]:
        """Return the prefix caches over this pool that are alive."""
        return self._owners.caches()

    # Tables ---------------------------------------------------------------------------------------------------

    def new_table(self, group: int = 0, *, start: int = 0) -> BlockTable:
        """Return an empty table, or one whose first ``start`` tokens are not held (already behind a sliding window)."""
        table = BlockTable(group, self.block_size)
        table.block_ids.extend([NULL_BLOCK] * (start // self.block_size))
        table.length = table.logical_start = start
        return self._owners.add_table(table)

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks, by reference. A write to a shared block copies it first."""
        self._owners.check(table)
        with self.lock.even_if_lost:
            # Registered before it holds blocks: if something fails here, they are released.
            copy = self._owners.add_table(BlockTable(table.group, self.block_size))
            self.retain(table.group, table.block_ids)
            copy.block_ids.extend(table.block_ids)
            copy.length, copy.logical_start = table.length, table.logical_start
            return copy

    def release_table(self, table: BlockTable) -> None:
        """Give the table's blocks back. The table must not be used any more.

        Raises:
            BlockStateError: it was released before.
        """
        self._owners.check(table)
        with self.lock.even_if_lost:
            table.released = True
            self._owners.remove_table(table)
            self._group(table).allocator.release(table.block_ids)
            table.block_ids.clear()
            table.forget_indices()
            self._group(table).touch()

    def _group(self, table: BlockTable) -> Group:
        return self.groups[table.group]

    # Sequences ------------------------------------------------------------------------------------------------

    def append_tokens(self, table: BlockTable, num_tokens: int) -> None:
        """Reserve ``num_tokens`` positions at the table's end, once per step for all layers of its group.

        Releases blocks that fell behind the sliding window, forks a shared, partially filled tail block, and
        allocates the blocks missing.

        Raises:
            PoolExhaustedError: they do not fit; the table is as it was (blocks behind its window released).
            BlockStateError: the table was released.
        """
        self._owners.check(table)
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        with self.lock:
            self._owners.collect()  # a block shared only with a dropped table is not shared
            group = self._group(table)
            if group.spec.window is not None:
                self._slide(group, table)
            references = group.tail_references(table)
            if num_tokens == 1 and references == 1:  # nearly every decode step
                table.length += 1
                group.touch()
                return
            needed = group.blocks_to_append(table, num_tokens)
            last = table.block_ids[-1] if table.block_ids else NULL_BLOCK
            blocks = self.allocate(table.group, needed, last) if needed else []
            if references > 1:
                try:
                    own = self.copy_on_write_block(table, table.length // self.block_size, blocks[0])
                except Exception:
                    self.release(table.group, [block for block in blocks if block not in table.block_ids])
                    raise
                if own != blocks[0]:  # not shared any more: the allocation evicted the prefix
                    self.release(table.group, blocks[:1])
                del blocks[0]
            table.block_ids.extend(blocks)
            table.length += num_tokens
            group.touch()
            if blocks:
                table.forget_indices()

    def append_token(self, group: int, tables: Sequence[BlockTable]) -> list[int]:
        """Reserve one position at the end of each table of a group whose last block is its own and has room, as nearly
        all have in a decode step, or that begins a block while some are free. Releases blocks that fell behind a
        sliding window.

        Returns:
            Indices of the other tables, which got no position: call :meth:`append_tokens` for them.
        """
        own = self.groups[group]
        refcount, owner, sees = own.allocator.refcount, self._owners.owner, own.sees
        others: list[int] = []
        fresh: list[int] = []  # tables that begin a block
        with self.lock.even_if_lost:
            self._owners.collect()
            own.touch()
            index = 0
            try:
                for index, table in enumerate(tables):
                    ids, tail = table.block_ids, table.length // self.block_size
                    is_usable = table.owner is owner and table.group == group and not table.released
                    # A sliding window that is not full yet stays where it is.
                    is_full = sees is not None and (sees.stride > 1 or table.length - table.logical_start >= sees.size)
                    if is_full and is_usable:
                        self._slide(own, table)
                    if is_usable and tail < len(ids) and refcount(ids[tail]) == 1:
                        table.length += 1
                    elif is_usable and tail == len(ids) and len(fresh) < own.allocator.num_free:
                        fresh.append(index)
                    else:
                        others.append(index)
                index = len(tables)
                for begun in fresh:  # first: nothing may fail between taking the blocks and adding them
                    tables[begun].forget_indices()
                last = [tables[begun].block_ids[-1] if tables[begun].length else NULL_BLOCK for begun in fresh]
                blocks = [own.allocator.allocate(1, self.memory.provide(group, 1, after))[0] for after in last]
            except Exception:
                for done in set(range(index)).difference(others, fresh):
                    tables[done].length -= 1
                raise
            for index, block in zip(fresh, blocks, strict=True):
                tables[index].block_ids.append(block)
                tables[index].length += 1
        return others

    def slide(self, tables: Iterable[BlockTable]) -> bool:
        """Release blocks that the tables' next tokens do not see, as :meth:`append_tokens` would, so that they count as
        free or cached. Returns whether any table changed."""
        slid = False
        with self.lock.even_if_lost:
            for table in tables:
                if not table.released and self._slide(self._group(table), table):
                    self._group(table).touch()
                    slid = True
        return slid

    def _slide(self, group: Group, table: BlockTable) -> bool:
        """Release the blocks that the table's next token does not see. Returns whether it sees less than before."""
        start = 0 if group.sees is None else group.sees.first_seen(table.length)
        if start <= table.logical_start:
            return False
        if start // self.block_size > table.logical_start // self.block_size:  # not in most decode steps
            behind = table.behind(start)
            gone = table.block_ids[behind]
            group.allocator.release(gone)
            table.block_ids[behind] = [NULL_BLOCK] * len(gone)
            table.forget_indices()
        table.logical_start = start
        return True

    def ensure_free_for(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Make blocks available for the next tokens of a sequence's tables (those as long as the first), in all groups
        before any is taken."""
        length = tables[0].length
        level = [table for table in tables if table.length == length]
        self.slide(level)
        counts = [0] * len(self.groups)
        for table in level:
            counts[table.group] = self._group(table).blocks_to_append(table, num_tokens)
        self.memory.ensure_free(counts)

    def copy_on_write_block(self, table: BlockTable, index: int, target: int | None = None) -> int:
        """Give the table a block of its own at ``index`` if the present one is shared.

        Args:
            table: the table.
            index: index of the block in the table.
            target: a block already allocated for the copy; None: allocate one.

        Returns:
            The id now in ``table.block_ids[index]`` (unchanged if it was not shared).
        """
        self._owners.check(table)
        with self.lock:
            self._owners.collect()
            group = self._group(table)
            if group.allocator.refcount(table.block_ids[index]) <= 1:
                return table.block_ids[index]
            own = self.allocate(table.group, 1)[0] if target is None else target
            try:
                self.lock.is_dirty = True
                shared = table.block_ids[index]
                for blocks in group.blocks:
                    blocks.copy([shared], [own])
                group.allocator.release([shared])
                table.block_ids[index] = own
                table.forget_indices()
                group.touch()
                self.cow_forks += 1
            except Exception:
                if target is None and own not in table.block_ids:
                    self.release(table.group, [own])
                raise
            return own

    def check_trim(self, table: BlockTable, length: int) -> None:
        """Raise TrimError if the table cannot be cut to ``length`` tokens."""
        self._owners.check(table)
        spec = self._group(table).spec
        if not 0 <= length <= table.length:
            raise TrimError(f"cannot trim to {length} tokens: the table has {table.length}")
        if spec.first_kept(length) < table.logical_start:
            raise TrimError(
                f"cannot trim to {length} tokens: the next token sees positions from {spec.first_kept(length)} on, "
                f"the table holds those from {table.logical_start} on"
            )

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Drop the last ``num_tokens`` tokens; blocks wholly beyond the new end are released.

        Raises:
            TrimError: more tokens than the table has, or the window before the new end is no longer held.
        """
        length = table.length - num_tokens
        if num_tokens < 0 or length < 0:
            raise TrimError(f"cannot trim {num_tokens} of {table.length} tokens")
        self.check_trim(table, length)
        with self.lock.even_if_lost:
            table.length = length
            keep = -(-length // self.block_size)
            self._group(table).allocator.release(table.block_ids[keep:])
            del table.block_ids[keep:]
            table.forget_indices()
            self._group(table).touch()

    # Keys and values ------------------------------------------------------------------------------------------

    def group_of(self, layer: int) -> Group:
        """Return the group that a model layer belongs to."""
        return self.groups[self.places[layer][0]]

    def blocks_of(self, layer: int) -> Blocks:
        """Return a model layer's blocks. Raises BlockStateError before the first write to its group."""
        group, position = self.places[layer]
        if not self.groups[group].blocks:
            raise BlockStateError(f"nothing has been written to the group of layer {layer} yet")
        return self.groups[group].blocks[position]

    def set_geometry(
        self, layer: int, k: mx.array, v: mx.array, *, batch: int, heads: QueryHeads | None = None
    ) -> Group:
        """Fix the geometry and kind of blocks of a layer's group by its first keys and values; then validate.

        Args:
            layer: index of the layer in the model.
            k, v: keys and values about to be written.
            batch: sequences they must hold.
            heads: the queries that will attend over them, for the choice of a kernel.

        Returns:
            The layer's group.

        Raises:
            GeometryError: rank, number of sequences, heads, head dimension or dtype do not match.
            PoolExhaustedError: not even the blocks handed out so far fit the budget.
            KernelUnavailableError: a kernel is demanded and there is none for this geometry.
        """
        group = self.group_of(layer)
        geometry = group.validate(k, v, batch)
        if group.geometry is None:
            with self.lock:
                self._owners.collect()
                self.memory.fix_geometry(group, geometry, heads)
        return group

    def tokens_of(self, layer: int, tables: Sequence[BlockTable], counts: Sequence[int] | int) -> NewTokens:
        """Return the tables' last positions as new tokens, for a layer to write.

        Args:
            layer: index of the layer in the model.
            tables: one per sequence, of the layer's group.
            counts: new tokens of each sequence, at least 1; an int holds for all of them.

        Raises:
            GeometryError: the layer is not of the tables' group, or fewer tokens are reserved.
            BlockStateError: a table was released, or a block of those positions is shared.
        """
        for table in tables:
            self.check(table, layer)
        tokens = NewTokens(tables, (counts,) * len(tables) if isinstance(counts, int) else counts)
        self.begin(self.group_of(layer), tokens)
        return tokens

    def begin(self, group: Group, tokens: NewTokens) -> None:
        """Begin a step of new tokens; see :meth:`Group.begin`."""
        self._owners.collect()  # a block shared only with a dropped table is not shared
        group.begin(tokens)

    def check(self, table: BlockTable, layer: int) -> None:
        """Raise BlockStateError if a table was released or belongs to another pool, and GeometryError if it is not of
        the layer's group."""
        self._owners.check(table)
        if table.group != self.places[layer][0]:
            raise GeometryError(f"layer {layer} does not belong to the table's group {table.group}")

    def write(self, layer: int, tables: Sequence[BlockTable], k: mx.array, v: mx.array) -> None:
        """Write keys and values of the last n reserved tokens of each of B sequences, as they are (no cast).

        Args:
            layer: index of the layer in the model.
            tables: B tables of the layer's group, each with at least n tokens.
            k: ``[B, n_kv_heads, n, k_head_dim]``.
            v: ``[B, n_kv_heads, n, v_head_dim]``.

        Raises:
            GeometryError, BlockStateError, PoolExhaustedError: before anything is written.
        """
        with self.lock:
            self.group_of(layer).validate(k, v, len(tables))
            tokens = self.tokens_of(layer, tables, k.shape[2])
            group = self.set_geometry(layer, k, v, batch=len(tables))
            self.begin(group, tokens)
            self.lock.is_dirty = True
            group.write(self.places[layer][1], tokens, k, v)

    def write_prefill(self, table: BlockTable, layer: int, k: mx.array, v: mx.array) -> None:
        """Write one sequence's tokens, see :meth:`write`: k and v ``[1, n_kv_heads, n_new, head_dim]``."""
        self.write(layer, [table], k, v)

    def write_stored(self, layer: int, tables: Sequence[BlockTable], k: mx.array, v: mx.array) -> None:
        """Write what :meth:`read_stored` returned for this layer or another one of the same geometry, without
        quantising it again.

        Raises:
            GeometryError, BlockStateError: before anything is written.
        """
        group = self.group_of(layer)
        with self.lock:
            geometry = group.geometry
            if geometry is None or geometry.format is None:
                self.write(layer, tables, k, v)
                return
            heads, k_words, v_words, dtype, _ = geometry.stored
            shape = (len(tables), heads, k.shape[2] if k.ndim == 4 else 0)
            if (k.shape, v.shape) != ((*shape, k_words), (*shape, v_words)) or {k.dtype, v.dtype} != {dtype}:
                raise GeometryError(
                    f"rows of {k.dtype} {k.shape} and {v.dtype} {v.shape} do not match pages of {geometry}"
                )
            tokens = self.tokens_of(layer, tables, k.shape[2])
            self.lock.is_dirty = True
            group.write(self.places[layer][1], tokens, k, v, stored=True)

    def gather_visible(self, table: BlockTable, layer: int) -> tuple[mx.array, mx.array]:
        """Return copies of a layer's keys and values of positions ``logical_start .. length - 1``.

        Returns:
            K ``[1, n_kv_heads, n, k_head_dim]``, V ``[1, n_kv_heads, n, v_head_dim]``.

        Raises:
            BlockStateError: the table was released, or nothing was written yet.
            GeometryError: the layer is not of the table's group.
        """
        return self._gather(table, layer, stored=False)

    def read_stored(self, table: BlockTable, layer: int) -> tuple[mx.array, mx.array]:
        """Return copies of positions ``logical_start .. length - 1`` as the blocks store them, for
        :meth:`write_stored`: rows ``[1, n_kv_heads, n, num_words]`` (uint32) of quantised pages, else keys and values.

        Raises:
            BlockStateError, GeometryError: as :meth:`gather_visible`.
        """
        return self._gather(table, layer, stored=True)

    def _gather(self, table: BlockTable, layer: int, *, stored: bool) -> tuple[mx.array, mx.array]:
        self.check(table, layer)
        if self.group_of(layer).geometry is None or not table.num_visible:
            raise BlockStateError("nothing has been written to this table")
        with self.lock:
            self.lock.is_dirty = True
            return self.blocks_of(layer).gather(table, stored=stored)

    def ready(self, layer: int | None = None) -> list[mx.array]:
        """Return small arrays that are ready when all writes so far are, or those to one layer; none before the first
        write. Any thread can wait for them."""
        with self.lock:
            if layer is None:
                return [array for group in self.groups for array in group.ready()]
            return self.blocks_of(layer).ready() if self.group_of(layer).blocks else []

    # Accounts -------------------------------------------------------------------------------------------------

    def stats(self) -> PagedCacheStats:
        """Return a snapshot of the figures; never blocks on the compute thread."""

        def read(is_exact: bool) -> PagedCacheStats:
            if is_exact:
                self.collect()
            return PagedCacheStats.of(self)

        return self.lock.glance(read)

    def check_integrity(self) -> None:
        """Raise BlockStateError unless reference counts, free lists, tables and tensors agree."""
        with self.lock.even_if_lost:
            tables = self._owners.tables()  # kept alive, so that none is collected in between
            self._owners.collect()
            for index, group in enumerate(self.groups):
                held = [ids for holder in self.holders() for ids in holder.held(index)]
                check_group(
                    group, [table for table in tables if table.group == index], self._owners.lists(index) + held
                )
            self.memory.states.check_integrity(self._owners.state_nbytes)
