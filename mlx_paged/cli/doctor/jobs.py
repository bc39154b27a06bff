"""What the doctor runs: the kernels for a shape of attention, and those that multiply a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ...attention import gather
from ...attention.dispatch import Dispatch, last_dispatch, paged_attention
from ...config import PagedConfig
from ...errors import PagedCacheError
from ...kernels.availability import device_decline
from ...kernels.build import backend
from ...kernels.check import MAX_RMS, SelfCheck, self_check
from ...kernels.launch_shape import Variant
from ...kernels.ops import variants_of
from ...kernels.prefill import prefill_variants_of, unsupported_prefill
from ...kernels.prefill_check import prefill_seconds, self_check_prefill
from ...kernels.products import narrow_matmul, packed_weight
from ...kernels.timing import dense_seconds, launch_seconds
from ...kv.group import LayerGroup
from ...kv.pool import BlockPool
from ...kv.storage.choice import storage_choice
from ...kv.storage.scoring import QueryHeads, Scoring
from .report import Row
from .shapes import POPULAR_DTYPE, Shape, all_shapes, models_of, popular_shapes

_KV_HEADS = 2


class Checked(NamedTuple):
    """A kernel that was compiled and checked, in this process.

    Attributes:
        row: without times.
        launch, dense: seconds of a launch, and of MLX's own attention; None where there is nothing to time.
    """

    row: Row
    launch: Callable[[], float] | None = None
    dense: Callable[[], float | None] | None = None

    def timed(self) -> Row:
        """The row with its times. Nothing else should run on the machine meanwhile."""
        return self.row._replace(seconds=self.launch and self.launch(), dense=self.dense and self.dense())


class ShapeJob(NamedTuple):
    """The kernels for one shape, and the path that attention takes.

    Attributes:
        shape: of the queries and blocks.
        every_body: also run the kernels that attention takes only if a better one fails.
    """

    shape: Shape
    every_body: bool

    def __str__(self) -> str:
        return str(self.shape)

    @property
    def pool(self) -> tuple[Any, ...]:
        """Of what jobs with the same kernels for their pool have in common."""
        return str(self.shape.dtype), self.shape.head_dim, self.shape.block_size

    def variants(self) -> tuple[Variant, ...]:
        """The kernels for the shape, the one that attention takes first."""
        shape = self.shape
        return variants_of(
            shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size,
            shape.softcap, shape.sinks,
        )  # fmt: skip

    def prefill_variants(self) -> tuple[Variant, ...]:
        """The kernels for the new tokens of prompts; none where there is no kernel for the shape."""
        shape = self.shape
        if unsupported_prefill(shape.dtype, shape.head_dim, shape.head_dim, shape.gqa, shape.block_size):
            return ()
        return prefill_variants_of(
            shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size,
            shape.softcap, shape.sinks,
        )  # fmt: skip

    def run(self, config: PagedConfig) -> Iterator[Checked]:
        """Run it: one for each kernel."""
        shape = self.shape
        passed, error, use = True, float("nan"), ""
        try:
            choice, error = dispatch_of(shape, config)
            use = f"{choice.path}: {choice.reason}"
            passed = error < MAX_RMS
            if not passed:
                use += " FAILED: attention through the pool differs"
        except (PagedCacheError, RuntimeError, ValueError) as failure:
            passed, use = False, f"FAILED: {type(failure).__name__}: {str(failure)[:500]}"
        if models_of(shape):
            use += f" [{models_of(shape)}]"
        if device_decline() is not None:
            yield Checked(Row(passed, str(shape), "-", "-", error, None, None, use))
            return
        for variant in self.prefill_variants():
            result = self_check_prefill(variant)
            yield _checked(
                True, str(shape), variant.body, result, "prompts in packs", partial(prefill_seconds, variant)
            )
        for variant in self.variants():
            result = self_check(variant)
            times = partial(launch_seconds, variant), partial(dense_seconds, variant)
            yield _checked(passed, str(shape), variant.body, result, use, *times)
            if result.ok and not self.every_body:
                return


class ProductJob(NamedTuple):
    """A kernel that multiplies a few rows, on CUDA."""

    body: str
    dtype: mx.Dtype
    tile: narrow_matmul.Tile
    bits: int = 0  # of quantised weights

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("mlx.core.")
        return f"{name:>8} products of up to {self.tile.rows} rows{f', {self.bits} bits' if self.bits else ''}"

    @property
    def pool(self) -> tuple[Any, ...] | None:
        """None: it has none."""
        return None

    def run(self, config: PagedConfig) -> Iterator[Checked]:
        """As :meth:`ShapeJob.run`."""
        result = narrow_matmul.self_check(*self)
        launch = partial(narrow_matmul.launch_seconds, *self)
        yield _checked(True, str(self), self.body, result, "compiled decode steps", launch)


Job = ShapeJob | ProductJob


def jobs(block_size: int, *, everything: bool) -> list[Job]:
    """What to run: the shapes of popular models, or all shapes; and products, where there are kernels for them."""
    # Those of popular models come first in any case; a shape that is in both is run once.
    shapes = dict.fromkeys([*popular_shapes(block_size), *(all_shapes(block_size) if everything else ())])
    dtypes = () if backend() != "cuda" else narrow_matmul.DTYPES if everything else (POPULAR_DTYPE,)
    products = [
        ProductJob(body, dtype, tile, bits)
        for bits in (0, *packed_weight.BITS)
        for dtype in dtypes
        for tile in narrow_matmul.TILES
        for body in narrow_matmul.BODIES
    ]
    return [*(ShapeJob(shape, everything) for shape in shapes), *products]


def dispatch_of(shape: Shape, config: PagedConfig) -> tuple[Dispatch, float]:
    """Path of a real decode step over a small pool, and the RMS of its result against dense attention in float32."""
    lengths = (shape.block_size + 3, 1)
    choose = storage_choice(config.kernel)
    pool = BlockPool([LayerGroup((0,))], block_size=shape.block_size, choose_storage=choose)
    heads = QueryHeads(_KV_HEADS * shape.gqa, shape.softcap, shape.sinks)
    mx.random.seed(0)
    sinks = mx.random.normal((heads.num_q_heads,)).astype(shape.dtype) if shape.sinks else None
    scoring = Scoring(shape.head_dim**-0.5, softcap=10.0 if shape.softcap else None, sinks=sinks)
    q = mx.random.normal((len(lengths), heads.num_q_heads, 1, shape.head_dim)).astype(shape.dtype)
    tables, expected = [], []
    for row, length in enumerate(lengths):
        k, v = (mx.random.normal((1, _KV_HEADS, length, shape.head_dim)).astype(shape.dtype) for _ in range(2))
        pool.set_geometry(0, k, v, batch=1, heads=heads)
        tables.append(pool.new_table())
        pool.append_tokens(tables[-1], length)
        pool.write_prefill(tables[-1], 0, k, v)
        one, k, v = (x.astype(mx.float32) for x in (q[row : row + 1], k, v))
        expected.append(gather.attention(one, k, v, scoring))
    got = paged_attention(q, pool, 0, tables, scoring)
    choice = last_dispatch()
    assert choice is not None
    error: Any = mx.sqrt(mx.square(got.astype(mx.float32) - mx.concatenate(expected)).mean()).item()
    return choice, error


def _checked(
    passed: bool,
    shape: str,
    body: str,
    result: SelfCheck | narrow_matmul.TileCheck,
    use: str,
    launch: Callable[[], float],
    dense: Callable[[], float | None] | None = None,
) -> Checked:
    """Of a kernel that was checked; one that failed is not timed."""
    compiled = "no" if math.isnan(result.rms) and not result.ok else "yes"
    if not result.ok:
        return Checked(Row(False, shape, body, compiled, result.rms, None, None, f"{use} FAILED: {result.reason}"))
    return Checked(Row(passed, shape, body, compiled, result.rms, None, None, use), launch, dense)
