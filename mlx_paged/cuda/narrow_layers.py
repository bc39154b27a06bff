"""Linear layers that multiply few rows in one kernel launch, in use while a decode step is built or traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)

from . import narrow_matmul
from .narrow_matmul import PackedWeight


def _weight_of(layer: nn.Module) -> narrow_matmul.Matrix | None:
    """Return a layer's weight; None if it is quantised in a form that no kernel supports."""
    return PackedWeight.of(layer) if "scales" in layer else layer["weight"]


class _OwnRows:
    """A linear layer whose results are complete: it has all rows of the weight, or this rank's."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        weight, bias = _weight_of(self), self.get("bias")
        if weight is None or not narrow_matmul.covers(x, [weight], bias):
            return super().__call__(x)  # type: ignore[misc, no-any-return]
        return narrow_matmul.products(x, [weight], bias)[0]


class _OwnColumns:
    """A linear layer with this rank's columns of the weight; the products of all ranks are added."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        weight = _weight_of(self)
        if weight is None or not narrow_matmul.covers(x, [weight]):
            return super().__call__(x)  # type: ignore[misc, no-any-return]
        return _summed(self, narrow_matmul.products(x, [weight])[0])


class _Output:
    """An embedding whose weight is also that of the output layer."""

    def as_linear(self: Any, x: mx.array) -> mx.array:
        weight = _weight_of(self)
        if weight is None or not narrow_matmul.covers(x, [weight]):
            return super().as_linear(x)  # type: ignore[misc, no-any-return]
        return narrow_matmul.products(x, [weight])[0]


def _summed(layer: nn.Module, product: mx.array) -> mx.array:
    total = mx.distributed.all_sum(product, group=layer.group)
    return total + layer["bias"] if "bias" in layer else total


def fused_projections(
    layers: Sequence[nn.Module], x: mx.array, heads: Sequence[int] | None = None
) -> list[mx.array] | None:
    """Return what :func:`..kernels.nvidia.projected` does, in one kernel launch; None if no launch can do it."""
    weights = _weights_of(layers)
    if weights is None or not narrow_matmul.covers(x, weights):
        return None
    # The launch gives results their final shapes: in a decode step even an operation that only reshapes costs time.
    shapes = None
    if heads is not None:
        shapes = [(x.shape[0], n, 1, w.shape[0] // n) for w, n in zip(weights, heads, strict=True)]
    return narrow_matmul.products(x, weights, shapes=shapes)


def gated(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array | None:
    """Return ``silu(gate(x)) * up(x)`` from one kernel launch; None if no launch can do it."""
    weights = _weights_of([gate, up])
    if weights is None or not narrow_matmul.covers(x, weights, gated=True):
        return None
    return narrow_matmul.products(x, weights, gated=True)[0]


def _weights_of(layers: Sequence[nn.Module]) -> list[narrow_matmul.Matrix] | None:
    """Return the layers' weights; None unless all are narrow layers without bias that have complete results."""
    weights: list[narrow_matmul.Matrix] = []
    for layer in layers:
        weight = _weight_of(layer) if "bias" not in layer and isinstance(layer, _OwnRows) else None
        if weight is None:
            return None
        weights.append(weight)
    return weights


_NARROW: dict[type, type] = {
    plain: type(f"Narrow{plain.__name__}", (form, plain), {})
    for plain, form in {
        nn.Linear: _OwnRows,
        nn.QuantizedLinear: _OwnRows,
        AllToShardedLinear: _OwnRows,
        QuantizedAllToShardedLinear: _OwnRows,
        ShardedToAllLinear: _OwnColumns,
        QuantizedShardedToAllLinear: _OwnColumns,
        nn.Embedding: _Output,
        nn.QuantizedEmbedding: _Output,
    }.items()
}


@contextmanager
def narrow_layers(model: Any, num_rows: int) -> Iterator[None]:
    """Make the model's linear layers and embeddings narrow within a ``with`` block, if a kernel multiplies so few rows.
    Layers of derived classes stay as they are."""
    changed: list[tuple[nn.Module, type]] = []
    is_served = isinstance(model, nn.Module) and num_rows <= narrow_matmul.MAX_PACKED_ROWS
    try:
        if is_served and narrow_matmul.is_available():
            for module in model.modules():
                original = type(module)
                if original in _NARROW:
                    changed.append((module, original))
                    object.__setattr__(module, "__class__", _NARROW[original])
        yield
    finally:
        for module, original in changed:
            object.__setattr__(module, "__class__", original)
