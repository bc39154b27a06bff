"""MLX's gather_mm for 16-bit types where it has none: on a CPU."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import mlx.core as mx


def gather_mm_of_16_bits() -> AbstractContextManager[Any]:
    """Within, ``mx.gather_mm`` takes 16-bit types on a CPU too, by way of float32."""
    multiply = mx.gather_mm
    if mx.default_device() != mx.Device(mx.cpu):
        return nullcontext()

    def by_float32(a: mx.array, b: mx.array, **options: Any) -> mx.array:
        return multiply(a.astype(mx.float32), b.astype(mx.float32), **options).astype(a.dtype)

    return mock.patch.object(mx, "gather_mm", by_float32)
