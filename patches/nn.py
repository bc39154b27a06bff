"""Replacements for quantised layers and experts on CUDA (cuda/quantized_matmul.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.nvidia import part
from .patch import replaces

LayerCall = Callable[[nn.Module, mx.array], mx.array]


@replaces("mlx.nn.layers.quantized:QuantizedLinear.__call__", "5fab14e7eb47285d", only_cuda=True)
def adapt_linear(original: LayerCall) -> LayerCall:
    """Return the replacement of ``QuantizedLinear.__call__``."""

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        product = part("quantized_matmul").product(self, x)
        if product is None:
            return original(self, x)
        return product + self["bias"] if "bias" in self else product

    return __call__


@replaces("mlx.nn.layers.quantized:QuantizedEmbedding.as_linear", "330736b7d2fb8ff0", only_cuda=True)
def adapt_as_linear(original: LayerCall) -> LayerCall:
    """Return the replacement of ``QuantizedEmbedding.as_linear``."""

    def as_linear(self: nn.Module, x: mx.array) -> mx.array:
        product = part("quantized_matmul").product(self, x)
        return original(self, x) if product is None else product

    return as_linear


@replaces("mlx_lm.models.switch_layers:QuantizedSwitchLinear.__call__", "ed21315c040a1498", only_cuda=True)
def adapt_experts(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return the replacement of ``QuantizedSwitchLinear.__call__``."""

    def __call__(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        product = part("quantized_matmul").sorted_experts_product(self, x, indices) if sorted_indices else None
        if product is None:
            return original(self, x, indices, sorted_indices)
        return product + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else product

    return __call__
