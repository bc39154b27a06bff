"""A NumPy model of the kernel that draws tokens (kernels/text/draw_rows.metal)."""

import math

import numpy as np

from mlx_paged.kernels.draw_rows import DrawnRow

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
