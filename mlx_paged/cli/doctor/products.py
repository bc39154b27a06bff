"""Times of products of a few rows for the doctor's report, on CUDA. Imported only there."""

from __future__ import annotations

import mlx.core as mx

from ...cuda import narrow_matmul
from ...cuda.narrow_matmul import BIASED, GATED, GROUPED, MAX_MATRICES, Matrix, PackedWeight
from .timing import LAUNCHES, seconds_of


def product_seconds(body: str, dtype: mx.Dtype, tile: int, bits: int = 0) -> float:
    """Return the seconds of a launch for matrices of 2,048 x 2,048 and the rows of a full tile; compilation
    excluded."""
    size = 2048
    x = mx.zeros((tile, 1, size), dtype)
    weights = [_weight(size, dtype, bits)] * {GROUPED: MAX_MATRICES, GATED: 2}.get(body, 1)
    bias = mx.zeros((size,), dtype) if body == BIASED else None
    mx.eval(x, *(w.arrays if isinstance(w, PackedWeight) else w for w in weights))
    shapes = [(tile, 1, size)] * (MAX_MATRICES if body == GROUPED else 1)

    def launches() -> list[mx.array]:
        return [y for _ in range(LAUNCHES) for y in narrow_matmul.launch(body, x, weights, bias, tile, shapes)]

    return seconds_of(launches) / LAUNCHES


def _weight(size: int, dtype: mx.Dtype, bits: int) -> Matrix:
    """Return a matrix of zeros, quantised if bits are given."""
    weight = mx.zeros((size, size), dtype)
    return PackedWeight(*mx.quantize(weight, 64, bits), bits) if bits else weight
