"""PageShape: what a page of quantised keys and values is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from .rows import QuantizedRows


class PageShape(NamedTuple):
    """The forms of a key's and a value's row in the pages of a pool in place.

    The pool's tensors are uint32 ``[num_blocks, n_kv_heads, block_size, num_words]``. A page, one block of one head, is
    ``block_size * num_words`` words in two planes: the codes of all its tokens ``[block_size, code_words]``, then of
    each token, in the dtype of the values, its scales and its biases ``[block_size, 2 * num_groups]``. So a token's
    codes are aligned to 16 bytes wherever their number is a multiple of that.

    Attributes:
        k, v: rows of one group size and dtype.
    """

    k: QuantizedRows
    v: QuantizedRows

    @classmethod
    def of(cls, dim: int, bits: tuple[int, int], group_size: int, dtype: mx.Dtype) -> PageShape:
        """Pages of keys and values of one size, of these bits each."""
        k_bits, v_bits = bits
        return cls(QuantizedRows(dim, k_bits, group_size, dtype), QuantizedRows(dim, v_bits, group_size, dtype))

    @property
    def dtype(self) -> mx.Dtype:
        """Of queries, and of keys and values as they are given and read."""
        return self.k.dtype

    @property
    def itemsize(self) -> float:
        """Bytes of a key's or value's element, on average, without its scale and bias."""
        return (self.k.bits + self.v.bits) / 16

    @property
    def constants(self) -> tuple[tuple[str, Any], ...]:
        """What a text for such pages is told, besides T, D and DV."""
        return (("KBITS", self.k.bits), ("VBITS", self.v.bits), ("GS", self.k.group_size))

    @property
    def row_constants(self) -> tuple[tuple[str, Any], ...]:
        """What a text that moves rows as they are is told: words of a row, and those of its codes."""
        words = (("T", mx.uint32), ("D", self.k.num_words), ("DV", self.v.num_words))
        return (*words, ("KC", self.k.code_words), ("VC", self.v.code_words))

    def quantize(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Rows ``[..., num_words]`` of keys and values, by MLX."""
        return self.k.quantize(k), self.v.quantize(v)

    def dequantize(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """The keys and values that rows stand for, by MLX."""
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
    """A pool's keys and values, all of one value, 0 or NaN; quantised pages have scales and biases of it (lazy)."""
    shape = (num_blocks, heads, block_size)
    if pages is None:
        return mx.full((*shape, dims[0]), value, dtype), mx.full((*shape, dims[1]), value, dtype)
    word = 0 if value == 0.0 else 0xFFFFFFFF
    return mx.full((*shape, pages.k.num_words), word, mx.uint32), mx.full((*shape, pages.v.num_words), word, mx.uint32)
