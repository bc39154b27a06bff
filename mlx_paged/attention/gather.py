"""Gather-then-SDPA: copy each sequence's blocks together, then MLX's own attention. The reference and the fallback."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.storage.scoring import Scoring
from .masks import causal_mask


def ring_rotation(table: BlockTable, ring: int | None) -> int:
    """Where the order of gathered keys starts so that it equals mlx-lm's rotating buffer, in visible tokens.

    Attention is a sum over keys in any order, but floating-point sums are not: a decode step reproduces dense
    mlx-lm bit for bit only in the order of its buffer. Once ``ring`` tokens are visible, that buffer holds position
    p in slot ``(p - ring_origin) % ring``; with fewer or (after a prefill) more, it is in order of position. Pinned
    tokens come first and are not counted, neither in positions nor in the window.
    """
    if ring is None or table.length <= ring or table.num_visible != ring:
        return 0
    ring -= table.pinned
    newest_slot = (table.length - 1 - table.pinned - table.ring_origin) % ring
    # The window's oldest token has index 0 here; slot 0 holds the token `newest_slot` before the newest.
    return (ring - 1 - newest_slot) % ring


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scoring: Scoring,
) -> mx.array:
    """MLX's attention, of q ``[B, n_q_heads, q_len, head_dim]`` over k, v ``[B, n_kv_heads, n, head_dim]``.

    With a soft cap, which MLX's does not have, it is spelled out: scores ``softcap * tanh(q k^T scale / softcap)``.
    """
    scale, mask, _, softcap, sinks, latent = scoring
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
    """As mlx-lm's modules do it for one token: the scores of what is rotated are the mask of attention over latents."""
    rank, q_len, length = latents.shape[3], q.shape[2], latents.shape[2]
    scores = (q[..., rank:] * scale) @ rotated.swapaxes(-1, -2)
    if isinstance(mask, str):
        mask = causal_mask(q_len, length - q_len)
    if mask is not None:
        least = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        scores = mx.where(mask, scores, least) if mask.dtype == mx.bool_ else scores + mask.astype(scores.dtype)
    return mx.fast.scaled_dot_product_attention(q[..., :rank], latents, latents, scale=scale, mask=scores)


def gather_attention(
    q: mx.array,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    scoring: Scoring,
) -> mx.array:
    """Attention of the last tokens of each sequence over all its visible tokens, one SDPA call per sequence.

    Args:
        q: ``[B, n_q_heads, q_len, head_dim]``; the queries are the last ``q_len`` tokens of each sequence.
        pool, layer, tables: where the keys and values lie, those of the queries included.
        scoring: its mask is over the visible tokens.

    Returns:
        ``[B, n_q_heads, q_len, v_head_dim]``.
    """
    outputs = []
    for row, table in enumerate(tables):
        rotation = ring_rotation(table, pool.groups[table.group].spec.ring) if q.shape[2] == 1 else 0
        k, v = pool.gather_visible(table, layer, rotation=rotation, copy=False)
        row_q = q[row : row + 1] if len(tables) > 1 else q
        outputs.append(attention(row_q, k, v, scoring))
    output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    if q.shape[2] == 1:  # a prefill's result may never be asked for: waiting for it would compute it
        pool.layer(layer).note_read(output)
    return output
