"""PagedBatchKVCache: one attention layer's cache for a decode step or a pack, over the block tables of its rows."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Any

import mlx.core as mx
import numpy as np

from ..attention import dispatch, gather
from ..attention.dispatch import Dispatch, record
from ..attention.gather import causal_mask, window_under
from ..errors import GeometryError, PromptCacheError
from ..kv.geometry import AttentionParams, Geometry, QueryHeads, Window
from ..kv.lock import locked
from ..kv.new_tokens import NewTokens, lengths_of
from ..kv.pool import BlockPool
from .batch import OWN_MASK, Batch, NotPackableError
from .layer_cache import LayerCache, LazyKV, hand_out
from .paged_kv_cache import PagedKVCache
from .placeholders import Placeholder, PlaceholderBatch

NO_GEOMETRY = Geometry(0, 0, 0, mx.float32)  # of nothing


class PagedBatchKVCache(LayerCache):
    """The cache of one attention layer for new tokens of several sequences, as rows of one token each. It has the part
    of mlx-lm's cache protocol that a model uses in a call.

    Rows may differ in length; none is padded in the pool.

    Args:
        batch: the sequences with their reserved new tokens, shared by the caches of all layers.
        layer: index of the model layer.
    """

    def __init__(self, batch: Batch, layer: int) -> None:
        super().__init__(batch, layer)
        self.batch = batch

    @property
    def offset(self) -> mx.array:
        """Position of each row's token, int32 ``[T]``; of the next token once the layer has written it."""
        batch = self.batch
        known = batch.positions.get(self.layer in batch.behind)
        return batch.offsets(self.layer) if known is None else known

    # Writing and reading --------------------------------------------------------------------------------------

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
            as_rows: attend with the decode kernel, as few tokens do, even if ``batch.as_rows`` is False.

        Returns:
            ``[T, n_q_heads, 1, v_head_dim]``.

        Raises:
            GeometryError: shapes do not fit the rows.
            NotPackableError: a pack with any other mask.
        """
        batch, shape = self.batch, queries.shape
        pool = batch.pool
        if pool.lock.owner != get_ident():
            with pool.lock:
                pool.lock.use()
                return self.attend(queries, keys, values, params, as_rows=as_rows)
        pool.lock.is_dirty = True
        if shape[0] != batch.num_tokens or shape[2] != 1:
            raise GeometryError(f"queries {shape} do not match {len(batch)} row(s) of one token")
        if params.mask is not None:
            if batch.is_pack:
                params = known_mask(batch, params)
            elif isinstance(params.mask, mx.array) and batch.masks.window_of(params.mask) is None:
                keys, values = self.update_and_fetch(keys, values)
                return gather.attention(queries, keys, values, params)
            else:
                params = params._replace(mask=None)
        group, count = pool.groups[self.group_index], batch.num_tokens
        kv_heads, k_dim, v_dim, dtype, _ = group.geometry or NO_GEOMETRY
        is_sized = keys.shape == (count, kv_heads, 1, k_dim) and values.shape == (count, kv_heads, 1, v_dim)
        if not (is_sized and keys.dtype == values.dtype == dtype):  # a call in each layer, if they did not fit
            heads = None if group.geometry is not None else params.heads(shape[1])
            keys, values = self._accepted(keys, values, heads)
        tokens = batch.begin_layer(self.layer)
        few = as_rows or batch.as_rows
        return dispatch.attend(queries, (keys, values), group, self.position, tokens, params, as_rows=few)

    def _accepted(self, keys: mx.array, values: mx.array, heads: QueryHeads | None = None) -> tuple[mx.array, mx.array]:
        """Return the keys and values in the pool's dtype. Raises GeometryError if they do not fit otherwise, or, in a
        pack, have another dtype."""
        count = self.batch.num_tokens
        if keys.ndim != 4 or keys.shape[2] != 1:
            raise GeometryError(f"keys {keys.shape} do not match {count} row(s) of one token")
        if self.batch.is_pack:  # with another dtype, a sequence may have to move to another pool, which it does alone
            self.pool.set_geometry(self.layer, keys, values, batch=count, heads=heads)
            return keys, values
        return self._fitted(keys, values, count, heads)

    @locked
    def update(self, keys: mx.array, values: mx.array) -> None:
        """Write the tokens' keys and values ``[T, n_kv_heads, 1, head_dim]`` to the pool, and read nothing.

        Raises:
            GeometryError: shapes do not fit the rows.
        """
        keys, values = self._accepted(keys, values)
        tokens = self.batch.begin_layer(self.layer)
        self.group.blocks[self.position].write(tokens, keys, values)

    @locked
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens' keys and values, and return those that the rows see.

        In a decode step they are lazy and left-padded to the longest row, as in mlx-lm's batch caches, and recognised
        as in :meth:`PagedKVCache.update_and_fetch`. In a pack only the new ones are returned, as placeholders for all
        that the tokens see: only the attention function that replaces mlx-lm's can use them, and :meth:`Batch.commit`
        raises if it has not.
        """
        batch, layer = self.batch, self.layer
        keys, values = self._accepted(keys, values)
        tokens = batch.begin_layer(layer, attends=False)
        if isinstance(batch, PlaceholderBatch):
            batch.unwritten[layer] = keys, values
            return self._placeholders(batch, keys.dtype)
        self.group.blocks[self.position].write(tokens, keys, values)
        if batch.is_pack:
            hand_out(keys, values, PackedKV(batch, layer, is_new=True))
            return keys, values
        return self._hand_out(tokens)

    @locked
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what :meth:`update_and_fetch` returned last, for another layer that attends over it; in a pack
        placeholders without data."""
        batch, geometry = self.batch, self.group.geometry
        if self.layer in batch.behind or geometry is None:
            raise PromptCacheError(f"layer {self.layer} has not written keys and values yet")
        if isinstance(batch, PlaceholderBatch):
            return self._placeholders(batch, geometry.dtype)
        if not batch.is_pack:
            return self._hand_out(batch.tokens_of(self.layer))
        heads, k_dim, v_dim, dtype, _ = geometry
        nothing = mx.zeros((), dtype)
        keys, values = (mx.broadcast_to(nothing, (len(batch), heads, 1, dim)) for dim in (k_dim, v_dim))
        hand_out(keys, values, PackedKV(batch, self.layer, is_new=False))
        return keys, values

    def _placeholders(self, batch: PlaceholderBatch, dtype: mx.Dtype) -> tuple[Any, Any]:
        """Return placeholders for what the rows see while a step is traced: only the attention function accepts them,
        they have neither shape nor values."""
        keys, values = (Placeholder(batch.misuses, dtype) for _ in "kv")
        hand_out(keys, values, PackedKV(batch, self.layer, is_new=False))
        return keys, values

    def apart(self) -> list[PackedPart]:
        """Return each sequence by itself, for attention that no method here computes. Each must write its tokens."""
        batch = self.batch
        tokens = batch.begin_layer(self.layer)
        record(Dispatch("apart", "the model computes with its cached keys and values directly"))
        return [PackedPart(batch.pool, self.layer, tokens, index) for index in range(len(tokens.tables))]

    # mlx-lm's protocol ----------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Return the mask of one token of each row.

        Returns:
            None if each row is masked by its own length and window. In a pack with a window narrower than the layer's,
            a placeholder for that window. In a decode step a boolean array ``[B, 1, 1, longest]`` over what
            :meth:`update_and_fetch` returns: on request, for a window other than the layer's, and if rows have several
            lengths.

        Raises:
            GeometryError: ``N`` is not 1.
            NotPackableError: in a pack, ``N`` is not 1, or the window is wider than the layer's: only that many tokens
                before the pack are held, but a token would see more of the pack.
        """
        batch, window = self.batch, self.group.spec.window
        if N != 1:
            message = f"a mask must be for 1 token per row, got {N}"
            raise NotPackableError(message) if batch.is_pack else GeometryError(message)
        is_own = window_size in (None, window)
        if not batch.is_pack:
            # Visible tokens of each row before its new one.
            before = lengths_of(batch.tables) - (self.layer in batch.behind)
            if self.sees is not None:
                before -= self.sees.first_seen_by(before)
            longest = int(before.max(initial=0)) + 1
            # Attention over fetched arrays needs a mask where rows are padded.
            if is_own and not return_array and (before == longest - 1).all():
                return None
            seen = window_under(self.group.spec, window_size and min(window_size, window or window_size))
            # Each column's number among its row's visible tokens; negative in padding.
            numbers = mx.array(before[:, None] + 1) + mx.arange(-longest, 0, dtype=mx.int32)
            first = np.zeros_like(before) if seen is None else seen.first_seen_by(before)
            mask = numbers[:, None, None] >= mx.array(first[:, None, None, None])
            if seen == self.sees:
                batch.masks.add(self.group_index, mask, seen or Window(1 << 30))
            return mask
        if is_own:
            return None
        assert window_size is not None
        if window is not None and window_size > window:
            if not batch.tokens[self.group_index].is_pack:  # a traced step, in which it hides nothing more
                return None
            raise NotPackableError(f"a mask for a window of {window_size} tokens is wider than the layer's, {window}")
        window_under(self.group.spec, window_size)  # raises GeometryError for chunked attention
        return batch.narrow_mask(window_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.layer}, rows={len(self.batch)})"


class PackedPart:
    """The cache of one attention layer for one sequence of a pack. It has the part of mlx-lm's cache protocol that is
    needed to write the sequence's tokens and to compute with what is fetched.

    Attributes:
        tokens: slice of the sequence's tokens in the pack.
        offset: position of the first of them.
        mask: causal mask over what :meth:`update_and_fetch` returns, ``[n, length]``; None for one token.
    """

    def __init__(self, pool: BlockPool, layer: int, tokens: NewTokens, index: int) -> None:
        self.pool, self.layer = pool, layer
        table, count = tokens.tables[index], tokens.counts[index]
        self._own = tokens.single(index)
        self.tokens = tokens.spans[index]
        self.offset = table.length - count
        self.mask = None if count == 1 else causal_mask(count, table.num_visible(tokens.group) - count)

    @locked
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens' keys and values ``[1, n_kv_heads, n, head_dim]``, and return all visible ones."""
        pool, layer, tokens = self.pool, self.layer, self._own
        group = pool.set_geometry(layer, keys, values, batch=1)
        if keys.shape[2] != tokens.num_tokens:
            raise GeometryError(f"keys {keys.shape} do not match {tokens.num_tokens} token(s)")
        if tokens.epoch != group.epoch:
            pool.begin(group, tokens)
        group.blocks[pool.places[layer][1]].write(tokens, keys, values)
        return pool.gather_visible(tokens.tables[0], layer)


class PackedKV(LazyKV):
    """How to attend from a pack's tokens, for a pair of arrays that are placeholders for what the tokens see.

    Args:
        is_new: whether the arrays are the layer's new keys and values; else they hold no data.
    """

    def __init__(self, batch: Batch, layer: int, *, is_new: bool) -> None:
        self.layer = layer
        self._is_new = is_new
        self._rows = weakref.ref(batch)

    def can_attend(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        """Return True. Raises NotPackableError for other queries or masks, as nothing else can use the arrays."""
        batch = self._rows()
        if not isinstance(batch, Batch) or queries.ndim != 4 or queries.shape[0] != len(batch) or queries.shape[2] != 1:
            raise NotPackableError(f"layer {self.layer}: queries {queries.shape} do not match the pack")
        known_mask(batch, AttentionParams(1.0, mask))
        return True

    @locked
    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams) -> mx.array:
        """Attend like :meth:`PagedBatchKVCache.attend`, from written tokens. Call it only after :meth:`can_attend`."""
        batch, layer = self._rows(), self.layer
        assert isinstance(batch, Batch)
        params = known_mask(batch, params)
        new = (keys, values) if self._is_new else None
        batch.attended.add(layer)
        index, position = batch.pool.places[layer]
        group, tokens = batch.pool.groups[index], batch.tokens_of(layer)
        append = batch.unwritten.pop(layer, None)
        if append is not None:
            return dispatch.attend(queries, append, group, position, tokens, params, as_rows=batch.as_rows)
        return dispatch.attend(queries, new, group, position, tokens, params, is_written=True, as_rows=batch.as_rows)


def known_mask(batch: Batch, params: AttentionParams) -> AttentionParams:
    """Return the parameters with the mask replaced by the window that it stands for. Raises NotPackableError for a mask
    that the model made itself."""
    if params.mask is None:
        return params
    if batch.is_traced and isinstance(params.mask, str):  # causality hides nothing from a row's newest token
        return params._replace(mask=None)
    window = batch.masks.window_of(params.mask)
    if window is None:
        raise NotPackableError(OWN_MASK)
    return params._replace(mask=None, window=window)


def first_paged(caches: Any) -> PagedKVCache | PagedBatchKVCache | None:
    """Return the first paged one of a model's caches; None if there is none, or if they are no list. It runs in every
    model call, so it checks no others."""
    if not isinstance(caches, list | tuple):
        return None
    for cache in caches:
        if isinstance(cache, PagedKVCache) or (isinstance(cache, PagedBatchKVCache) and not cache.batch.is_traced):
            return cache
        found = first_paged(getattr(cache, "caches", None))  # the parts of a composite
        if found is not None:
            return found
    return None
