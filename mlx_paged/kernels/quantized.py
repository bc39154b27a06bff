"""Quantised pages: their rows, how values are packed and rotated, and the kernels that write, gather and copy them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from .build import Constants, build_kernel, prepared


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

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.num_words

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

    @classmethod
    def of(cls, dim: int, bits: int | tuple[int, int], group_size: int, dtype: mx.Dtype) -> PageShape:
        """Return the forms for keys and values of ``dim`` values each; ``bits``: of both, or (of keys, of values)."""
        k_bits, v_bits = bits if isinstance(bits, tuple) else (bits, bits)
        return cls(QuantizedRows(dim, k_bits, group_size, dtype), QuantizedRows(dim, v_bits, group_size, dtype))

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of queries, and of keys and values as they are given and read."""
        return self.k.dtype

    @property
    def itemsize(self) -> float:
        """Average bytes of an element of keys and values, without scales and biases."""
        return (self.k.bits + self.v.bits) / 16

    @property
    def constants(self) -> tuple[tuple[str, Any], ...]:
        """Constants of a text for such pages, besides T, D and DV."""
        return (("KBITS", self.k.bits), ("VBITS", self.v.bits), ("GS", self.k.group_size))

    @property
    def row_constants(self) -> tuple[tuple[str, Any], ...]:
        """Constants of a text that moves rows unchanged: words of a row, and words of its codes."""
        words = (("T", mx.uint32), ("D", self.k.num_words), ("DV", self.v.num_words))
        return (*words, ("KC", self.k.code_words), ("VC", self.v.code_words))

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


_PARTS = 2  # keys and values


def write_options(slots: mx.array, heads: int, parts: int = 1) -> dict[str, Any]:
    """Return the options of a launch that writes a row for each slot and head, with ``parts`` simdgroups per row."""
    group = next(n for n in (8, 4, 2, 1) if heads % n == 0)
    return {
        "grid": (slots.size * heads * parts * 32, 1, 1),
        "threadgroup": (group * 32, 1, 1),
        "output_shapes": [(1,)],
        "output_dtypes": [mx.uint32],
    }


def page_constants(pages: PageShape, block_size: int) -> Constants:
    """Return constants of the kernels that quantise and dequantise."""
    return (("T", pages.dtype), ("D", pages.k.dim), ("DV", pages.v.dim), ("BS", block_size), *pages.constants)


def row_constants(pages: PageShape, block_size: int) -> Constants:
    """Return constants of the kernels that move rows."""
    return (*pages.row_constants, ("BS", block_size))


def texts_of(pages: PageShape, block_size: int) -> list[tuple[str, Constants]]:
    """Return (body, constants) of the kernels that write and read pages."""
    values, rows, slots = page_constants(pages, block_size), row_constants(pages, block_size), ("S", mx.int32)
    texts = [("quantized_write", (*values, slots)), ("quantized_gather", values)]
    return [*texts, ("write_rows", (*rows, slots)), ("gather_rows", rows)]


def write_rows(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, k: mx.array, v: mx.array, slots: mx.array, pages: PageShape
) -> mx.array:
    """Scatter rows, uint32 ``[B, n_kv_heads, length, num_words]``, into pages unchanged. Returns the next fence.

    Args:
        slots: the slot of each row, as in :func:`.ops.prepare_write`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    batch, heads, length = k.shape[:3]
    for x, pool in ((k, k_pool), (v, v_pool)):
        if x.shape != (batch, pool.shape[1], length, pool.shape[3]) or x.dtype != mx.uint32:
            raise ValueError(f"rows {x.dtype} x {x.shape} do not fit pages {pool.shape}")
    if slots.shape != (batch * length,) or slots.dtype not in (mx.int32, mx.int64):
        raise ValueError(f"rows {k.shape} and slots {slots.dtype} x {slots.shape} do not agree")
    kernel = build_kernel("write_rows", (*row_constants(pages, k_pool.shape[2]), ("S", slots.dtype)))
    return kernel(inputs=[k_pool, v_pool, fence, k, v, slots], **write_options(slots, heads, _PARTS))[0]


def gather_rows(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, ids: mx.array, start: int, length: int, pages: PageShape
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the rows of keys and of values, uint32 ``[1, n_kv_heads, length, num_words]``, at positions ``start ..
    start + length - 1`` of one block table, as the pages hold them; and the next fence.

    Args:
        ids: block ids, int32 ``[n]``, by absolute position.

    Raises:
        ValueError: the range is empty or exceeds the table.
    """
    outputs = [(form.num_words, mx.uint32) for form in pages]
    constants = row_constants(pages, k_pool.shape[2])
    launch = gather_launch("gather_rows", constants, k_pool, ids, start, length, outputs, 1, _PARTS)
    return launch(k_pool, v_pool, fence)


# Takes pools of keys and of values, and their fence. Returns keys, values, and the next fence.
GatherLaunch = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]


def gather_launch(
    body: str,
    constants: Constants,
    k_pool: mx.array,
    ids: mx.array,
    start: int,
    length: int,
    outputs: list[tuple[int, mx.Dtype]],
    elements: int,
    parts: int,
) -> GatherLaunch:
    """Prepare a launch of a gather over pools of this geometry.

    Args:
        outputs: elements of a token and head, and their dtype, of keys and of values.
        elements: how many of them a thread copies.
        parts: 2 if keys and values have threads of their own.

    Raises:
        ValueError: the range is empty or exceeds the table.
    """
    _, heads, block_size, _ = k_pool.shape
    if start < 0 or length < 1 or start + length > ids.size * block_size:
        raise ValueError(f"positions {start}..{start + length} are not in a table of {ids.size} blocks of {block_size}")
    threads = length * (max(size for size, _ in outputs) // elements)
    options = {
        "grid": (-(-threads // 256) * 256, heads, parts),
        "threadgroup": (256, 1, 1),
        "output_shapes": [*((1, heads, length, size) for size, _ in outputs), (1,)],
        "output_dtypes": [*(dtype for _, dtype in outputs), mx.uint32],
    }
    launch, span = prepared(build_kernel(body, constants), options), mx.array([start, length], mx.int32)
    return lambda k_pool, v_pool, fence: tuple(launch([k_pool, v_pool, fence, ids, span]))  # type: ignore[return-value]
