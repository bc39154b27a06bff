"""QuantizedRows: the form in which keys or values of 8 or 4 bits are kept."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

BITS = (8, 4)
GROUP_SIZES = (32, 64, 128)


class QuantizedRows(NamedTuple):
    """Rows of one head's keys or values in MLX's affine quantisation: of each group of a row's values the scale and
    the bias, and of each value a code, which stands for ``scale * code + bias``.

    A row is so many words (uint32): its codes, then its scales, then its biases, byte for byte those that
    ``mx.quantize`` gives, and that mlx-lm's ``QuantizedKVCache`` keeps in three arrays.

    Attributes:
        dim: values of a row.
        bits: of a code.
        group_size: values that share a scale and a bias; divides dim.
        dtype: of the values, the scales and the biases.
    """

    dim: int
    bits: int
    group_size: int
    dtype: mx.Dtype

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return self.dim // self.group_size

    @property
    def code_words(self) -> int:
        """Words of a row's codes."""
        return self.dim * self.bits // 32

    @property
    def num_words(self) -> int:
        """Words of a row."""
        return self.code_words + 2 * self.num_groups * self.dtype.size // 4

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.num_words

    def quantize(self, x: mx.array) -> mx.array:
        """Rows ``[..., num_words]`` of values ``[..., dim]``."""
        return self.join(*mx.quantize(mx.contiguous(x), self.group_size, self.bits))  # views went wrong on Metal

    def dequantize(self, rows: mx.array) -> mx.array:
        """Values ``[..., dim]`` of rows ``[..., num_words]``, as ``mx.dequantize`` gives them."""
        codes, scales, biases = (mx.contiguous(part) for part in self.split(rows))
        return mx.dequantize(codes, scales, biases, self.group_size, self.bits)

    def join(self, codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """Rows ``[..., num_words]`` of what ``mx.quantize`` gives: codes ``[..., code_words]`` (uint32), scales and
        biases ``[..., num_groups]``."""
        factors = mx.concatenate([scales, biases], axis=-1).view(mx.uint32)
        return mx.concatenate([codes, factors], axis=-1)

    def split(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Codes, scales and biases of rows; the inverse of :meth:`join`."""
        factors = rows[..., self.code_words :].view(self.dtype)
        return rows[..., : self.code_words], factors[..., : self.num_groups], factors[..., self.num_groups :]
