"""silu(gate) * up on CUDA, in one launch. MLX compiles a kernel of its own for it: some 4 s, once per machine."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import mlx.core as mx

from .build import build_kernel, warn_when_compiling
from .check import outcome_of
from .products.inference import is_inference
from .products.narrow_matmul import DTYPES, is_available
from .trial import Text

BODY = "silu_product"
_THREADS = 256
_EACH = 8  # values of a thread


def silu_product(gate: mx.array, up: mx.array) -> mx.array | None:
    """``silu(gate) * up``, with the bits of MLX's operations.

    Args:
        gate, up: of the same shape and dtype, 16 bits.

    Returns:
        The same shape; None where MLX is to compute it: outside of inference, elsewhere than on CUDA, for other dtypes.
    """
    fits = gate.shape == up.shape and gate.dtype == up.dtype and gate.size > 0
    if not fits or not is_inference() or not works(gate.dtype, gate.ndim):
        return None
    return _launch(gate, up)


def text_of(dtype: mx.Dtype, num_dims: int) -> Text:
    """Return the text for arrays of so many dimensions."""
    return Text(BODY, (("T", dtype), ("XD", num_dims)))


def _launch(gate: mx.array, up: mx.array) -> mx.array:
    text = text_of(gate.dtype, gate.ndim)
    groups = -(-gate.size // (_THREADS * _EACH))
    (out,) = build_kernel(text.body, text.constants)(
        inputs=[gate, up],
        grid=(groups * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[gate.shape],
        output_dtypes=[gate.dtype],
    )
    return out


@lru_cache(maxsize=64)
def works(dtype: mx.Dtype, num_dims: int) -> bool:
    """Return whether the kernel can be used on this machine for arrays of so many dimensions. One that fails its
    self-check or does not compile warns once, and is not."""
    if dtype not in DTYPES or not is_available():
        return False
    with warn_when_compiling():
        *_, reason = outcome_of(lambda: _difference(dtype, num_dims))
    if reason:
        warnings.warn(f"mlx_paged: {BODY} ({dtype}) is off, MLX computes it: {reason}", stacklevel=2)
    return not reason


def _difference(dtype: mx.Dtype, num_dims: int) -> float:
    """RMS of the kernel's error, the results being about 1."""
    errors = []
    for size in (7, 4100):  # less than a packet, and several thread groups with a rest
        shape = (*[1] * (num_dims - 1), size)
        # Not by split and index, which MLX would have to compile on CUDA.
        gate, up = (mx.random.normal(shape, key=mx.random.key(size + i)).astype(dtype) for i in range(2))
        wide = gate.astype(mx.float32)
        got = _launch(gate, up).astype(mx.float32)
        errors.append(mx.square(got - wide * mx.sigmoid(wide) * up.astype(mx.float32)).mean())
    rms: Any = mx.sqrt(mx.stack(errors).max()).item()
    return float(rms)
