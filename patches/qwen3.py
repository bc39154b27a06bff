"""Qwen3's attention: queries and keys are normalised per head before rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .attention import paged_call, split_heads


def project(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values before rotation, heads first."""
    queries = self.q_norm(split_heads(self.q_proj(x), self.n_heads)).transpose(0, 2, 1, 3)
    keys = self.k_norm(split_heads(self.k_proj(x), self.n_kv_heads)).transpose(0, 2, 1, 3)
    values = split_heads(self.v_proj(x), self.n_kv_heads).transpose(0, 2, 1, 3)
    return queries, keys, values


adapt = paged_call(project)
