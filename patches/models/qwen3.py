"""Qwen3's attention: queries and keys are normalised per head before rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .attention import paged_call, project_heads


def project(self: Any, x: mx.array) -> list[mx.array]:
    """Queries, keys and values before rotation, heads first."""
    heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
    return project_heads(x, (self.q_proj, self.k_proj, self.v_proj), heads, (self.q_norm, self.k_norm, None))


adapt = paged_call(project)
