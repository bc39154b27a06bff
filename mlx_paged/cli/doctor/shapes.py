"""Shapes of attention that the doctor checks kernels with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx

from ...kernels.launch_shape import DTYPES


class Shape(NamedTuple):
    """A shape of attention that kernel variants are made for."""

    dtype: mx.Dtype
    head_dim: int
    gqa: int
    block_size: int
    softcap: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        extras = " softcap" * self.softcap + " sinks" * self.sinks
        name = str(self.dtype).removeprefix("mlx.core.")
        return f"{name:>8} D{self.head_dim:<3} gqa {self.gqa:<2} block {self.block_size:<3}{extras}"


class Attention(NamedTuple):
    """Attention of a model: ``head_dim``, query heads per KV head (``gqa``), and whether it has a softcap or sinks."""

    head_dim: int
    gqa: int
    softcap: bool = False
    sinks: bool = False


POPULAR = {
    Attention(64, 4): "Llama 3.2 1B",
    Attention(64, 7): "Qwen2.5 0.5B",
    Attention(64, 8, sinks=True): "gpt-oss",
    Attention(80, 1): "Phi-2",
    Attention(96, 1): "Phi-3 mini",
    Attention(128, 2): "Qwen3 0.6B, 1.7B; Gemma 3 27B",
    Attention(128, 2, softcap=True): "Gemma 2 27B",
    Attention(128, 3): "Llama 3.2 3B; Phi-4 mini",
    Attention(128, 4): "Llama 3.1 8B; Mistral 7B; Qwen3 4B, 8B; Phi-4",
    Attention(128, 5): "Qwen3 14B; Qwen2.5 14B, 32B",
    Attention(128, 6): "Qwen2.5 1.5B",
    Attention(128, 7): "Qwen2.5 7B",
    Attention(128, 8): "Llama 3.1 70B; Qwen3 32B; Qwen2.5 3B",
    Attention(256, 2): "Gemma 3 4B, 12B",
    Attention(256, 2, softcap=True): "Gemma 2 2B, 9B",
    Attention(256, 4): "Gemma 3 1B",
}
# Models come in bfloat16; other dtypes are checked with the most common shape only.
POPULAR_DTYPE = mx.bfloat16
COMMON = Attention(128, 4)


def popular_shapes(block_size: int) -> Iterator[Shape]:
    """Yield the shapes of popular models."""
    for attention in POPULAR:
        yield Shape(POPULAR_DTYPE, attention.head_dim, attention.gqa, block_size, attention.softcap, attention.sinks)
    for dtype in DTYPES:
        if dtype != POPULAR_DTYPE:
            yield Shape(dtype, COMMON.head_dim, COMMON.gqa, block_size)


def models_of(shape: Shape) -> str:
    """Return the popular models with this shape, or an empty string."""
    return POPULAR.get(Attention(shape.head_dim, shape.gqa, shape.softcap, shape.sinks), "")
