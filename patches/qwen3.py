"""Qwen3's attention: queries and keys are normalised per head before rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .attention import heads_first, paged_call


def project(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values before rotation, heads first."""
    queries = heads_first(self.q_proj(x), self.n_heads, self.q_norm)
    keys = heads_first(self.k_proj(x), self.n_kv_heads, self.k_norm)
    values = heads_first(self.v_proj(x), self.n_kv_heads)
    return queries, keys, values


adapt = paged_call(project)
