"""How long a launch of a kernel takes that is compiled already."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from . import ops as kernels
from .launch_shape import Variant
from .quantized.pages import new_blocks

LAUNCHES, REPEATS = 20, 3
ROWS, TOKENS = 8, 1024
_KV_HEADS = 2


def launch_seconds(variant: Variant) -> float:
    """Seconds of one decode launch for 8 sequences of 1,024 tokens and 2 KV heads, the kernels being compiled."""
    block, dtype = variant.block_size, variant.dtype
    per_row = TOKENS // block
    dims = variant.head_dim, variant.value_dim
    k_pool, v_pool = new_blocks(ROWS * per_row + 1, _KV_HEADS, block, dims, dtype, variant.pages)
    q = mx.zeros((ROWS, _KV_HEADS * variant.gqa, 1, variant.head_dim), dtype)
    tables = mx.arange(1, 1 + ROWS * per_row, dtype=mx.int32).reshape(ROWS, per_row)
    ends, starts = mx.full((ROWS, 1), TOKENS, mx.int32), mx.zeros((ROWS, 1), mx.int32)
    sinks = mx.zeros((q.shape[1],)) if variant.sinks else None
    mx.eval(k_pool, v_pool, q, tables, ends, starts)

    def launches() -> list[mx.array]:
        fence, results = kernels.new_fence(), []
        for _ in range(LAUNCHES):
            out, fence = kernels.paged_decode(
                q,
                k_pool,
                v_pool,
                fence,
                tables,
                ends,
                starts,
                scale=variant.head_dim**-0.5,
                softcap=10.0 if variant.softcap else None,
                sinks=sinks,
                variant=variant,
                pages=variant.pages,
            )
            results.append(out)
        return [*results, fence]

    return seconds_of(launches) / LAUNCHES


def dense_seconds(variant: Variant) -> float | None:
    """Seconds of MLX's own attention for the same shapes, over keys and values in one piece; None where it has none,
    with a softcap."""
    if variant.softcap:
        return None
    dtype = variant.dtype
    q = mx.random.normal((ROWS, _KV_HEADS * variant.gqa, 1, variant.head_dim)).astype(dtype)
    k = mx.random.normal((ROWS, _KV_HEADS, TOKENS, variant.head_dim)).astype(dtype)
    v = mx.random.normal((ROWS, _KV_HEADS, TOKENS, variant.value_dim)).astype(dtype)
    sinks = mx.zeros((q.shape[1],), dtype) if variant.sinks else None
    mx.eval(q, k, v)

    def launches() -> list[mx.array]:
        # Another scale each time, or one would be computed for all.
        scales = [variant.head_dim**-0.5 * (1 + i / 1024) for i in range(LAUNCHES)]
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, sinks=sinks) for scale in scales]

    return seconds_of(launches) / LAUNCHES


def seconds_of(compute: Callable[[], list[mx.array]]) -> float:
    """The least time it takes to build and evaluate some arrays, of three, after a first time that is not counted."""
    mx.eval(compute())
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        mx.eval(compute())
        best = min(best, time.perf_counter() - begin)
    return best
