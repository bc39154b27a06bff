"""AttentionParams: scale, mask, window, soft cap and sinks of attention."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Window(NamedTuple):
    """The tokens that a token sees: at most ``size``, itself included, starting at a multiple of ``stride``. With a
    stride of 1 the window slides; with a stride of ``size`` it is the chunk that contains the token.

    Positions may be counted from any multiple of the stride.
    """

    size: int
    stride: int = 1

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at ``position`` sees."""
        return max(0, -((self.size - 1 - position) // self.stride) * self.stride)

    def first_seen_by(self, positions: np.ndarray) -> np.ndarray:
        """Return :meth:`first_seen` of each position."""
        return np.maximum(-((self.size - 1 - positions) // self.stride) * self.stride, 0)


class QueryHeads(NamedTuple):
    """The properties of queries that the choice of a kernel depends on."""

    num_q_heads: int
    softcap: bool = False
    sinks: bool = False
    latent: bool = False


class AttentionParams(NamedTuple):
    """The arguments of attention besides queries, keys and values.

    Attributes:
        scale: factor on the scores.
        mask: over the visible keys, as for ``mx.fast.scaled_dot_product_attention``. For several new tokens, None and
            "causal" are causal where kernels read the blocks; over arrays, None masks nothing.
        window: if given, the mask is no more than causality and this window; kernels cannot use an array without it.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: one more logit per query head in the softmax, ``[n_q_heads]``.
        latent: keys are latents and values their rotated parts (absorbed MLA). Queries are as long as both together:
            scores are over both, concatenated, and the output is a weighted sum of the latents.
    """

    scale: float
    mask: mx.array | str | None = None
    window: Window | None = None
    softcap: float | None = None
    sinks: mx.array | None = None
    latent: bool = False

    def heads(self, num_q_heads: int) -> QueryHeads:
        """Return the query heads, for the choice of a kernel."""
        return QueryHeads(num_q_heads, self.softcap is not None, self.sinks is not None, self.latent)
