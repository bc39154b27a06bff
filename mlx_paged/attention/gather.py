"""Gather-then-SDPA: copy each sequence's blocks together, then MLX's own attention. The reference and the fallback."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import GeometryError
from ..kv.geometry import AttentionParams, Window
from ..kv.group import Group, LayerGroup
from ..kv.host_blocks import HostBlocks
from ..kv.new_tokens import NewTokens, Padding


def causal_mask(num_tokens: int, offset: int = 0, window: Window | None = None) -> mx.array:
    """Return the boolean mask ``[num_tokens, offset + num_tokens]``: query i, at position ``offset + i``, sees the
    positions up to its own, and with a window only those inside it. Positions count from the first visible token."""
    keys = mx.arange(offset + num_tokens)[None]
    queries = mx.arange(offset, offset + num_tokens)[:, None]
    mask = queries >= keys
    if window is not None:
        mask = mask & (keys >= mx.array(window.first_seen_by(np.arange(offset, offset + num_tokens)))[:, None])
    return mask


def window_under(group: LayerGroup, size: int | None) -> Window | None:
    """Return a token's window under a sliding mask of ``size`` tokens, or the group's own window if ``size`` is None.

    Raises:
        GeometryError: the group's windows are chunks, and the mask has another size.
    """
    if size is None or size == group.window:
        return group.sees
    if group.stride > 1:
        raise GeometryError(f"attention in chunks of {group.window} tokens cannot have a window of {size} tokens")
    return Window(size)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    params: AttentionParams,
) -> mx.array:
    """Compute MLX's attention of q ``[B, n_q_heads, q_len, head_dim]`` over k, v ``[B, n_kv_heads, n, head_dim]``.

    A soft cap, which MLX's function lacks, is computed explicitly: scores ``softcap * tanh(q k^T scale / softcap)``.
    """
    scale, mask, _, softcap, sinks, latent = params
    if latent:
        return _latent_attention(q, k, v, scale, mask)
    if softcap is None:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    batch, n_q_heads, q_len, _ = q.shape
    n_kv_heads = k.shape[1]
    q = (q * scale).reshape(batch, n_kv_heads, n_q_heads // n_kv_heads, q_len, -1)
    scores = q @ k[:, :, None].swapaxes(-1, -2)
    scores = mx.tanh(scores / softcap) * softcap
    if isinstance(mask, str):
        mask = causal_mask(q_len, k.shape[2] - q_len)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        column = mx.broadcast_to(sinks.reshape(1, n_kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([column.astype(scores.dtype), scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights @ v[:, :, None]).reshape(batch, n_q_heads, q_len, -1)


def _latent_attention(
    q: mx.array, latents: mx.array, rotated: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attend as mlx-lm's MLA modules do for one token: the scores of the rotated part become the additive mask of
    attention over latents."""
    rank, q_len, length = latents.shape[3], q.shape[2], latents.shape[2]
    scores = (q[..., rank:] * scale) @ rotated.swapaxes(-1, -2)
    if isinstance(mask, str):
        mask = causal_mask(q_len, length - q_len)
    if mask is not None:
        least = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        scores = mx.where(mask, scores, least) if mask.dtype == mx.bool_ else scores + mask.astype(scores.dtype)
    return mx.fast.scaled_dot_product_attention(q[..., :rank], latents, latents, scale=scale, mask=scores)


def gather_attention(q: mx.array, group: Group, position: int, tokens: NewTokens, params: AttentionParams) -> mx.array:
    """Attend from the last tokens of each sequence over copies of all its visible tokens.

    Args:
        q: ``[B, n_q_heads, q_len, head_dim]``; the queries are the last ``q_len`` tokens of each sequence.
        group, position: the layer's group, and its index there.
        tokens: the new tokens, which are written.
        params: the mask is over the visible tokens.

    Returns:
        ``[B, n_q_heads, q_len, v_head_dim]``.
    """
    pairs = [group.blocks[position].gather(table, group.index) for table in tokens.tables]
    return _by_row(q, pairs, params)


def view_attention(q: mx.array, blocks: HostBlocks, tokens: NewTokens, params: AttentionParams) -> mx.array:
    """Attend like :func:`gather_attention` from few tokens, lazily and over views of a host's blocks (docs/adr/0092).

    A sequence alone gets the bits of MLX's function. One token each of several short sequences attend together, over
    padded copies: fewer operations. Over long ones copies cost more than they save.
    """
    scale, mask, _, softcap, sinks, latent = params
    padding: Padding | None = None
    if q.shape[2] == 1 and len(tokens.tables) > 1 and mask is None and softcap is None and not latent:
        padding = tokens.made.get("padding") or tokens.padding(blocks.most_padded)
    if padding is not None and padding.longest <= blocks.most_padded:
        k, v = blocks.fetch(tokens)
        output = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=padding.mask, sinks=sinks)
    elif padding is not None and sinks is None:
        # What MLX's function computes on a CPU, with the same bits. Rows share the operations before and after the
        # products, since one costs as much as the products of a short row.
        batch, num_heads, _, head_dim = q.shape
        queries = mx.split((q * scale).reshape(batch, blocks.geometry.num_kv_heads, -1, head_dim), batch)
        found = []
        for row, (k, v) in zip(queries, blocks.read(tokens), strict=True):
            found.append(mx.softmax(row @ k.swapaxes(-1, -2), axis=-1, precise=True) @ v)
        output = mx.concatenate(found).reshape(batch, num_heads, 1, -1)
    else:
        output = _by_row(q, blocks.read(tokens), params)
    blocks.pending.append(output)
    return output


def _by_row(q: mx.array, pairs: Sequence[tuple[mx.array, mx.array]], params: AttentionParams) -> mx.array:
    """Return :func:`attention` of each row over its own keys and values."""
    if len(pairs) == 1:
        return attention(q, *pairs[0], params)
    rows = zip(mx.split(q, len(pairs)), pairs, strict=True)
    return mx.concatenate([attention(row, k, v, params) for row, (k, v) in rows])
