"""PagedKVCache: mlx-lm's cache protocol for one layer of one sequence, over a BlockPool and its BlockTables."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from ..attention import dispatch
from ..attention.gather import causal_mask, window_under
from ..errors import BlockStateError, PromptCacheError
from ..kv.block_table import BlockTable
from ..kv.geometry import AttentionParams, QueryHeads, Window
from ..kv.lock import locked
from ..kv.new_tokens import NewTokens
from .layer_cache import LayerCache, LazyKV, hand_out
from .sequence import SequenceTables


class PagedKVCache(LayerCache):
    """The cache of one attention layer of one sequence. It replaces mlx-lm's ``KVCache`` and, in a group with a sliding
    window, its ``RotatingKVCache``.

    Args:
        sequence: the sequence's tables, shared by the caches of all its layers.
        layer: index of the model layer.
    """

    def __init__(self, sequence: SequenceTables, layer: int) -> None:
        super().__init__(sequence, layer)
        self.sequence = sequence

    @property
    def table(self) -> BlockTable:
        """The sequence's block table."""
        return self.sequence.table

    @property
    def offset(self) -> int:
        """Number of tokens that this layer has seen, which is the position of the next one."""
        return self.sequence.offset(self.layer)

    # Writing and reading --------------------------------------------------------------------------------------

    @locked
    def update(self, keys: mx.array, values: mx.array) -> None:
        """Write the next tokens' keys and values ``[1, n_kv_heads, n_new, head_dim]`` to the pool.

        Raises:
            GeometryError, PoolExhaustedError, KernelUnavailableError: before anything is changed.
        """
        tokens, keys, values = self._begin(keys, values, None)
        self.group.blocks[self.position].write(tokens, keys, values)

    def _begin(
        self, keys: mx.array, values: mx.array, heads: QueryHeads | None
    ) -> tuple[NewTokens, mx.array, mx.array]:
        """Reserve positions for the next tokens. Return these, and the keys and values in the pool's dtype. The first
        call of a group chooses its kind of blocks by the queries' ``heads``."""
        keys, values = self._fitted(keys, values, 1, heads)
        return self.sequence.begin_layer(self.layer, keys.shape[2]), keys, values

    @locked
    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        params: AttentionParams,
    ) -> mx.array:
        """Write the next tokens and attend from them.

        Args:
            queries: ``[1, n_q_heads, n_new, head_dim]``, rotated.
            keys: ``[1, n_kv_heads, n_new, head_dim]``, rotated.
            values: ``[1, n_kv_heads, n_new, v_head_dim]``.
            params: its mask may come from :meth:`make_mask` or be any other.

        Returns:
            ``[1, n_q_heads, n_new, v_head_dim]``.
        """
        heads = None if self.group.geometry is not None else params.heads(queries.shape[1])
        tokens, keys, values = self._begin(keys, values, heads)
        if params.mask is not None:
            params = params._replace(window=self.sequence.masks.window_of(params.mask))
        return dispatch.attend(queries, (keys, values), self.group, self.position, tokens, params)

    @locked
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens and return all visible keys and values, gathered lazily, by position.

        The attention function that replaces mlx-lm's (``patches/models/seam.py``) recognises them, and nothing is
        gathered.
        """
        tokens, keys, values = self._begin(keys, values, None)
        self.group.blocks[self.position].write(tokens, keys, values)
        sequence, table = self.sequence, tokens.tables[0]
        if table.num_visible(self.group_index) == tokens.num_tokens and not self.group.is_quantized:
            hand_out(keys, values, LazyKV(sequence, self.layer))
            return keys, values
        return self._hand_out(tokens)

    @locked
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the visible keys and values ``[1, n_kv_heads, n, head_dim]``, by position (a copy), also for another
        layer that attends over them; recognised as those of :meth:`update_and_fetch` are."""
        self.pool.check(self.table)
        if not self.group.blocks or not self.table.num_visible(self.group_index):
            raise BlockStateError("nothing has been written to this table")
        return self._hand_out(NewTokens([self.table], (1,), self.group_index))

    @locked
    def load(self, keys: mx.array, values: mx.array, offset: int, *, stored: bool = False) -> None:
        """Fill an empty cache with dense keys and values, in order of position.

        Args:
            keys: ``[1, n_kv_heads, n, head_dim]`` of positions ``offset - n .. offset - 1``.
            values: ``[1, n_kv_heads, n, v_head_dim]``.
            offset: tokens seen so far; more than ``n`` only with a sliding window.
            stored: see :meth:`BlockPool.write`.

        Raises:
            PromptCacheError: the cache is not empty, or tokens the layer still needs are missing.
            GeometryError, PoolExhaustedError: before anything is changed.
        """
        start, spec = offset - keys.shape[2], self.group.spec
        surplus = -start % spec.stride  # tokens of a chunk whose first tokens are missing
        if self.offset or start < 0 or start + surplus > spec.first_kept(offset):
            raise PromptCacheError(
                f"layer {self.layer}: cannot load {keys.shape[2]} tokens ending at {offset} into a cache of "
                f"{self.offset} tokens" + (f" with window {self.window}" if self.window else "")
            )
        if not offset:
            return
        pool = self.pool
        if not stored:
            pool.set_geometry(self.layer, keys, values, batch=1)
        keys, values, start = keys[:, :, surplus:], values[:, :, surplus:], start + surplus
        try:
            self.sequence.load(self.layer, offset, start)
        except BlockStateError as error:
            raise PromptCacheError(str(error)) from None
        if offset == start:
            return
        pool.write(self.layer, [self.table], keys, values, stored=stored)
        mx.eval(pool.ready(self.layer))  # layer by layer, so that one layer's keys are held twice, not all

    # mlx-lm's protocol ----------------------------------------------------------------------------------------

    @property
    def state(self) -> tuple[Any, ...]:
        """Return what mlx-lm evaluates between prefill chunks: arrays that are ready when this layer's writes are, and
        the cache itself. No keys are gathered for it; see :meth:`keys_and_values`."""
        return (self.pool.ready(self.layer), self)

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        """Restore an empty cache from a paged state, or from mlx-lm's ``(keys, values, offset)``."""
        if len(value) == 2 and isinstance(value[1], PagedKVCache):
            source = value[1]
            if source.offset:
                is_alike = source.group.geometry == self.group.geometry
                k, v = source.pool.gather_visible(source.table, source.layer, stored=is_alike)
                self.load(k, v, source.offset, stored=is_alike)
        elif len(value) == 3 and isinstance(value[0], mx.array):
            keys, values, offset = value
            self.load(keys[..., :offset, :], values[..., :offset, :], offset)
        else:
            raise PromptCacheError("a state must be that of a paged cache, or (keys, values, offset)")

    @property
    def nbytes(self) -> int:
        """Bytes of this layer in the blocks this sequence holds; shared blocks count in each sequence."""
        group = self.group
        return self.table.num_blocks(group.index) * group.bytes_per_block // len(group.spec.layers)

    def size(self) -> int:
        """Return the number of visible tokens, at most the window."""
        return self.offset if self.window is None else min(self.offset, self.window)

    def empty(self) -> bool:
        """Return whether the layer has seen no token."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Return whether it can be trimmed: always, unless a sliding window is full, as in mlx-lm."""
        ring = self.group.spec.ring
        return ring is None or self.offset < ring

    def trim(self, n: int) -> int:
        """Drop up to ``n`` tokens from the end. Return how many.

        Raises:
            TrimError: tokens that the one after the new end sees are no longer held (see :meth:`is_trimmable`).
        """
        n = min(self.offset, n)
        if n > 0:
            self.sequence.trim(self.layer, n)
        return n

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Return the mask of the next ``N`` tokens over the visible ones and themselves, as mlx-lm's dense caches do.

        Returns:
            None (all visible), "causal", or a boolean array ``[N, visible + N]``.
        """
        mask, window = self._mask(N, return_array, window_size)
        if isinstance(mask, mx.array):
            self.sequence.masks.add(self.group_index, mask, window)
        return mask

    def _mask(self, N: int, return_array: bool, window_size: int | None) -> tuple[mx.array | str | None, Window]:
        """Return the mask, and the window it stands for."""
        everything, own = self.offset + N, self.sees
        seen = window_under(self.group.spec, window_size)
        if self.window is None or own is None:
            if seen is not None:
                return causal_mask(N, self.offset, seen), seen
            if N == 1:
                return None, Window(everything)
            return (causal_mask(N, self.offset) if return_array else "causal"), Window(everything)
        assert seen is not None
        if N > 1:
            before = self.offset - own.first_seen(self.offset)
            if return_array or seen.first_seen(before + N - 1):
                return causal_mask(N, before, seen), seen
            return "causal", seen
        if window_size is None or self.offset < window_size or own.size <= window_size:
            return None, own
        # One new token, under a window narrower than what is kept.
        visible = min(self.offset + 1, self.window)
        return mx.arange(visible) >= visible - window_size, seen

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        return type(self)(copy.deepcopy(self.sequence, memo), self.layer)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.layer}, offset={self.offset}, {self.table})"
