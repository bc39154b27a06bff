"""Embedding lookup on CUDA, in one launch. MLX would compile a kernel for it: about 3 s for each dtype of tokens, once
per machine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from .build import build_kernel
from .check import check_and_warn
from .products.inference import is_inference
from .products.narrow_matmul import is_available
from .trial import KernelKey

BODY = "embedding_rows"
DTYPES = (mx.bfloat16, mx.float16, mx.float32, mx.uint32)
TOKEN_DTYPES = (mx.int32, mx.uint32)
MAX_TOKENS = 65535  # limit of a grid's second dimension
_THREADS = 128


def embedding_rows(table: mx.array, tokens: mx.array) -> mx.array | None:
    """Return ``table[tokens]``.

    Args:
        table: ``[num_rows, width]``.
        tokens: int32 or uint32 of any shape, at most 65,535.

    Returns:
        ``[*tokens.shape, width]``; None if MLX has to copy the rows: outside of inference, without CUDA, or for other
        dtypes or shapes.
    """
    fits = table.ndim == 2 and 0 < tokens.size <= MAX_TOKENS
    if not fits or not is_inference() or not passes_check(table.dtype, tokens.dtype):
        return None
    return _launch(table, tokens)


def kernel_key(dtype: mx.Dtype, token_dtype: mx.Dtype) -> KernelKey:
    """Return the key of the kernel for a table and tokens of these dtypes."""
    return KernelKey(BODY, (("T", dtype), ("S", token_dtype)))


def _launch(table: mx.array, tokens: mx.array) -> mx.array:
    key = kernel_key(table.dtype, tokens.dtype)
    (out,) = build_kernel(key.body, key.constants)(
        inputs=[table, tokens],
        grid=(_THREADS, tokens.size, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*tokens.shape, table.shape[1])],
        output_dtypes=[table.dtype],
    )
    return out


@lru_cache(maxsize=16)
def passes_check(dtype: mx.Dtype, token_dtype: mx.Dtype) -> bool:
    """Return whether the kernel can be used on this machine; warns once if it fails its self-check or does not
    compile."""
    if dtype not in DTYPES or token_dtype not in TOKEN_DTYPES or not is_available():
        return False
    return check_and_warn(BODY, dtype, lambda: _difference(dtype, token_dtype))


def _difference(dtype: mx.Dtype, token_dtype: mx.Dtype) -> float:
    """Return the largest fraction of values that the kernel copies wrong."""
    wrong = []
    for width in (9, 2056):  # mostly unaligned rows, and several packets per thread
        table = mx.arange(5 * width).reshape(5, width).astype(dtype)
        ids = [4, 0, 3, 3]
        # Not by indexing, for which MLX would have to compile its kernel.
        rows = mx.concatenate([table[i : i + 1] for i in ids])
        got = _launch(table, mx.array(ids, token_dtype))
        wrong.append((got != rows).astype(mx.float32).mean())
    most: Any = mx.stack(wrong).max().item()
    return float(most)
