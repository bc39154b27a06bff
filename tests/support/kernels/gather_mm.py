"""gather_mm for 16-bit types on a CPU, where MLX has none."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import mlx.core as mx


def gather_mm_of_16_bits() -> AbstractContextManager[Any]:
    """Make ``mx.gather_mm`` take 16-bit types on a CPU too, through float32."""
    multiply = mx.gather_mm
    if mx.default_device() != mx.Device(mx.cpu):
        return nullcontext()

    def by_float32(a: mx.array, b: mx.array, **options: Any) -> mx.array:
        return multiply(a.astype(mx.float32), b.astype(mx.float32), **options).astype(a.dtype)

    return mock.patch.object(mx, "gather_mm", by_float32)
