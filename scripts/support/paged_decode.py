"""Single launches over a pool's tensors, for tests and scripts: decode, with its variants, writes and gathers."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.launch_shape import Variant
from mlx_paged.kernels.quantized import PageShape, QuantizedRows


def page_shape(dim: int, bits: int | tuple[int, int], group_size: int, dtype: mx.Dtype) -> PageShape:
    """Return the form of pages for keys and values of ``dim`` values each; ``bits``: of both, or (of keys, of
    values)."""
    both = bits if isinstance(bits, tuple) else (bits, bits)
    return PageShape(*(QuantizedRows(dim, each, group_size, dtype) for each in both))


def decode_variants(
    k_pool: mx.array,
    v_pool: mx.array,
    n_q_heads: int,
    *,
    softcap: bool = False,
    sinks: bool = False,
    pages: PageShape | None = None,
) -> tuple[Variant, ...]:
    """Return the variants that can attend over this pool, fastest first; empty without a GPU.

    Raises ValueError if no kernel supports the geometry.
    """
    dtype, n_kv_heads, block_size, head_dim, value_dim = kernels.geometry_of(k_pool, v_pool, pages)
    return kernels.variants_of(dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size, softcap, sinks, pages)


def paged_decode(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    start_positions: mx.array,
    *,
    sinks: mx.array | None = None,
    append: tuple[mx.array, mx.array] | None = None,
    **options: Any,
) -> tuple[mx.array, mx.array]:
    """Attend for a few query positions per sequence over scattered blocks.

    Args:
        q: queries ``[B, n_q_heads, q_len, head_dim]``, q_len 1 to 8, in the pool's dtype.
        block_tables: int32 ``[B, max_blocks]``, block ids by absolute position.
        context_lens, start_positions: int32 ``[B, q_len]``; a query sees start <= position < context_len.
        sinks: one logit per query head, ``[n_q_heads]``.
        append: keys and values ``[B, n_kv_heads, 1, head_dim]`` of the tokens at context_lens - 1, which are not in the
            pool yet (q_len 1).
        options: of :func:`mlx_paged.kernels.ops.prepare_decode`.

    Returns:
        Results ``[B, n_q_heads, q_len, value_dim]``, and the next fence. A query that sees nothing gets zeros.
    """
    launch = kernels.prepare_decode(
        k_pool,
        v_pool,
        (block_tables, context_lens, start_positions),
        n_q_heads=q.shape[1],
        sinks=sinks is not None,
        append=append is not None,
        **options,
    )
    return launch(q, k_pool, v_pool, fence, sinks, *(append or ()))


def write_slots(
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    k: mx.array,
    v: mx.array,
    slots: mx.array,
    pages: PageShape | None = None,
) -> mx.array:
    """Write rows ``[N, n_kv_heads, head_dim]`` or ``[B, n_kv_heads, length, head_dim]`` to slots ``[N]`` or
    ``[B * length]``; return the next fence."""
    if k.ndim == 3:
        k, v = k[:, :, None], v[:, :, None]
    return kernels.prepare_write(k_pool, v_pool, slots, pages)(k_pool, v_pool, fence, k, v)


def gather_blocks(
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    ids: mx.array | Sequence[int],
    start: int,
    length: int,
    pages: PageShape | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Return keys and values of a block table's positions, and the next fence."""
    return kernels.prepare_gather(k_pool, v_pool, ids, start, length, pages)(k_pool, v_pool, fence)
