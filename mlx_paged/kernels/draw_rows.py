"""Sampling: one launch draws a token for each row of a batch, with a temperature, top-p, min-p and top-k per row.

The kernel uses rejection sampling (docs/adr/0029). Its random numbers depend only on the row's key and the token's
position, so a row's token does not depend on the other rows.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .availability import backend, device_unsupported_reason
from .build import KernelText, prepare
from .check import check_and_warn, outcome_of

WIDTH = 8  # numbers per row in each array: on Metal, an array of fewer elements makes another text


class DrawnRow(NamedTuple):
    """Sampling parameters of a row.

    Attributes:
        temperature: 0 takes the first of the largest logits.
        top_p: 1 or more is off.
        min_p: 0 is off.
        top_k: None is off.
        min_kept: number of most likely tokens that min-p keeps in any case.
        key: seed of 64 bits.
    """

    temperature: float
    top_p: float = math.inf
    min_p: float = 0.0
    top_k: int | None = None
    min_kept: int = 1
    key: int = 0

    def params(self) -> list[float]:
        """Return the kernel's parameters of the row, 8 numbers."""
        scale = min(math.log2(math.e) / self.temperature, 1e30) if self.temperature else 0.0
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        is_limited = self.top_p < 1 or self.min_p > 0 or self.top_k is not None
        top_k = math.inf if self.top_k is None else self.top_k
        return [scale, self.top_p, log_min_p, top_k, self.min_kept, float(is_limited), 0.0, 0.0]

    def key_words(self) -> list[int]:
        """Return the key's high and low 32 bits, padded to 8 numbers."""
        return [self.key >> 32 & 0xFFFFFFFF, self.key & 0xFFFFFFFF, *[0] * (WIDTH - 2)]


BODY = "draw_rows"
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# Simdgroups per row. The drawn tokens depend on it.
_GROUPS = {"cuda": 32, "metal": 16}
# Logits that a lane loads at a time: as many as its registers hold, since a pass waits for its loads.
_AHEAD = {"cuda": 16, "metal": 8}
_TOKENS_OF_GROUP = 32**3


def draw_rows(x: mx.array, params: mx.array, keys: mx.array, positions: mx.array) -> mx.array:
    """Draw a token for each row.

    Args:
        x: logits ``[R, vocab]`` for which :func:`is_supported` is true. A token with -inf is not drawn unless all have
            it.
        params: ``[R, 8]`` float32, from :meth:`DrawnRow.params`.
        keys: ``[R, 8]`` uint32, from :meth:`DrawnRow.key_words`.
        positions: ``[R]`` uint32.

    Returns:
        ``[R]``, uint32.
    """
    rows, dialect = x.shape[0], backend() or ""
    threads = 32 * _GROUPS[dialect]
    launch = prepare(kernel_key(x.dtype, dialect), (rows * threads, 1, 1), threads, [((rows,), mx.uint32)])
    return launch([x, params, keys, positions])[0]


def kernel_key(dtype: mx.Dtype, dialect: str) -> KernelText:
    """Return the key of the kernel for logits of a dtype."""
    bounds = (("GROUPS", 1),) if dialect == "cuda" else ()
    return BODY, (("T", dtype), ("O", mx.uint32), ("SG", _GROUPS[dialect]), ("AHEAD", _AHEAD[dialect]), *bounds)


def is_supported(x: mx.array) -> bool:
    """Return whether the kernel can draw from such logits ``[R, vocab]``. A dtype's first call runs the self-check."""
    most = _TOKENS_OF_GROUP * min(_GROUPS.values())
    return (
        x.dtype in DTYPES and 0 < x.shape[-1] <= most and device_unsupported_reason() is None and passes_check(x.dtype)
    )


@lru_cache(maxsize=8)
def passes_check(dtype: mx.Dtype) -> bool:
    """Return whether the kernel passes its self-check; warns once if it fails or does not compile."""
    return check_and_warn(f"{BODY} ({dtype})", lambda: outcome_of(lambda: _difference(dtype)))


# Rows of the self-check, and the tokens that each number of simdgroups draws for them: those of the NumPy model of the
# kernel in tests/support/kernels/drawn.py.
_ROWS = (
    DrawnRow(0.0),
    DrawnRow(1.0),
    DrawnRow(0.7, top_p=0.8),
    DrawnRow(3.0, top_k=1),
    DrawnRow(1.5, min_p=0.2),
    DrawnRow(2.0, min_p=1.0, min_kept=3),
    DrawnRow(5.0, top_p=0.3, top_k=40),
    DrawnRow(1.3, top_p=0.95, min_p=0.01, top_k=2),
    DrawnRow(30.0, top_k=5),
)
_EXPECTED = {
    32: (5, 375, 2203, 5, 1313, 8, 771, 6, 6),
    16: (5, 375, 2203, 5, 1313, 7, 51, 6, 31),
}
_VOCAB = 3001  # tokens; several per lane of a CUDA group


def checked_rows() -> tuple[list[DrawnRow], np.ndarray, np.ndarray]:
    """Return the rows of the self-check with their keys, their logits ``[R, vocab]`` float32, and their positions."""
    rows = [row._replace(key=0x9E3779B97F4A7C15 * (i + 1) % (1 << 64)) for i, row in enumerate(_ROWS)]
    mixed = np.arange(len(rows) * _VOCAB, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)
    # Multiples of 1/8 are exact in every dtype, and many logits are equal.
    x = ((mixed >> np.uint64(16)) % np.uint64(113)).astype(np.float32).reshape(len(rows), _VOCAB) / 8 - 7
    x[:, 5:9], x[:, 1500:1700] = 7.25, -np.inf
    return rows, x, (mixed[: len(rows)] + np.uint64(7)).astype(np.uint32)


def _difference(dtype: mx.Dtype) -> float:
    """Return the fraction of rows whose token is wrong. Launches few rows, then more: on Metal these are two texts."""
    rows, x, positions = checked_rows()
    expected, wrong, num_rows = _EXPECTED[_GROUPS[backend() or ""]], 0, 0
    for count in (2, len(rows)):
        got = draw_rows(
            mx.array(x[:count]).astype(dtype),
            mx.array([row.params() for row in rows[:count]]),
            mx.array(np.array([row.key_words() for row in rows[:count]], np.uint32)),
            mx.array(positions[:count]),
        )
        wrong += int((np.array(got) != np.array(expected[:count])).sum())
        num_rows += count
    return wrong / num_rows
