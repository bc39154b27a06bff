"""HiddenStates: the model's last hidden states of the tokens of sequences, as its calls compute them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ...cache.batch_cache import PagedBatchKVCache, first_paged
from ...cache.rows import SequenceTables

MOST_KEPT = 1024  # positions of a sequence, and of a call; older calls are dropped


class Span(NamedTuple):
    """Hidden states of consecutive positions.

    Attributes:
        begin: the first position.
        end: behind the last one.
        array: ``[T, hidden]``, in which they are rows.
        row: of the first one.
    """

    begin: int
    end: int
    array: mx.array
    row: int

    def part(self, begin: int, end: int) -> mx.array:
        """Return those of some of the positions."""
        return self.array[self.row + begin - self.begin : self.row + end - self.begin]


class HiddenStates:
    """Keeps the last hidden states of sequences as long as these are there: of each, those of the calls with its last
    :attr:`kept` positions. Positions that are computed again, because drafts there were refused, replace what was kept
    of them.

    Attributes:
        kept: positions, :data:`MOST_KEPT` at most.
    """

    def __init__(self) -> None:
        self.kept = MOST_KEPT
        # Of each sequence, consecutive ones: each begins where the one before it ends.
        self._spans: weakref.WeakKeyDictionary[SequenceTables, deque[Span]] = weakref.WeakKeyDictionary()

    @staticmethod
    def places(caches: Sequence[Any], num_tokens: int) -> list[tuple[SequenceTables, int, int]]:
        """Return the sequences of a call, the first new position of each, and the number of its new tokens.

        Args:
            caches: of the call, which is about to be made.
            num_tokens: new ones of a sequence alone.
        """
        first = first_paged(caches)
        if isinstance(first, PagedBatchKVCache):
            rows = first.rows  # whose tokens are reserved
            return [(own, own.length - n, n) for own, n in zip(rows.sequences, rows.counts, strict=True)]
        return [] if first is None else [(first.sequence, first.sequence.length, num_tokens)]

    def note(self, places: Sequence[tuple[SequenceTables, int, int]], hidden: mx.array) -> None:
        """Note a call's hidden states ``[T, hidden]``, sequence by sequence."""
        row = 0
        for sequence, begin, count in places:
            spans = self._spans.setdefault(sequence, deque())
            while spans and spans[-1].begin >= begin:
                spans.pop()
            if spans and spans[-1].end < begin:
                spans.clear()
            elif spans and spans[-1].end > begin:
                spans[-1] = spans[-1]._replace(end=begin)
            span = Span(begin, begin + count, hidden, row)
            if count > MOST_KEPT:
                span = Span(span.end - MOST_KEPT, span.end, hidden, row + count - MOST_KEPT)
                spans.clear()
            spans.append(span)
            self.drop(sequence, span.end - self.kept)
            row += count

    def drop(self, sequence: SequenceTables, begin: int) -> None:
        """Drop what is kept of calls before position ``begin``."""
        spans = self._spans.get(sequence)
        while spans and spans[0].end <= begin:
            spans.popleft()

    def known(self, sequence: SequenceTables, end: int) -> int | None:
        """Return the first position from which on, up to ``end``, all are kept; None: that before ``end`` is not."""
        spans = self._spans.get(sequence)
        return spans[0].begin if spans and spans[0].begin < end <= spans[-1].end else None

    def of(self, sequence: SequenceTables, begin: int, end: int) -> list[mx.array]:
        """Return those of some positions, the last of which are kept, in parts: zeros before them."""
        found: list[mx.array] = []
        for span in reversed(self._spans[sequence]):
            if span.end <= begin:
                break
            if span.begin < end:
                found.append(span.part(max(begin, span.begin), min(end, span.end)))
        unknown = end - begin - sum(map(len, found))
        if unknown:
            found.append(mx.zeros((unknown, found[0].shape[1]), found[0].dtype))
        return found[::-1]
