"""LookUp: drafts of what rows had before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence

from ...kv.pool import BlockPool
from ..ranks.ranks import Ranks
from ..request import Request
from ..sampling.token_choice import TokenChoice
from . import ngrams
from .depth import CPU_LOOKED_UP, LOOKED_UP, Candidate, Depth, new_depth
from .ngrams import Drafts, Predictor
from .proposal import MOST_TOKENS, NextTokens, Proposal, most_drafts, num_known

# Tokens of context that a step reads again for drafts: the kernel reads the row's for each.
MOST_READS = 1 << 18
WATCH_EVERY = 4  # in large batches: tokens of a row that repeats nothing between looks at whether it does

_depths: weakref.WeakKeyDictionary[BlockPool, Depth] = weakref.WeakKeyDictionary()


def depth_of(pool: BlockPool, ranks: Ranks | None) -> Depth:
    """Return what decides how many drafts rows get; one for all batches over the pool, as what they cost is the same.
    Ranks go by the clock of rank 0, as all of them have to decide alike."""
    depth = _depths.get(pool)
    if depth is None:
        depth = _depths[pool] = new_depth(LOOKED_UP, CPU_LOOKED_UP)
        if ranks is not None:
            own: Callable[[], float] = depth.clock
            depth.clock = lambda: ranks.broadcast(own())
    return depth


class LookUp:
    """Proposes what rows are going to repeat. A :class:`.proposal.Proposer`.

    Rows are not even looked at while drafts could not pay, or be tried, if all of them were right.

    Args:
        depth: decides how many drafts rows get.

    Attributes:
        rows: those that look tokens up.
    """

    def __init__(self, depth: Depth) -> None:
        self.rows: dict[Request, Predictor] = {}
        self.depth = depth
        self._last: list[int] = []  # uids of the batch's rows in the last step, if its time says something of others

    @property
    def seconds_saved(self) -> float:
        """See :attr:`.proposal.Proposer.seconds_saved`."""
        return self.depth.seconds_saved

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
        """Return drafts of the rows that have some, as many as are worth a step."""
        uids = [row.uid for row in rows]
        self.depth.begin(len(rows), is_like_last=uids == self._last and self.depth.caller == id(self))
        self._last, self.depth.caller = uids if is_alone else [], id(self)
        if not self.depth.may_choose(len(rows)):
            return None
        share = (MOST_TOKENS - len(rows)) // len(self.rows)
        share = min(share, MOST_READS // max(1, sum(each.length for each in self.rows)))
        share = min(share, max(predictor.most for predictor in self.rows.values()))
        every = min(WATCH_EVERY, len(rows) // 4)
        drafts: dict[Request, Drafts] = {}
        for row, predictor in self.rows.items():
            if not predictor.expects and num_known(row) + 1 - predictor.num_tokens <= every:
                continue
            predictor.follow(row)
            found = predictor.drafts(num_known(row) + 1 - predictor.num_tokens, min(share, most_drafts(row)))
            if found is not None:
                drafts[row] = found
        candidates = [Candidate(found.chances, most_drafts(row)) for row, found in drafts.items()]
        counts = dict(zip(drafts, self.depth.choose(candidates, len(rows)), strict=True))
        if not any(counts.values()):
            return None
        self.depth.note_proposed(sum(counts.values()))
        tokens = [drafts[row].tokens[: counts[row]] if row in drafts else [] for row in rows]
        return Proposal([len(each) for each in tokens], [token for each in tokens for token in each])

    def note(
        self,
        rows: Sequence[Request],
        drafted: Sequence[int],
        accepted: Sequence[int],
        following: list[int],
        *,
        is_new: bool,
    ) -> None:
        """Follow the rows up to their next tokens, which the next drafts come behind."""
        self.depth.note(len(rows), drafted, accepted, is_new=is_new)
        for row, count, token in zip(rows, drafted, following, strict=True):
            predictor = self.rows.get(row)
            if predictor is not None and count:
                predictor.follow(row)
                predictor.add(token)
