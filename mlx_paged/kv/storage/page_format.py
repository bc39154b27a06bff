"""PageFormat: of how many bits the keys and values in a pool's pages are."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ...errors import ConfigError
from ...kernels.quantized.rows import BITS, GROUP_SIZES

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
PAIRS = ((8, 8), (4, 4), (8, 4))
DEFAULT_GROUP_SIZE = 64


class PageFormat(NamedTuple):
    """How keys and values are quantised when they are written to pages (see :class:`QuantizedRows`).

    Attributes:
        k_bits: of a key's codes.
        v_bits: of a value's codes.
        group_size: values of a head's vector that share a scale and a bias.
        rotate: keys (after RoPE) and values are rotated before they are quantised, and back when they are read.
    """

    k_bits: int
    v_bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    rotate: bool = False

    @classmethod
    def of(cls, bits: int | tuple[int, int], group_size: int = DEFAULT_GROUP_SIZE, rotate: bool = False) -> PageFormat:
        """The format of 8 or 4 bits, or of (8, 4) for keys and values. Raises ConfigError for any other."""
        pair = bits if isinstance(bits, tuple) else (bits, bits)
        if pair not in PAIRS:
            raise ConfigError(f"pages are of {BITS[0]} or {BITS[1]} bits, or of (8, 4) for keys and values, not {bits}")
        if group_size not in GROUP_SIZES:
            raise ConfigError(f"keys and values are quantised in groups of {GROUP_SIZES}, not of {group_size}")
        return cls(*pair, group_size, rotate)

    def why_not(self, k_head_dim: int, v_head_dim: int, dtype: mx.Dtype) -> str | None:
        """Why keys and values of these sizes and this dtype are kept as they are, or None."""
        if dtype not in DTYPES:
            return f"keys are {dtype}"
        for dim in (k_head_dim, v_head_dim):
            if dim % self.group_size:
                return f"a head of {dim} is not made of groups of {self.group_size} (kv_group_size)"
        return None

    def __str__(self) -> str:
        bits = f"{self.k_bits}" if self.k_bits == self.v_bits else f"{self.k_bits}/{self.v_bits}"
        return f"{bits} bits in groups of {self.group_size}{', rotated' if self.rotate else ''}"
