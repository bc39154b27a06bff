"""The only place outside mlx_paged/cuda/ that names its modules, which are imported only where MLX has CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .availability import backend


@lru_cache(maxsize=16)
def part(name: str) -> Any:
    """Return a module of mlx_paged/cuda/. Call it only where MLX has CUDA: this imports the module."""
    return importlib.import_module(f"mlx_paged.cuda.{name}")


def narrow_layers(model: Any, num_rows: int) -> AbstractContextManager[None]:
    """Return a context in which the model's linear layers multiply ``num_rows`` rows by kernels, where these are
    faster."""
    context: AbstractContextManager[None] = (
        part("narrow_layers").narrow_layers(model, num_rows) if backend() == "cuda" else nullcontext()
    )
    return context


def projected(layers: Sequence[nn.Module], x: mx.array, heads: Sequence[int] | None = None) -> list[mx.array]:
    """Return ``layer(x)`` of each layer, in one kernel launch if the layers are narrow.

    Args:
        layers: up to three layers.
        x: ``[B, L, hidden]``; L is 1 with ``heads``.
        heads: heads of each layer's result, which then has the shape ``[B, n_heads, 1, head_dim]``.
    """
    found: list[mx.array] | None = (
        part("narrow_layers").fused_projections(layers, x, heads) if backend() == "cuda" else None
    )
    if found is not None:
        return found
    results = []
    for index, layer in enumerate(layers):  # no comprehension, which is a call: the host's time limits decode steps
        y = layer(x)
        results.append(y if heads is None else y.reshape(x.shape[0], heads[index], 1, -1))
    return results
