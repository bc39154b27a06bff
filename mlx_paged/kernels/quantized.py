"""Quantised pages: their rows, and how values are packed and rotated."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .build import Constants


def rotate(x: mx.array) -> mx.array:
    """Multiply vectors by an orthonormal Hadamard matrix, in blocks of the largest power of two that divides ``dim``.

    The matrix is symmetric, so it is its own inverse: rotating twice restores the vectors, but for rounding. A vector's
    result depends on that vector alone, bit for bit. Dot products are unchanged: rotated queries over rotated keys and
    values give the rotated output.

    Args:
        x: ``[..., dim]`` of float32, float16 or bfloat16. If a group size divides ``dim``, blocks are 32 or more.

    Returns:
        ``[..., dim]`` in x's dtype.
    """
    dim = x.shape[-1]
    block = dim & -dim
    if block == dim:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(x.reshape(*x.shape[:-1], dim // block, block)).reshape(x.shape)


BITS = (8, 4)
GROUP_SIZES = (32, 64, 128)


class QuantizedRows(NamedTuple):
    """Rows of one head's keys or values in MLX's affine quantisation: a scale and a bias for each group of a row's
    values, and for each value a code, which stands for ``scale * code + bias``.

    A row is a sequence of uint32 words: its codes, then its scales, then its biases, byte for byte those that
    ``mx.quantize`` returns, and that mlx-lm's ``QuantizedKVCache`` keeps in three arrays.

    Attributes:
        dim: values of a row.
        bits: bits of a code.
        group_size: values that share a scale and a bias; divides dim.
        dtype: dtype of the values, the scales and the biases.
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

    def quantize(self, x: mx.array) -> mx.array:
        """Return rows ``[..., num_words]`` of values ``[..., dim]``."""
        return self.join(*mx.quantize(mx.contiguous(x), self.group_size, self.bits))  # views went wrong on Metal

    def dequantize(self, rows: mx.array) -> mx.array:
        """Return values ``[..., dim]`` of rows ``[..., num_words]``, by ``mx.dequantize``."""
        codes, scales, biases = (mx.contiguous(part) for part in self.split(rows))
        return mx.dequantize(codes, scales, biases, self.group_size, self.bits)

    def join(self, codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """Return rows ``[..., num_words]`` made of what ``mx.quantize`` returns: codes ``[..., code_words]`` (uint32),
        scales and biases ``[..., num_groups]``."""
        factors = mx.concatenate([scales, biases], axis=-1).view(mx.uint32)
        return mx.concatenate([codes, factors], axis=-1)

    def split(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the codes, scales and biases of rows; the inverse of :meth:`join`."""
        factors = rows[..., self.code_words :].view(self.dtype)
        return rows[..., : self.code_words], factors[..., : self.num_groups], factors[..., self.num_groups :]


class PageShape(NamedTuple):
    """The forms of the rows of keys and of values in the pages of an in-place pool.

    The pool's tensors are uint32 ``[num_blocks, n_kv_heads, block_size, num_words]``. A page, one block of one head, is
    ``block_size * num_words`` words in two planes: the codes of all its tokens ``[block_size, code_words]``, then each
    token's scales and biases in the dtype of the values ``[block_size, 2 * num_groups]``. So a token's codes are
    aligned to 16 bytes if they take a multiple of 16 bytes.

    Attributes:
        k, v: forms of rows, with the same group size and dtype.
    """

    k: QuantizedRows
    v: QuantizedRows

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of queries, and of keys and values as they are given and read."""
        return self.k.dtype

    @property
    def constants(self) -> Constants:
        """Constants of a text for such pages, besides T, D and DV."""
        return (("KBITS", self.k.bits), ("VBITS", self.v.bits), ("GS", self.k.group_size))

    def quantize(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Return rows ``[..., num_words]`` of keys and values, quantised by MLX."""
        return self.k.quantize(k), self.v.quantize(v)

    def dequantize(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values of rows, dequantised by MLX."""
        return self.k.dequantize(k), self.v.dequantize(v)

    def __str__(self) -> str:
        bits = f"{self.k.bits}" if self.k.bits == self.v.bits else f"{self.k.bits}/{self.v.bits}"
        return f"{bits} bits/{self.k.group_size}"


def new_blocks(
    num_blocks: int,
    heads: int,
    block_size: int,
    dims: tuple[int, int],
    dtype: mx.Dtype,
    pages: PageShape | None = None,
    value: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """Return a pool's keys and values, lazy arrays full of ``value``, 0 or NaN; in quantised pages, scales and biases
    have that value."""
    shape = (num_blocks, heads, block_size)
    if pages is None:
        return mx.full((*shape, dims[0]), value, dtype), mx.full((*shape, dims[1]), value, dtype)
    word = 0 if value == 0.0 else 0xFFFFFFFF
    return mx.full((*shape, pages.k.num_words), word, mx.uint32), mx.full((*shape, pages.v.num_words), word, mx.uint32)
