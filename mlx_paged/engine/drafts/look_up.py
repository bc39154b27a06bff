"""LookUp: drafts of what rows had before."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...kv.pool import BlockPool
from ..request import Request
from ..sampling.token_choice import TokenChoice
from . import ngrams
from .ngrams import CPU_PRICE, PRICE, Predictor
from .proposal import MOST_TOKENS, NextTokens, Proposal, most_drafts, num_known

# What a step with drafts costs beyond one without and beyond the drafts' own price, in tokens of each row: the host
# waits for it (docs/adr/0031).
LEAST_GAIN = 0.75
# Tokens of context that a step reads again for drafts: the kernel reads the row's for each.
MOST_READS = 1 << 18


class LookUp:
    """Proposes what rows are going to repeat. A :class:`.proposal.Proposer`.

    Args:
        pool: of the rows' blocks.

    Attributes:
        rows: those that look tokens up.
        seconds_saved: not measured: 0.
    """

    seconds_saved = 0.0

    def __init__(self, pool: BlockPool) -> None:
        self.rows: dict[Request, Predictor] = {}
        self._pool = pool

    def add(self, rows: Sequence[Request], choice: TokenChoice) -> None:
        """Look up tokens of those rows that ask for it, and whose next token depends on nothing but the tokens before
        it and on chance."""
        for row in rows:
            most = row.options.prompt_lookup or 0
            if most > 0 and choice.takes_drafts(row):
                self.rows[row] = ngrams.Predictor([*row.history, *row.source], most)

    def remove(self, rows: Collection[Request]) -> None:
        """Forget rows."""
        for row in rows:
            self.rows.pop(row, None)

    def propose(
        self, rows: Sequence[Request], inputs: NextTokens, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """Return drafts of the rows that have some, if together they are worth a step."""
        price = PRICE if self._pool.groups[0].in_place else CPU_PRICE
        share = None
        drafts: dict[Request, list[int]] = {}
        gain = 0.0
        for row, predictor in self.rows.items():
            predictor.follow(row)
            if not predictor.expects:
                continue
            if share is None:
                share = (MOST_TOKENS - len(rows)) // len(self.rows)
                share = min(share, MOST_READS // max(1, sum(each.length for each in self.rows)))
            found = predictor.drafts(num_known(row) + 1 - predictor.num_tokens, min(share, most_drafts(row)), price)
            if found is not None:
                drafts[row] = found.tokens
                gain += found.gain
        if not drafts or gain < LEAST_GAIN * len(rows):
            return None
        tokens = [drafts.get(row, []) for row in rows]
        return Proposal([len(each) for each in tokens], [token for each in tokens for token in each])

    def note(
        self, rows: Sequence[Request], drafted: Sequence[int], accepted: Sequence[int], following: list[int]
    ) -> None:
        """Follow the rows up to their next tokens, which the next drafts come behind."""
        for row, token in zip(rows, following, strict=True):
            predictor = self.rows.get(row)
            if predictor is not None:
                predictor.follow(row)
                predictor.add(token)
