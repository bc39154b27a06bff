"""Linear layers of a model that multiply few rows in one kernel launch, for as long as a step is traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import narrow_matmul

# Layers of one module that models give the same input, by the names mlx-lm has for them.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Siblings:
    """Linear layers with the same input: whichever is called first multiplies for all.

    Args:
        layers: without biases.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._input: mx.array | None = None
        self._ready: dict[int, mx.array] = {}  # by layer; not asked for yet
        self._wasted = False  # some product was not asked for

    def product(self, layer: nn.Module, x: mx.array) -> mx.array | None:
        """The layer's; None if it has to multiply for itself."""
        if self._wasted:
            return None
        if self._input is not x:
            weights = [sibling["weight"] for sibling in self._layers]
            if not narrow_matmul.covers(x, weights):
                return None
            self._wasted = bool(self._ready)
            outputs = narrow_matmul.products(x, weights)
            self._input = x
            self._ready = {id(sibling): out for sibling, out in zip(self._layers, outputs, strict=True)}
        return self._ready.pop(id(layer), None)

    def settle(self) -> bool:
        """After a step was traced: whether all products were asked for. If not, each layer multiplies for itself from
        now on, and the step has to be traced again."""
        settled = self._input is None or not (self._ready or self._wasted)
        self._wasted |= not settled
        self._input, self._ready = None, {}
        return settled


class NarrowLinear(nn.Linear):
    """A linear layer; see :func:`narrow_matmul.products`."""

    _siblings: Siblings | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if self._siblings is not None:
            product = self._siblings.product(self, x)
            if product is not None:
                return product
        weight, bias = self["weight"], self.get("bias")
        if not narrow_matmul.covers(x, [weight], bias):
            return super().__call__(x)
        return narrow_matmul.products(x, [weight], bias)[0]


class NarrowEmbedding(nn.Embedding):
    """An embedding whose weight is the output layer's as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if not narrow_matmul.covers(x, [weight]):
            return super().as_linear(x)
        return narrow_matmul.products(x, [weight])[0]


def added(layer: nn.Module, x: mx.array, residual: mx.array) -> mx.array:
    """``residual + layer(x)``, in one kernel launch if the layer is a narrow one."""
    if type(layer) is NarrowLinear and "bias" not in layer and narrow_matmul.covers_sum(x, layer["weight"], residual):
        return narrow_matmul.product_sum(x, layer["weight"], residual)
    product: mx.array = layer(x)
    return residual + product


def gated(gate: nn.Module, up: nn.Module, x: mx.array) -> mx.array | None:
    """``silu(gate(x)) * up(x)`` in one kernel launch; None if these are not narrow layers."""
    if any(type(layer) is not NarrowLinear or "bias" in layer for layer in (gate, up)):
        return None
    if not narrow_matmul.covers_gated(x, gate["weight"], up["weight"]):
        return None
    return narrow_matmul.gated_product(x, gate["weight"], up["weight"])


_NARROW: dict[type, type] = {nn.Linear: NarrowLinear, nn.Embedding: NarrowEmbedding}


@contextmanager
def narrow_layers(model: Any, num_rows: int) -> Iterator[list[Siblings]]:
    """Within, the model's own linear layers and embeddings (not classes derived from them) are narrow ones.

    Gives those that multiply together.
    """
    siblings: list[Siblings] = []
    changed: list[tuple[nn.Module, type]] = []
    try:
        if isinstance(model, nn.Module) and narrow_matmul.MIN_ROWS <= num_rows <= narrow_matmul.MAX_ROWS:
            modules = model.modules()
            for module in modules:
                original = type(module)
                if original in _NARROW:
                    changed.append((module, original))
                    object.__setattr__(module, "__class__", _NARROW[original])
            for module in modules:
                siblings += _siblings_in(module)
        yield siblings
    finally:
        for module, original in changed:
            module.__dict__.pop("_siblings", None)
            object.__setattr__(module, "__class__", original)


def _siblings_in(module: nn.Module) -> Iterator[Siblings]:
    for names in SIBLINGS:
        layers = [module.get(name) for name in names]
        if all(type(layer) is NarrowLinear and "bias" not in layer for layer in layers):
            siblings = Siblings(layers)
            for layer in layers:
                object.__setattr__(layer, "_siblings", siblings)
            yield siblings
