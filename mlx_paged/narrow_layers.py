"""Linear layers of a model that multiply few rows in one kernel launch, for as long as a step is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import narrow_matmul


class NarrowLinear(nn.Linear):
    """A linear layer; see :func:`narrow_matmul.narrow_matmul`."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if not narrow_matmul.covers(x, weight):
            return super().__call__(x)
        bias = self.get("bias")
        return narrow_matmul.narrow_matmul(x, weight, bias)


class NarrowEmbedding(nn.Embedding):
    """An embedding whose weight is the output layer's as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if not narrow_matmul.covers(x, weight):
            return super().as_linear(x)
        return narrow_matmul.narrow_matmul(x, weight)


_NARROW: dict[type, type] = {nn.Linear: NarrowLinear, nn.Embedding: NarrowEmbedding}


@contextmanager
def narrow_layers(model: Any, num_rows: int) -> Iterator[None]:
    """Within, the model's own linear layers and embeddings (not classes derived from them) are narrow ones."""
    changed: list[tuple[nn.Module, type]] = []
    try:
        if isinstance(model, nn.Module) and narrow_matmul.MIN_ROWS <= num_rows <= narrow_matmul.MAX_ROWS:
            for module in model.modules():
                original = type(module)
                if original in _NARROW:
                    changed.append((module, original))
                    object.__setattr__(module, "__class__", _NARROW[original])
        yield
    finally:
        for module, original in changed:
            object.__setattr__(module, "__class__", original)
