"""Embeddings and quantised layers on CUDA: rows by a kernel, and all rows in one product (kernels/products)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..kernels.embedding_rows import embedding_rows
from ..kernels.products import quantized_matmul

LayerCall = Callable[[nn.Module, mx.array], mx.array]


def adapt(original: LayerCall) -> LayerCall:
    """Make the replacement of ``Embedding.__call__``."""

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        rows = embedding_rows(self["weight"], x)
        return original(self, x) if rows is None else rows

    return __call__


def adapt_quantized(original: LayerCall) -> LayerCall:
    """Make the replacement of ``QuantizedEmbedding.__call__``."""

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        parts = {name: self[name] for name in ("weight", "scales", "biases") if self.get(name) is not None}
        rows = {name: embedding_rows(part, x) for name, part in parts.items()}
        words, scales, biases = rows["weight"], rows["scales"], rows.get("biases")
        if words is None or scales is None or (biases is None and "biases" in parts):
            return original(self, x)
        return mx.dequantize(
            words, scales=scales, biases=biases, group_size=self.group_size, bits=self.bits, mode=self.mode
        )

    return __call__


def adapt_linear(original: LayerCall) -> LayerCall:
    """Make the replacement of ``QuantizedLinear.__call__``."""

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        product = quantized_matmul.product(self, x)
        if product is None:
            return original(self, x)
        return product + self["bias"] if "bias" in self else product

    return __call__


def adapt_as_linear(original: LayerCall) -> LayerCall:
    """Make the replacement of ``QuantizedEmbedding.as_linear``."""

    def as_linear(self: nn.Module, x: mx.array) -> mx.array:
        product = quantized_matmul.product(self, x)
        return original(self, x) if product is None else product

    return as_linear
