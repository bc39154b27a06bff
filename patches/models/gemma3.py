"""Gemma 3: attention as Llama's, with queries and keys normalised after the heads are moved first; and the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...engine.narrow_layers import projected
from . import llama
from .attention import paged_call


def project(self: Any, x: mx.array) -> list[mx.array]:
    """Queries, keys and values before rotation, heads first."""
    queries, keys, values = llama.project(self, x)
    return [self.q_norm(queries), self.k_norm(keys), values]


adapt = paged_call(project)


def adapt_mlp(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Replace upstream's ``MLP.__call__`` by one that multiplies for gate and up together where a kernel does."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        gate, up = projected((self.gate_proj, self.up_proj), x)
        return self.down_proj(nn.gelu_approx(gate) * up)

    return __call__
