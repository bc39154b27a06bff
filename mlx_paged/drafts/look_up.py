"""LookUp: drafts that repeat earlier tokens of a row. Predictor finds where, and follows what stood there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import mlx.core as mx

from ..engine.interfaces import MOST_TOKENS, Peers, Proposal, most_drafts, num_known
from ..engine.request import Request
from ..kv.pool import BlockPool
from .depth import Candidate, Depth, new_depth

# Lengths of the n-grams that are looked up, longest first. A single token predicts next to nothing.
SIZES = (3, 2)
MOST_COMPARED = 8  # longest length of a match that is measured
MOST_INDEXED = 1 << 16  # last tokens of a prompt that are indexed, in some 17 MB
INDEXED_A_STEP = 1024  # tokens of prompts that a step indexes, for all rows: some 0.5 ms


def _common_end(tokens: Sequence[int], a: int, b: int) -> int:
    """Return how many tokens before two positions are equal, up to 5."""
    length = 0
    most = min(a, MOST_COMPARED - SIZES[0])
    while length < most and tokens[a - length - 1] == tokens[b - length - 1]:
        length += 1
    return length


PREDICTIONS_AVERAGED = 8  # predictions that an estimate averages over, roughly
LEAST_CHANCE = 1 / 16  # least chance of acceptance of a draft; less likely ones are not proposed


class Drafts(NamedTuple):
    """Tokens proposed for a row.

    Attributes:
        tokens: in order.
        chances: chance of acceptance of each.
    """

    tokens: list[int]
    chances: list[float]


class Predictor:
    """Predicts what followed an earlier occurrence of a row's latest tokens, as long as the row repeats it.

    It knows where each n-gram of 2 and of 3 tokens ended last, except the one at the end. Added tokens are indexed at
    once, those of a prompt by :meth:`index`, the latest first.

    Each token of the row is compared with the prediction, proposed or not. Hit rates are kept by length of the match,
    so a row that repeats nothing gets no drafts, and gets them again once it does: watching costs no step.

    Args:
        tokens: the row's tokens so far; more are added to this list. Nothing is predicted before :meth:`index`.
        most: most drafts at a time.

    Attributes:
        tokens: all of the row's tokens that were added.
    """

    def __init__(self, tokens: list[int], most: int) -> None:
        self.tokens, self.most = tokens, most
        # By length of n-grams, the position after the last place of each.
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in SIZES]
        # N-grams that end after the first position, up to the second, are not indexed yet.
        self._first, self._last = max(0, len(tokens) - MOST_INDEXED), max(0, len(tokens) - 1)
        # Chance that the predicted token is right, by length of the match; starts as assumed here.
        self._chances = [1 - 0.5 ** (matched / 3) for matched in range(MOST_COMPARED + 1)]
        self._next = 0  # position of the token that is predicted
        self._matched = 0  # length of the match before it; 0: nothing is predicted

    @property
    def expects(self) -> bool:
        """Return whether anything is predicted."""
        return self._matched > 0

    def index(self, most: int) -> int:
        """Index the n-grams that end at up to ``most`` more positions. Returns the number of positions."""
        begin = max(self._first, self._last - most)
        for size, ends in zip(SIZES, self._ends, strict=True):
            tokens, keep_latest = self.tokens[max(0, begin + 1 - size) : self._last], ends.setdefault
            runs = list(zip(*(tokens[place:] for place in range(size)), strict=False))
            for end, run in zip(range(self._last, 0, -1), reversed(runs), strict=False):
                keep_latest(run, end)
        count, self._last = max(0, self._last - begin), min(self._last, begin)
        if count and not self._matched:
            self._next, self._matched = self.find() or (0, 0)
        return count

    def find(self) -> tuple[int, int] | None:
        """Find the latest earlier occurrence of the last tokens. Returns the position after it and the length of the
        match, up to 8; None if there is none."""
        for size, ends in zip(SIZES, self._ends, strict=True):
            if found := ends.get(tuple(self.tokens[-size:])):
                return found, size + _common_end(self.tokens, found - size, len(self.tokens) - size)
        return None

    def follow(self, row: Request) -> None:
        """Add the row's tokens that are missing here."""
        for token in row.source[max(0, len(self.tokens) - len(row.history)) :]:
            self.add(token)

    def add(self, token: int) -> None:
        """Add the row's next token, delivered or about to be."""
        is_hit = self._matched > 0 and self.tokens[self._next] == token
        if self._matched:
            self._chances[self._matched] += (is_hit - self._chances[self._matched]) / PREDICTIONS_AVERAGED
        for size, ends in zip(SIZES, self._ends, strict=True):
            if len(self.tokens) >= size:
                ends[tuple(self.tokens[-size:])] = len(self.tokens)
        self.tokens.append(token)
        if is_hit:
            self._next, self._matched = self._next + 1, min(self._matched + 1, MOST_COMPARED)
        else:
            self._next, self._matched = self.find() or (0, 0)

    def drafts(self, skipped: int, most: int) -> Drafts | None:
        """Return the tokens predicted next, as far as they are likely enough; None: there are none.

        Args:
            skipped: number of predicted tokens to skip, because they are being computed already.
            most: most drafts, if fewer than the Predictor's.
        """
        if not self._matched:
            return None
        tokens, most = self.tokens, min(self.most, most)
        period = len(tokens) - self._next  # at the row's own end the repeated part starts over
        chance, drafts, chances = 1.0, [], []
        for step in range(skipped + most):
            chance *= self._chances[min(self._matched + step, MOST_COMPARED)]
            if chance < LEAST_CHANCE:
                break
            if step >= skipped:
                drafts.append(tokens[self._next + step % period])
                chances.append(chance)
        return Drafts(drafts, chances) if drafts else None


# Most context tokens that a step reads again for drafts: the kernel reads a row's whole context for each draft.
MOST_READS = 1 << 18
WATCH_EVERY = 4  # in large batches, tokens of a row without a match between searches for one

_depths: weakref.WeakKeyDictionary[BlockPool, Depth] = weakref.WeakKeyDictionary()


def depth_of(pool: BlockPool, peers: Peers) -> Depth:
    """Return the :class:`Depth` of all batches over the pool, in which drafts cost the same. Ranks use the clock of
    rank 0, because all have to decide alike."""
    depth = _depths.get(pool)
    if depth is None:
        depth = _depths[pool] = new_depth()
        if not peers.is_alone:
            own: Callable[[], float] = depth.clock
            depth.clock = lambda: peers.broadcast(own())
    return depth


class LookUp:
    """Proposes tokens that rows may repeat. A :class:`mlx_paged.engine.interfaces.Proposer`.

    Rows are not searched while ``depth`` could not pay for drafts (:meth:`Depth.may_choose`).

    Args:
        depth: decides how many drafts rows get.

    Attributes:
        rows: rows that use look-up, and their predictors.
    """

    def __init__(self, depth: Depth) -> None:
        self.rows: dict[Request, Predictor] = {}
        self.depth = depth
        self._last: list[int] = []  # row uids of the last step; empty if a prompt was computed beside it

    @property
    def seconds_saved(self) -> float:
        """See :attr:`..engine.interfaces.Proposer.seconds_saved`."""
        return self.depth.seconds_saved

    def add(self, rows: Sequence[Request]) -> None:
        """Add the rows that ask for look-up and can take drafts."""
        for row in rows:
            most = row.options.prompt_lookup or 0
            if most > 0 and row.takes_drafts:
                self.rows[row] = Predictor([*row.history, *row.source], most)

    def remove(self, rows: Collection[Request]) -> None:
        """Forget rows."""
        for row in rows:
            self.rows.pop(row, None)

    def propose(
        self, rows: Sequence[Request], inputs: mx.array, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """Return as many drafts of the rows as pay; see :meth:`..engine.interfaces.Proposer.propose`."""
        uids = [row.uid for row in rows]
        self.depth.begin(len(rows), is_like_last=uids == self._last and self.depth.caller == id(self))
        self._last, self.depth.caller = uids if is_alone else [], id(self)
        if not self.depth.may_choose(len(rows)):
            return None
        share = (MOST_TOKENS - len(rows)) // len(self.rows)
        share = min(share, MOST_READS // max(1, sum(each.length for each in self.rows)))
        share = min(share, max(predictor.most for predictor in self.rows.values()))
        every, unindexed = min(WATCH_EVERY, len(rows) // 4), INDEXED_A_STEP
        drafts: dict[Request, Drafts] = {}
        for row, predictor in self.rows.items():
            unindexed -= predictor.index(unindexed)
            if not predictor.expects and num_known(row) + 1 - len(predictor.tokens) <= every:
                continue
            predictor.follow(row)
            found = predictor.drafts(num_known(row) + 1 - len(predictor.tokens), min(share, most_drafts(row)))
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
        """Note acceptance, and add the tokens of rows with drafts up to their next one, which later drafts follow."""
        self.depth.note(drafted, accepted, is_new=is_new)
        for row, count, token in zip(rows, drafted, following, strict=True):
            predictor = self.rows.get(row)
            if predictor is not None and count:
                predictor.follow(row)
                predictor.add(token)
