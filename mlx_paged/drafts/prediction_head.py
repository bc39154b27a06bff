"""PredictionHead: drafts from the model's own head for later tokens (multi-token prediction). HiddenStates: the
model's hidden states that it needs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.batch_cache import PagedBatchKVCache, first_paged
from ..cache.sequence import SequenceTables
from ..engine.proposer import NextTokens, Proposal, num_known
from ..engine.request import Request
from ..prefix.prefix_cache import SharedPrefixes
from .depth import TRIAL_CONTEXT, Depth
from .draft_model import MOST_BEHIND, DraftModel, Span

MOST_POSITIONS = 1024  # most positions kept of a sequence, and of a call; older calls are dropped


class HiddenSpan(NamedTuple):
    """Hidden states of consecutive positions.

    Attributes:
        begin: the first position.
        end: the position after the last one.
        array: ``[T, hidden]``, whose rows they are among.
        row: row of the first one in ``array``.
    """

    begin: int
    end: int
    array: mx.array
    row: int

    def part(self, begin: int, end: int) -> mx.array:
        """Return the hidden states of positions ``begin`` to ``end``."""
        return self.array[self.row + begin - self.begin : self.row + end - self.begin]


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
            span = HiddenSpan(begin, begin + count, hidden, row)
            if count > MOST_POSITIONS:
                span = HiddenSpan(span.end - MOST_POSITIONS, span.end, hidden, row + count - MOST_POSITIONS)
                spans.clear()
            spans.append(span)
            self.drop(sequence, span.end - self.kept)
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
                found.append(span.part(max(begin, span.begin), min(end, span.end)))
        unknown = end - begin - sum(map(len, found))
        if unknown:
            found.append(mx.zeros((unknown, found[0].shape[1]), found[0].dtype))
        return found[::-1]


class PredictionHead(DraftModel):
    """Proposes tokens of a prediction head: a layer that takes a token and the model's last hidden state of the token
    before it. A :class:`mlx_paged.engine.proposer.Proposer`.

    The head's keys and values are paged like those of a draft model. For the row's tokens they come from the model's
    hidden states; for drafts from the head's own output, and are dropped when the draft is verified. In a prefix that
    was not computed for the row the head sees what it computed for others. It does not see tokens more than
    :data:`MOST_POSITIONS` positions before the row's first draft (:data:`.TRIAL_CONTEXT` if drafts did not pay then).

    Args:
        head: called with tokens, ``hidden`` of the tokens before them and ``cache``, a list. Returns a hidden state of
            each token, which ``head.logits`` turns into the logits of the next.
        factory: makes its prompt caches, all of them paged.
        num_draft_tokens: most drafts of a row in a step, unless its request says otherwise.
        depth: decides how many drafts rows get.
        prefixes: a prefix cache over the head's pool.
        hidden: the model's hidden states.
    """

    keeps_accepted = False
    first_position = 1  # a row's first token has no hidden state before it

    def __init__(
        self,
        head: Any,
        factory: Callable[[], list[Any]],
        num_draft_tokens: int,
        depth: Depth,
        prefixes: SharedPrefixes,
        hidden: HiddenStates,
    ) -> None:
        super().__init__(head, factory, num_draft_tokens, depth, prefixes)
        self.hidden = hidden

    def _shared(self, row: Request) -> tuple[list[int], Hashable]:
        """Return the row's tokens but the first, and a salt with that one, because hidden states depend on it."""
        tokens, salt = super()._shared(row)
        return tokens[1:], (salt, *tokens[:1])

    def propose(
        self, rows: Sequence[Request], inputs: NextTokens, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """See :meth:`.proposal.Proposer.propose`."""
        self.hidden.kept = MOST_POSITIONS if self.depth.pays else TRIAL_CONTEXT  # unread ones take memory
        return super().propose(rows, inputs, vocab_size, is_alone=is_alone)

    def knows(self, row: Request) -> bool:
        """Return whether the hidden state before the row's next token is kept. Tokens whose hidden states are not kept
        are skipped; but up to :data:`MOST_BEHIND` after a prefix get zeros, so that positions stay right."""
        own, end = self.rows[row], num_known(row)
        if row.sequence is None:
            return False
        first = self.hidden.known(row.sequence, end)
        if first is None:
            return False
        if not own.end or first + 1 - own.end > MOST_BEHIND:
            own.end = max(own.end, first + 1)
        return True

    def forward(
        self, tokens: mx.array, layers: list[Any], spans: Sequence[Span] = (), before: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Return logits of the next tokens, and the head's hidden states; see :meth:`DraftModel.forward`."""
        if spans:
            parts: list[mx.array] = []
            for row, begin, end in spans:
                assert row.sequence is not None
                parts += self.hidden.of(row.sequence, begin - 1, end - 1)
            before = mx.concatenate(parts).reshape(*tokens.shape, -1)
        hidden = self.model(tokens, cache=layers, hidden=before)
        for row, _, end in spans:
            assert row.sequence is not None
            self.hidden.drop(row.sequence, end - 1)
        return self.model.logits(hidden), hidden
