"""Times of products of a few rows for the doctor's report, on CUDA. Imported only there."""

from __future__ import annotations

import mlx.core as mx

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
from .timing import LAUNCHES, seconds_of


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
