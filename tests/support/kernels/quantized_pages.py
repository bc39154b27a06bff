"""Quantised pages by NumPy: rows as MLX's kernels make them on a GPU, and pages of rows."""

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.kernels.quantized import PageShape, QuantizedRows

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
UNSET = 0xFFFFFFFF  # a word of unwritten slots: their scales and biases are NaN


def page_shape(
    dim: int = 64,
    bits: tuple[int, int] = (8, 8),
    group_size: int = 64,
    dtype: mx.Dtype = mx.float32,
    value_dim: int = 0,
) -> PageShape:
    """Return the shape of pages with ``bits`` of keys and of values."""
    k_bits, v_bits = bits
    return PageShape(
        QuantizedRows(dim, k_bits, group_size, dtype), QuantizedRows(value_dim or dim, v_bits, group_size, dtype)
    )


def rounded(x: Floats) -> Floats:
    """Round to the nearest, halves away from 0."""
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= 0.5, x).astype(np.float32)


def quantized(x: Floats, form: QuantizedRows) -> Words:
    """Return rows ``[..., num_words]`` of values ``[..., dim]``, as MLX's GPU kernels quantise: a group's maximum is at
    least 0, halves are rounded away from 0, and codes use the scale before it is rounded to its dtype."""
    most = np.float32((1 << form.bits) - 1)
    groups = x.astype(np.float32).reshape(*x.shape[:-1], form.num_groups, form.group_size)
    with np.errstate(all="ignore"):
        low = np.fmin.reduce(groups, axis=-1, initial=np.inf)
        high = np.fmax.reduce(groups, axis=-1, initial=0.0)
        step = np.fmax((high - low) / most, np.float32(1e-7))
        is_low = np.abs(low) > np.abs(high)
        scale, edge = np.where(is_low, step, -step), np.where(is_low, low, high)
        steps = rounded(edge / scale)
        is_zero = steps == 0
        scale, bias = np.where(is_zero, scale, edge / steps), np.where(is_zero, np.float32(0), edge)
        codes = np.fmin(rounded((groups - bias[..., None]) / scale[..., None]), most)
    each = 32 // form.bits
    parts = codes.astype(np.uint32).reshape(*x.shape[:-1], form.code_words, each)
    words = np.bitwise_or.reduce(parts << (np.arange(each, dtype=np.uint32) * np.uint32(form.bits)), axis=-1)
    factors = mx.array(np.concatenate([scale, bias], axis=-1)).astype(form.dtype).view(mx.uint32)
    return np.concatenate([words.astype(np.uint32), np.array(factors)], axis=-1)


def dequantized(rows: Words, form: QuantizedRows) -> Floats:
    """Return the values of rows, not rounded to their dtype."""
    codes, scales, biases = form.split(mx.array(rows))
    exact = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), form.group_size, form.bits)
    return np.array(exact)


def pages_of(rows: Words, form: QuantizedRows) -> Words:
    """Return a pool's pages ``[num_blocks, n_kv_heads, block_size, num_words]`` of the rows in them."""
    flat = rows.shape[0], rows.shape[1], -1
    planes = [x.reshape(flat) for x in (rows[..., : form.code_words], rows[..., form.code_words :])]
    return np.ascontiguousarray(np.concatenate(planes, axis=-1).reshape(rows.shape))


def rows_of(pages: Words, form: QuantizedRows) -> Words:
    """Return the rows in a pool's pages; the inverse of :func:`pages_of`."""
    lead, size = pages.shape[:3], pages.shape[2] * form.code_words
    flat = pages.reshape(*lead[:2], -1)
    parts = [x.reshape(*lead, -1) for x in (flat[..., :size], flat[..., size:])]
    return np.concatenate(parts, axis=-1)


def unset_pages(x: Floats, form: QuantizedRows) -> mx.array:
    """Return a pool's pages of values ``[num_blocks, n_kv_heads, block_size, dim]``; slots with NaN are unwritten."""
    words = quantized(x, form)
    words[np.isnan(x).any(-1)] = UNSET
    return mx.array(pages_of(words, form))
