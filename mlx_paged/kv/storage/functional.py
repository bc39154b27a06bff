"""FunctionalStorage: one layer's K and V blocks as ordinary MLX arrays, updated without copying the pool.
QuantizedStorage: such blocks as rows of codes, scales and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy as handle_of
from typing import Any

import mlx.core as mx
import numpy as np

from ...kernels.build import NoKernelError
from ...kernels.ops import DecodeLaunch
from ...kernels.quantized import rotate
from ..block_table import BlockTable, Segment
from ..step import MAX_INT32, Columns, Step
from .attention_params import AttentionParams, QueryHeads
from .base import Geometry, Storage, StorageChoice


class GatheredStorage:
    """Base of storages in ordinary MLX arrays, which no kernel writes or reads."""

    in_place = decoded_by_kernel = False

    def prepare_decode(
        self, q: mx.array, tables: Sequence[BlockTable], step: Step, params: AttentionParams, *, appends: bool
    ) -> DecodeLaunch:
        raise NoKernelError("the blocks are not written in place")

    def decode(
        self,
        launch: DecodeLaunch,
        q: mx.array,
        sinks: mx.array | None = None,
        append: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        raise NoKernelError("the blocks are not written in place")

    def prefill(self, q: mx.array, tables: Sequence[BlockTable], step: Step, params: AttentionParams) -> mx.array:
        raise NoKernelError("the blocks are not written in place")

    def read_packed(self, tables: Sequence[BlockTable], step: Step) -> tuple[mx.array, mx.array]:
        raise NoKernelError("the blocks are not written in place")

    def rewind(self, to: mx.array, latest: mx.array) -> bool:
        return False


class FunctionalStorage(GatheredStorage):
    """K ``[1, n_kv_heads, num_blocks * block_size, k_head_dim]`` and V (with ``v_head_dim``) of one layer: the slots of
    all blocks, block by block.

    The layout is that of mlx-lm's own cache. So blocks with consecutive ids, as a sequence alone in the pool has, are
    written and read by one slice: attention takes a view of them, and nothing is gathered (docs/adr/0002). Steps of
    several rows leave the arrays flat, ``[n_kv_heads * num_blocks * block_size, head_dim]``, for the next such step.

    MLX arrays are values: an update happens in place only if no other handle, view or unfinished read keeps the old
    buffer when the update is evaluated. So each write replaces the only handle, no view outlives the step that made
    it, and the pool lets the reads of the step before finish (BlockGroup.wait_for_reads). Otherwise MLX copies the
    pool.
    """

    num_quantized = 0

    def __init__(self, geometry: Geometry, block_size: int, num_blocks: int) -> None:
        self.geometry = geometry
        self.block_size, self.num_blocks = block_size, num_blocks
        heads = geometry.num_kv_heads
        # Zeros, not uninitialised memory: a masked product with NaN would still be NaN.
        self._keys = mx.zeros((1, heads, num_blocks * block_size, geometry.k_head_dim), geometry.dtype)
        self._values = mx.zeros((1, heads, num_blocks * block_size, geometry.v_head_dim), geometry.dtype)

    def _unflatten(self) -> tuple[mx.array, mx.array]:
        """Give keys and values the shape ``[1, n_kv_heads, num_slots, head_dim]``, and return them."""
        if self._keys.ndim == 2:
            self._keys, self._values = (
                flat.reshape(1, self.geometry.num_kv_heads, -1, flat.shape[1]) for flat in (self._keys, self._values)
            )
        return self._keys, self._values

    def write(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        if step.num_tokens == 1:
            self.write_segments(tables[0].tail_segments(1), k, v)
            return
        if not step.is_pack:
            if step.flat_index is None or step.flat_index[0] != self.num_blocks:
                step.flat_index = self.num_blocks, self.host_flat_index(step.host_slots(tables)[:, None])
            self.write_rows(step.flat_index[1], k, v)
            return
        for table, count, part_k, part_v in zip(tables, step.counts, step.split(k), step.split(v), strict=True):
            self.write_segments(table.tail_segments(count), part_k, part_v)

    def write_stored(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        self.write(tables, step, k, v)

    def write_segments(self, segments: Sequence[Segment], k: mx.array, v: mx.array) -> None:
        """Write tokens of k, v ``[1, n_kv_heads, n, head_dim]``: one slice update per segment.

        Slices, not a scatter: on the CPU a scatter goes element by element and is 4-7 times slower here.
        """
        for pool, x in zip(self._unflatten(), (k, v), strict=True):
            for slot, num_tokens, source in segments:
                part = x[:, :, source : source + num_tokens] if len(segments) > 1 else x
                pool[:, :, slot : slot + num_tokens] = part

    def write_rows(self, index: mx.array, k: mx.array, v: mx.array) -> None:
        """Write k, v ``[B, n_kv_heads, 1, head_dim]`` at an index ``[B, n_kv_heads, 1]`` of :meth:`flat_index`.

        One index over one axis: with an index per axis MLX would make arrays in each layer, which takes longer than the
        write (8 rows of 2 heads of size 16 on a CPU: 28 us, and 12 us with one index).
        """
        if self._keys.ndim == 4:
            self._keys, self._values = (pool.reshape(-1, pool.shape[3]) for pool in (self._keys, self._values))
        self._keys[index] = k
        self._values[index] = v

    def flat_index(self, slots: mx.array) -> mx.array:
        """Return the index ``[B, n_kv_heads, n]`` of slots ``[B, n]`` in flat arrays; valid until the pool grows."""
        heads = mx.arange(self.geometry.num_kv_heads, dtype=slots.dtype)[:, None] * (self.num_blocks * self.block_size)
        return heads + slots[:, None]

    def host_flat_index(self, slots: np.ndarray) -> mx.array:
        """Return :meth:`flat_index` of slots that are known on the host: one array in place of four operations."""
        width, heads = self.num_blocks * self.block_size, self.geometry.num_kv_heads
        index = slots[:, None] + np.arange(0, heads * width, width)[:, None]
        return mx.array(index if heads * width > MAX_INT32 else index.astype(np.int32))

    def read_visible(self, table: BlockTable, *, copy: bool = True) -> tuple[mx.array, mx.array]:
        """Read by a slice where the blocks are consecutive, else gather them. The table keeps the device index, so that
        all layers of a step share it."""
        place = self.place_of(table)
        # With one head a view is contiguous: mx.contiguous would return the view, which keeps the pool's buffer alive.
        if place is not None and not (copy and self.geometry.num_kv_heads == 1):
            k, v = self.view_tokens(*place)
            return (mx.contiguous(k), mx.contiguous(v)) if copy else (k, v)
        size, start, end = table.block_size, table.logical_start, table.length
        first, last = start // size, -(-end // size)
        key = ("blocks", first, last, self.num_blocks)
        index = table.indices.get(key)
        if index is None:
            index = table.indices[key] = self.block_index(table.block_ids[first:last])
        k, v = self.gather_blocks(index)
        skip = start - first * size
        return k[:, :, skip : skip + end - start], v[:, :, skip : skip + end - start]

    def place_of(self, table: BlockTable) -> tuple[int, int] | None:
        """Return the start and end of the visible tokens among the pool's slots, or None if their blocks are not
        consecutive."""
        size, start, end = table.block_size, table.logical_start, table.length
        first = start // size
        if not table.is_consecutive(first, -(-end // size)):
            return None
        before = (table.block_ids[first] - first) * size
        return before + start, before + end

    def append(self, table: BlockTable, step: Step, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Write one token of one table, and return its visible keys and values without a copy."""
        place = step.place
        if place is None:  # in a step's first layer, or where the blocks are not consecutive
            place = step.place = self.place_of(table)
        if place is None:
            self.write_segments(table.tail_segments(1), k, v)
            return self.read_visible(table, copy=False)
        start, end = place
        keys, values = self._unflatten()
        keys[:, :, end - 1 : end] = k
        values[:, :, end - 1 : end] = v
        return keys[:, :, start:end], values[:, :, start:end]

    def read_stored(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        return self.read_visible(table)

    def read_rows(self, columns: Columns) -> tuple[mx.array, mx.array]:
        if columns.prepared is None or columns.prepared[0] != self.num_blocks:
            if columns.slots is not None:
                columns.prepared = self.num_blocks, self.host_flat_index(columns.slots)
                return self.read_tokens(columns.prepared[1])
            size, positions = self.block_size, columns.positions
            slots = mx.take_along_axis(columns.block_ids, positions // size, axis=1) * size + positions % size
            columns.prepared = self.num_blocks, self.flat_index(slots)
        return self.read_tokens(columns.prepared[1])

    def read_tokens(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """Return the tokens at an index of :meth:`flat_index`: K and V of its shape plus an axis of head_dim."""
        keys, values = self._keys, self._values
        if keys.ndim == 4:
            keys, values = keys.reshape(-1, keys.shape[3]), values.reshape(-1, values.shape[3])
        return keys[index], values[index]

    def view_tokens(self, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Return slots ``start .. end - 1`` without a copy: K ``[1, n_kv_heads, end - start, k_head_dim]`` and V.

        The views keep the pool's buffer; drop them before the next write is evaluated.
        """
        keys, values = self._unflatten()
        return keys[:, :, start:end], values[:, :, start:end]

    def for_single_queries(self, groups: int, index: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Return all tokens of the pool, or of the blocks at an index, in the shapes for products with one token's
        queries: K ``[1, n_kv_heads, groups, k_head_dim, n]``, and V ``[1, n_kv_heads, groups, n, v_head_dim]``, for
        ``groups`` query heads per KV head. Without an index they are views, as in :meth:`view_tokens`."""
        of = self._unflatten() if index is None else self.gather_blocks(index)
        # Broadcast once: otherwise each product would broadcast its own slice.
        k, v = (mx.broadcast_to(mx.expand_dims(x, 2), (*x.shape[:2], groups, *x.shape[2:])) for x in of)
        return k.swapaxes(3, 4), v

    def block_index(self, block_ids: Sequence[int]) -> mx.array:
        """Return the index ``[n_kv_heads, n]`` of blocks for :meth:`gather_blocks`; valid until the pool grows."""
        heads = mx.arange(self.geometry.num_kv_heads, dtype=mx.int32)[:, None]
        return heads * self.num_blocks + mx.array(list(block_ids), dtype=mx.int32)[None]

    def gather_blocks(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """Gather any blocks in one copy: K ``[1, n_kv_heads, n * block_size, k_head_dim]`` and V."""
        tokens = index.shape[1] * self.block_size
        k, v = (
            pool.reshape(-1, self.block_size * pool.shape[-1])[index].reshape(1, -1, tokens, pool.shape[-1])
            for pool in (self._keys, self._values)
        )
        return k, v

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy runs of consecutive blocks, since a scatter is slow on the CPU. The sources are evaluated first: reading
        and writing a pool in one graph would copy the pool."""
        size = self.block_size
        runs = [tuple(size * number for number in run) for run in _runs(sources, targets)]
        for pool in self._unflatten():
            copies = [mx.contiguous(pool[:, :, source : source + count]) for source, _, count in runs]
            if self.geometry.num_kv_heads == 1:  # a contiguous slice is a view, which would keep the pool
                copies = [copy + 0 for copy in copies]
            mx.eval(copies)
            for (_, target, count), copy in zip(runs, copies, strict=True):
                pool[:, :, target : target + count] = copy

    def resize(self, num_blocks: int) -> None:
        self._unflatten()
        try:
            for name in ("_keys", "_values"):
                old: mx.array = getattr(self, name)
                missing = num_blocks * self.block_size - old.shape[2]
                if missing == 0:
                    continue
                if missing > 0:
                    new = mx.concatenate([old, mx.zeros((*old.shape[:2], missing, old.shape[3]), old.dtype)], axis=2)
                else:
                    new = mx.contiguous(old[:, :, :missing])
                mx.eval(new)
                setattr(self, name, new)
                del old, new
                mx.clear_cache()
            self.num_blocks = num_blocks
        except Exception:
            fewest = min(self._keys.shape[2], self._values.shape[2])  # keys and values must have the same size
            self._keys, self._values = self._keys[:, :, :fewest], self._values[:, :, :fewest]
            self.num_blocks = fewest // self.block_size
            raise

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        """Return the arrays, ready only when every write so far is."""
        return mx.depends(list(arrays), [self._keys, self._values])

    def fence(self) -> mx.array:
        """Return two elements that are ready when every write so far is, and do not keep the pool's buffer alive."""
        keys, values = self._unflatten()
        return mx.stack([keys[0, 0, 0, 0], values[0, 0, 0, 0]])

    def latest(self) -> list[mx.array]:
        return [self._keys, self._values]

    def forget_failed_writes(self) -> None:
        """Do nothing: the tensors themselves could not be computed, and there are no others."""

    def snapshot(self) -> Any:
        # Other handles of the same arrays: assigning to a slice changes which array a handle refers to.
        return handle_of(self._keys), handle_of(self._values)

    def restore(self, snapshot: Any) -> None:
        keys, values = snapshot
        if keys.size == self._keys.size:
            self._keys, self._values = keys, values


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (source, target, number of blocks) of each run that is consecutive in both."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, target):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def functional_form(geometry: Geometry) -> Callable[[Geometry, int, int], Storage]:
    """Return the form of storage that works on every device."""
    return FunctionalStorage if geometry.format is None else QuantizedStorage


def functional_storage(geometry: Geometry, block_size: int, heads: QueryHeads | None) -> StorageChoice:
    """Return the choice of storage that works on every device."""
    return StorageChoice(functional_form(geometry), "the pool was made without kernels")


class QuantizedStorage(GatheredStorage):
    """A :class:`FunctionalStorage` of quantised rows (see :class:`QuantizedRows`): keys and values are quantised when
    they are written, and dequantised, one layer at a time, when they are read. If the format rotates, the rows hold
    rotated keys and values; only code that moves rows sees these."""

    def __init__(self, geometry: Geometry, block_size: int, num_blocks: int) -> None:
        forms = geometry.rows
        assert forms is not None
        self.geometry = geometry
        self.num_quantized = 0
        self._k, self._v = forms
        self._rotates = geometry.rotates
        self._rows = FunctionalStorage(geometry.stored, block_size, num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._rows.num_blocks

    def write(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        self._rows.write(tables, step, *self._quantized(k, v))

    def write_stored(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        self._rows.write(tables, step, k, v)

    def _quantized(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        self.num_quantized += k.shape[0] * k.shape[2]
        if self._rotates:
            k, v = rotate(k), rotate(v)
        return self._k.quantize(k), self._v.quantize(v)

    def read_visible(self, table: BlockTable, *, copy: bool = True) -> tuple[mx.array, mx.array]:
        return self._dequantized(*self._rows.read_visible(table, copy=copy))

    def read_rows(self, columns: Columns) -> tuple[mx.array, mx.array]:
        return self._dequantized(*self._rows.read_rows(columns))

    def read_stored(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        return self._rows.read_stored(table)

    def _dequantized(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        k, v = self._k.dequantize(k), self._v.dequantize(v)
        return (rotate(k), rotate(v)) if self._rotates else (k, v)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._rows.copy_blocks(sources, targets)

    def resize(self, num_blocks: int) -> None:
        self._rows.resize(num_blocks)

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        return self._rows.after_writes(*arrays)

    def fence(self) -> mx.array:
        return self._rows.fence()

    def latest(self) -> list[mx.array]:
        return self._rows.latest()

    def forget_failed_writes(self) -> None:
        self._rows.forget_failed_writes()

    def snapshot(self) -> Any:
        return self._rows.snapshot(), self.num_quantized

    def restore(self, snapshot: Any) -> None:
        rows, self.num_quantized = snapshot
        self._rows.restore(rows)
