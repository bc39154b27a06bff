"""BlockPool: every sequence's keys and values, in blocks of one shared set of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from ..errors import BlockStateError, GeometryError, TrimError
from .allocator import NULL_BLOCK
from .block_store import UNLIMITED, BlockStore
from .block_table import BlockTable
from .group import BlockGroup, ChooseStorage, LayerGroup, functional_storage
from .stats import PagedCacheStats, check_group, count
from .step import DeviceTables, Step
from .storage.base import Storage


class BlockPool(BlockStore):
    """Allocates blocks, writes keys and values into them and gathers them back.

    A step of a sequence is: :meth:`append_tokens` once (reserves positions for all layers of the group), then
    :meth:`write_prefill` or :meth:`write_decode` for each layer, which write the positions reserved last.

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
        super().__init__(groups, block_size=block_size, memory_budget=memory_budget, choose_storage=choose_storage)
        self._tables: weakref.WeakSet[BlockTable] = weakref.WeakSet()
        self._owner = object()  # of all its tables
        self._cow_forks = 0
        self.preemptions = 0  # counted by whoever schedules sequences over this pool

    # Tables ---------------------------------------------------------------------------------------------------

    def new_table(self, group: int = 0, *, start: int = 0) -> BlockTable:
        """An empty table, or one whose first ``start`` tokens, pinned ones excepted, are not held (already behind a
        sliding window). Pinned ones are to be written by :meth:`write_pinned`."""
        table = BlockTable(group, self.block_size, self.groups[group].spec.pinned)
        table.block_ids.extend([NULL_BLOCK] * (start // self.block_size))
        table.length = table.logical_start = start
        self._track(table)
        pinned = min(table.num_pinned_blocks, len(table.block_ids))
        if pinned:
            table.block_ids[:pinned] = self.allocate(group, pinned)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks: references, no bytes. Whoever writes to a shared block copies it."""
        self._check_table(table)
        with self._lock:
            # Known to the pool before it holds anything: if something fails here, its blocks come back.
            copy = self._track(BlockTable(table.group, self.block_size, table.pinned))
            self.retain(table.group, table.block_ids)
            copy.block_ids.extend(table.block_ids)
            copy.length, copy.logical_start, copy.ring_origin = table.length, table.logical_start, table.ring_origin
            return copy

    def release_table(self, table: BlockTable) -> None:
        """Give the table's blocks back. The table must not be used any more.

        Raises:
            BlockStateError: it was released before.
        """
        self._check_table(table)
        with self._lock:
            table.released = True
            self._tables.discard(table)
            self._lists.pop(id(table.block_ids), None)
            self._group(table).allocator.release(table.block_ids)
            table.block_ids.clear()
            table.forget_indices()
            self._group(table).touch()

    def _track(self, table: BlockTable) -> BlockTable:
        self._tables.add(table)
        self._lists[id(table.block_ids)] = (table.group, table.block_ids)
        table.owner = self._owner
        abandon = weakref.finalize(table, self._abandoned.append, (table.group, table.block_ids))
        abandon.atexit = False
        return table

    def _renumber(self, group: int, moves: Mapping[int, int]) -> None:
        super()._renumber(group, moves)
        for table in list(self._tables):
            if table.group == group:
                table.forget_indices()

    def _group(self, table: BlockTable) -> BlockGroup:
        return self.groups[table.group]

    def _check_table(self, table: BlockTable) -> None:
        if table.released or table.owner is not self._owner:
            raise BlockStateError("table used after release, or of another pool")

    # Sequences ------------------------------------------------------------------------------------------------

    def append_tokens(self, table: BlockTable, num_tokens: int) -> None:
        """Reserve ``num_tokens`` positions at the table's end, once per step for all layers of its group.

        Releases blocks that fell behind the sliding window, forks a shared, partially filled tail block, and
        allocates the blocks missing.

        Raises:
            PoolExhaustedError: they do not fit; the table is as it was (blocks behind its window released).
            BlockStateError: the table was released.
        """
        self._check_table(table)
        if num_tokens < 1:
            raise ValueError(f"at least one token must be appended, not {num_tokens}")
        with self.turn:
            self._collect_abandoned()  # a block shared only with a dropped table is not shared
            group = self._group(table)
            spec = group.spec
            if spec.window is not None:
                self._slide(table, spec.first_kept(table.length))
            tail = table.length // self.block_size
            shared_tail = self.has_shared_tail(table)
            if num_tokens == 1 and not shared_tail and tail < len(table.block_ids):  # as nearly every decode step
                table.length += 1
                group.touch()
                return
            needed = table.blocks_for(num_tokens) + shared_tail
            blocks = self.allocate(table.group, needed) if needed else []
            if shared_tail:
                try:
                    self._copy_on_write(table, tail, blocks[0])
                except Exception:
                    self.release(table.group, [block for block in blocks if block not in table.block_ids])
                    raise
                del blocks[0]
            table.block_ids.extend(blocks)
            table.length += num_tokens
            group.touch()
            if blocks:
                table.forget_indices()
            if spec.window is not None and num_tokens > 1:
                table.ring_origin = spec.ring_origin(table.length)

    def append_token(self, group: int, tables: Sequence[BlockTable]) -> list[int]:
        """Reserve one position at the end of each of a group's tables that has it in a block of its own, as nearly all
        have in a decode step.

        Returns:
            Indices of the other tables, which are as they were: for :meth:`append_tokens`.
        """
        own = self.groups[group]
        if own.spec.window is not None:  # blocks behind it are released first
            return list(range(len(tables)))
        refcount = own.allocator.refcount
        others = []
        with self._lock:
            self._collect_abandoned()
            own.touch()
            index = 0
            try:
                for index, table in enumerate(tables):
                    ids, tail = table.block_ids, table.length // self.block_size
                    is_usable = table.owner is self._owner and table.group == group and not table.released
                    if is_usable and tail < len(ids) and refcount(ids[tail]) == 1:
                        table.length += 1
                    else:
                        others.append(index)
            except Exception:
                for done in set(range(index)).difference(others):
                    tables[done].length -= 1
                raise
        return others

    def has_shared_tail(self, table: BlockTable) -> bool:
        """Whether the next token goes into a block that others hold, too, which is copied first."""
        tail = table.length // self.block_size
        return tail < len(table.block_ids) and self.groups[table.group].allocator.refcount(table.block_ids[tail]) > 1

    def blocks_to_append(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that :meth:`append_tokens` takes, after :meth:`slide`."""
        return table.blocks_for(num_tokens) + self.has_shared_tail(table)

    def slide(self, tables: Iterable[BlockTable]) -> bool:
        """Release what the tables' next tokens do not see, as :meth:`append_tokens` would, so that it counts as free or
        cached. Returns whether there was anything."""
        slid = False
        with self._lock:
            for table in tables:
                group = self._group(table)
                start = group.spec.first_kept(table.length)
                if start > table.logical_start and not table.released:
                    self._slide(table, start)
                    group.touch()
                    slid = True
        return slid

    def make_room(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Have blocks free for the next tokens of a sequence's tables, all those of the same length as the first, so
        that no group has to take them from another in the middle of a step."""
        length = tables[0].length
        level = [table for table in tables if table.length == length]
        self.slide(level)
        counts = [0] * len(self.groups)
        for table in level:
            counts[table.group] = self.blocks_to_append(table, num_tokens)
        self.make_free(counts)

    def _slide(self, table: BlockTable, start: int) -> None:
        if start <= table.logical_start:
            return
        first, last = max(table.logical_start // self.block_size, table.num_pinned_blocks), start // self.block_size
        gone = table.block_ids[first:last]
        if gone:
            self._group(table).allocator.release(gone)
            table.block_ids[first:last] = [NULL_BLOCK] * len(gone)
            table.forget_indices()
        table.logical_start = start

    def copy_on_write_block(self, table: BlockTable, index: int) -> int:
        """Give the table a block of its own at ``index`` if the present one is shared.

        Returns:
            The id now in ``table.block_ids[index]`` (unchanged if it was not shared).
        """
        self._check_table(table)
        with self.turn:
            self._collect_abandoned()
            if self._group(table).allocator.refcount(table.block_ids[index]) <= 1:
                return table.block_ids[index]
            target = self.allocate(table.group, 1)[0]
            try:
                return self._copy_on_write(table, index, target)
            except Exception:
                if target not in table.block_ids:
                    self.release(table.group, [target])
                raise

    def _copy_on_write(self, table: BlockTable, index: int, target: int) -> int:
        group = self._group(table)
        source = table.block_ids[index]
        self.turn.is_dirty = True
        for storage in group.storages:
            storage.copy_blocks([source], [target])
        group.allocator.release([source])
        table.block_ids[index] = target
        table.forget_indices()
        group.touch()
        self._cow_forks += 1
        return target

    def check_trim(self, table: BlockTable, length: int) -> None:
        """Raise TrimError if the table cannot be cut to ``length`` tokens."""
        self._check_table(table)
        spec = self._group(table).spec
        if not 0 <= length <= table.length:
            raise TrimError(f"cannot trim {table.length} tokens to {length}")
        if spec.first_kept(length) < table.logical_start:
            raise TrimError(
                f"cannot trim to {length} tokens: the window of {spec.window} before it is held "
                f"from {table.logical_start} on"
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
        with self._lock:
            table.length = length
            keep = -(-length // self.block_size)
            self._group(table).allocator.release(table.block_ids[keep:])
            del table.block_ids[keep:]
            table.forget_indices()
            self._group(table).touch()

    # Keys and values ------------------------------------------------------------------------------------------

    def storage(self, layer: int) -> Storage:
        """The layer's storage. Raises BlockStateError before the first write to its group."""
        group, position = self._place[layer]
        if not self.groups[group].storages:
            raise BlockStateError("nothing has been written to this table")
        self.turn.is_dirty = True
        return self.groups[group].storages[position]

    def step(
        self, layer: int, tables: Sequence[BlockTable], num_tokens: int, counts: Sequence[int] | None = None
    ) -> Step:
        """The tables' last ``num_tokens`` positions: checked, and made for the device, once for all layers of a group.

        Args:
            layer: of the tables' group.
            tables: one per sequence.
            num_tokens: new tokens of each sequence.
            counts: real ones among them, at least one each; the rest is padding on the right.

        Raises:
            GeometryError: the layer is not of the tables' group, or fewer tokens are reserved.
            BlockStateError: a table was released, or a block of those positions is shared.
        """
        group = self.groups[self.group_of(layer)]
        if self._abandoned:
            with self._lock:
                self._collect_abandoned()
        step, is_new = group.step(tables, num_tokens, counts)
        if is_new:
            try:
                for index, table in enumerate(tables):
                    self._check_positions(table, layer, num_tokens if counts is None else counts[index])
            except Exception:
                group.touch()
                raise
        return step

    def _check_positions(self, table: BlockTable, layer: int, num_tokens: int) -> None:
        self._check_table(table)
        if table.group != self.group_of(layer):
            raise GeometryError(f"layer {layer} is not of the table's group {table.group}")
        if num_tokens > table.length:
            raise GeometryError(f"{num_tokens} tokens to write, only {table.length} reserved: append_tokens first")
        allocator = self._group(table).allocator
        first = (table.length - num_tokens) // self.block_size
        for block_id in table.block_ids[first:]:
            if allocator.refcount(block_id) != 1:
                raise BlockStateError(
                    f"block {block_id} is to be written but held {allocator.refcount(block_id)} times"
                )

    def write(self, tables: Sequence[BlockTable], layer: int, k: mx.array, v: mx.array) -> None:
        """Write keys and values of the last n reserved tokens of each of B sequences, as they are (no cast).

        Args:
            tables: B tables of one group, each with at least n tokens.
            layer: model layer.
            k: ``[B, n_kv_heads, n, k_head_dim]``.
            v: ``[B, n_kv_heads, n, v_head_dim]``.

        Raises:
            GeometryError, BlockStateError, PoolExhaustedError: before anything is written.
        """
        group_index, _ = self._place[layer]
        with self.turn:
            self.groups[group_index].validate(k, v, len(tables))
            step = self.step(layer, tables, k.shape[2])
            self.set_geometry(layer, k, v, batch=len(tables))
            self.write_step(tables, layer, step, k, v)

    def write_step(self, tables: Sequence[BlockTable], layer: int, step: Step, k: mx.array, v: mx.array) -> None:
        """:meth:`write` for k and v that :meth:`set_geometry` has accepted, and a step of :meth:`step`; in a turn."""
        group_index, position = self._place[layer]
        group = self.groups[group_index]
        if self.turn.is_newcomer:  # what it cannot compute, such as lazy weights of another thread, is not let in
            mx.eval(k, v)
        self.turn.is_dirty = True
        if not group.in_place:
            group.wait_for_reads(position)
        group.storages[position].write(tables, step, k, v)
        group.pace(position, step.num_tokens)

    def write_pinned(self, table: BlockTable, layer: int, k: mx.array, v: mx.array) -> None:
        """Write the pinned tokens of a table made by :meth:`new_table` with a ``start``: k and v
        ``[1, n_kv_heads, pinned, head_dim]``, accepted by :meth:`set_geometry`."""
        self._check_table(table)
        # Writing goes to the end of a table: one that ends there, over the same blocks, and known to nobody else.
        head = BlockTable(table.group, self.block_size)
        head.block_ids.extend(table.block_ids[: table.num_pinned_blocks])
        head.length = table.pinned
        group = self._group(table)
        if any(group.allocator.refcount(block_id) != 1 for block_id in head.block_ids):
            raise BlockStateError(f"pinned blocks {head.block_ids} are to be written but shared")
        with self.turn:
            step = Step([head], head.length, group.epoch, group.allocator.num_blocks, DeviceTables())
            self.write_step([head], layer, step, k, v)

    def write_prefill(self, table: BlockTable, layer: int, k: mx.array, v: mx.array) -> None:
        """:meth:`write` for several tokens of one sequence: k and v ``[1, n_kv_heads, n_new, head_dim]``."""
        self.write([table], layer, k, v)

    def write_decode(self, tables: Sequence[BlockTable], layer: int, k: mx.array, v: mx.array) -> None:
        """:meth:`write` for one token of each of B sequences: k and v ``[B, n_kv_heads, 1, head_dim]``."""
        if k.ndim == 4 and k.shape[2] != 1:
            raise GeometryError(f"decode writes one token per sequence, not {k.shape[2]}")
        self.write(tables, layer, k, v)

    def gather_visible(
        self, table: BlockTable, layer: int, *, rotation: int = 0, copy: bool = True
    ) -> tuple[mx.array, mx.array]:
        """Keys and values of positions ``logical_start .. length - 1``, after those of pinned tokens (lazy).

        Args:
            table: the sequence's table.
            layer: model layer.
            rotation: start the order at this visible token, pinned ones not counted, and wrap around (0: by position).
            copy: False allows a view of the pool where the blocks are consecutive. Drop it, and whatever was computed
                from it unevaluated, before the next write: a view held makes that write copy the pool.

        Returns:
            K ``[1, n_kv_heads, n, k_head_dim]``, V ``[1, n_kv_heads, n, v_head_dim]``.

        Raises:
            BlockStateError: the table was released, or nothing was written yet.
            GeometryError: the layer is not of the table's group.
        """
        self._check_table(table)
        if table.group != self.group_of(layer):
            raise GeometryError(f"layer {layer} is not of the table's group {table.group}")
        if self._group(table).geometry is None or not table.num_visible:
            raise BlockStateError("nothing has been written to this table")
        with self.turn:
            return self.storage(layer).read_visible(table, rotation=rotation, copy=copy)

    def after_writes(self, layer: int, k: mx.array, v: mx.array) -> list[mx.array]:
        """k and v, ready only when the layer's writes are. Without it MLX may leave the writes of all layers to the
        end of a prefill, and every layer's new keys and values live until then."""
        return self.storage(layer).after_writes(k, v)

    def note_read(self, layer: int, *results: mx.array) -> None:
        """Tell the pool what was computed from a layer's blocks in this step (see BlockGroup.wait_for_reads)."""
        group, position = self._place[layer]
        self.groups[group].note_read(position, *results)

    def watch_read(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The same keys and values, read from a layer's blocks in this step, for whoever computes with them; what is
        remembered of them does not keep them (see BlockGroup.wait_for_reads)."""
        group, position = self._place[layer]
        return self.groups[group].watch_read(position, keys, values)

    def fence(self, layer: int) -> mx.array:
        """A small array that is ready when all writes to the layer so far are; empty before the first write."""
        group = self.groups[self.group_of(layer)]
        return self.storage(layer).fence() if group.storages else mx.zeros((0,))

    # Accounts -------------------------------------------------------------------------------------------------

    def stats(self) -> PagedCacheStats:
        with self._lock:
            self._collect_abandoned()
            return count(
                self.groups,
                self.block_size,
                self.memory_budget,
                self._cow_forks,
                self.holders(),
                self.preemptions,
                self.shrinks,
            )

    def check_integrity(self) -> None:
        """Raise BlockStateError unless reference counts, free lists, tables and tensors agree."""
        with self._lock:
            tables = list(self._tables)  # held, so that none is collected between the two steps
            self._collect_abandoned()
            for index, group in enumerate(self.groups):
                held = [ids for holder in self.holders() for ids in holder.held(index)]
                check_group(group, [table for table in tables if table.group == index], held)
