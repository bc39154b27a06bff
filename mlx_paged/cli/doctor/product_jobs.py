"""The doctor's jobs for products of a few rows, on CUDA. Imported only there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ...config import PagedConfig
from ...cuda import narrow_matmul
from ...cuda.narrow_matmul import (
    ADDED,
    BIASED,
    GATED,
    GROUPED,
    MAX_MATRICES,
    NOT_FUSED,
    FusedRotation,
    Matrix,
    PackedWeight,
    Tile,
)
from ...kernels.nvidia import Rotation
from .jobs import Checked, checked
from .timing import LAUNCHES, seconds_of


class ProductJob(NamedTuple):
    """A job that checks a CUDA kernel for products of a few rows."""

    body: str
    dtype: mx.Dtype
    tile: Tile
    bits: int = 0  # of quantised weights; 0: not quantised
    fused: FusedRotation = NOT_FUSED

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("mlx.core.")
        return f"{name:>8} products of up to {self.tile.rows} rows{f', {self.bits} bits' if self.bits else ''}"

    @property
    def pool(self) -> tuple[Any, ...] | None:
        """None: a product uses no pool."""
        return None

    def run(self, config: PagedConfig) -> Iterator[Checked]:
        """Check the kernel and yield its result."""
        result = narrow_matmul.self_check(*self)
        launch = partial(product_seconds, *self)
        yield checked(True, str(self), self.body + self.fused.suffix, result, "compiled decode steps", launch)


def product_jobs(dtypes: Sequence[mx.Dtype]) -> list[ProductJob]:
    """Return the jobs for all kernels in those of the dtypes that they support."""
    return [
        ProductJob(body, dtype, tile, bits, fused)
        for bits in (0, *narrow_matmul.BITS)
        for dtype in narrow_matmul.DTYPES
        if dtype in dtypes
        for tile in narrow_matmul.TILES
        for body, fused in narrow_matmul.KERNELS
    ]


def product_seconds(body: str, dtype: mx.Dtype, tile: Tile, bits: int = 0, fused: FusedRotation = NOT_FUSED) -> float:
    """Return the seconds of a launch for matrices of 2,048 x 2,048 and the rows of a full tile; compilation
    excluded."""
    size, num_rows = 2048, tile.rows
    x = mx.zeros((num_rows, 1, size), dtype)
    weights = [_weight(size, dtype, bits)] * {GROUPED: MAX_MATRICES, GATED: 2}.get(body, 1)
    addends = {BIASED: (size,), ADDED: (num_rows, 1, size)}
    addend = mx.zeros(addends[body], dtype) if body in addends else None
    offsets = mx.zeros((num_rows,), mx.int32)
    rotation = Rotation(fused.half, offsets, fused.scale, fused.base, None) if fused.half else None
    mx.eval(x, *(w.arrays if isinstance(w, PackedWeight) else w for w in weights))
    shapes = [(num_rows, 1, size)] * (MAX_MATRICES if body == GROUPED else 1)

    def launches() -> list[mx.array]:
        given = x, weights, addend, tile, shapes, rotation
        return [y for _ in range(LAUNCHES) for y in narrow_matmul.launch(body, *given)]

    return seconds_of(launches) / LAUNCHES


def _weight(size: int, dtype: mx.Dtype, bits: int) -> Matrix:
    """Return a matrix of zeros, quantised if bits are given."""
    weight = mx.zeros((size, size), dtype)
    return PackedWeight(*mx.quantize(weight, 64, bits), bits) if bits else weight
