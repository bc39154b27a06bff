"""Helpers of the self-checks of attention: blocks in random order, and reference attention in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

_MOST = 1 << 25  # elements of the largest temporary of `attention`


class Blocks(NamedTuple):
    """Blocks of some sequences, in random order.

    Attributes:
        ids: block ids of each sequence.
        slots: the slot of each token, sequence after sequence.
    """

    ids: list[list[int]]
    slots: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], block: int, seed: int, first: int = 1) -> Blocks:
        """Return blocks for sequences of these lengths; their ids begin at ``first``."""
        used = [-(-n // block) for n in lengths]
        # In Python, here and below: on CUDA, MLX would have to compile kernels to index an array.
        order = random.Random(seed).sample(range(first, first + sum(used)), sum(used))
        ids, slots = [], []
        for n, count in zip(lengths, used, strict=True):
            own, order = order[:count], order[count:]
            ids.append(own)
            slots += [own[t // block] * block + t % block for t in range(n)]
        return cls(ids, slots)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all sequences."""
        return sum(map(len, self.ids))

    def tables(self, multiple: int = 1) -> list[list[int]]:
        """Return block tables whose width is a multiple of ``multiple``, with 0 where a sequence has no block."""
        width = -(-max(map(len, self.ids)) // multiple) * multiple
        return [[*own, *[0] * (width - len(own))] for own in self.ids]


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
) -> mx.array:
    """Compute causal attention in float32, without matrix units.

    Args:
        q: queries of the last tokens, ``[n, n_q_heads, D]``.
        k, v: keys and values of all tokens, ``[length, n_kv_heads, D]``.
        scale, softcap, sinks, window: as passed to a kernel.

    Returns:
        ``[n, n_q_heads, Dv]``.
    """
    count, n_q, dim = q.shape
    length, n_kv, _ = k.shape
    group = n_q // n_kv
    positions, own = mx.arange(length), (length - count + mx.arange(count))[:, None]
    seen = positions <= own
    if window is not None:
        seen = mx.logical_and(seen, positions > own - window)
    q = q.astype(mx.float32).reshape(count, n_kv, group, 1, dim)
    keys, values = (x.astype(mx.float32).swapaxes(0, 1)[:, None] for x in (k, v))
    logits = None if sinks is None else mx.broadcast_to(sinks.reshape(n_kv, group, 1), (count, n_kv, group, 1))
    step, heads = max(1, _MOST // (count * n_kv * length * dim)), []
    for first in range(0, group, step):
        scores = (q[:, :, first : first + step] * keys).sum(-1) * scale  # [count, n_kv, step, length]
        if softcap is not None:
            scores = softcap * mx.tanh(scores / softcap)
        scores = mx.where(seen[:, None, None], scores, -float("inf"))
        if logits is not None:
            scores = mx.concatenate([logits[:, :, first : first + step], scores], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)[..., int(sinks is not None) :]
        heads.append((weights[..., None] * values).sum(-2))
    return mx.concatenate(heads, axis=2).reshape(count, n_q, -1)


def worst_rms(errors: list[mx.array]) -> float:
    """Return the largest root of mean squared differences. Raises RuntimeError if one is not finite."""
    rms: Any = mx.sqrt(mx.stack(errors).max()).item()
    if not rms < float("inf"):
        raise RuntimeError("the result is not finite")
    return float(rms)
