"""BlockPool: every sequence's keys and values, in blocks of one shared set of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from ..errors import BlockStateError, GeometryError, TrimError
from .allocator import NULL_BLOCK
from .block_table import BlockTable
from .blocks import Blocks, ChooseBlocks, host_blocks
from .geometry import PageFormat, QueryHeads
from .group import Group, LayerGroup, check_layout
from .lock import PoolLock
from .new_tokens import NewTokens
from .pool_memory import UNLIMITED, PoolMemory
from .stats import PagedCacheStats, check_group


class BlockPool:
    """All blocks of a model: allocated, counted by references, written, and gathered back.

    A step of a sequence calls :meth:`append_tokens` once, which reserves positions for all layers. Then each layer
    writes the positions reserved last (:meth:`Group.write`).

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
        self.groups = [Group(index, spec, block_size, choose_blocks, page_format) for index, spec in enumerate(groups)]
        # Guards every change. Holders of blocks use it for their own changes, which avoids deadlocks.
        self.lock = PoolLock(self.groups)
        self.memory = PoolMemory(self.groups, memory_budget, self.lock)
        self._identity = object()  # of the pool's tables
        # Of each model layer: the index of its group, and its own index in the group.
        self.places = {
            layer: (index, position)
            for index, group in enumerate(self.groups)
            for position, layer in enumerate(group.spec.layers)
        }
        self.cow_forks = 0
        self.appended_tokens = 0
        self.traces = 0  # compiled steps traced; a trace slows its step down
        # Counted by the scheduler of the pool's sequences.
        self.preemptions = self.drafted = self.accepted = self.draft_steps = self.draft_depth = self.draft_ms_saved = 0

    @property
    def memory_budget(self) -> int:
        """Most bytes that the tensors of all groups, and states, may take."""
        return self.memory.budget

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
                self.lock.use()
                self.lock.collect()
                first = self.memory.provide(group, count, after)
                blocks = self.groups[group].allocator.allocate(count, first)
        except Exception:  # if blocks were taken, computing failed when the lock was released
            self.release(group, blocks)
            raise
        return blocks

    def retain(self, group: int, block_ids: Sequence[int]) -> None:
        """Add one reference to each block. Raises BlockStateError if one is free."""
        with self.lock:
            self.groups[group].epoch += 1
            self.groups[group].allocator.retain(block_ids)

    def release(self, group: int, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block. Raises BlockStateError if one is free already."""
        with self.lock:
            self.groups[group].allocator.release(block_ids)

    # Tables ---------------------------------------------------------------------------------------------------

    def new_table(self) -> BlockTable:
        """Return an empty table."""
        table = BlockTable(len(self.groups), self.block_size)
        table.owner = self._identity
        self.lock.add_table(table)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks, by reference. A write to a shared block copies it first."""
        self.check(table)
        return self.table_over(table.block_ids, table.length, table.starts)

    def table_over(
        self, block_ids: Sequence[Sequence[int]], length: int, starts: Sequence[int] | None = None
    ) -> BlockTable:
        """Return a table over shared blocks, with its own reference on each.

        Args:
            block_ids: of each group, by position; null blocks where none are held.
            length: number of tokens that they hold.
            starts: of each group, the first visible position; None: as a prefill of ``length`` tokens leaves it.
        """
        with self.lock:
            table = self.new_table()  # registered before it holds blocks: if something fails here, they are released
            for group, ids in enumerate(block_ids):
                self.retain(group, ids)
                table.block_ids[group].extend(ids)
            table.length = length
            table.starts[:] = starts or [group.spec.first_kept(length) for group in self.groups]
            return table

    def release_table(self, table: BlockTable) -> None:
        """Give the table's blocks back. The table must not be used any more.

        Raises:
            BlockStateError: it was released before.
        """
        self.check(table)
        with self.lock:
            table.released = True
            self.lock.remove_table(table)
            for group in self.groups:
                group.drop_blocks(table, 0)

    def fill(self, table: BlockTable, group: int, start: int) -> None:
        """Allocate a group's blocks from position ``start`` on, for a table of :meth:`table_over` to which tokens are
        written that come from elsewhere.

        Raises:
            PoolExhaustedError: they do not fit; the table is as it was.
        """
        first = start // self.block_size
        blocks = self.allocate(group, -(-table.length // self.block_size) - first)
        table.block_ids[group][first:] = blocks
        table.starts[group] = min(start, table.starts[group])
        table.forget_indices(group)
        self.groups[group].epoch += 1

    def check(self, table: BlockTable) -> None:
        """Raise BlockStateError if a table was released or belongs to another pool."""
        if table.released or table.owner is not self._identity:
            raise BlockStateError("the table was released, or belongs to another pool")

    # Sequences ------------------------------------------------------------------------------------------------

    def append_tokens(self, table: BlockTable, num_tokens: int) -> None:
        """Reserve ``num_tokens`` positions at the table's end, in all groups or in none.

        Releases blocks that fell behind a sliding window, forks a shared, partially filled tail block, and allocates
        the blocks missing.

        Raises:
            PoolExhaustedError: they do not fit; the table is as it was (blocks behind its window released).
            BlockStateError: the table was released.
        """
        self.check(table)
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        with self.lock:
            self.lock.collect()  # a block shared only with a dropped table is not shared
            for group in self.groups:
                group.slide(table)
            references = [group.tail_references(table) for group in self.groups]
            if num_tokens > 1 or any(count != 1 for count in references):  # not in nearly every decode step
                self._extend(table, num_tokens, references)
            table.length += num_tokens
            self.appended_tokens += num_tokens
            for group in self.groups:
                group.epoch += 1

    def _extend(self, table: BlockTable, num_tokens: int, references: Sequence[int]) -> None:
        """Add the blocks for the next tokens; copy tail blocks that have several references."""
        fresh: list[list[int]] = [[] for _ in self.groups]
        try:
            for group in self.groups:
                if count := group.blocks_to_append(table, num_tokens):
                    ids = table.block_ids[group.index]
                    fresh[group.index] = self.allocate(group.index, count, ids[-1] if ids else NULL_BLOCK)
            for group, blocks, count in zip(self.groups, fresh, references, strict=True):
                if count > 1:
                    if self.copy_on_write_block(table, group, blocks[0]) != blocks[0]:
                        self.release(group.index, blocks[:1])  # not shared any more: the prefix was evicted
                    del blocks[0]
        except Exception:
            for ids, blocks in zip(table.block_ids, fresh, strict=True):
                blocks[:] = [block for block in blocks if block not in ids]
            for group, blocks in zip(self.groups, fresh, strict=True):
                self.release(group.index, blocks)
            raise
        for group, blocks in zip(self.groups, fresh, strict=True):
            if blocks:
                table.block_ids[group.index].extend(blocks)
                table.forget_indices(group.index)

    def append_token(self, tables: Sequence[BlockTable]) -> list[int]:
        """Reserve one position at the end of each table whose last blocks are its own and have room, as nearly all have
        in a decode step. Releases blocks that fell behind a sliding window.

        Returns:
            Indices of the other tables, which got no position: call :meth:`append_tokens` for them.
        """
        identity, size, others = self._identity, self.block_size, []
        with self.lock:
            if self.lock.abandoned:
                self.lock.collect()
            for index, table in enumerate(tables):
                tail = table.length // size
                has_room = table.owner is identity and not table.released
                for group in self.groups if has_room else ():
                    # A sliding window that is not full yet stays where it is.
                    sees, place = group.sees, group.index
                    if sees and (sees.stride > 1 or table.length - table.starts[place] >= sees.size):
                        group.slide(table)
                    ids = table.block_ids[place]
                    has_room = has_room and tail < len(ids) and group.allocator.refcount(ids[tail]) == 1
                if has_room:
                    table.length += 1
                    self.appended_tokens += 1
                else:
                    others.append(index)
            for group in self.groups:
                group.epoch += 1
        return others

    def slide(self, tables: Iterable[BlockTable]) -> bool:
        """Release blocks that the tables' next tokens do not see, as :meth:`append_tokens` would, so that they count as
        free or cached. Returns whether any table changed."""
        with self.lock:
            # A list: each group of each table must slide.
            return any([group.slide(table) for table in tables if not table.released for group in self.groups])

    def copy_on_write_block(self, table: BlockTable, group: Group, target: int) -> int:
        """Give the table an own block in place of its last one in a group, if that is shared.

        Args:
            table: the table.
            group: the group.
            target: a block that has been allocated for the copy.

        Returns:
            The id of the table's last block now: ``target``, or the same as before if it was not shared.
        """
        ids, index = table.block_ids[group.index], table.length // self.block_size
        shared = ids[index]
        if group.allocator.refcount(shared) <= 1:
            return shared
        self.lock.use()
        self.lock.compute_held()
        for blocks in group.blocks:
            blocks.copy([shared], [target])
        group.allocator.release([shared])
        ids[index] = target
        table.forget_indices(group.index)
        self.cow_forks += 1
        return target

    def check_trim(self, table: BlockTable, length: int) -> None:
        """Raise TrimError if the table cannot be cut to ``length`` tokens."""
        self.check(table)
        if not 0 <= length <= table.length:
            raise TrimError(f"cannot trim to {length} tokens: the table has {table.length}")
        for group, start in zip(self.groups, table.starts, strict=True):
            first = group.spec.first_kept(length)
            if first < start:
                raise TrimError(
                    f"cannot trim to {length} tokens: the next token sees positions from {first} on, the table holds "
                    f"those from {start} on"
                )

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Drop the last ``num_tokens`` tokens; blocks wholly beyond the new end are released.

        Raises:
            TrimError: more tokens than the table has, or the window before the new end is no longer held.
        """
        length = table.length - num_tokens
        self.check_trim(table, length)
        with self.lock:
            table.length = length
            for group in self.groups:
                group.drop_blocks(table, -(-length // self.block_size))

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
                self.lock.collect()
                self.memory.fix_geometry(group, geometry, heads)
        return group

    def tokens_of(self, layer: int, tables: Sequence[BlockTable], counts: Sequence[int] | int) -> NewTokens:
        """Return the tables' last positions as new tokens, for a layer to write.

        Args:
            layer: index of the layer in the model.
            tables: one per sequence.
            counts: new tokens of each sequence, at least 1; an int holds for all of them.

        Raises:
            GeometryError: fewer tokens are reserved.
            BlockStateError: a table was released, or a block of those positions is shared.
        """
        for table in tables:
            self.check(table)
        counts = (counts,) * len(tables) if isinstance(counts, int) else counts
        tokens = NewTokens(tables, counts, self.places[layer][0])
        self.begin(self.group_of(layer), tokens)
        return tokens

    def begin(self, group: Group, tokens: NewTokens) -> None:
        """Begin a step of new tokens, unless that was done since the group's last change.

        Raises:
            GeometryError: fewer positions are reserved.
            BlockStateError: a table was released, or a block of those positions is shared.
        """
        lock = self.lock
        if lock.held:
            lock.compute_held()
        if lock.abandoned:  # a block shared only with a dropped table is not shared
            lock.collect()
        if tokens.epoch == group.epoch:
            return
        refcount, size = group.allocator.refcount, self.block_size
        for table, num_tokens in zip(tokens.tables, tokens.counts, strict=True):
            first = table.length - num_tokens
            if table.released:
                raise BlockStateError("the table was released")
            if first < 0:
                raise GeometryError(
                    f"cannot write {num_tokens} tokens: only {table.length} reserved; call append_tokens first"
                )
            for block_id in table.block_ids[group.index][first // size :]:
                if refcount(block_id) != 1:
                    raise BlockStateError(
                        f"cannot write block {block_id}: it has {refcount(block_id)} references, not 1"
                    )
        tokens.begin(group.epoch)

    def write(
        self, layer: int, tables: Sequence[BlockTable], k: mx.array, v: mx.array, *, stored: bool = False
    ) -> None:
        """Write keys and values of the last n reserved tokens of each of B sequences, as they are (no cast).

        Args:
            layer: index of the layer in the model.
            tables: B tables, each with at least n tokens.
            k: ``[B, n_kv_heads, n, k_head_dim]``.
            v: ``[B, n_kv_heads, n, v_head_dim]``.
            stored: they are what :meth:`gather_visible` returned as stored for this layer or another one of the same
                geometry, which is known here: quantised rows are not quantised again.

        Raises:
            GeometryError, BlockStateError, PoolExhaustedError: before anything is written.
        """
        group = self.group_of(layer)
        with self.lock:
            self.lock.use()
            geometry = group.geometry
            if not (stored and geometry is not None and geometry.format is not None):
                group.validate(k, v, len(tables))
            else:
                heads, k_words, v_words, dtype, _ = geometry.stored
                shape = (len(tables), heads, k.shape[2] if k.ndim == 4 else 0)
                if (k.shape, v.shape) != ((*shape, k_words), (*shape, v_words)) or {k.dtype, v.dtype} != {dtype}:
                    raise GeometryError(
                        f"rows of {k.dtype} {k.shape} and {v.dtype} {v.shape} do not match pages of {geometry}"
                    )
            tokens = self.tokens_of(layer, tables, k.shape[2])
            if geometry is None:
                self.set_geometry(layer, k, v, batch=len(tables))
            group.blocks[self.places[layer][1]].write(tokens, k, v, stored=stored)

    def write_prefill(self, table: BlockTable, layer: int, k: mx.array, v: mx.array) -> None:
        """Write one sequence's tokens, see :meth:`write`: k and v ``[1, n_kv_heads, n_new, head_dim]``."""
        self.write(layer, [table], k, v)

    def gather_visible(self, table: BlockTable, layer: int, *, stored: bool = False) -> tuple[mx.array, mx.array]:
        """Return copies of a layer's keys and values of the visible positions, up to ``length - 1``.

        Args:
            table: the table.
            layer: index of the layer in the model.
            stored: return them as the blocks store them: rows ``[1, n_kv_heads, n, num_words]`` (uint32) of quantised
                pages.

        Returns:
            K ``[1, n_kv_heads, n, k_head_dim]``, V ``[1, n_kv_heads, n, v_head_dim]``.

        Raises:
            BlockStateError: the table was released, or nothing was written yet.
        """
        self.check(table)
        group = self.group_of(layer)
        if group.geometry is None or not table.num_visible(group.index):
            raise BlockStateError("nothing has been written to this table")
        with self.lock:
            self.lock.use()
            return self.blocks_of(layer).gather(table, group.index, stored=stored)

    def ready(self, layer: int | None = None) -> list[mx.array]:
        """Return small arrays that are ready when all writes so far are, or those to one layer; none before the first
        write. Any thread can wait for them."""
        with self.lock:
            if layer is None:
                return [array for group in self.groups for array in group.pending]
            return list(self.blocks_of(layer).pending) if self.group_of(layer).blocks else []

    # Accounts -------------------------------------------------------------------------------------------------

    def stats(self) -> PagedCacheStats:
        """Return a snapshot of the figures; never blocks on the compute thread."""

        def read(is_exact: bool) -> PagedCacheStats:
            if is_exact:
                self.lock.collect()
            return PagedCacheStats.of(self)

        return self.lock.glance(read)

    def check_integrity(self) -> None:
        """Raise BlockStateError unless reference counts, free lists, tables and tensors agree."""
        with self.lock:
            tables = self.lock.tables()  # kept alive, so that none is collected in between
            self.lock.collect()
            for index, group in enumerate(self.groups):
                held = [ids for holder in self.memory.holders() for ids in holder.held(index)]
                check_group(group, tables, self.lock.lists(index) + held)
