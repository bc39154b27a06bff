"""PredictionHead: drafts of the model's own head for tokens further ahead (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from ...prefix.store import SharedPrefixes
from ..request import Request
from .depth import TRIAL_CONTEXT, Depth
from .draft_model import MOST_BEHIND, DraftModel, Span
from .hidden_states import MOST_KEPT, HiddenStates
from .proposal import NextTokens, Proposal, num_known


class PredictionHead(DraftModel):
    """Proposes what a prediction head says: a layer that is given a token and the model's last hidden state of the
    token before it. A :class:`.proposal.Proposer`.

    The head's keys and values are paged as those of a draft model are. Those of the row's tokens come from the model's
    hidden states; those of a draft come from the head's own output, and are dropped when the draft is verified. Of a
    prefix that was not computed for the row the head sees what it has computed for others. It does not see what is more
    than :data:`.hidden_states.MOST_KEPT` positions before the row's first draft, or what comes before drafts pay.

    Args:
        head: called with tokens, ``hidden`` of the tokens before them and ``cache``, a list. Returns a hidden state of
            each token, of which ``head.logits`` makes the logits of the next.
        factory: makes its prompt caches, all of them paged.
        num_draft_tokens: most drafts of a row in a step, where its request does not say.
        depth: decides how many drafts rows get.
        prefixes: a prefix cache over the head's pool.
        hidden: of the model.
    """

    keeps_accepted = False
    first = 1  # a row's first token has no hidden state before it

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
        """Return the row's tokens but the first, and a salt that tells that one: hidden states depend on it."""
        tokens, salt = super()._shared(row)
        return tokens[1:], (salt, *tokens[:1])

    def propose(
        self, rows: Sequence[Request], inputs: NextTokens, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """See :meth:`.proposal.Proposer.propose`."""
        self.hidden.kept = MOST_KEPT if self.depth.pays else TRIAL_CONTEXT  # those that nobody reads take memory
        return super().propose(rows, inputs, vocab_size, is_alone=is_alone)

    def knows(self, row: Request) -> bool:
        """Return whether the hidden state before the row's next token is known. What the head lacks without a known one
        is skipped, but for few tokens between its prefix and the model's, so that positions stay right."""
        own, end = self.rows[row], num_known(row)
        if row.sequence is None:
            return False
        first = self.hidden.known(row.sequence, end)
        if first is None:
            return False
        if not own.length or first + 1 - own.length > MOST_BEHIND:
            own.length = max(own.length, first + 1)
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
