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

from .availability import device_unsupported_reason
from .build import KernelText, backend, build_kernel
from .check import check_and_warn

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


_TURNS = (13, 15, 26, 6, 17, 29, 16, 24)
_ALL = 0xFFFFFFFF


def threefry(key: int, position: int, count: int) -> tuple[int, int]:
    """Return two 32-bit random numbers: Threefry-2x32 with 20 rounds, a 64-bit key and a counter of two words."""
    high, low = key >> 32 & _ALL, key & _ALL
    schedule = (high, low, 0x1BD11BDA ^ high ^ low)
    left, right = (position + high) & _ALL, (count + low) & _ALL
    for i in range(20):
        left = (left + right) & _ALL
        turn = _TURNS[i % 8]
        right = ((right << turn | right >> (32 - turn)) & _ALL) ^ left
        if i % 4 == 3:
            left = (left + schedule[(i // 4 + 1) % 3]) & _ALL
            right = (right + schedule[(i // 4 + 2) % 3] + i // 4 + 1) & _ALL
    return left, right


def reference_draw(x: np.ndarray, row: DrawnRow, position: int, num_groups: int) -> int:
    """Return the token that a kernel with ``num_groups`` simdgroups draws from logits ``[vocab]``."""
    if row.temperature == 0:
        return int(np.argmax(x))
    order = np.argsort(-x, kind="stable")
    rank = np.empty(len(x), np.int64)
    rank[order] = np.arange(len(x))
    masses = np.exp(x - x.max())
    weights = np.exp((x - x.max()) / row.temperature)
    part = -(-len(x) // (num_groups * 32)) * 32
    before = np.ones(len(x), bool)
    for attempt in range(1024):
        numbers = [n for half in range(2) for n in threefry(row.key, position, 2 * attempt + half)]
        padded = np.zeros(num_groups * -(-part // 1024) * 1024)
        blocks = padded.reshape(num_groups, -1)
        for group in range(num_groups):
            own = (weights * before)[group * part : (group + 1) * part]
            blocks[group, : len(own)] = own
        cells = blocks.reshape(num_groups, -1, 32, 32)  # group, number, line, column
        group = _place(cells.sum((1, 2, 3)), numbers[0])
        column = _place(cells[group].sum((0, 1)), numbers[1])
        line = _place(cells[group, :, :, column].sum(0), numbers[2])
        number = _place(cells[group, :, line, column], numbers[3])
        token = group * part + column + 32 * (line + 32 * number)
        in_top_p = row.top_p >= 1 or masses[x > x[token]].sum() < row.top_p * masses.sum()
        log_min_p = math.log(row.min_p) if row.min_p else -math.inf
        in_min_p = x[token] >= x.max() + log_min_p or rank[token] < row.min_kept
        if in_top_p and in_min_p and (row.top_k is None or rank[token] < row.top_k):
            return token
        before = rank < rank[token]
    raise RuntimeError("1024 draws gave no token that the filters keep")


def _place(weights: np.ndarray, number: int) -> int:
    """Return the index of the weight that a 32-bit random number selects, by its upper 24 bits."""
    ends = np.cumsum(weights)
    hits = np.flatnonzero((weights > 0) & (ends > (number >> 8) / (1 << 24) * ends[-1]))
    return int(hits[0]) if len(hits) else int(np.flatnonzero(weights)[-1])


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
    constants = kernel_key(x.dtype, backend() or "").constants
    threads = 32 * dict(constants)["SG"]
    (out,) = build_kernel(BODY, constants)(
        inputs=[x, params, keys, positions],
        grid=(x.shape[0] * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(x.shape[0],)],
        output_dtypes=[mx.uint32],
    )
    return out


def kernel_key(dtype: mx.Dtype, dialect: str) -> KernelText:
    """Return the key of the kernel for logits of a dtype."""
    bounds = (("GROUPS", 1),) if dialect == "cuda" else ()
    return KernelText(
        BODY, (("T", dtype), ("O", mx.uint32), ("SG", _GROUPS[dialect]), ("AHEAD", _AHEAD[dialect]), *bounds)
    )


def is_supported(x: mx.array) -> bool:
    """Return whether the kernel can draw from such logits ``[R, vocab]``. A dtype's first call runs the self-check."""
    most = _TOKENS_OF_GROUP * min(_GROUPS.values())
    return (
        x.dtype in DTYPES and 0 < x.shape[-1] <= most and device_unsupported_reason() is None and passes_check(x.dtype)
    )


@lru_cache(maxsize=8)
def passes_check(dtype: mx.Dtype) -> bool:
    """Return whether the kernel passes its self-check; warns once if it fails or does not compile."""
    return check_and_warn(BODY, dtype, lambda: _difference(dtype))


# Rows of the self-check.
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
_VOCAB = 3001  # tokens; several per lane of a CUDA group


def _difference(dtype: mx.Dtype) -> float:
    """Return the fraction of rows whose token differs from the reference's. Launches few rows, then more: on Metal
    these are two texts."""
    groups, wrong, num_rows = _GROUPS[backend() or ""], 0, 0
    rng = np.random.default_rng(29)
    for count in (2, 45):
        rows = [_ROWS[i % len(_ROWS)]._replace(key=int(rng.integers(1 << 63))) for i in range(count)]
        # Multiples of 1/8 are exact in every dtype, and many logits are equal.
        x = np.round(rng.normal(size=(count, _VOCAB)) * 16).clip(-56, 56) / 8
        x[:, 5:9], x[:, 1500:1700] = 7.25, -np.inf
        positions = rng.integers(1 << 32, size=count, dtype=np.uint32)
        got = draw_rows(
            mx.array(x.astype(np.float32)).astype(dtype),
            mx.array([row.params() for row in rows]),
            mx.array(np.array([row.key_words() for row in rows], np.uint32)),
            mx.array(positions),
        )
        tokens = np.array(got).tolist()
        for row, logits, position, token in zip(rows, x, positions.tolist(), tokens, strict=True):
            wrong += token != reference_draw(logits, row, position, groups)
        num_rows += count
    return wrong / num_rows
