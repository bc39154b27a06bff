"""RowParameters: the parameters of some rows, side by side as arrays, and which of them any row needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .params import SamplingParams


class RowParameters:
    """What draws the tokens of some rows. A parameter that no row uses is None; in rows that do not use one it is a
    value that changes nothing.

    Args:
        rows: in the order of the logits.
        vocab_size: words.

    Attributes:
        draws: some row's tokens are drawn.
        greedy: which rows' are not, ``[R, 1]``; None: no row's are not.
        temperature, top_p, log_min_p, xtc_probability, xtc_threshold: ``[R, 1]``, float32.
        top_k, min_kept: ``[R, 1]``, int32; ``top_k`` is the number of words in rows without.
        xtc_special: ``[R, vocab]``, words that XTC leaves alone.
        drops_words: any of these is not None.
        keys: of the rows with a seed, ``[R, 2]``; None: no row has one.
        seeded: which rows have one, ``[R, 1]``; None: all.
    """

    def __init__(self, rows: Sequence[SamplingParams], vocab_size: int) -> None:
        drawn = [row for row in rows if row.draws]
        self.draws = bool(drawn)
        self.greedy = _column([not row.draws for row in rows], mx.bool_) if len(drawn) < len(rows) else None
        self.temperature = _column([row.temperature if row.draws else 1.0 for row in rows])
        self.top_p = self.log_min_p = self.min_kept = self.top_k = None
        self.xtc_probability = self.xtc_threshold = self.xtc_special = None
        self.keys = self.seeded = None
        if any(row.uses_top_p for row in drawn):
            self.top_p = _column([row.top_p if row.draws and row.uses_top_p else math.inf for row in rows])
        if any(row.min_p for row in drawn):
            self.log_min_p = _column([math.log(row.min_p) if row.draws and row.min_p else -math.inf for row in rows])
            if any(row.min_p and row.min_tokens_to_keep > 1 for row in drawn):
                self.min_kept = _column([min(row.min_tokens_to_keep, vocab_size) for row in rows], mx.int32)
        if any(row.uses_xtc for row in drawn):
            self.xtc_probability = _column(
                [row.xtc_probability if row.draws and row.uses_xtc else -1.0 for row in rows]
            )
            self.xtc_threshold = _column([row.xtc_threshold for row in rows])
            special = np.zeros((len(rows), vocab_size), np.bool_)
            for index, row in enumerate(rows):
                if row.draws and row.uses_xtc:
                    special[index, list(row.xtc_special_tokens)] = True
            self.xtc_special = mx.array(special) if special.any() else None
        if any(row.top_k > 0 for row in drawn):
            self.top_k = _column([row.top_k if row.draws and row.top_k > 0 else vocab_size for row in rows], mx.int32)
        filters = (self.top_p, self.log_min_p, self.xtc_probability, self.top_k)
        self.drops_words = any(parameter is not None for parameter in filters)
        seeds = [row.seed if row.draws else None for row in rows]
        if any(seed is not None for seed in seeds):
            self.keys = mx.stack([mx.random.key((seed or 0) % (1 << 64)) for seed in seeds])
            if any(seed is None for seed in seeds):
                self.seeded = _column([seed is not None for seed in seeds], mx.bool_)


def _column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(list(values), dtype)[:, None]
