"""Times of kernels for the doctor's report, and of MLX's own attention."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from ...kernels import ops as kernels
from ...kernels.launch_shape import Variant
from ...kernels.prefill import PrefillLaunch, prepare_prefill
from ...kernels.quantized import new_blocks

LAUNCHES, REPEATS = 20, 3
_KV_HEADS = 2
_ROWS, _TOKENS = 8, 1024  # of a launch that is timed


def seconds_of(compute: Callable[[], list[mx.array]]) -> float:
    """Return the shortest time, in seconds, of three times to build and evaluate arrays, after one that does not
    count."""
    mx.eval(compute())
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        mx.eval(compute())
        best = min(best, time.perf_counter() - begin)
    return best


def _seconds_of_launch(
    launch: kernels.DecodeLaunch | PrefillLaunch,
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    sinks: mx.array | None,
) -> float:
    """Return the seconds of one launch of attention; each begins with the fence of the one before."""

    def launches() -> list[mx.array]:
        fence, results = kernels.new_fence(), []
        for _ in range(LAUNCHES):
            out, fence = launch(q, k_pool, v_pool, fence, sinks)
            results.append(out)
        return [*results, fence]

    return seconds_of(launches) / LAUNCHES


def launch_seconds(variant: Variant) -> float:
    """Return the seconds of one decode launch, without compiling, for 8 sequences of 1,024 tokens and 2 KV heads."""
    block, dtype = variant.block_size, variant.dtype
    per_row = _TOKENS // block
    dims = variant.head_dim, variant.value_dim
    k_pool, v_pool = new_blocks(_ROWS * per_row + 1, _KV_HEADS, block, dims, dtype, variant.pages)
    q = mx.zeros((_ROWS, _KV_HEADS * variant.gqa, 1, variant.head_dim), dtype)
    tables = mx.arange(1, 1 + _ROWS * per_row, dtype=mx.int32).reshape(_ROWS, per_row)
    ends, starts = mx.full((_ROWS, 1), _TOKENS, mx.int32), mx.zeros((_ROWS, 1), mx.int32)
    sinks = mx.zeros((q.shape[1],)) if variant.sinks else None
    mx.eval(k_pool, v_pool, q, tables, ends, starts)

    launch = kernels.prepare_decode(
        k_pool,
        v_pool,
        (tables, ends, starts),
        n_q_heads=q.shape[1],
        scale=variant.head_dim**-0.5,
        softcap=10.0 if variant.softcap else None,
        sinks=variant.sinks,
        variant=variant,
        pages=variant.pages,
    )
    return _seconds_of_launch(launch, q, k_pool, v_pool, sinks)


def dense_seconds(variant: Variant) -> float | None:
    """Return the seconds of MLX's own attention for the same shapes, over contiguous keys and values; None with a
    softcap, which it does not support."""
    if variant.softcap:
        return None
    dtype = variant.dtype
    q = mx.random.normal((_ROWS, _KV_HEADS * variant.gqa, 1, variant.head_dim)).astype(dtype)
    k = mx.random.normal((_ROWS, _KV_HEADS, _TOKENS, variant.head_dim)).astype(dtype)
    v = mx.random.normal((_ROWS, _KV_HEADS, _TOKENS, variant.value_dim)).astype(dtype)
    sinks = mx.zeros((q.shape[1],), dtype) if variant.sinks else None
    mx.eval(q, k, v)

    def launches() -> list[mx.array]:
        # A different scale each time: equal calls might be computed only once.
        scales = [variant.head_dim**-0.5 * (1 + i / 1024) for i in range(LAUNCHES)]
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, sinks=sinks) for scale in scales]

    return seconds_of(launches) / LAUNCHES


def prefill_seconds(variant: Variant) -> float:
    """Return the seconds of one launch for 4 sequences of 512 new tokens and 2 KV heads, compilation excluded."""
    batch, length, block, dtype = 4, 512, variant.block_size, variant.dtype
    per_row = length // block
    dims = variant.head_dim, variant.value_dim
    k_pool, v_pool = new_blocks(batch * per_row + 1, _KV_HEADS, block, dims, dtype, variant.pages)
    q = mx.zeros((batch * length, _KV_HEADS * variant.gqa, 1, variant.head_dim), dtype)
    sinks = mx.zeros((q.shape[1],)) if variant.sinks else None
    tables = mx.arange(1, 1 + batch * per_row, dtype=mx.int32).reshape(batch, per_row)
    mx.eval(k_pool, v_pool, q, tables)
    launch = prepare_prefill(
        k_pool,
        v_pool,
        tables,
        [length] * batch,
        [length] * batch,
        n_q_heads=q.shape[1],
        scale=variant.head_dim**-0.5,
        softcap=10.0 if variant.softcap else None,
        sinks=variant.sinks,
        variant=variant,
        pages=variant.pages,
    )
    return _seconds_of_launch(launch, q, k_pool, v_pool, sinks)
