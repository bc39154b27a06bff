"""Products with quantised weights on CUDA: one product of all rows. In model calls over a pool, a kernel of this
package multiplies few rows, and for many rows the weight is dequantised first.

MLX multiplies ``[B, 1, depth]`` as B products of one row, each of which reads the whole weight. Its products of many
rows take longer than dequantising the weight first, and it compiles them at first use, most of a minute for each number
of rows that they are made for (docs/adr/0011).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import inference
from . import narrow_matmul
from .narrow_matmul import PackedWeight

# From this number of rows on, a weight is dequantised first.
DEQUANTIZED_ROWS = 129
# The limit for experts, in rows per expert on average: all experts of a layer are dequantised.
DEQUANTIZED_ROWS_PER_EXPERT = 8
MOST_BYTES = 512 << 20  # of one dequantised weight; larger ones stay quantised
_DTYPES = (mx.bfloat16, mx.float16)  # float32 products may go through TF32 where quantised ones do not


def product(layer: nn.Module, x: mx.array) -> mx.array | None:
    """Return ``x @ w.T`` with a layer's quantised weight ``[width, depth]``.

    Args:
        layer: a ``QuantizedLinear`` or ``QuantizedEmbedding``.
        x: ``[..., depth]``.

    Returns:
        ``[..., width]``; None if MLX's own product is as good: it multiplies all rows of x together.
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
        ``[N, 1, width]``; None if the weights should not be dequantised.
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
    """Return a layer's weight of ``size`` values in x's dtype, for one product with x; None if it may not be
    dequantised."""
    scales, biases = layer["scales"], layer.get("biases")
    num_bytes = size * x.dtype.size
    pace = inference.pace()
    if (
        pace is None
        or x.dtype not in _DTYPES
        or num_bytes > MOST_BYTES
        or (biases is not None and scales.dtype != x.dtype)  # MLX would compute in another dtype
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
