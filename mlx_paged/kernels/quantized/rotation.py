"""The rotation of keys and values before they are quantised: no value of a vector stands out from the others then."""

from __future__ import annotations

import mlx.core as mx


def rotate(x: mx.array) -> mx.array:
    """Vectors times an orthonormal matrix: Hadamard's, in blocks of the largest power of two that divides the vector.

    The matrix is symmetric, so it is its own inverse: rotating twice gives the vectors again, but for rounding. Each
    vector's result depends on that vector alone, bit for bit, whatever is rotated beside it. Products stay what they
    are: rotated queries over rotated keys and values give the output rotated.

    Args:
        x: ``[..., dim]`` of float32, float16 or bfloat16. Whatever a group size divides has blocks of 32 at least.

    Returns:
        ``[..., dim]`` in x's dtype.
    """
    dim = x.shape[-1]
    block = dim & -dim
    if block == dim:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(x.reshape(*x.shape[:-1], dim // block, block)).reshape(x.shape)
