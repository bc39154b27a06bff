"""Single launches over a pool's tensors, for tests and scripts: decode, with its variants, writes and gathers."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.launch_shape import MAX_QUERY_LENGTH, LaunchShape, Variant
from mlx_paged.kernels.quantized import PageShape


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
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    max_visible: int | None = None,
    append: tuple[mx.array, mx.array] | None = None,
    variant: Variant | None = None,
    launch_shape: LaunchShape | None = None,
    pages: PageShape | None = None,
    items: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Attend for a few query positions per sequence over scattered blocks.

    q [B, n_q_heads, q_len, head_dim], q_len 1..8, dtype of the pool; block_tables int32 [B, max_blocks], block ids by
    absolute position; context_lens and start_positions int32 [B, q_len]: a query sees start <= position < context_len,
    and entries of the table outside that range are never followed. sinks: one logit per query head, [n_q_heads].
    max_visible: no query sees more tokens than this (a window), which saves empty partitions; the result is the same.
    append: keys and values [B, n_kv_heads, 1, head_dim] of the tokens at context_lens - 1 (q_len 1), which are not in
    the pool yet: the launch writes them to their slots and attends to them, as if write_slots had run before.
    Returns (out [B, n_q_heads, q_len, value_dim], fence). A query that sees nothing gets zeros.

    pages: form of a pool of quantised pages; appended tokens are quantised, and attended to as their page holds them.

    items: which rows read blocks together (:mod:`.shared_runs`), for q_len 1.

    A row's bits do not depend on the other rows. `variant` and `launch_shape` override the choice, for checks and
    timings.
    Raises ValueError for an unsupported shape, NoKernelError without a GPU or with every variant switched off.
    """
    batch, n_q_heads, q_len, head_dim = q.shape
    dtype, n_kv_heads, _, pool_dim, value_dim = kernels.geometry_of(k_pool, v_pool, pages)
    if not 1 <= q_len <= MAX_QUERY_LENGTH:
        raise ValueError(f"q_len {q_len} is not in 1..{MAX_QUERY_LENGTH}")
    if head_dim != pool_dim or q.dtype != dtype:
        raise ValueError(f"queries {q.dtype} x {head_dim} do not fit a pool of {dtype} x {pool_dim}")
    if context_lens.shape != (batch, q_len) or start_positions.shape != (batch, q_len):
        raise ValueError("context_lens and start_positions must be [B, q_len]")
    if not block_tables.dtype == context_lens.dtype == start_positions.dtype == mx.int32:
        raise ValueError("block_tables, context_lens and start_positions must be int32")
    launch = kernels.prepare_decode(
        k_pool,
        v_pool,
        (block_tables, context_lens, start_positions),
        n_q_heads=n_q_heads,
        scale=scale,
        softcap=softcap,
        sinks=sinks is not None,
        max_visible=max_visible,
        append=append is not None,
        variant=variant,
        launch_shape=launch_shape,
        pages=pages,
        items=items,
    )
    if append is None:
        return launch(q, k_pool, v_pool, fence, sinks)
    for x, dim in zip(append, (head_dim, value_dim), strict=True):
        if x.shape != (batch, n_kv_heads, 1, dim) or x.dtype != dtype or q_len != 1:
            raise ValueError(f"cannot append rows {x.dtype} x {x.shape} for queries {q.shape}")
    return launch(q, k_pool, v_pool, fence, sinks, *append)


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
