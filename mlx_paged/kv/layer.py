"""PoolLayer: one model layer's keys and values in a pool: written into the blocks of tables, and read from them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..errors import BlockStateError, GeometryError
from .attention_params import QueryHeads
from .block_table import BlockTable
from .blocks import Blocks
from .device_blocks import DeviceBlocks
from .group import BlockGroup
from .host_blocks import HostBlocks
from .memory import PoolMemory
from .step import Step, padded_slots


class PoolLayer:
    """One model layer of a pool; made by :class:`BlockPool`.

    Args:
        number: index of the layer in the model.
        group: the layer's group.
        group_index: index of the group in the pool.
        position: index of the layer in the group.
        memory: the pool's memory.
    """

    __slots__ = (
        "group",
        "group_index",
        "is_last",
        "lock",
        "memory",
        "number",
        "owners",
        "position",
        "sees",
        "spec",
        "window",
    )

    def __init__(self, number: int, group: BlockGroup, group_index: int, position: int, memory: PoolMemory) -> None:
        self.number = number
        self.group = group
        self.group_index = group_index
        self.position = position
        self.is_last = position == len(group.spec.layers) - 1
        self.memory = memory
        self.owners, self.lock = memory.owners, memory.lock
        self.spec, self.window, self.sees = group.spec, group.spec.window, group.spec.sees

    @property
    def in_place(self) -> bool:
        """Whether kernels write and read the layer's blocks, on a GPU."""
        return self.group.in_place

    @property
    def is_quantized(self) -> bool:
        """Whether the layer's pages hold quantised keys and values, so that reads differ from what was written."""
        return self.group.is_quantized

    @property
    def blocks(self) -> Blocks:
        """The layer's blocks; marks the lock as dirty. Raises BlockStateError before the first write to its group."""
        if not self.group.blocks:
            raise BlockStateError(f"nothing has been written to the group of layer {self.number} yet")
        self.lock.is_dirty = True
        return self.group.blocks[self.position]

    @property
    def device(self) -> DeviceBlocks:
        """The layer's blocks, which are a GPU's (:attr:`in_place`)."""
        blocks = self.blocks
        assert isinstance(blocks, DeviceBlocks)
        return blocks

    @property
    def host(self) -> HostBlocks:
        """The layer's blocks, which are the host's (not :attr:`in_place`)."""
        blocks = self.blocks
        assert isinstance(blocks, HostBlocks)
        return blocks

    # Geometry -------------------------------------------------------------------------------------------------

    def set_geometry(self, k: mx.array, v: mx.array, *, batch: int, heads: QueryHeads | None = None) -> BlockGroup:
        """Fix the geometry and kind of blocks of the layer's group by its first keys and values; then validate.

        Args:
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
        group = self.group
        geometry = group.validate(k, v, batch)
        if group.geometry is None:
            with self.lock:
                self.owners.collect()
                self.memory.fix_geometry(group, geometry, heads)
        return group

    def fitted(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values cast to the layer's dtype, as mlx-lm's caches do; unchanged if that is not known yet,
        or if :meth:`set_geometry` will refuse them."""
        geometry = self.group.geometry
        if geometry is None or not mx.issubdtype(k.dtype, mx.floating) or k.dtype != v.dtype:
            return k, v
        return k.astype(geometry.dtype), v.astype(geometry.dtype)

    # Writing --------------------------------------------------------------------------------------------------

    def step(self, tables: Sequence[BlockTable], counts: Sequence[int] | int) -> Step:
        """Return the step of the tables' last positions, checked and prepared once for all layers of a group.

        Args:
            tables: one per sequence, of the layer's group.
            counts: new tokens of each sequence, at least 1; an int holds for all of them.

        Raises:
            GeometryError: the layer is not of the tables' group, or fewer tokens are reserved.
            BlockStateError: a table was released, or a block of those positions is shared.
        """
        if isinstance(counts, int):
            counts = (counts,) * len(tables)
        self.owners.collect()
        step, is_new = self.group.step(tables, counts)
        if is_new:
            try:
                self._check_positions(tables, counts)
            except Exception:
                self.group.touch()
                raise
        return step

    def _check(self, table: BlockTable) -> None:
        self.owners.check(table)
        if table.group != self.group_index:
            raise GeometryError(f"layer {self.number} does not belong to the table's group {table.group}")

    def _check_positions(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> None:
        refcount, size = self.group.allocator.refcount, self.group.block_size
        owner, group = self.owners.owner, self.group_index
        for table, num_tokens in zip(tables, counts, strict=True):
            if table.released or table.owner is not owner or table.group != group:
                self._check(table)  # raises
            first = table.length - num_tokens
            if first < 0:
                raise GeometryError(
                    f"cannot write {num_tokens} tokens: only {table.length} reserved; call append_tokens first"
                )
            for block_id in table.block_ids[first // size :]:
                if refcount(block_id) != 1:
                    raise BlockStateError(
                        f"cannot write block {block_id}: it has {refcount(block_id)} references, not 1"
                    )

    def write(self, tables: Sequence[BlockTable], k: mx.array, v: mx.array) -> None:
        """Write keys and values of the last n reserved tokens of each of B sequences, as they are (no cast).

        Args:
            tables: B tables of the layer's group, each with at least n tokens.
            k: ``[B, n_kv_heads, n, k_head_dim]``.
            v: ``[B, n_kv_heads, n, v_head_dim]``.

        Raises:
            GeometryError, BlockStateError, PoolExhaustedError: before anything is written.
        """
        with self.lock:
            self.group.validate(k, v, len(tables))
            step = self.step(tables, k.shape[2])
            self.set_geometry(k, v, batch=len(tables))
            self.write_step(tables, step, k, v)

    def write_stored(self, tables: Sequence[BlockTable], k: mx.array, v: mx.array) -> None:
        """Write what :meth:`read_stored` returned for this layer or another one of the same geometry, without
        quantising it again.

        Raises:
            GeometryError, BlockStateError: before anything is written.
        """
        with self.lock:
            geometry = self.group.geometry
            if geometry is None or geometry.format is None:
                self.write(tables, k, v)
                return
            heads, k_words, v_words, dtype, _ = geometry.stored
            shape = (len(tables), heads, k.shape[2] if k.ndim == 4 else 0)
            if (k.shape, v.shape) != ((*shape, k_words), (*shape, v_words)) or {k.dtype, v.dtype} != {dtype}:
                raise GeometryError(
                    f"rows of {k.dtype} {k.shape} and {v.dtype} {v.shape} do not match pages of {geometry}"
                )
            step = self.step(tables, k.shape[2])
            self._write(tables, step, k, v, stored=True)

    def write_step(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        """Write k and v that :meth:`set_geometry` has accepted at the positions of a :meth:`step`; the caller holds the
        pool's lock. Their shape may also be ``[T, n_kv_heads, 1, head_dim]``, for all tokens of the step."""
        self._write(tables, step, k, v)

    def _write(
        self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array, *, stored: bool = False
    ) -> None:
        lock = self.lock
        if not hasattr(lock.local, "has_worked"):
            mx.eval(k, v)  # raises for what this thread cannot compute, such as another thread's lazy weights
        lock.is_dirty = True
        if lock.held_arrays.pairs:
            lock.held_arrays.compute()
        self.group.blocks[self.position].write(tables, step, k, v, stored=stored)
        if step.is_pack:
            self.group.pace(self.position, step.num_tokens)

    # Reading --------------------------------------------------------------------------------------------------

    def gather_visible(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        """Return copies of the keys and values of positions ``logical_start .. length - 1``.

        Returns:
            K ``[1, n_kv_heads, n, k_head_dim]``, V ``[1, n_kv_heads, n, v_head_dim]``.

        Raises:
            BlockStateError: the table was released, or nothing was written yet.
            GeometryError: the layer is not of the table's group.
        """
        return self._gather(table, stored=False)

    def read_stored(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        """Return copies of positions ``logical_start .. length - 1`` as the blocks store them, for
        :meth:`write_stored`: rows ``[1, n_kv_heads, n, num_words]`` (uint32) of quantised pages, else keys and values.

        Raises:
            BlockStateError, GeometryError: as :meth:`gather_visible`.
        """
        return self._gather(table, stored=True)

    def _gather(self, table: BlockTable, *, stored: bool) -> tuple[mx.array, mx.array]:
        self._check(table)
        if self.group.geometry is None or not table.num_visible:
            raise BlockStateError("nothing has been written to this table")
        with self.lock:
            return self.blocks.gather(table, stored=stored)

    def fetch(self, tables: Sequence[BlockTable], step: Step | None = None) -> tuple[mx.array, mx.array, mx.array]:
        """Return lazy copies of what tables hold in the host's blocks, padded on the left to the longest as by
        :func:`.step.padded_slots`, and an array in the blocks' pending reads that stands for both.

        Args:
            tables: of the layer's group.
            step: the tables' step, for which all layers share an index.
        """
        blocks, known = self.host, None if step is None else step.fetch_index
        if known is None or known[0] != blocks.num_blocks:
            known = blocks.num_blocks, blocks.index_of(padded_slots(tables))
            if step is not None:
                step.fetch_index = known
        keys, values = blocks.fetch(known[1])
        # Outputs of one operation are computed together: the third, of one element, is ready when the others are.
        keys, values, read = mx.depends([keys, values, mx.zeros(())], [])
        self.note_read(read)
        return keys, values, read

    def note_read(self, *results: mx.array) -> None:
        """Note lazy arrays that read the host's blocks: the next write computes them first."""
        self.host.pending += results

    def ready(self) -> list[mx.array]:
        """Return small arrays that are ready when all writes to the layer so far are; none before the first write. Any
        thread can wait for them."""
        with self.lock:
            return self.group.blocks[self.position].ready() if self.group.blocks else []

    def after_writes(self, k: mx.array, v: mx.array) -> list[mx.array]:
        """Return k and v, ready only when the layer's writes are. Without this MLX may put off all layers' writes to
        the end of a prefill, which keeps every layer's new keys and values alive until then."""
        return self.device.after_writes(k, v) if self.in_place else [k, v]
