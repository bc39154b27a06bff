"""PagedBatchKVCache: one attention layer's cache for a decode step or a pack, over the block tables of its rows."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx

from ..attention import dispatch, gather
from ..attention.dispatch import Dispatch, record
from ..attention.gather import causal_mask, window_under
from ..errors import GeometryError, PromptCacheError
from ..kv.attention_params import AttentionParams, Window
from ..kv.block_table import BlockTable
from ..kv.layer import PoolLayer
from ..kv.lock import locked
from ..kv.pool import BlockPool
from ..kv.step import Step
from .lazy_kv import Append, Fences, LazyKV, hand_out
from .paged_kv_cache import PagedKVCache
from .rows import OWN_MASK, NotPackableError, Rows


class PagedBatchKVCache:
    """The cache of one attention layer for new tokens of several sequences, as rows of one token each. It has the part
    of mlx-lm's cache protocol that a model uses in a call.

    Rows may differ in length; none is padded in the pool.

    Args:
        rows: the sequences with their reserved new tokens, shared by the caches of all layers.
        layer: index of the model layer.
        row_type: class of the rows' own caches, whose ``masks_rows`` says whether attention needs array masks; read for
            each mask, as it changes when the patches are removed.
    """

    def __init__(self, rows: Rows, layer: int, row_type: type[PagedKVCache] = PagedKVCache) -> None:
        self.rows = rows
        self.layer = layer
        self.row_type = row_type
        self.pool: BlockPool = rows.pool
        self._kv: PoolLayer = rows.pool.layer(layer)

    @property
    def window(self) -> int | None:
        """Most tokens that a token sees, itself included; None: all."""
        return self._kv.window

    @property
    def offset(self) -> mx.array:
        """Position of each row's token, int32 ``[T]``; of the next token once the layer has written it."""
        return self.rows.offsets(self.layer)

    # Writing and reading --------------------------------------------------------------------------------------

    @locked
    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams, *, as_rows: bool = False
    ) -> mx.array:
        """Write the tokens' keys and values and attend from them.

        Args:
            queries: ``[T, n_q_heads, 1, head_dim]``, rotated.
            keys: ``[T, n_kv_heads, 1, head_dim]``, rotated.
            values: ``[T, n_kv_heads, 1, v_head_dim]``.
            params: with a mask from :meth:`make_mask` each row is masked by its own length. In a decode step it may be
                any other array mask over what :meth:`update_and_fetch` returns; the blocks are gathered then.
            as_rows: attend with the decode kernel, as few tokens do, even if ``rows.as_rows`` is False.

        Returns:
            ``[T, n_q_heads, 1, v_head_dim]``.

        Raises:
            GeometryError: shapes do not fit the rows.
            NotPackableError: a pack with any other mask.
        """
        rows, layer = self.rows, self.layer
        shape = queries.shape
        if shape[0] != rows.num_tokens or shape[2] != 1:
            raise GeometryError(f"queries {shape} do not match {len(rows)} row(s) of one token")
        if params.mask is not None:
            if rows.is_pack:
                params = known_mask(rows, params)
            elif isinstance(params.mask, mx.array) and rows.window_of(params.mask) is None:
                keys, values = self.update_and_fetch(keys, values)
                return gather.attention(queries, keys, values, params)
            else:
                params = params._replace(mask=None)
        keys, values = self._accepted(keys, values, params, shape[1])
        tables, step = rows.begin_layer(layer)
        few = as_rows or rows.as_rows
        return dispatch.attend(queries, (keys, values), self._kv, tables, step, params, as_rows=few)

    def _accepted(
        self, keys: mx.array, values: mx.array, params: AttentionParams | None = None, num_q_heads: int = 0
    ) -> tuple[mx.array, mx.array]:
        """Return the keys and values in the pool's dtype. Raises GeometryError if they do not fit otherwise, or, in a
        pack, have another dtype."""
        kv, count = self._kv, self.rows.num_tokens
        if keys.ndim != 4 or keys.shape[2] != 1:
            raise GeometryError(f"keys {keys.shape} do not match {count} row(s) of one token")
        is_first = kv.group.geometry is None
        heads = params.heads(num_q_heads) if is_first and params is not None else None
        try:
            if is_first:
                kv.set_geometry(keys, values, batch=count, heads=heads)
            else:
                kv.group.validate(keys, values, count)
        except GeometryError:
            if self.rows.is_pack:  # a sequence may have to move to another pool, which it does alone
                raise
            keys, values = kv.fitted(keys, values)
            kv.set_geometry(keys, values, batch=count, heads=heads)
        return keys, values

    @locked
    def update(self, keys: mx.array, values: mx.array) -> None:
        """Write the tokens' keys and values ``[T, n_kv_heads, 1, head_dim]`` to the pool, and read nothing.

        Raises:
            GeometryError: shapes do not fit the rows.
        """
        rows, layer = self.rows, self.layer
        keys, values = self._accepted(keys, values)
        tables, step = rows.begin_layer(layer)
        self._kv.write_step(tables, step, keys, values)

    @locked
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens' keys and values, and return those that the rows see.

        In a decode step they are lazy and left-padded to the longest row, as in mlx-lm's batch caches, and recognised
        as in :meth:`PagedKVCache.update_and_fetch`. In a pack only the new ones are returned, as placeholders for all
        that the tokens see: only the attention function that replaces mlx-lm's can use them, and :meth:`Rows.commit`
        raises if it has not.
        """
        rows, kv, layer = self.rows, self._kv, self.layer
        keys, values = self._accepted(keys, values)
        step, tables = rows.step(layer), rows.tables_of(layer)
        rows.take(layer)
        before = kv.device.fence() if kv.in_place else None
        kv.write_step(tables, step, keys, values)
        if rows.is_pack:
            hand_out(keys, values, PackedKV(rows, layer, is_new=True))
            return keys, values
        return self._fetch(tables, step, Append(keys, values, step), before)

    @locked
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what :meth:`update_and_fetch` returned last, for another layer that attends over it; in a pack
        placeholders without data."""
        rows, geometry = self.rows, self._kv.group.geometry
        if rows.is_behind(self.layer) or geometry is None:
            raise PromptCacheError(f"layer {self.layer} has not written keys and values yet")
        if not rows.is_pack:
            layer = self.layer
            return self._fetch(rows.tables_of(layer), rows.step(layer), None, None)
        heads, k_dim, v_dim, dtype, _ = geometry
        nothing = mx.zeros((), dtype)
        keys, values = (mx.broadcast_to(nothing, (len(rows), heads, 1, dim)) for dim in (k_dim, v_dim))
        hand_out(keys, values, PackedKV(rows, self.layer, is_new=False))
        return keys, values

    def _fetch(
        self, tables: list[BlockTable], step: Step, append: Append | None, before: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        rows, kv = self.rows, self._kv
        if not kv.in_place:
            keys, values, read = kv.fetch(tables, step)
            hand_out(keys, values, LazyKV(rows, self.layer, read=read))
            return keys, values
        written = kv.device.fence()
        keys, values = kv.device.fetch(tables, step)
        fences = Fences(written if before is None else before, written, kv.device.fence())
        hand_out(keys, values, LazyKV(rows, self.layer, append, fences))
        return keys, values

    def apart(self) -> list[PackedPart]:
        """Return each sequence by itself, for attention that no method here computes. Each must write its tokens."""
        rows, layer = self.rows, self.layer
        rows.take(layer)
        rows.note_attended(layer)
        record(Dispatch("apart", "the model computes with its cached keys and values directly"))
        return [PackedPart(rows, layer, index) for index in range(len(rows.sequences))]

    # mlx-lm's protocol ----------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Return the mask of one token of each row.

        Returns:
            None if each row is masked by its own length and window. In a pack with a window narrower than the layer's,
            a placeholder for that window. In a decode step a boolean array ``[B, 1, 1, longest]`` over what
            :meth:`update_and_fetch` returns: on request, for a window other than the layer's, and if attention reads
            rows of several lengths by ``update_and_fetch``.

        Raises:
            GeometryError: ``N`` is not 1.
            NotPackableError: in a pack, ``N`` is not 1, or the window is wider than the layer's: only that many tokens
                before the pack are held, but a token would see more of the pack.
        """
        rows, window = self.rows, self.window
        if N != 1:
            message = f"a mask must be for 1 token per row, got {N}"
            raise NotPackableError(message) if rows.is_pack else GeometryError(message)
        if window_size in (None, window) and (rows.is_pack or not (return_array or self._masks_rows())):
            return None
        if not rows.is_pack:
            seen = window_under(self._kv.spec, window_size and min(window_size, window or window_size))
            mask = rows.left_padding(self.layer).mask(seen)
            if seen == self._kv.sees:
                rows.masks[self.pool.group_of(self.layer)] = weakref.ref(mask), seen or Window(1 << 30)
            return mask
        assert window_size is not None
        if window is not None and window_size > window:
            raise NotPackableError(f"a mask for a window of {window_size} tokens is wider than the layer's, {window}")
        window_under(self._kv.spec, window_size)  # raises GeometryError for chunked attention
        return rows.narrow_mask(window_size)

    def _masks_rows(self) -> bool:
        """Return whether attention over fetched arrays needs a mask, because rows are padded."""
        return self.row_type.masks_rows and not self.rows.left_padding(self.layer).is_even

    def size(self) -> int:
        """Return the number of visible tokens of the longest sequence."""
        longest = max(self.rows.lengths(self.layer), default=0)
        return longest if self.window is None else min(longest, self.window)

    def empty(self) -> bool:
        """Return whether no row has a token."""
        return self.size() == 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.layer}, rows={len(self.rows)})"


class PackedPart:
    """The cache of one attention layer for one sequence of a pack. It has the part of mlx-lm's cache protocol that is
    needed to write the sequence's tokens and to compute with what is fetched.

    Attributes:
        tokens: slice of the sequence's tokens in the pack.
        offset: position of the first of them.
        mask: causal mask over what :meth:`update_and_fetch` returns, ``[n, length]``; None for one token.
    """

    def __init__(self, rows: Rows, layer: int, index: int) -> None:
        self.pool, self.layer = rows.pool, layer
        tables, step, count = rows.tables_of(layer), rows.step(layer), rows.counts[index]
        self._tables = [tables[index]]
        self._step = step.single_step(tables, index)
        self.tokens = step.spans[index]
        self.offset = tables[index].length - count
        self.mask = None if count == 1 else causal_mask(count, tables[index].num_visible - count)

    @locked
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens' keys and values ``[1, n_kv_heads, n, head_dim]``, and return all visible ones."""
        kv = self.pool.layer(self.layer)
        kv.set_geometry(keys, values, batch=1)
        if keys.shape[2] != self._step.num_tokens:
            raise GeometryError(f"keys {keys.shape} do not match {self._step.num_tokens} token(s)")
        kv.write_step(self._tables, self._step, keys, values)
        return kv.gather_visible(self._tables[0])


class PackedKV(LazyKV):
    """How to attend from a pack's tokens, for a pair of arrays that are placeholders for what the tokens see.

    Args:
        is_new: whether the arrays are the layer's new keys and values; else they hold no data.
    """

    def __init__(self, rows: Rows, layer: int, *, is_new: bool) -> None:
        self.layer = layer
        self._is_new = is_new
        self._rows = weakref.ref(rows)
        self._pool = weakref.ref(rows.pool)

    def can_attend(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        """Return True. Raises NotPackableError for other queries or masks, as nothing else can use the arrays."""
        rows = self._rows()
        if not isinstance(rows, Rows) or queries.ndim != 4 or queries.shape[0] != len(rows) or queries.shape[2] != 1:
            raise NotPackableError(f"layer {self.layer}: queries {queries.shape} do not match the pack")
        known_mask(rows, AttentionParams(1.0, mask))
        return True

    @locked
    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams) -> mx.array:
        """Attend like :meth:`PagedBatchKVCache.attend`, from written tokens. Call it only after :meth:`can_attend`."""
        rows, layer = self._rows(), self.layer
        assert isinstance(rows, Rows)
        params = known_mask(rows, params)
        new = (keys, values) if self._is_new else None
        rows.note_attended(layer)
        tables, step = rows.tables_of(layer), rows.step(layer)
        return dispatch.attend(
            queries, new, rows.pool.layer(layer), tables, step, params, is_written=True, as_rows=rows.as_rows
        )


def known_mask(rows: Rows, params: AttentionParams) -> AttentionParams:
    """Return the parameters with the mask replaced by the window that it stands for. Raises NotPackableError for a mask
    that the model made itself."""
    if params.mask is None:
        return params
    window = rows.window_of(params.mask)
    if window is None:
        raise NotPackableError(OWN_MASK)
    return params._replace(mask=None, window=window)


def first_paged(caches: Any) -> PagedKVCache | PagedBatchKVCache | None:
    """Return the first paged one of a model's caches; None if there is none, or if they are no list. It runs in every
    model call, so it checks no others."""
    if not isinstance(caches, list | tuple):
        return None
    for cache in caches:
        if isinstance(cache, PagedKVCache | PagedBatchKVCache):
            return cache
        found = first_paged(getattr(cache, "caches", None))  # the parts of a composite
        if found is not None:
            return found
    return None
