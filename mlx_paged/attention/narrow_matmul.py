"""Products of a few rows with a weight matrix, on CUDA: one kernel launch each.

A decode step of a small batch is bound by the host, and there MLX's way to cuBLAS takes five times as long as a kernel
launch (docs/adr/0011). The result has the precision of MLX's: 16-bit factors, sums in float32.
"""

from __future__ import annotations

import time
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from .kernel_build import backend, build_kernel

MAX_RMS = 5e-3
MIN_ROWS, MAX_ROWS = 2, 32  # one row: MLX has a kernel of its own; for more, cuBLAS is worth its call
# Values of a matrix: larger ones take the GPU longer than a call takes the host, and cuBLAS is better at them.
MAX_SIZE = 1 << 26
DTYPES = (mx.bfloat16, mx.float16)
_SIMDGROUPS = 8
_VECTOR = 8  # values per load


class Tile(NamedTuple):
    """What a thread group computes, and how.

    Attributes:
        rows, columns: of the result.
        unroll: loads of 32 values of each row that are in flight.
    """

    rows: int
    columns: int
    unroll: int


SMALL, LARGE = Tile(16, 16, 4), Tile(32, 32, 2)


class TileCheck(NamedTuple):
    """Outcome of a self-check; rms is NaN if there was no result, seconds include compiling."""

    dtype: mx.Dtype
    tile: Tile
    ok: bool
    rms: float
    seconds: float
    reason: str


def tile_of(num_rows: int) -> Tile:
    return SMALL if num_rows <= SMALL.rows else LARGE


def covers(x: mx.array, w: mx.array) -> bool:
    """Whether :func:`narrow_matmul` multiplies these here: shapes, dtypes, a GPU with CUDA, and a kernel that works.

    The first call for a dtype and tile compiles and checks its kernel.
    """
    num_rows = _num_rows(x)
    return (
        MIN_ROWS <= num_rows <= MAX_ROWS
        and w.ndim == 2
        and w.size <= MAX_SIZE
        and x.shape[-1] == w.shape[1]
        and w.shape[1] % _VECTOR == 0
        and x.dtype == w.dtype
        and works(w.dtype, tile_of(num_rows))
    )


def narrow_matmul(x: mx.array, w: mx.array, bias: mx.array | None = None) -> mx.array:
    """``x @ w.T + bias`` for few rows; :func:`covers` says whether it can be had.

    Args:
        x: ``[..., depth]``, 2 to 32 rows in all, bfloat16 or float16.
        w: ``[width, depth]`` of the same dtype, depth a multiple of 8.
        bias: ``[width]``, or None.

    Returns:
        ``[..., width]``. A row's bits depend neither on the other rows nor on their number.
    """
    return _launch(x, w, bias, tile_of(_num_rows(x)))


def _num_rows(x: mx.array) -> int:
    return x.size // x.shape[-1]


def _launch(x: mx.array, w: mx.array, bias: mx.array | None, tile: Tile) -> mx.array:
    constants = (
        ("T", w.dtype),
        ("MT", tile.rows // 8),
        ("R", tile.columns // 16),
        ("U", tile.unroll),
        ("SG", _SIMDGROUPS),
        ("GROUPS", 2),
    )
    threads = 32 * _SIMDGROUPS
    (out,) = build_kernel("narrow_matmul", constants)(
        inputs=[x, w, w if bias is None else bias],  # a bias has one dimension
        grid=(-(-w.shape[0] // tile.columns) * threads, -(-_num_rows(x) // tile.rows), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*x.shape[:-1], w.shape[0])],
        output_dtypes=[w.dtype],
    )
    return out


@lru_cache(maxsize=16)
def works(dtype: mx.Dtype, tile: Tile) -> bool:
    """Whether the kernel can be used on this machine. A kernel that fails its self-check warns once, and is not."""
    if dtype not in DTYPES or backend() != "cuda" or mx.default_device() != mx.Device(mx.gpu):
        return False
    result = self_check(dtype, tile)
    if not result.ok:
        warnings.warn(f"mlx_paged: products of few rows ({dtype}, {tile}) are MLX's: {result.reason}", stacklevel=2)
    return result.ok


def self_check(dtype: mx.Dtype, tile: Tile) -> TileCheck:
    """Compare the kernel with float32 products of the same factors: edges in every dimension, with a bias and without.

    Fails on a compile error or an RMS difference of 5e-3 of the result's and more. Never raises for a failing kernel.
    """
    begin = time.perf_counter()
    rms = float("nan")
    try:
        rms = max(_difference(dtype, tile, 2, 40, 8), _difference(dtype, tile, tile.rows + 5, 200, 2200))
        reason = "" if rms < MAX_RMS else f"RMS {rms:.2e} is not below {MAX_RMS}"
    except (RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:500]}"
    return TileCheck(dtype, tile, not reason, rms, time.perf_counter() - begin, reason)


def _difference(dtype: mx.Dtype, tile: Tile, num_rows: int, width: int, depth: int) -> float:
    """RMS of the kernel's error, the result's being about 1."""
    keys = mx.random.split(mx.random.key(num_rows), 3)
    x = mx.random.normal((num_rows, depth), key=keys[0]).astype(dtype)
    w = (mx.random.normal((width, depth), key=keys[1]) * depth**-0.5).astype(dtype)
    bias = mx.random.normal((width,), key=keys[2]).astype(dtype)
    # Sums, not products of matrices: those may go through TF32.
    expected = (x.astype(mx.float32)[:, None] * w.astype(mx.float32)).sum(-1)
    errors = [
        mx.square(_launch(x, w, None, tile).astype(mx.float32) - expected).mean(),
        mx.square(_launch(x, w, bias, tile).astype(mx.float32) - (expected + bias)).mean(),
    ]
    rms: Any = mx.sqrt(mx.stack(errors).max()).item()
    return float(rms)
