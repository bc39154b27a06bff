"""What MLX's GPU backend and default device support."""

from __future__ import annotations

import mlx.core as mx

from .build import backend


def device_unsupported_reason() -> str | None:
    """Return why no kernel can run on MLX's default device, or None. Builds nothing."""
    if backend() is None:
        return "MLX has no GPU here"
    if mx.default_device() != mx.Device(mx.gpu):
        return f"MLX's default device is {mx.default_device()}"
    return None


def packs_prompts() -> bool:
    """Return whether packs of prompts pay off: on a GPU, where a call of few tokens costs as much as one of many."""
    return backend() is not None


def on_metal() -> bool:
    """Return whether MLX's GPU backend is Metal."""
    return backend() == "metal"


def prepares_plans() -> bool:
    """Return whether MLX's attention prepares a plan for each new shape of its arguments, as it does on CUDA."""
    return backend() == "cuda"
