"""Replacements on CUDA: quantised layers and experts (cuda/quantized_matmul.py), and the MLPs of Llama, Qwen3 and Gemma
3, whose gate and up are multiplied in one launch of a decode step (cuda/narrow_layers.py)."""

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


@replaces("mlx_lm.models.llama:MLP.__call__", "ec6fbfefb1f0b4c0", only_cuda=True)
@replaces("mlx_lm.models.qwen3:MLP.__call__", "ec6fbfefb1f0b4c0", only_cuda=True)
def adapt_mlp(original: LayerCall) -> LayerCall:
    """Return the replacement of ``MLP.__call__``, whose launch applies the activation, too."""

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        activated = part("narrow_layers").gated(self.gate_proj, self.up_proj, x)
        return original(self, x) if activated is None else self.down_proj(activated)

    return __call__


@replaces("mlx_lm.models.gemma3_text:MLP.__call__", "40fa7af8e58d245e", only_cuda=True)
def adapt_gemma(original: LayerCall) -> LayerCall:
    """Return the replacement of Gemma 3's ``MLP.__call__``."""

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        found = part("narrow_layers").fused_projections((self.gate_proj, self.up_proj), x)
        return original(self, x) if found is None else self.down_proj(nn.gelu_approx(found[0]) * found[1])

    return __call__
