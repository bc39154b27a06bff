"""The doctor's rows: each kernel for shapes of popular models, checked and timed."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from ...attention import gather
from ...attention.dispatch import Dispatch, attend, last_dispatch
from ...config import PagedConfig
from ...errors import PagedCacheError
from ...kernels.availability import device_unsupported_reason
from ...kernels.build import backend
from ...kernels.check import MAX_RMS, CheckResult, self_check
from ...kernels.ops import variants_of
from ...kernels.prefill import prefill_variants_of, unsupported_prefill
from ...kv.blocks import blocks_choice
from ...kv.geometry import AttentionParams, QueryHeads
from ...kv.group import LayerGroup
from ...kv.pool import BlockPool
from .shapes import POPULAR_DTYPE, Shape, models_of, popular_shapes
from .timing import dense_seconds, launch_seconds, prefill_seconds

_KV_HEADS = 2


class Row(NamedTuple):
    """Result of one kernel for one shape: a line of the doctor's output.

    Attributes:
        passed: neither the kernel nor attention through it failed.
        shape: the shape, as text.
        body: name of the kernel's body, or ``-`` where none runs.
        rms: RMS difference from attention in float32, or NaN.
        seconds: time of a launch, without compiling, or None.
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
    products = importlib.import_module(".products", __package__)
    matmul = products.narrow_matmul
    for bits, tile, body in itertools.product((0, *matmul.BITS), matmul.TILES, matmul.BODIES):
        kernel = body, POPULAR_DTYPE, tile, bits
        what = f"products of up to {tile} rows{f', {bits} bits' if bits else ''}"
        launch = functools.partial(products.product_seconds, *kernel)
        yield _checked(True, what, body, matmul.self_check(*kernel), "compiled decode steps", launch)


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
    if models_of(shape):
        use += f" [{models_of(shape)}]"
    if device_unsupported_reason() is not None:
        yield Row(passed, str(shape), "-", error, None, None, use)
        return
    heads = shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size
    if not unsupported_prefill(shape.dtype, shape.head_dim, shape.head_dim, shape.gqa, shape.block_size):
        for variant in prefill_variants_of(*heads, shape.softcap, shape.sinks):
            launch = lambda variant=variant: prefill_seconds(variant)  # noqa: E731
            yield _checked(True, str(shape), variant.body, self_check(variant), "packed prefill", launch)
    for variant in variants_of(*heads, shape.softcap, shape.sinks):
        checked = self_check(variant)
        launch = lambda variant=variant: launch_seconds(variant)  # noqa: E731
        yield _checked(passed, str(shape), variant.body, checked, use, launch, dense_seconds(variant))
        if checked.ok:  # the others serve only if it fails
            return


def _checked(
    passed: bool,
    shape: str,
    body: str,
    check: CheckResult,
    use: str,
    launch: Callable[[], float],
    dense: float | None = None,
) -> Row:
    """Return the row of a self-check; a kernel that failed it has nothing to time."""
    if not check.ok:
        return Row(False, shape, body, check.rms, None, None, f"{use} FAILED: {check.reason}")
    return Row(passed, shape, body, check.rms, launch(), dense, use)


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
