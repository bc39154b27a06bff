"""AttentionParams: how attention turns scores into weights."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Window(NamedTuple):
    """Which of the tokens before it a token sees: at most ``size``, itself included, and from a multiple of ``stride``
    on. With a stride of 1 the window slides; with one of ``size`` it is the chunk that the token lies in.

    Positions may be counted from any multiple of the stride.
    """

    size: int
    stride: int = 1

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at this one sees."""
        return max(0, -((self.size - 1 - position) // self.stride) * self.stride)

    def first_seen_by(self, positions: np.ndarray) -> np.ndarray:
        """Like :meth:`first_seen`, for each of several tokens."""
        return np.maximum(-((self.size - 1 - positions) // self.stride) * self.stride, 0)


class QueryHeads(NamedTuple):
    """What attends over a layer, as far as it matters for the choice of a kernel."""

    num_q_heads: int
    softcap: bool = False
    sinks: bool = False
    latent: bool = False


class LatentHeads(NamedTuple):
    """What attends over the keys and values that a layer's latents stand for.

    Attributes:
        num_heads: of queries; keys and values have as many.
        head_dim: of queries and keys, what is rotated included.
        value_dim: of values.
    """

    num_heads: int
    head_dim: int
    value_dim: int


class AttentionParams(NamedTuple):
    """What attention is given besides queries, keys and values.

    Attributes:
        scale: factor on the scores.
        mask: over the visible keys, as for ``mx.fast.scaled_dot_product_attention``. Of several new tokens, None and
            "causal" are causal where blocks are read; over arrays, None masks nothing.
        window: the mask says no more than causality and this window. An array without it cannot be told to a kernel.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: one more logit per query head in the softmax, ``[n_q_heads]``.
        latent: keys are latents and values what is rotated of them (MLA, absorbed): scores are of both, one after the
            other, so queries are as long as both, and what is summed up are the latents.
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
