"""Quantised layers on CUDA: all rows in one product (see kernels/products/quantized_matmul.py)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ...kernels.products import quantized_matmul

LayerCall = Callable[[nn.Module, mx.array], mx.array]


def adapt_linear(original: LayerCall) -> LayerCall:
    """From ``QuantizedLinear.__call__`` to its replacement."""

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        product = quantized_matmul.product(self, x)
        if product is None:
            return original(self, x)
        return product + self["bias"] if "bias" in self else product

    return __call__


def adapt_as_linear(original: LayerCall) -> LayerCall:
    """From ``QuantizedEmbedding.as_linear`` to its replacement."""

    def as_linear(self: nn.Module, x: mx.array) -> mx.array:
        product = quantized_matmul.product(self, x)
        return original(self, x) if product is None else product

    return as_linear
