"""Gemma 3's attention: as Llama's, with queries and keys normalised after the heads are moved first."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from . import llama
from .attention import paged_call


def project(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values before rotation, heads first."""
    queries, keys, values = llama.project(self, x)
    return self.q_norm(queries), self.k_norm(keys), values


adapt = paged_call(project)
