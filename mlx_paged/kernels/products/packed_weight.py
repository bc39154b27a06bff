"""PackedWeight: a quantised matrix that kernels of this package read as it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)


class PackedWeight(NamedTuple):
    """A matrix ``[width, depth]`` of affine quantisation, as MLX packs it.

    Attributes:
        words: ``[width, depth * bits / 32]``, uint32.
        scales, biases: ``[width, depth / group_size]``, in the dtype of what is multiplied with it.
        bits: of a value.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    @classmethod
    def of(cls, layer: Any) -> PackedWeight | None:
        """The weight of a ``QuantizedLinear`` or ``QuantizedEmbedding``; None if it is packed in another way."""
        words, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
        if layer.mode != "affine" or layer.bits not in BITS or layer.group_size not in GROUP_SIZES or biases is None:
            return None
        if words.dtype != mx.uint32 or words.ndim != 2 or biases.dtype != scales.dtype:
            return None
        packed = cls(words, scales, biases, layer.bits)
        return packed if packed.shape[1] == layer.group_size * scales.shape[1] else None

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.words, self.scales, self.biases

    @property
    def shape(self) -> tuple[int, int]:
        """Width and depth."""
        return self.words.shape[0], self.words.shape[1] * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        """That of its values."""
        return self.scales.dtype

    def values(self) -> mx.array:
        """``[width, depth]`` in float32. Computed in 16 bits, as a dequantised weight of that dtype is, product and sum
        would be rounded one by one."""
        scales, biases = (x.astype(mx.float32) for x in (self.scales, self.biases))
        return mx.dequantize(self.words, scales, biases, self.shape[1] // scales.shape[1], self.bits)
