"""KernelRows: the parameters of some rows, side by side as arrays, for the kernel that draws their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ...kernels.sampling.draw_rows import draw_rows
from ...kernels.sampling.drawn_row import WIDTH, DrawnRow
from .draw import uniforms
from .filters import kept_words
from .params import SamplingParams
from .row_parameters import RowParameters

_SEEDS = 1 << 64


class KernelRows:
    """How one launch chooses the tokens of some rows. A row's token is a function of its logits, its key and the
    position, so it is the same whatever rows are beside it. XTC's words are not a beginning of the words by
    likelihood: MLX's operations find them, for the rows that need it.

    Args:
        rows: in the order of the logits.
        vocab_size: words.

    Attributes:
        draws: some row's tokens are drawn.
        greedy: which rows' are not, ``[R, 1]``; None: no row's are not.
    """

    def __init__(self, rows: Sequence[SamplingParams], vocab_size: int) -> None:
        drawn = [_drawn_row(row) for row in rows]
        self.draws = any(row.draws for row in rows)
        self.greedy = None if all(row.draws for row in rows) else mx.array([not row.draws for row in rows])[:, None]
        self._params = mx.array([row.params() for row in drawn], mx.float32)
        # Rows without a seed have a key from mx.random's state: positions count on from there.
        words = np.array([row.key_words() for row in drawn], np.uint32)
        self._keys = mx.array(words)
        has_none = [row.seed is None for row in rows]
        if any(has_none):
            own = mx.random.uniform(shape=(len(rows), WIDTH)).view(mx.uint32)
            self._keys = mx.where(mx.array(has_none)[:, None], own, self._keys)
        self._xtc: RowParameters | None = None
        if any(_uses_xtc(row) for row in rows):
            self._xtc = RowParameters([row if _uses_xtc(row) else SamplingParams() for row in rows], vocab_size)

    def draw(self, logits: mx.array, positions: mx.array) -> mx.array:
        """A token of each row, ``[R]`` uint32.

        Args:
            logits: ``[R, vocab]``.
            positions: of the tokens in their answers, ``[R]`` uint32.
        """
        if self._xtc is not None:
            kept = kept_words(logits, self._xtc, uniforms(self._xtc, positions)[:, 2:])
            assert kept is not None
            logits = mx.where(kept, logits, mx.array(-mx.inf, logits.dtype))
        return draw_rows(logits, self._params, self._keys, positions)


def _uses_xtc(row: SamplingParams) -> bool:
    return row.draws and row.uses_xtc


def _drawn_row(row: SamplingParams) -> DrawnRow:
    key = (row.seed or 0) % _SEEDS
    if not row.draws:
        return DrawnRow(0.0)
    if row.uses_xtc:  # its other parameters are in XTC's
        return DrawnRow(row.temperature, key=key)
    return DrawnRow(
        row.temperature,
        top_p=row.top_p if row.uses_top_p else DrawnRow(0.0).top_p,
        min_p=row.min_p,
        top_k=row.top_k if row.top_k > 0 else None,
        min_kept=row.min_tokens_to_keep,
        key=key,
    )
