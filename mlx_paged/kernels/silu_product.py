"""silu(gate) * up on CUDA, in one launch. MLX would compile a kernel for it: about 4 s, once per machine."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .build import build_kernel
from .cases import worst_rms
from .check import check_and_warn
from .products.inference import is_inference
from .products.narrow_matmul import DTYPES, is_available
from .trial import KernelKey

BODY = "silu_product"
_THREADS = 256
_EACH = 8  # values per thread


def silu_product(gate: mx.array, up: mx.array) -> mx.array | None:
    """Return ``silu(gate) * up``, with the bits of MLX's operations.

    Args:
        gate, up: arrays of the same shape and dtype, of 16 bits.

    Returns:
        An array of the same shape; None if MLX has to compute it: outside of inference, without CUDA, or for other
        dtypes.
    """
    fits = gate.shape == up.shape and gate.dtype == up.dtype and gate.size > 0
    if not fits or not is_inference() or not passes_check(gate.dtype, gate.ndim):
        return None
    return _launch(gate, up)


def kernel_key(dtype: mx.Dtype, num_dims: int) -> KernelKey:
    """Return the key of the kernel for arrays of ``num_dims`` dimensions."""
    return KernelKey(BODY, (("T", dtype), ("XD", num_dims)))


def _launch(gate: mx.array, up: mx.array) -> mx.array:
    key = kernel_key(gate.dtype, gate.ndim)
    groups = -(-gate.size // (_THREADS * _EACH))
    (out,) = build_kernel(key.body, key.constants)(
        inputs=[gate, up],
        grid=(groups * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[gate.shape],
        output_dtypes=[gate.dtype],
    )
    return out


@lru_cache(maxsize=64)
def passes_check(dtype: mx.Dtype, num_dims: int) -> bool:
    """Return whether the kernel can be used on this machine for arrays of ``num_dims`` dimensions; warns once if it
    fails its self-check or does not compile."""
    if dtype not in DTYPES or not is_available():
        return False
    return check_and_warn(BODY, dtype, lambda: _difference(dtype, num_dims))


def _difference(dtype: mx.Dtype, num_dims: int) -> float:
    """Return the RMS of the kernel's error; results are about 1."""
    errors = []
    for size in (7, 4100):  # less than a packet, and several thread groups with a rest
        shape = (*[1] * (num_dims - 1), size)
        # Keys are not split and indexed: MLX would have to compile kernels for that on CUDA.
        gate, up = (mx.random.normal(shape, key=mx.random.key(size + i)).astype(dtype) for i in range(2))
        wide = gate.astype(mx.float32)
        got = _launch(gate, up).astype(mx.float32)
        errors.append(mx.square(got - wide * mx.sigmoid(wide) * up.astype(mx.float32)).mean())
    return worst_rms(errors)
