"""Geometry and PageFormat: the shape of a layer's keys and values, and how its pages hold them. AttentionParams: scale,
mask, window, soft cap and sinks of attention over them."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import ConfigError
from ..kernels.quantized import BITS, GROUP_SIZES, QuantizedRows

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
PAIRS = ((8, 8), (4, 4), (8, 4))
DEFAULT_GROUP_SIZE = 64


class PageFormat(NamedTuple):
    """How keys and values are quantised when they are written to pages (see :class:`QuantizedRows`).

    Attributes:
        k_bits: bits of a key's codes.
        v_bits: bits of a value's codes.
        group_size: number of values of a head's vector that share a scale and a bias.
        rotate: keys (after RoPE) and values are rotated before they are quantised, and back when they are read.
    """

    k_bits: int
    v_bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    rotate: bool = False

    @classmethod
    def of(cls, bits: int | tuple[int, int], group_size: int = DEFAULT_GROUP_SIZE, rotate: bool = False) -> PageFormat:
        """Return the format of 8 or 4 bits, or of (8, 4) for keys and values. Raises ConfigError for any other."""
        pair = bits if isinstance(bits, tuple) else (bits, bits)
        if pair not in PAIRS:
            raise ConfigError(f"kv_bits must be {BITS[0]}, {BITS[1]} or (8, 4), got {bits!r}")
        if group_size not in GROUP_SIZES:
            raise ConfigError(f"kv_group_size must be one of {GROUP_SIZES}, got {group_size}")
        return cls(*pair, group_size, rotate)

    def unsupported_reason(self, k_head_dim: int, v_head_dim: int, dtype: mx.Dtype) -> str | None:
        """Return why keys and values of these sizes and this dtype cannot be quantised, or None."""
        if dtype not in DTYPES:
            return f"keys of {dtype} cannot be quantised"
        for dim in (k_head_dim, v_head_dim):
            if dim % self.group_size:
                return f"head size {dim} is not a multiple of kv_group_size {self.group_size}"
        return None

    @property
    def nameable(self) -> PageFormat:
        """The part of the format that mlx-lm's options can express: bits and group size."""
        return PageFormat(self.k_bits, self.v_bits, self.group_size)

    @property
    def stock_bits(self) -> int | None:
        """Bits of mlx-lm's quantised cache that holds the same bytes, or None if it has no such form."""
        return self.k_bits if self.k_bits == self.v_bits and self == self.nameable else None

    def __str__(self) -> str:
        bits = f"{self.k_bits}" if self.k_bits == self.v_bits else f"{self.k_bits}/{self.v_bits}"
        return f"{bits} bits in groups of {self.group_size}{', rotated' if self.rotate else ''}"


class Geometry(NamedTuple):
    """Shape of one layer's keys and values in a group, and the format of its pages; all layers of a group share it.

    Attributes:
        num_kv_heads, k_head_dim, v_head_dim, dtype: of keys and values as the model makes them.
        format: format of the pages; None: keys and values are not quantised.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    format: PageFormat | None = None

    @classmethod
    def of(cls, k: mx.array, v: mx.array) -> Geometry:
        """Return the geometry of k ``[B, n_kv_heads, n, k_head_dim]`` and v ``[B, n_kv_heads, n, v_head_dim]``."""
        return cls(k.shape[1], k.shape[3], v.shape[3], k.dtype)

    def in_format(self, wanted: PageFormat | None, why: str | None) -> tuple[Geometry, str | None]:
        """Return the geometry with the format that its pages get, and the reason if that is not the one wanted.

        Args:
            wanted: the format asked for; None: keys and values are not quantised.
            why: a reason not to quantise them, if one is known already.
        """
        if wanted is None:
            return self._replace(format=None), None
        why = why or wanted.unsupported_reason(self.k_head_dim, self.v_head_dim, self.dtype)
        return self._replace(format=wanted if why is None else None), why

    @property
    def rows(self) -> tuple[QuantizedRows, QuantizedRows] | None:
        """The forms of a key's and a value's row in quantised pages; None if these are not quantised."""
        if self.format is None:
            return None
        group_size = self.format.group_size
        return (
            QuantizedRows(self.k_head_dim, self.format.k_bits, group_size, self.dtype),
            QuantizedRows(self.v_head_dim, self.format.v_bits, group_size, self.dtype),
        )

    @property
    def rotates(self) -> bool:
        """Whether pages hold rotated keys and values; queries and results of attention are rotated to match."""
        return self.format is not None and self.format.rotate

    @property
    def stored(self) -> Geometry:
        """Shape of what the pages hold: quantised rows as vectors of words, else keys and values."""
        if self.rows is None:
            return self
        k, v = self.rows
        return Geometry(self.num_kv_heads, k.num_words, v.num_words, mx.uint32)

    def bytes_per_token(self) -> int:
        """Return the bytes of K and V of one token in one layer."""
        if self.format is not None:
            return self.stored.bytes_per_token()
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype.size


def first_keys(geometry: Geometry) -> tuple[mx.array, mx.array]:
    """Return zeros as one token's keys and values, for :meth:`BlockPool.set_geometry` ahead of the first write."""
    heads, k_dim, v_dim, dtype, _ = geometry
    return mx.zeros((1, heads, 1, k_dim), dtype), mx.zeros((1, heads, 1, v_dim), dtype)


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
