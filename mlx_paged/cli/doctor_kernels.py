"""The doctor's rows: each kernel for shapes of popular models, checked and timed."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from ..attention import gather
from ..attention.dispatch import Dispatch, attend, last_dispatch
from ..config import BLOCK_SIZE, PagedConfig
from ..errors import PagedCacheError
from ..kernels import nvidia
from ..kernels.availability import backend, device_unsupported_reason
from ..kernels.check import MAX_RMS, CheckResult, self_check
from ..kernels.launch_shape import DTYPES, Variant
from ..kernels.ops import new_fence, prepare_decode, variants_of
from ..kernels.quantized import new_blocks
from ..kv.blocks import blocks_choice
from ..kv.geometry import AttentionParams, QueryHeads
from ..kv.group import LayerGroup
from ..kv.pool import BlockPool

_KV_HEADS = 2
LAUNCHES, REPEATS = 20, 3  # that are timed
_ROWS, _TOKENS = 8, 1024  # of these launches


class Shape(NamedTuple):
    """A shape of attention that kernel variants are made for."""

    dtype: mx.Dtype
    head_dim: int
    gqa: int
    block_size: int = BLOCK_SIZE
    softcap: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        extras = " softcap" * self.softcap + " sinks" * self.sinks
        name = str(self.dtype).removeprefix("mlx.core.")
        return f"{name:>8} D{self.head_dim:<3} gqa {self.gqa:<2} block {self.block_size:<3}{extras}"


POPULAR_DTYPE = mx.bfloat16  # of models; other dtypes are checked with the most common shape only
POPULAR = {
    Shape(POPULAR_DTYPE, 64, 4): "Llama 3.2 1B",
    Shape(POPULAR_DTYPE, 64, 7): "Qwen2.5 0.5B",
    Shape(POPULAR_DTYPE, 64, 8, sinks=True): "gpt-oss",
    Shape(POPULAR_DTYPE, 80, 1): "Phi-2",
    Shape(POPULAR_DTYPE, 96, 1): "Phi-3 mini",
    Shape(POPULAR_DTYPE, 128, 2): "Qwen3 0.6B, 1.7B; Gemma 3 27B",
    Shape(POPULAR_DTYPE, 128, 2, softcap=True): "Gemma 2 27B",
    Shape(POPULAR_DTYPE, 128, 3): "Llama 3.2 3B; Phi-4 mini",
    Shape(POPULAR_DTYPE, 128, 4): "Llama 3.1 8B; Mistral 7B; Qwen3 4B, 8B; Phi-4",
    Shape(POPULAR_DTYPE, 128, 5): "Qwen3 14B; Qwen2.5 14B, 32B",
    Shape(POPULAR_DTYPE, 128, 6): "Qwen2.5 1.5B",
    Shape(POPULAR_DTYPE, 128, 7): "Qwen2.5 7B",
    Shape(POPULAR_DTYPE, 128, 8): "Llama 3.1 70B; Qwen3 32B; Qwen2.5 3B",
    Shape(POPULAR_DTYPE, 256, 2): "Gemma 3 4B, 12B",
    Shape(POPULAR_DTYPE, 256, 2, softcap=True): "Gemma 2 2B, 9B",
    Shape(POPULAR_DTYPE, 256, 4): "Gemma 3 1B",
}
COMMON = Shape(POPULAR_DTYPE, 128, 4)


def popular_shapes(block_size: int) -> Iterator[Shape]:
    """Yield the shapes of popular models."""
    yield from (shape._replace(block_size=block_size) for shape in POPULAR)
    yield from (COMMON._replace(dtype=dtype, block_size=block_size) for dtype in DTYPES if dtype != POPULAR_DTYPE)


# Rows -----------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Result of one kernel for one shape: a line of the doctor's output.

    Attributes:
        passed: neither the kernel nor attention through it failed.
        shape: the shape, as text.
        body: name of the kernel's body, or ``-`` where none runs.
        rms: RMS difference from attention in float32, or NaN.
        seconds: time of a decode launch, without compiling, or None.
        dense: seconds of MLX's own attention for the same shape, or None.
        use: the path that attention takes and why, models with the shape, and what failed.
    """

    passed: bool
    shape: str
    body: str
    rms: float
    seconds: float | None
    dense: float | None
    use: str

    def __str__(self) -> str:
        launch, dense = ("-" if each is None else f"{1e6 * each:.0f} us" for each in (self.seconds, self.dense))
        return _line(self.shape, self.body, f"{self.rms:.1e}", launch, dense, self.use)


def _line(shape: str, body: str, rms: str, launch: str, dense: str, use: str) -> str:
    return f"{shape:<46}{body:<22}{rms:<10}{launch:<9}{dense:<9}{use}"


HEADER = _line("shape", "kernel", "RMS", "launch", "MLX's", "attention")


def rows(block_size: int, config: PagedConfig) -> Iterator[Row]:
    """Yield a row for each kernel: for the shapes of popular models, and on CUDA for products of a few rows."""
    for shape in popular_shapes(block_size):
        yield from _rows_of_shape(shape, config)
    if backend() != "cuda":
        return
    matmul = nvidia.part("narrow_matmul")
    for bits, tile, body in itertools.product((0, *matmul.BITS), matmul.TILES, matmul.BODIES):
        what = f"products of up to {tile} rows{f', {bits} bits' if bits else ''}"
        yield _checked(what, body, matmul.self_check(body, POPULAR_DTYPE, tile, bits), "compiled decode steps")


def _rows_of_shape(shape: Shape, config: PagedConfig) -> Iterator[Row]:
    """Check the path that attention takes and its kernels; a row for each, or a single one where no kernel can run."""
    passed, error, use = True, math.nan, ""
    try:
        choice, error = dispatch_of(shape, config)
        use = f"{choice.path}: {choice.reason}"
        passed = error < MAX_RMS
        if not passed:
            use += " FAILED: attention over the pool differs from dense attention"
    except (PagedCacheError, RuntimeError, ValueError) as failure:
        passed, use = False, f"FAILED: {type(failure).__name__}: {str(failure)[:500]}"
    if models := POPULAR.get(shape._replace(dtype=POPULAR_DTYPE, block_size=COMMON.block_size)):
        use += f" [{models}]"
    if device_unsupported_reason() is not None:
        yield Row(passed, str(shape), "-", error, None, None, use)
        return
    heads = shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size
    for variant in variants_of(*heads, shape.softcap, shape.sinks, use="prefill") if shape.dtype.size == 2 else ():
        yield _checked(str(shape), variant.body, self_check(variant), "packed prefill")
    for variant in variants_of(*heads, shape.softcap, shape.sinks):
        row = _checked(str(shape), variant.body, self_check(variant), use)
        if row.passed:
            yield row._replace(passed=passed, seconds=launch_seconds(variant), dense=dense_seconds(variant))
            return  # the others serve only if it fails
        yield row


def _checked(shape: str, body: str, check: CheckResult, use: str) -> Row:
    """Return the row of a self-check."""
    return Row(check.ok, shape, body, check.rms, None, None, use if check.ok else f"{use} FAILED: {check.reason}")


def dispatch_of(shape: Shape, config: PagedConfig) -> tuple[Dispatch, float]:
    """Run a decode step over a small pool; return its path and its RMS difference from dense attention in float32."""
    lengths = (shape.block_size + 3, 1)
    choose = blocks_choice(config.kernel)
    pool = BlockPool([LayerGroup((0,))], block_size=shape.block_size, choose_blocks=choose)
    heads = QueryHeads(_KV_HEADS * shape.gqa, shape.softcap, shape.sinks)
    mx.random.seed(0)
    sinks = mx.random.normal((heads.num_q_heads,)).astype(shape.dtype) if shape.sinks else None
    params = AttentionParams(shape.head_dim**-0.5, softcap=10.0 if shape.softcap else None, sinks=sinks)
    q = mx.random.normal((len(lengths), heads.num_q_heads, 1, shape.head_dim)).astype(shape.dtype)
    tables, expected = [], []
    for row, length in enumerate(lengths):
        k, v = (mx.random.normal((1, _KV_HEADS, length, shape.head_dim)).astype(shape.dtype) for _ in range(2))
        pool.set_geometry(0, k, v, batch=1, heads=heads)
        tables.append(pool.new_table())
        pool.append_tokens(tables[-1], length)
        pool.write_prefill(tables[-1], 0, k, v)
        one, k, v = (x.astype(mx.float32) for x in (q[row : row + 1], k, v))
        expected.append(gather.attention(one, k, v, params))
    got = attend(q, None, pool.groups[0], 0, pool.tokens_of(0, tables, 1), params, is_written=True)
    choice = last_dispatch()
    assert choice is not None
    error: Any = mx.sqrt(mx.square(got.astype(mx.float32) - mx.concatenate(expected)).mean()).item()
    return choice, error


# Times ----------------------------------------------------------------------------------------------------------------


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
    launch = prepare_decode(
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

    def launches() -> list[mx.array]:
        fence, results = new_fence(), []  # each launch begins with the fence of the one before
        for _ in range(LAUNCHES):
            out, fence = launch(q, k_pool, v_pool, fence, sinks)
            results.append(out)
        return [*results, fence]

    return seconds_of(launches) / LAUNCHES


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
