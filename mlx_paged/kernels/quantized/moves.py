"""Writes and reads of quantised pages: of keys and values, which the kernels quantise and dequantise to MLX's own bits,
and of rows as they are.

Whether the bits are MLX's is found out on the device, once. Where they are not, MLX quantises and dequantises, and the
kernels move rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..build import Constants, build_kernel
from .pages import PageShape

Kernel = Callable[..., list[mx.array]]
_PARTS = 2  # keys and values
_TOKENS = 40  # of the check, in pages of their own order


class Exact(NamedTuple):
    """What the kernels do to MLX's bits on this device."""

    write: bool
    gather: bool


def write_options(slots: mx.array, heads: int, parts: int = 1) -> dict[str, Any]:
    """Of a launch that writes so many rows, with a simdgroup for each part of a row of a head."""
    group = next(n for n in (8, 4, 2, 1) if heads % n == 0)
    return {
        "grid": (slots.size * heads * parts * 32, 1, 1),
        "threadgroup": (group * 32, 1, 1),
        "output_shapes": [(1,)],
        "output_dtypes": [mx.uint32],
    }


def page_constants(pages: PageShape, block_size: int) -> Constants:
    """Of the texts that quantise and dequantise."""
    return (("T", pages.dtype), ("D", pages.k.dim), ("DV", pages.v.dim), ("BS", block_size), *pages.constants)


def row_constants(pages: PageShape, block_size: int) -> Constants:
    """Of the texts that move rows."""
    return (*pages.row_constants, ("BS", block_size))


def texts_of(pages: PageShape, block_size: int) -> list[tuple[str, Constants]]:
    """Body and constants of what writes and reads pages."""
    values, rows, slots = page_constants(pages, block_size), row_constants(pages, block_size), ("S", mx.int32)
    texts = [("quantized_write", (*values, slots)), ("quantized_gather", values)]
    return [*texts, ("write_rows", (*rows, slots)), ("gather_rows", rows)]


def write_kernel(pages: PageShape, block_size: int, slots: mx.Dtype) -> tuple[Kernel, PageShape | None]:
    """What writes keys and values into pages; and where it takes rows, what MLX is to make of them before."""
    if exact(pages, block_size).write:
        return build_kernel("quantized_write", (*page_constants(pages, block_size), ("S", slots))), None
    return build_kernel("write_rows", (*row_constants(pages, block_size), ("S", slots))), pages


def write_rows(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, k: mx.array, v: mx.array, slots: mx.array, pages: PageShape
) -> mx.array:
    """Scatter rows, uint32 ``[B, n_kv_heads, length, num_words]``, into pages as they are. Returns the next fence.

    Args:
        slots: of each row, as those of :func:`.ops.write_slots`.

    Raises:
        ValueError: other shapes or dtypes.
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
    """Rows, uint32 ``[1, n_kv_heads, length, num_words]``, of positions ``start .. start + length - 1`` of one block
    table, as the pages hold them, of values too; and the next fence.

    Args:
        ids: int32 ``[n]``, by absolute position.

    Raises:
        ValueError: the range is empty or passes the table.
    """
    constants = row_constants(pages, k_pool.shape[2])
    items = max(pages.k.num_words, pages.v.num_words)
    outputs = [(form.num_words, mx.uint32) for form in pages]
    return _gather("gather_rows", constants, items, outputs, k_pool, v_pool, fence, ids, start, length)


def gather(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, ids: mx.array, start: int, length: int, pages: PageShape
) -> tuple[mx.array, mx.array, mx.array]:
    """As :func:`gather_rows`, what the rows stand for: keys ``[1, n_kv_heads, length, dim]``, values and a fence."""
    if not exact(pages, k_pool.shape[2]).gather:
        k, v, fence = gather_rows(k_pool, v_pool, fence, ids, start, length, pages)
        return *pages.dequantize(k, v), fence
    return _gather_values(k_pool, v_pool, fence, ids, start, length, pages)


def _gather_values(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, ids: mx.array, start: int, length: int, pages: PageShape
) -> tuple[mx.array, mx.array, mx.array]:
    constants = page_constants(pages, k_pool.shape[2])
    outputs = [(form.dim, pages.dtype) for form in pages]
    items = max(pages.k.dim, pages.v.dim) // 4
    return _gather("quantized_gather", constants, items, outputs, k_pool, v_pool, fence, ids, start, length)


def _gather(
    body: str,
    constants: Constants,
    items: int,
    outputs: list[tuple[int, mx.Dtype]],
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    ids: mx.array,
    start: int,
    length: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """A launch with so many threads for a row of a head, over what is checked here."""
    _, heads, block_size, _ = k_pool.shape
    if start < 0 or length < 1 or start + length > ids.size * block_size:
        raise ValueError(f"positions {start}..{start + length} are not in a table of {ids.size} blocks of {block_size}")
    k, v, fence = build_kernel(body, constants)(
        inputs=[k_pool, v_pool, fence, ids, mx.array([start, length], mx.int32)],
        grid=(-(-length * items // 256) * 256, heads, _PARTS),
        threadgroup=(256, 1, 1),
        output_shapes=[*((1, heads, length, size) for size, _ in outputs), (1,)],
        output_dtypes=[*(dtype for _, dtype in outputs), mx.uint32],
    )
    return k, v, fence


def newest_slots(visible: tuple[mx.array, mx.array, mx.array], block_size: int) -> mx.array:
    """Of (block_tables, context_lens ``[B, 1]``, start_positions) the slot of each row's newest token, int32 ``[B]``;
    -1 for rows of padding."""
    tables, ends, _ = visible
    newest = mx.maximum(ends - 1, 0)
    blocks = mx.take_along_axis(tables, newest // block_size, axis=1)
    return mx.where(ends > 0, blocks * block_size + newest % block_size, -1).reshape(-1)


@lru_cache(maxsize=256)
def exact(pages: PageShape, block_size: int) -> Exact:
    """Whether the kernels quantise and dequantise as MLX does on this device, to the bit. Tried at the first call,
    which warns if they do not; only speed is lost then."""
    outcome = Exact(*(_holds(check, pages, block_size) for check in (_writes_alike, _gathers_alike)))
    for what, holds in zip(("quantising", "dequantising"), outcome, strict=True):
        if not holds:
            warnings.warn(f"mlx_paged: {what} of {pages} is left to MLX: a kernel differs from it", stacklevel=2)
    return outcome


def _holds(check: Callable[[PageShape, int], bool], pages: PageShape, block_size: int) -> bool:
    try:
        return check(pages, block_size)
    except (RuntimeError, ValueError):  # it does not compile
        return False


def _samples(pages: PageShape) -> tuple[mx.array, mx.array]:
    """Keys and values ``[1, 1, n, dim]`` of many sizes; groups of one sign, of one value and of zeros among them."""
    arrays = []
    for seed, form in enumerate(pages):
        x = mx.random.normal((1, 1, _TOKENS, form.dim), key=mx.random.key(seed))
        scale = mx.array([2.0 ** (t % 20 - 10) for t in range(_TOKENS)])[:, None]
        kinds = [x[:, :, :24] * scale[:24], mx.abs(x[:, :, 24:30]), -mx.abs(x[:, :, 30:36]) - 3.0]
        constant = mx.broadcast_to(x[:, :, 36:38, :1], (1, 1, 2, form.dim))
        arrays.append(mx.concatenate([*kinds, constant, 0.0 * x[:, :, 38:]], axis=2).astype(form.dtype))
    return arrays[0], arrays[1]


def _empty(pages: PageShape, block_size: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """Pools, a fence, a table and slots for the samples."""
    count = -(-_TOKENS // block_size)
    k_pool, v_pool = (mx.zeros((count, 1, block_size, form.num_words), mx.uint32) for form in pages)
    ids = list(range(count))[::-1]
    slots = [ids[t // block_size] * block_size + t % block_size for t in range(_TOKENS)]
    return k_pool, v_pool, mx.zeros((1,), mx.uint32), mx.array(ids, mx.int32), mx.array(slots, mx.int32)


def _writes_alike(pages: PageShape, block_size: int) -> bool:
    k_pool, v_pool, fence, ids, slots = _empty(pages, block_size)
    k, v = _samples(pages)
    kernel = build_kernel("quantized_write", (*page_constants(pages, block_size), ("S", mx.int32)))
    (fence,) = kernel(inputs=[k_pool, v_pool, fence, k, v, slots], **write_options(slots, 1, _PARTS))
    *rows, _ = gather_rows(k_pool, v_pool, fence, ids, 0, _TOKENS, pages)
    return all(mx.array_equal(a, b).item() for a, b in zip(rows, pages.quantize(k, v), strict=True))


def _gathers_alike(pages: PageShape, block_size: int) -> bool:
    k_pool, v_pool, fence, ids, slots = _empty(pages, block_size)
    rows = pages.quantize(*_samples(pages))
    fence = write_rows(k_pool, v_pool, fence, *rows, slots, pages)
    *got, _ = _gather_values(k_pool, v_pool, fence, ids, 0, _TOKENS, pages)
    bits = mx.uint32 if pages.dtype.size == 4 else mx.uint16
    pairs = zip(got, pages.dequantize(*rows), strict=True)
    return all(mx.array_equal(a.view(bits), b.view(bits)).item() for a, b in pairs)
