"""Proposer: the interface of a source of drafts; Proposal: the drafts of one step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from .request import Request

MOST_TOKENS = 256  # most tokens of a step with drafts: with more, matrix products take longer


class Proposal(NamedTuple):
    """Tokens proposed to follow the next token of rows.

    Attributes:
        counts: drafts of each row of the batch, in order; 0 where there are none.
        tokens: the drafts, row by row; an array may not be computed yet.
    """

    counts: list[int]
    tokens: list[int] | mx.array


class NextTokens(NamedTuple):
    """The next token of each row, not in its cache yet.

    Attributes:
        array: ``[B]``.
        known: the same on the host; None if they have not been read.
    """

    array: mx.array
    known: list[int] | None


class Proposer(Protocol):
    """Proposes drafts for the rows of a decode batch. It only chooses which tokens the model verifies: what a row gets
    is sampled from the model's own logits.
    """

    @property
    def rows(self) -> Collection[Request]:
        """Return the rows that may get drafts."""

    @property
    def seconds_saved(self) -> float:
        """Seconds that drafts have saved, as far as measured; negative: lost."""

    def add(self, rows: Sequence[Request]) -> None:
        """Note that rows have joined the batch; those that want no drafts are ignored."""

    def remove(self, rows: Collection[Request]) -> None:
        """Note that rows have left, or get no more drafts; those that had none are ignored."""

    def propose(
        self, rows: Sequence[Request], inputs: NextTokens, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """Return drafts for a step of the batch; None: the step goes without.

        Args:
            rows: rows of the batch.
            inputs: their next tokens, which the drafts follow.
            vocab_size: size of the model's vocabulary; None: not known yet.
            is_alone: no prompt is computed in the step.
        """

    def note(
        self,
        rows: Sequence[Request],
        drafted: Sequence[int],
        accepted: Sequence[int],
        following: list[int],
        *,
        is_new: bool,
    ) -> None:
        """Note how many of each row's drafts a verification accepted; they are in ``row.source`` now.

        Args:
            rows: rows of the batch.
            drafted: number of drafts of each.
            accepted: how many of them were right, from the first on.
            following: the next token of each.
            is_new: a step of this shape was compiled in it, so its time is no measure of others.
        """


def most_drafts(row: Request) -> int:
    """Return how many drafts the row could use: the tokens that it may get after its next one."""
    is_delivered = row.logits is not None  # its next token, in this step
    return row.max_tokens - row.num_generated - is_delivered


def num_known(row: Request) -> int:
    """Return how many tokens of the row the host knows that come before its next one."""
    return len(row.history) + len(row.source) - (row.logits is None)
