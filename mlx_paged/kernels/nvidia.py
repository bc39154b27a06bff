"""The only place outside mlx_paged/cuda/ that names its modules, which are imported only where MLX has CUDA.

Layers of models ask here for kernels that compute several of their operations in one launch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn


class Rotation(NamedTuple):
    """A rotation of queries and keys by their positions, as ``mx.fast.rope`` rotates the halves of whole heads.

    Attributes:
        half: half of a head's dimensions.
        offsets: position of each row, int32 ``[rows]``.
        scale: factor of the positions.
        base: base of the frequencies; None if ``frequencies`` are given.
        frequencies: ``freqs`` of ``mx.fast.rope``, float32 ``[half]``, or None.
    """

    half: int
    offsets: mx.array
    scale: float
    base: float | None
    frequencies: mx.array | None


@lru_cache(maxsize=1)
def has_cuda() -> bool:
    """Return whether MLX has CUDA."""
    return bool(mx.cuda.is_available())


@lru_cache(maxsize=16)
def part(name: str) -> Any:
    """Return a module of mlx_paged/cuda/. Call it only where MLX has CUDA: this imports the module."""
    return importlib.import_module(f"mlx_paged.cuda.{name}")


def narrow_layers(model: Any, num_rows: int) -> AbstractContextManager[None]:
    """Return a context in which the model's linear layers multiply ``num_rows`` rows by kernels, where these are
    faster."""
    context: AbstractContextManager[None] = (
        part("narrow_layers").narrow_layers(model, num_rows) if has_cuda() else nullcontext()
    )
    return context


def is_narrow(layer: nn.Module) -> bool:
    """Return whether the layer is at present one that a kernel may multiply few rows with."""
    return has_cuda() and bool(part("narrow_layers").is_narrow(layer))


def projected(layers: Sequence[nn.Module], x: mx.array, heads: Sequence[int] | None = None) -> list[mx.array]:
    """Return ``layer(x)`` of each layer, in one kernel launch if the layers are narrow.

    Args:
        layers: up to three layers.
        x: ``[B, L, hidden]``; L is 1 with ``heads``.
        heads: heads of each layer's result, which then has the shape ``[B, n_heads, 1, head_dim]``.
    """
    found = fused_projections(layers, x, heads) if has_cuda() else None
    if found is not None:
        return found
    results = []
    for index, layer in enumerate(layers):  # no comprehension, which is a call: the host's time limits decode steps
        y = layer(x)
        results.append(y if heads is None else y.reshape(x.shape[0], heads[index], 1, -1))
    return results


def fused_projections(
    layers: Sequence[nn.Module],
    x: mx.array,
    heads: Sequence[int] | None = None,
    rotation: Rotation | None = None,
) -> list[mx.array] | None:
    """Return what :func:`projected` does, in one kernel launch, the first two results (queries and keys) rotated by
    ``rotation``; None if no launch can do all of it."""
    if not has_cuda():
        return None
    found: list[mx.array] | None = part("narrow_layers").fused_projections(layers, x, heads, rotation)
    return found


def added(layer: nn.Module, x: mx.array, residual: mx.array) -> mx.array:
    """Return ``residual + layer(x)``, in one kernel launch if the layer is narrow.

    Args:
        layer: maps a row of x to a row of the residual.
        x: rows one after the other, in any shape, such as ``[B, n_heads, 1, head_dim]``.
        residual: ``[B, L, width]``.
    """
    total: mx.array | None = part("narrow_layers").added(layer, x, residual) if has_cuda() else None
    return residual + layer(x.reshape(*residual.shape[:-1], -1)) if total is None else total


def gated(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array | None:
    """Return ``silu(gate(x)) * up(x)`` from one kernel launch; None if no launch can do it."""
    found: mx.array | None = part("narrow_layers").gated(gate, up, x) if has_cuda() else None
    return found
