"""DrawnRow: how a row's word is chosen, as the kernel takes it."""

from __future__ import annotations

import math
from typing import NamedTuple

WIDTH = 8  # numbers of a row in each array, so that no array is of less than 8, which is another text on Metal


class DrawnRow(NamedTuple):
    """How a row's word is chosen.

    Attributes:
        temperature: 0 takes the first of the largest logits.
        top_p: 1 or more is off.
        min_p: 0 is off.
        top_k: None is off.
        min_kept: words that min-p does not drop.
        key: 64 bits.
    """

    temperature: float
    top_p: float = math.inf
    min_p: float = 0.0
    top_k: int | None = None
    min_kept: int = 1
    key: int = 0

    def params(self) -> list[float]:
        """As the kernel takes them, 8 numbers."""
        scale = min(math.log2(math.e) / self.temperature, 1e30) if self.temperature else 0.0
        log_min_p = math.log(self.min_p) if self.min_p else -math.inf
        is_limited = self.top_p < 1 or self.min_p > 0 or self.top_k is not None
        top_k = math.inf if self.top_k is None else self.top_k
        return [scale, self.top_p, log_min_p, top_k, self.min_kept, float(is_limited), 0.0, 0.0]

    def key_words(self) -> list[int]:
        """The high and the low half, in 8 numbers."""
        return [self.key >> 32 & 0xFFFFFFFF, self.key & 0xFFFFFFFF, *[0] * (WIDTH - 2)]
