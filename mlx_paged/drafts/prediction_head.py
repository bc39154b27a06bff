"""PredictionHead: drafts from the model's own head for later tokens (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from ..engine.hidden_states import MOST_POSITIONS, HiddenStates
from ..engine.interfaces import Proposal, num_known
from ..engine.request import Request
from ..prefix.prefix_cache import SharedPrefixes
from .depth import TRIAL_CONTEXT, Depth
from .draft_model import MOST_BEHIND, DraftModel, Span


class PredictionHead(DraftModel):
    """Proposes tokens of a prediction head: a layer that takes a token and the model's last hidden state of the token
    before it. A :class:`mlx_paged.engine.interfaces.Proposer`.

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
        self, rows: Sequence[Request], inputs: mx.array, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """See :meth:`..engine.interfaces.Proposer.propose`."""
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
