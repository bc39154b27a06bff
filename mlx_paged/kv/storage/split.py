"""More query positions per sequence than a launch of the decode kernel takes, as several rows of it."""

from __future__ import annotations

import mlx.core as mx

from ...kernels.launch_shape import MAX_QUERY_LENGTH


def split_queries(q: mx.array) -> mx.array:
    """From ``[B, n_q_heads, q_len, head_dim]`` to ``[B * parts, n_q_heads, 8, head_dim]``, zeros at the end."""
    batch, heads, q_len, dim = q.shape
    parts = -(-q_len // MAX_QUERY_LENGTH)
    q = _padded(q, 2)
    return (
        q.reshape(batch, heads, parts, MAX_QUERY_LENGTH, dim).swapaxes(1, 2).reshape(-1, heads, MAX_QUERY_LENGTH, dim)
    )


def join_queries(out: mx.array, q_len: int) -> mx.array:
    """From the kernel's result for :func:`split_queries` to ``[B, n_q_heads, q_len, v_head_dim]``."""
    parts = -(-q_len // MAX_QUERY_LENGTH)
    _, heads, _, dim = out.shape
    out = out.reshape(-1, parts, heads, MAX_QUERY_LENGTH, dim).swapaxes(1, 2)
    return out.reshape(-1, heads, parts * MAX_QUERY_LENGTH, dim)[:, :, :q_len]


def split_visible(visible: tuple[mx.array, mx.array, mx.array]) -> tuple[mx.array, mx.array, mx.array]:
    """What :func:`split_queries`' rows see, of :meth:`.step.Step.visible`; its padding sees nothing."""
    tables, ends, starts = visible
    parts = -(-ends.shape[1] // MAX_QUERY_LENGTH)
    ends, starts = (_padded(x, 1).reshape(-1, MAX_QUERY_LENGTH) for x in (ends, starts))
    return mx.repeat(tables, parts, axis=0), ends, starts


def _padded(x: mx.array, axis: int) -> mx.array:
    missing = -x.shape[axis] % MAX_QUERY_LENGTH
    return mx.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
