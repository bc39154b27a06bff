"""Products with quantised weights on CUDA: as one product of all rows; in a model's calls over a pool, of few rows by a
kernel of this package, and of many with the weight dequantised.

MLX multiplies ``[B, 1, depth]`` as B products of one row there, each of which reads the whole weight; its products of
many rows take longer than to dequantise the weight first; and it compiles them when they are first used, the better
part of a minute for each number of rows that they are made for (docs/adr/0024).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import inference, narrow_matmul
from .narrow_matmul import PackedWeight

# From so many rows on a weight is dequantised first.
DEQUANTIZED_ROWS = 129
# The same for experts, with so many rows for each of them on average: all of a layer's are dequantised.
DEQUANTIZED_ROWS_PER_EXPERT = 8
MOST_BYTES = 512 << 20  # of one dequantised weight; larger ones stay as they are
_DTYPES = (mx.bfloat16, mx.float16)  # float32 products may go through TF32 where quantised ones do not


def product(layer: nn.Module, x: mx.array) -> mx.array | None:
    """``x @ w.T`` with a layer's quantised weight ``[width, depth]``.

    Args:
        layer: a ``QuantizedLinear`` or ``QuantizedEmbedding``.
        x: ``[..., depth]``.

    Returns:
        ``[..., width]``; None if MLX multiplies all rows together as x is, and nothing else is to be done.
    """
    depth = x.shape[-1]
    num_rows = x.size // max(1, depth)
    if inference.pace() is not None and num_rows > 1:
        if num_rows >= DEQUANTIZED_ROWS:
            weight = _dequantized(layer, x, layer["weight"].shape[0] * depth)
            if weight is not None:
                return x @ weight.T
        if num_rows <= narrow_matmul.MAX_PACKED_ROWS:
            packed = PackedWeight.of(layer)
            if packed is not None and narrow_matmul.covers(x, [packed]):
                return narrow_matmul.products(x, [packed])[0]
    if x.ndim < 3 or num_rows == x.shape[-2] or not num_rows:
        return None
    rows = mx.quantized_matmul(
        x.reshape(num_rows, depth),
        layer["weight"],
        scales=layer["scales"],
        biases=layer.get("biases"),
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
    return rows.reshape(*x.shape[:-1], -1)


def sorted_experts_product(layer: Any, x: mx.array, indices: mx.array) -> mx.array | None:
    """Return the product of each row with the weight of its expert.

    Args:
        layer: a ``QuantizedSwitchLinear``, with a weight ``[num_experts, width, depth]``.
        x: ``[N, 1, depth]``.
        indices: int ``[N]``, the expert of each row, in ascending order.

    Returns:
        ``[N, 1, width]``; None if the weights are not to be dequantised for that.
    """
    num_experts, width, _ = layer["weight"].shape
    is_row_each = x.ndim == 3 and x.shape[1] == 1 and indices.ndim == 1 and x.shape[0] == indices.size
    if not is_row_each or indices.size < DEQUANTIZED_ROWS_PER_EXPERT * num_experts or layer.global_scale is not None:
        return None
    weights = _dequantized(layer, x, num_experts * width * x.shape[-1])
    if weights is None:
        return None
    return mx.gather_mm(x, weights.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=True)


def _dequantized(layer: nn.Module, x: mx.array, size: int) -> mx.array | None:
    """Return a layer's weight of so many values in x's dtype, for one product with x; None if it is not to be had."""
    scales, biases = layer["scales"], layer.get("biases")
    num_bytes = size * x.dtype.size
    pace = inference.pace()
    if (
        pace is None
        or x.dtype not in _DTYPES
        or num_bytes > MOST_BYTES
        or (biases is not None and scales.dtype != x.dtype)  # of both: what MLX would compute in is another one
        or not pace.make_way(x, num_bytes)
    ):
        return None
    return mx.dequantize(
        layer["weight"],
        scales=scales,
        biases=biases,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=x.dtype,
    )
