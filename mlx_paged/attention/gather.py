"""Gather-then-SDPA: copy each sequence's blocks together, then MLX's own attention. The reference and the fallback."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool


def ring_rotation(table: BlockTable, window: int | None) -> int:
    """Where the order of gathered keys starts so that it equals mlx-lm's rotating buffer, in visible tokens.

    Attention is a sum over keys in any order, but floating-point sums are not: a decode step reproduces dense
    mlx-lm bit for bit only in the order of its buffer. Once ``window`` tokens are visible, that buffer holds position
    p in slot ``(p - ring_origin) % window``; with fewer or (after a prefill) more, it is in order of position.
    """
    if window is None or table.length <= window or table.length - table.logical_start != window:
        return 0
    newest_slot = (table.length - 1 - table.ring_origin) % window
    # The window's oldest token has index 0 here; slot 0 holds the token `newest_slot` before the newest.
    return (window - 1 - newest_slot) % window


def gather_attention(
    q: mx.array,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    *,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Attention of the last tokens of each sequence over all its visible tokens, one SDPA call per sequence.

    Args:
        q: ``[B, n_q_heads, q_len, head_dim]``; the queries are the last ``q_len`` tokens of each sequence.
        pool, layer, tables: where the keys and values lie, those of the queries included.
        scale: factor on the scores.
        mask: as for ``mx.fast.scaled_dot_product_attention``.

    Returns:
        ``[B, n_q_heads, q_len, v_head_dim]``.
    """
    outputs = []
    for row, table in enumerate(tables):
        rotation = ring_rotation(table, pool.groups[table.group].spec.window) if q.shape[2] == 1 else 0
        k, v = pool.gather_visible(table, layer, rotation=rotation, copy=False)
        outputs.append(mx.fast.scaled_dot_product_attention(q[row : row + 1], k, v, scale=scale, mask=mask))
    output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    if q.shape[2] == 1:  # a prefill's result may never be asked for: waiting for it would compute it
        pool.note_read(layer, output)
    return output
