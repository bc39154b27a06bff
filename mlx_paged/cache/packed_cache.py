"""PackedKVCache: what one attention layer sees of a pack."""

from __future__ import annotations

import weakref
from threading import get_ident

import mlx.core as mx

from ..attention import dispatch, latent_prompts
from ..attention.dispatch import Dispatch, record
from ..attention.gather import causal_mask, window_under
from ..attention.latent_prompts import Expand
from ..errors import GeometryError, PromptCacheError
from ..kv.layer import PoolLayer
from ..kv.pool import BlockPool
from ..kv.storage.attention_params import AttentionParams, LatentHeads, QueryHeads, Window
from ..kv.turn import in_turn
from .lazy_kv import LazyKV, compute_rewound, hand_out
from .pack import NotPackableError, Pack


class PackedKVCache:
    """What one attention layer sees of a pack: T rows of one token each. Of mlx-lm's cache protocol it has what a model
    uses in a call.

    Args:
        pack: shared by the caches of all layers.
        layer: index of the model layer.
    """

    def __init__(self, pack: Pack, layer: int) -> None:
        self.pack = pack
        self.layer = layer

    @property
    def pool(self) -> BlockPool:
        return self.pack.pool

    @property
    def _kv(self) -> PoolLayer:
        return self.pack.pool.layer(self.layer)

    @property
    def window(self) -> int | None:
        """Most tokens that one sees, itself included, or None."""
        return self._kv.window

    @property
    def offset(self) -> mx.array:
        """Position of each token's row; int32 ``[T]``."""
        return self.pack.offsets(self.layer)

    # Writing and reading --------------------------------------------------------------------------------------

    @in_turn
    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams, *, as_rows: bool = False
    ) -> mx.array:
        """Write the tokens' keys and values and attend from them.

        Args:
            queries: ``[T, n_q_heads, 1, head_dim]``, rotated.
            keys: ``[T, n_kv_heads, 1, head_dim]``, rotated.
            values: ``[T, n_kv_heads, 1, v_head_dim]``.
            params: its mask is what :meth:`make_mask` gave.
            as_rows: they are few, and attended to like the rows of a decode step, whatever the pack says.

        Returns:
            ``[T, n_q_heads, 1, v_head_dim]``.

        Raises:
            GeometryError: shapes differ from the pack, or dtypes from the pool.
            NotPackableError: the mask is another.
        """
        if queries.shape[0] != len(self.pack) or queries.shape[2] != 1:
            raise GeometryError(f"queries {queries.shape} for {len(self.pack)} token(s)")
        params = known_mask(self.pack, params)
        self._write(keys, values, params.heads(queries.shape[1]))
        return attend_pack(self.pack, self.layer, queries, keys, values, params, as_rows=as_rows)

    def _write(self, keys: mx.array, values: mx.array, heads: QueryHeads | None) -> None:
        # Keys of another dtype than the pool's may have to go to another pool: each sequence finds out alone.
        kv, pack = self._kv, self.pack
        kv.set_geometry(keys, values, batch=len(pack), heads=heads)
        if keys.shape[2] != 1:
            raise GeometryError(f"keys {keys.shape} for {len(pack)} token(s)")
        step = pack.step(self.layer)
        pack.wrote(self.layer)
        kv.write_packed(pack.tables_of(self.layer), step, keys, values)

    @in_turn
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens' keys and values. What is returned is good for the attention function that replaces
        mlx-lm's only, where it stands for all that the tokens see; :meth:`Pack.commit` raises if it is not used there.
        """
        compute_rewound(self.pool, self.layer)
        self._write(keys, values, None)
        hand_out(keys, values, PackedKV(self.pack, self.layer, is_new=True))
        return keys, values

    @in_turn
    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return a stand-in for a layer that attends to what another has written, which holds nothing."""
        if self.layer not in self.pack.written:
            raise PromptCacheError(f"layer {self.layer} has written nothing yet")
        geometry = self._kv.group.geometry
        assert geometry is not None
        heads, k_dim, v_dim, dtype, _ = geometry
        nothing = mx.zeros((), dtype)
        keys, values = (mx.broadcast_to(nothing, (len(self.pack), heads, 1, dim)) for dim in (k_dim, v_dim))
        hand_out(keys, values, PackedKV(self.pack, self.layer, is_new=False))
        return keys, values

    @in_turn
    def attend_expanded(
        self, queries: tuple[mx.array, mx.array], latent: mx.array, rotated: mx.array, heads: LatentHeads, scale: float,
        expand: Expand,
    ) -> mx.array:  # fmt: skip
        """Write the tokens' latents and attend from them over the keys and values that these stand for. Only where
        :func:`..attention.latent_prompts.serves` says so.

        Args:
            queries: part that is not rotated and part that is, ``[T, n_heads, 1, dim]`` each.
            latent: ``[T, 1, 1, rank]``.
            rotated: ``[T, 1, 1, rope]``.
            heads, scale, expand: as :func:`..attention.latent_prompts.attend`.

        Returns:
            ``[T, n_heads, 1, value_dim]``.

        Raises:
            GeometryError: shapes differ from the pack, or dtypes from the pool.
        """
        pack, layer = self.pack, self.layer
        if queries[0].shape[0] != len(pack) or queries[0].shape[2] != 1:
            raise GeometryError(f"queries {queries[0].shape} for {len(pack)} token(s)")
        self._write(latent, rotated, None)
        pack.attended(layer)
        tables, step = pack.tables_of(layer), pack.step(layer)
        return latent_prompts.attend(*queries, self.pool, layer, tables, step, heads, scale, expand)

    def apart(self) -> list[PackedPart]:
        """Each sequence by itself, for attention that nothing here serves: all of them have to write."""
        pack = self.pack
        pack.wrote(self.layer)
        pack.attended(self.layer)
        record(Dispatch("apart", "attention that computes with what it has written by itself"))
        return [PackedPart(pack, self.layer, index) for index in range(len(pack.rows))]

    # mlx-lm's protocol ----------------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Mask of one token of each row: None, as in a decode step, or for a window narrower than the layer's an array
        that stands for it.

        Raises:
            NotPackableError: a window wider than the layer's, by which a token sees more of its own chunk than is held
                of what was before it; or several tokens of each row.
        """
        if N != 1:
            raise NotPackableError(f"a mask for {N} tokens of each row")
        if window_size is None or window_size == self.window:
            return None
        if self.window is not None and window_size > self.window:
            raise NotPackableError(f"a mask of {window_size} tokens over a window of {self.window}")
        window_under(self._kv.spec, window_size)  # raises if there is no such mask
        return self.pack.mask(window_size)

    def size(self) -> int:
        """Visible tokens of the longest sequence."""
        longest = max(row.offsets[self.layer] for row in self.pack.rows)
        return longest if self.window is None else min(longest, self.window)

    def empty(self) -> bool:
        return self.size() == 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layer={self.layer}, tokens={len(self.pack)})"


class PackedPart:
    """What one attention layer sees of one sequence of a pack: of mlx-lm's cache protocol what it needs to write the
    sequence's tokens and compute with what it fetches.

    Attributes:
        tokens: of the sequence, among the pack's.
        offset: position of the first of them.
        mask: over what :meth:`update_and_fetch` gives: ``[n, length]``, or None for one token.
    """

    def __init__(self, pack: Pack, layer: int, index: int) -> None:
        self.pack, self.layer, self.index = pack, layer, index
        self._tables = [pack.tables_of(layer)[index]]
        count, table = pack.counts[index], self._tables[0]
        self.tokens = pack.step(layer).spans[index]
        self.offset = table.length - count
        self.mask = None if count == 1 else causal_mask(count, table.num_visible - count)

    @in_turn
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens' keys and values ``[1, n_kv_heads, n, head_dim]``; all visible ones, theirs included."""
        kv = self.pool.layer(self.layer)
        kv.set_geometry(keys, values, batch=1)
        step = self.pack.step(self.layer).part(self.pack.tables_of(self.layer), self.index)
        if keys.shape[2] != step.num_tokens:
            raise GeometryError(f"keys {keys.shape} for {step.num_tokens} token(s)")
        kv.write_step(self._tables, step, keys, values)
        return kv.gather_visible(self._tables[0])

    @property
    def pool(self) -> BlockPool:
        return self.pack.pool


class PackedKV(LazyKV):
    """How to attend from a pack's tokens, for a pair of arrays that only stands for what they see.

    Args:
        is_new: the arrays are the layer's new keys and values, else nothing at all.
    """

    def __init__(self, pack: Pack, layer: int, *, is_new: bool) -> None:
        self.layer = layer
        self.thread = get_ident()
        self._is_new = is_new
        self._pack = weakref.ref(pack)
        self._pool = weakref.ref(pack.pool)

    def serves(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        """True. Raises NotPackableError where nothing else could be done with the arrays either."""
        pack = self._pack()
        if pack is None or queries.ndim != 4 or queries.shape[0] != len(pack) or queries.shape[2] != 1:
            raise NotPackableError(f"layer {self.layer} attends with queries of another shape, {queries.shape}")
        known_mask(pack, AttentionParams(1.0, mask))
        return True

    @in_turn
    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams) -> mx.array:
        """Like :meth:`PackedKVCache.attend`, for what is written. Call it only where :meth:`serves` says so."""
        pack = self._pack()
        assert pack is not None
        params = known_mask(pack, params)
        if not self._is_new:
            return attend_pack(pack, self.layer, queries, None, None, params)
        return attend_pack(pack, self.layer, queries, keys, values, params)


def known_mask(pack: Pack, params: AttentionParams) -> AttentionParams:
    """Return the parameters with the window that the mask stands for instead of it. Raises NotPackableError for a mask
    of the model's own."""
    if params.mask is None:
        return params
    window = pack.window_of(params.mask)
    if window is None:
        raise NotPackableError("the model's attention makes a mask of its own")
    return params._replace(mask=None, window=Window(window))


def attend_pack(
    pack: Pack,
    layer: int,
    queries: mx.array,
    keys: mx.array | None,
    values: mx.array | None,
    params: AttentionParams,
    *,
    as_rows: bool = False,
) -> mx.array:
    """Attention from the pack's tokens, which the layer has written; ``keys`` and ``values`` are they, or None."""
    pack.attended(layer)
    tables, step = pack.tables_of(layer), pack.step(layer)
    return dispatch.packed_attention(
        queries, keys, values, pack.pool, layer, tables, step, params, as_rows=as_rows or pack.as_rows
    )
