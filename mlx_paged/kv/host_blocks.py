"""HostBlocks: one layer's K and V blocks in a CPU's memory, written through NumPy views."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels.launch_shape import MAX_QUERY_LENGTH
from ..kernels.quantized import rotate
from .block_table import BlockTable
from .geometry import Geometry
from .new_tokens import NewTokens, visible_slots

NO_BLOCKS = mx.array(np.zeros((0, 1), np.float32))
# Of 8 rows and 2 heads of 16, f32, 12 tokens took 132 us a layer for 288 row by row, 100 tokens (25 KB) 280 for 346,
# 300 tokens 561 for 533.
MOST_PADDED_BYTES = 32 << 10
ZERO = mx.array(np.zeros((), np.float32))


class HostBlocks:
    """K ``[n_kv_heads * num_blocks * block_size, head_dim]`` and V of one layer: the slots of all blocks, block by
    block, of one head after the other. It is the layout of mlx-lm's own cache, so attention reads blocks with
    consecutive ids, as a sequence alone in the pool has, through a view (docs/adr/0092).

    The next few tokens of each sequence are written lazily, by an index that all layers of a step share: a step is one
    graph, and MLX reuses the arrays' memory unless something else refers to it. Everything else, and a thread's first
    write, goes through NumPy views: nothing is copied, and it is done when the method returns. So an MLX view of the
    blocks is memory, not a value: it changes with the next write. Whatever leaves the cache is a copy, and what was
    built over the blocks and is not computed yet is in ``pending``, which a write computes first (docs/adr/0092). With
    a page format the arrays hold quantised rows, made when a token is written.

    Args:
        geometry: of the layer's keys and values.
        block_size, num_blocks: size and number of the blocks.

    Attributes:
        num_blocks: blocks that both tensors hold; 0 after :meth:`drop`.
        most_padded: most tokens of the longest of several rows that attend together over copies.
        pending: lazy arrays that read the blocks, and one that is ready when the latest lazy write is.
    """

    in_place = False

    def __init__(self, geometry: Geometry, block_size: int, num_blocks: int) -> None:
        self.geometry, self.block_size, self.num_blocks = geometry, block_size, num_blocks
        self.pending: list[mx.array] = []
        self.most_padded = MOST_PADDED_BYTES // geometry._replace(format=None).bytes_per_token()
        self._stored, self._forms = geometry.stored, geometry.rows
        self._is_bfloat16 = self._stored.dtype == mx.bfloat16
        self._keys, self._values = (self._zeros(num_blocks, dim) for dim in self._dims)
        # None while MLX may write: it would copy an array that has a view.
        self._known_views: tuple[np.ndarray, np.ndarray] | None = None
        self._thread = threading.local()  # ``has_written`` if the thread has

    @property
    def _dims(self) -> tuple[int, int]:
        return self._stored.k_head_dim, self._stored.v_head_dim

    def _zeros(self, num_blocks: int, dim: int) -> mx.array:
        # Zeros, not uninitialised memory: a masked product with NaN would still be NaN.
        return mx.zeros((self._stored.num_kv_heads * num_blocks * self.block_size, dim), self._stored.dtype)

    @property
    def _views(self) -> tuple[np.ndarray, np.ndarray]:
        """The memory of both tensors, ``[n_kv_heads, num_slots, head_dim]``, once all lazy writes are computed."""
        if self._known_views is None:
            self._known_views = self._view(self._keys), self._view(self._values)
        return self._known_views

    def _view(self, x: mx.array) -> np.ndarray:
        view: np.ndarray = np.array(_as_words(x), copy=False)
        return view.reshape(self._stored.num_kv_heads, -1, x.shape[1])

    # Writing --------------------------------------------------------------------------------------------------

    def write(self, tokens: NewTokens, k: mx.array, v: mx.array, *, stored: bool = False) -> None:
        """Write new tokens; see :meth:`Blocks.write`."""
        if self._forms is not None and not stored:
            if self.geometry.rotates:
                k, v = rotate(k), rotate(v)
            k, v = self._forms[0].quantize(k), self._forms[1].quantize(v)
        if tokens.num_tokens <= MAX_QUERY_LENGTH * len(tokens.tables) and hasattr(self._thread, "has_written"):
            # Nothing waits for the new keys, so the next layers' can be built. A prompt's would be alive in all layers
            # until the end of its call.
            key = "index", k.shape[0], self._keys.shape[0]
            index = tokens.made.get(key)
            if index is None:
                index = tokens.made[key] = self._index_of(tokens.host_slots().reshape(len(k), -1))
            mx.eval(self.pending)  # done long ago, but for a model of a layer or two: MLX would copy what is still read
            self.pending.clear()
            self._known_views = None
            self._keys[index], self._values[index] = k, v
            self.pending += mx.depends([ZERO], [self._keys, self._values])
            return
        if self._is_bfloat16:
            k, v = _as_words(k), _as_words(v)
        mx.eval(self.pending, k, v)  # raises for what this thread cannot compute, such as another's lazy weights
        self._thread.has_written = True
        self.pending.clear()
        slots = tokens.host_slots()
        for view, x in zip(self._views, (k, v), strict=True):
            new = np.array(x, copy=False)
            view[:, slots] = new[0] if len(new) == 1 else new.swapaxes(0, 1).reshape(new.shape[1], -1, new.shape[3])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others; see :meth:`Blocks.copy`."""
        mx.eval(self.pending)
        self.pending.clear()
        for view in self._views:
            blocks = view.reshape(view.shape[0], -1, self.block_size, view.shape[2])
            blocks[:, list(targets)] = blocks[:, list(sources)]

    def resize(self, num_blocks: int) -> list[mx.array]:
        """Change the number of blocks; see :meth:`Blocks.resize`. Reads that were built keep the former arrays."""
        tensors = []
        for old, dim in zip((self._keys, self._values), self._dims, strict=True):
            new = self._zeros(num_blocks, dim)
            kept = min(self.num_blocks, num_blocks) * self.block_size
            # Also for no blocks: a view computes the new array, which another thread could not.
            self._view(new)[:, :kept] = self._view(old)[:, :kept]
            tensors.append(new)
        self._keys, self._values = tensors  # both or neither: they share indices
        self.num_blocks = num_blocks
        self._known_views = None
        return []

    def drop(self) -> None:
        """Drop the tensors; see :meth:`Blocks.drop`. Reads that were built keep them."""
        self._keys = self._values = NO_BLOCKS
        self.num_blocks = 0
        self._known_views = None
        self.pending.clear()

    # Reading --------------------------------------------------------------------------------------------------

    def gather(self, table: BlockTable, group: int, *, stored: bool = False) -> tuple[mx.array, mx.array]:
        """Return copies of the visible positions; see :meth:`Blocks.gather`."""
        place = table.place(group)
        index: Any = visible_slots(table, group) if place is None else slice(*place)
        k, v = (_copy(view[:, index], self._stored.dtype) for view in self._views)
        return (k, v) if stored or self._forms is None else self._dequantized(k, v)

    def read(self, tokens: NewTokens) -> list[tuple[mx.array, mx.array]]:
        """Return the visible positions of each table, lazily and, where its blocks are consecutive, as a view. What is
        computed from them must be added to ``pending`` before anything else is done with the pool."""
        heads, k, v, found = self._stored.num_kv_heads, self._keys, self._values, []
        keys, values = k.reshape(1, heads, -1, k.shape[1]), v.reshape(1, heads, -1, v.shape[1])
        # Loops, not comprehensions, which are calls: the host's time limits decode steps.
        for table, place in zip(tokens.tables, tokens.made.get("places") or tokens.places(), strict=True):
            if place is None:
                found.append(self._taken(table, tokens.group))
            else:
                start, end = place
                found.append((keys[:, :, start:end], values[:, :, start:end]))
        return found if self._forms is None else [self._dequantized(*pair) for pair in found]

    def _taken(self, table: BlockTable, group: int) -> tuple[mx.array, mx.array]:
        """Return the stored rows of a table's visible positions, block by block."""
        size, first = table.block_size, table.starts[group] // table.block_size
        key, indices = ("blocks", self.num_blocks), table.indices[group]
        index = indices.get(key)
        if index is None:
            ids = np.array(table.block_ids[group][first:], np.int32)
            heads = np.arange(self._stored.num_kv_heads, dtype=np.int32)[:, None] * self.num_blocks
            index = indices[key] = mx.array(heads + ids)
        skip = table.starts[group] - first * size
        k, v = (
            x.reshape(-1, size * x.shape[1])[index].reshape(1, len(index), -1, x.shape[1])[
                :, :, skip : skip + table.num_visible(group)
            ]
            for x in (self._keys, self._values)
        )
        return k, v

    def fetch(self, tokens: NewTokens) -> tuple[mx.array, mx.array]:
        """Return the keys ``[B, n_kv_heads, n, k_head_dim]`` and values that the tables' last tokens see, padded on the
        left as by :meth:`.NewTokens.padded_slots`: lazy copies, which must be added to ``pending`` like what is
        read."""
        key = "fetch", self._keys.shape[0]
        index = tokens.made.get(key)
        if index is None:
            index = tokens.made[key] = self._index_of(tokens.padded_slots())
        k, v = self._keys[index], self._values[index]
        return (k, v) if self._forms is None else self._dequantized(k, v)

    def _index_of(self, slots: np.ndarray) -> mx.array:
        """Return the index ``[B, n_kv_heads, n]`` of slots ``[B, n]`` in the tensors; valid while :attr:`num_blocks` is
        the same."""
        heads = np.arange(self._stored.num_kv_heads)[:, None] * (self.num_blocks * self.block_size)
        return mx.array((slots[:, None] + heads).astype(np.int64 if self._keys.size > 1 << 31 else np.int32))

    def _dequantized(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        assert self._forms is not None
        k, v = self._forms[0].dequantize(k), self._forms[1].dequantize(v)
        return (rotate(k), rotate(v)) if self.geometry.rotates else (k, v)

    def forget_failed_work(self) -> None:
        """Forget the reads: they could not be computed."""
        self.pending.clear()


def _as_words(x: mx.array) -> mx.array:
    """Return bfloat16, which NumPy lacks, as uint16; other arrays unchanged."""
    return x.view(mx.uint16) if x.dtype == mx.bfloat16 else x


def _copy(part: np.ndarray, dtype: mx.Dtype) -> mx.array:
    # Contiguous first: for a strided array MLX would allocate as much as it spans, nearly the whole pool.
    copy = mx.array(np.ascontiguousarray(part)[None])
    return copy.view(dtype) if dtype == mx.bfloat16 else copy
