"""Llama's attention (also Mistral and others that mlx-lm builds with this module)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .attention import paged_call, project_heads


def project(self: Any, x: mx.array) -> list[mx.array]:
    """Queries, keys and values before rotation, heads first."""
    heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
    return project_heads(x, (self.q_proj, self.k_proj, self.v_proj), heads)


adapt = paged_call(project)
