"""paged_attention(): attention of new queries over the blocks of their sequences; says which path it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..errors import GeometryError
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from . import gather


class Dispatch(NamedTuple):
    """One choice of path.

    Attributes:
        path: "prefill" (fresh keys and values only, nothing read from the pool), "gather" (gather-then-SDPA).
        reason: why this path.
    """

    path: str
    reason: str


_counts: Counter[Dispatch] = Counter()
_last: Dispatch | None = None


def last_dispatch() -> Dispatch | None:
    """The path taken by the last attention call in this process, or None."""
    return _last


def dispatch_counts() -> dict[Dispatch, int]:
    """How often each path was taken, with its reason, since the last :func:`reset_dispatch_counts`."""
    return dict(_counts)


def reset_dispatch_counts() -> None:
    global _last
    _counts.clear()
    _last = None


def _record(path: str, reason: str) -> None:
    global _last
    _last = Dispatch(path, reason)
    _counts[_last] += 1


def prefill_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pool: BlockPool,
    layer: int,
    table: BlockTable,
    *,
    scale: float,
    mask: mx.array | str | None = "causal",
) -> mx.array:
    """Attention of several new tokens of one sequence, whose k and v are already written to the pool.

    Args:
        q: ``[1, n_q_heads, n_new, head_dim]``.
        k: the new keys ``[1, n_kv_heads, n_new, k_head_dim]``, as written.
        v: the new values ``[1, n_kv_heads, n_new, v_head_dim]``.
        pool, layer, table: where they were written.
        scale: factor on the scores.
        mask: as for ``mx.fast.scaled_dot_product_attention``, over the visible keys (prefix and new ones).

    Returns:
        ``[1, n_q_heads, n_new, v_head_dim]``.
    """
    if table.length - table.logical_start == q.shape[2]:
        _record("prefill", "no prefix: the new keys are all there is")
        k, v = pool.after_writes(layer, k, v)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    _record("gather", "several new tokens after a prefix")
    return gather.gather_attention(q, pool, layer, [table], scale=scale, mask=mask)


def paged_attention(
    q: mx.array,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    *,
    scale: float,
    mask: mx.array | None = None,
) -> mx.array:
    """Decode attention: one new token per sequence over the sequence's visible tokens, itself included.

    Args:
        q: ``[B, n_q_heads, 1, head_dim]``.
        pool: holds the keys and values, those of the new tokens included.
        layer: model layer.
        tables: B block tables of the layer's group.
        scale: factor on the scores.
        mask: optional, over the visible tokens of the only sequence (B = 1).

    Returns:
        ``[B, n_q_heads, 1, v_head_dim]``.

    Raises:
        GeometryError: the queries are not one row per table.
    """
    if q.ndim != 4 or q.shape[0] != len(tables):
        raise GeometryError(f"queries {q.shape} for {len(tables)} sequence(s)")
    _record("gather", "one new token per sequence")
    return gather.gather_attention(q, pool, layer, tables, scale=scale, mask=mask)
