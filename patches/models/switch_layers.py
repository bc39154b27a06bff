"""Quantised experts on CUDA: many rows are multiplied with dequantised weights (products/quantized_matmul.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...kernels.products import quantized_matmul


def adapt(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Make the replacement of ``QuantizedSwitchLinear.__call__``."""

    def __call__(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        product = quantized_matmul.sorted_experts_product(self, x, indices) if sorted_indices else None
        if product is None:
            return original(self, x, indices, sorted_indices)
        return product + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else product

    return __call__
