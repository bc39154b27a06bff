"""HiddenStates: the model's last hidden states of sequences, for proposers that need them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.batch_cache import PagedBatchKVCache, first_paged
from ..cache.sequence import SequenceTables

MOST_POSITIONS = 1024  # most positions kept of a sequence, and of a call; older calls are dropped


class HiddenSpan(NamedTuple):
    """Hidden states of consecutive positions.

    Attributes:
        begin: the first position.
        end: the position after the last one.
        array: ``[T, hidden]`` of a call.
        row: index in ``array`` of position 0, as if the call had computed all before.
    """

    begin: int
    end: int
    array: mx.array
    row: int


class HiddenStates:
    """The model's last hidden states of sequences, kept as long as a sequence exists: those of the calls with its last
    :attr:`kept` positions. Positions that are computed again after refused drafts replace the earlier ones.

    Attributes:
        kept: number of positions to keep, at most :data:`MOST_POSITIONS`.
    """

    def __init__(self) -> None:
        self.kept = MOST_POSITIONS
        # Consecutive spans of each sequence: each begins where the one before it ends.
        self._spans: weakref.WeakKeyDictionary[SequenceTables, deque[HiddenSpan]] = weakref.WeakKeyDictionary()

    @staticmethod
    def places(caches: Sequence[Any], num_tokens: int) -> list[tuple[SequenceTables, int, int]]:
        """Return the sequences of a call, the first new position of each, and the number of its new tokens.

        Args:
            caches: caches of the call, which is about to be made.
            num_tokens: new tokens, if the call is of a single sequence.
        """
        first = first_paged(caches)
        if isinstance(first, PagedBatchKVCache):
            batch = first.batch  # the new tokens are reserved already
            return [(each, each.length - n, n) for each, n in zip(batch.sequences, batch.counts, strict=True)]
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
            end = begin + count
            spans.append(HiddenSpan(max(begin, end - MOST_POSITIONS), end, hidden, row - begin))
            self.drop(sequence, end - self.kept)
            row += count

    def drop(self, sequence: SequenceTables, begin: int) -> None:
        """Drop the hidden states of calls that end before position ``begin``."""
        spans = self._spans.get(sequence)
        while spans and spans[0].end <= begin:
            spans.popleft()

    def known(self, sequence: SequenceTables, end: int) -> int | None:
        """Return the first position from which all up to ``end`` are kept; None if the one before ``end`` is not."""
        spans = self._spans.get(sequence)
        return spans[0].begin if spans and spans[0].begin < end <= spans[-1].end else None

    def of(self, sequence: SequenceTables, begin: int, end: int) -> list[mx.array]:
        """Return the hidden states of positions ``begin`` to ``end``, in parts; zeros for leading ones not kept."""
        found: list[mx.array] = []
        for span in reversed(self._spans[sequence]):
            if span.end <= begin:
                break
            if span.begin < end:
                found.append(span.array[span.row + max(begin, span.begin) : span.row + min(end, span.end)])
        unknown = end - begin - sum(map(len, found))
        if unknown:
            found.append(mx.zeros((unknown, found[0].shape[1]), found[0].dtype))
        return found[::-1]
