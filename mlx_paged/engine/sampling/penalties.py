"""Penalties: the words that rows have seen, how often each, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .params import ALL, SamplingParams

ROOM = 256  # entries more than needed, so that arrays get another shape as seldom


class Seen(NamedTuple):
    """A row that has penalties.

    Attributes:
        params: of the row.
        length: entries of its history at present.
    """

    params: SamplingParams
    length: int

    @property
    def num_needed(self) -> int:
        """Entries, the last ones, that still count."""
        return min(self.length, max(self.params.contexts))


class Penalties:
    """Histories of some rows, on the device. They are lists of words rather than counts of all there are: a step reads
    and writes as many logits as a row has seen tokens, in the whole history or in the longest of its windows.

    Every entry knows how often its word stands in each of the row's three windows, so it does not matter how often a
    word has an entry; free entries repeat another one.
    """

    def __init__(self) -> None:
        self.rows: list[Seen] = []
        self._words = mx.zeros((0, 0), mx.int32)  # [R, L]
        self._counts = mx.zeros((3, 0, 0), mx.int32)  # [3, R, L]
        self._lengths = self._contexts = self._values = mx.zeros((0,))

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Sequence[tuple[SamplingParams, Sequence[int]]]) -> None:
        """Rows and the tokens that they have seen."""
        if rows:
            self._arrange(list(range(len(self.rows))), rows)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(indices) < len(self.rows):
            self._arrange(indices, ())

    def _arrange(self, indices: Sequence[int], joining: Sequence[tuple[SamplingParams, Sequence[int]]]) -> None:
        """Arrays of the rows that stay and of those that join, with what counts, and room."""
        stay = [self.rows[index] for index in indices]
        rows = [row._replace(length=row.num_needed) for row in stay]
        rows += [Seen(params, min(len(tokens), max(params.contexts))) for params, tokens in joining]
        capacity = -(-(max((row.length for row in rows), default=0) + 1) // ROOM) * ROOM
        words, counts = [], []
        if stay:
            columns = np.zeros((len(stay), capacity), np.int32)
            for place, row in enumerate(stay):
                start, last = row.length - row.num_needed, max(row.length - 1, 0)
                columns[place] = np.minimum(np.arange(capacity) + start, last)
            at, which = mx.array(columns), mx.array(list(indices))
            words.append(mx.take_along_axis(self._words[which], at, axis=1))
            counts.append(mx.take_along_axis(self._counts[:, which], mx.broadcast_to(at, (3, *at.shape)), axis=2))
        if joining:
            own_words, own_counts = (
                np.zeros((len(joining), capacity), np.int32),
                np.zeros((3, len(joining), capacity), np.int32),
            )
            for place, (params, tokens) in enumerate(joining):
                _enter(own_words[place], own_counts[:, place], params, tokens)
            words.append(mx.array(own_words))
            counts.append(mx.array(own_counts))
        self.rows = rows
        if not rows:
            return
        self._words, self._counts = mx.concatenate(words), mx.concatenate(counts, axis=1)
        self._lengths = mx.array([row.length for row in rows], mx.int32)[:, None]
        self._contexts = mx.array([row.params.contexts for row in rows], mx.int32).T[:, :, None]
        self._values = mx.array([row.params.penalties for row in rows], mx.float32).T[:, :, None]

    def see(self, tokens: mx.array) -> None:
        """One more token of each row, ``[R]``."""
        if max(row.length for row in self.rows) >= self._words.shape[1]:
            self._arrange(list(range(len(self.rows))), ())
        token, slot = tokens.astype(mx.int32)[:, None], self._lengths
        is_same = self._words == token
        count = mx.where(is_same, self._counts, 0).max(axis=-1, keepdims=True) + 1
        counts = mx.where(is_same, count, self._counts)
        words = mx.put_along_axis(self._words, slot, token, axis=1)
        counts = mx.put_along_axis(counts, mx.broadcast_to(slot, count.shape), count, axis=2)
        if any(min(row.params.contexts) < ALL for row in self.rows):
            first = slot - self._contexts  # the entry that the windows leave behind
            gone = mx.take_along_axis(mx.broadcast_to(words, counts.shape), mx.maximum(first, 0), axis=2)
            counts = counts - ((words == gone) & (first >= 0))
        self._words, self._counts = words, counts
        self._lengths = slot + 1
        self.rows = [row._replace(length=row.length + 1) for row in self.rows]

    def apply(self, logits: mx.array, indices: mx.array | None) -> mx.array:
        """Logits ``[B, vocab]`` in float32, with the penalties of these rows ``[R]`` (all if None); a new array."""
        words = self._words
        if indices is None:
            return mx.put_along_axis(logits, words, self._penalised(mx.take_along_axis(logits, words, axis=1)), axis=1)
        rows = indices[:, None]
        picked = self._penalised(logits[rows, words])
        changed = logits + 0.0  # assignment would change what was given
        changed[rows, words] = picked
        return changed

    def _penalised(self, x: mx.array) -> mx.array:
        """Logits of the entries' words ``[R, L]``, as the penalties make them."""
        repetition, presence, frequency = self._values
        repeated, present, count = self._counts  # by one number each, MLX would gather them
        x = mx.where(repeated > 0, mx.where(x > 0, x / repetition, x * repetition), x)
        x = mx.where(present > 0, x - presence, x)
        return x - frequency * count


def _enter(words: np.ndarray, counts: np.ndarray, params: SamplingParams, tokens: Sequence[int]) -> None:
    """A row's entries, from the tokens it has seen."""
    contexts = params.contexts
    last = list(tokens[-max(contexts) :])
    if not last:
        return  # word 0, which it has seen 0 times
    words[:] = last[-1]
    words[: len(last)] = last
    for kind, context in enumerate(contexts):
        counted = Counter(last[-context:])
        of_entry = [counted[token] for token in last]
        counts[kind] = of_entry[-1]
        counts[kind, : len(last)] = of_entry
