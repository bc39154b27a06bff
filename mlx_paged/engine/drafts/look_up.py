"""LookUp: drafts that repeat what a row had before, and Predictor, the index of n-grams that finds them."""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...kv.pool import BlockPool
from ..ranks.ranks import Ranks
from ..request import Request
from ..sampling.token_choice import TokenChoice
from .depth import CPU_LOOKED_UP, LOOKED_UP, Candidate, Depth, new_depth
from .proposal import MOST_TOKENS, NextTokens, Proposal, most_drafts, num_known

# Tokens at the end that are looked for, most first. What a single one was followed by says next to nothing.
SIZES = (3, 2)
MOST_COMPARED = 8  # further back a match is not measured
MOST_AT_ONCE = 1 << 16  # tokens of a prompt that are indexed, its last ones: some 10 ms
TOKEN_BITS = 21  # of a token id: three fit a key of 64 bits


class _Runs(NamedTuple):
    """Runs of tokens in a prompt.

    Attributes:
        keys: int64, ascending, each once.
        ends: int64, the position behind the last run with that key.
    """

    keys: array[int]
    ends: array[int]

    @classmethod
    def of(cls, tokens: np.ndarray, size: int, first: int) -> _Runs:
        """Return those of ``size`` tokens in tokens that begin at position ``first``, but for the run at the end."""
        count = max(0, len(tokens) - size)
        keys = np.zeros(count, np.int64)
        for place in range(size):
            keys = keys << TOKEN_BITS | tokens[place : place + count]
        latest, places = np.unique(keys[::-1], return_index=True)  # the first of the reversed ones is the last
        return cls(array("q", latest.tobytes()), array("q", (first + size + count - 1 - places).tobytes()))

    def end_of(self, run: tuple[int, ...]) -> int | None:
        key = 0
        for token in run:
            key = key << TOKEN_BITS | token
        place = bisect_left(self.keys, key)
        return self.ends[place] if place < len(self.keys) and self.keys[place] == key else None


class NgramIndex:
    """A row's tokens, and where each run of 2 and of 3 of them ended last, but for the run at the end. A token is added
    in constant time. The prompt's runs lie in sorted arrays, made when something is looked for.

    Args:
        tokens: of the row so far.

    Attributes:
        tokens: all of them.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = list(tokens)
        self._prompt_length = len(self.tokens)
        self._prompt_runs: list[_Runs] | None = None
        self._later: list[dict[tuple[int, ...], int]] = [{} for _ in SIZES]  # of runs that end behind the prompt's
        self._latest = [tuple(self.tokens[-size:]) for size in SIZES]  # the runs at the end, or all there is

    def add(self, token: int) -> None:
        """Take the row's next token."""
        tokens = self.tokens
        end = len(tokens)
        (long, short), (long_ends, short_ends) = self._latest, self._later
        long_ends[long], short_ends[short] = end, end
        tokens.append(token)
        self._latest = [(*long[-2:], token), (*short[-1:], token)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the row's next tokens."""
        first = len(self.tokens)
        self.tokens += tokens
        for size, later in zip(SIZES, self._later, strict=True):
            begin = max(first, size)
            last = self.tokens[begin - size : -1]
            later.update(
                zip(
                    zip(*(last[place:] for place in range(size)), strict=False),
                    range(begin, len(self.tokens)),
                    strict=True,
                )
            )
        self._latest = [tuple(self.tokens[-size:]) for size in SIZES]

    def find(self) -> tuple[int, int] | None:
        """Find where the last tokens have stood before: the position behind them, and how many tokens are the same, up
        to 8."""
        if self._prompt_runs is None:
            first = max(0, self._prompt_length - MOST_AT_ONCE)
            prompt = np.array(self.tokens[first : self._prompt_length], np.int64)
            self._prompt_runs = [_Runs.of(prompt, size, first) for size in SIZES]
        for size, later, runs, run in zip(SIZES, self._later, self._prompt_runs, self._latest, strict=True):
            if len(run) < size:
                continue
            found = later.get(run)
            if found is None:
                found = runs.end_of(run)
            if found is not None:
                return found, size + _common_end(self.tokens, found - size, len(self.tokens) - size)
        return None


def _common_end(tokens: Sequence[int], a: int, b: int) -> int:
    """Return how many tokens before two positions are the same, as far as is looked."""
    length = 0
    most = min(a, MOST_COMPARED - SIZES[0])
    while length < most and tokens[a - length - 1] == tokens[b - length - 1]:
        length += 1
    return length


MEMORY = 8  # predictions that an estimate goes by, roughly
LEAST_CHANCE = 1 / 16  # of a draft of being accepted; less likely ones are not worth anything


class Drafts(NamedTuple):
    """Tokens proposed for a row.

    Attributes:
        tokens: in order.
        chances: of each, of being accepted.
    """

    tokens: list[int]
    chances: list[float]


class Predictor:
    """Follows what stood behind a row's latest tokens before, as long as the row repeats it.

    Each token of the row shows whether it was the one predicted, proposed or not. How often that is
    so is kept by how many tokens had matched, so a row that repeats nothing stops proposing, and begins again when it
    does: watching costs no step.

    Args:
        tokens: of the row so far.
        most: drafts at a time.
    """

    def __init__(self, tokens: Sequence[int], most: int) -> None:
        self.most = most
        self._index = NgramIndex(tokens)
        # Of the next token being the one that follows, by the number of tokens that match; before anything is known.
        self._chances = [1 - 0.5 ** (matched / 3) for matched in range(MOST_COMPARED + 1)]
        self._next = 0  # position of the token that is predicted
        self._matched = 0  # tokens before it that are the row's latest ones; 0: nothing is predicted
        self._look()

    @property
    def expects(self) -> bool:
        """Return whether anything is predicted."""
        return self._matched > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that are known here."""
        return len(self._index.tokens)

    def _look(self) -> None:
        self._next, self._matched = self._index.find() or (0, 0)

    def follow(self, row: Request) -> None:
        """Take those of the row's tokens that are not known here yet. What was predicted long ago is not followed."""
        tokens = row.source[max(0, self.num_tokens - len(row.history)) :]
        if self._matched and len(tokens) <= self.most + 1:
            for token in tokens:
                self.add(token)
        elif tokens:
            self._index.extend(tokens)
            self._look()

    def add(self, token: int) -> None:
        """Take the row's next token, delivered or about to be."""
        if self._matched:
            is_hit = self._index.tokens[self._next] == token
            self._chances[self._matched] += (is_hit - self._chances[self._matched]) / MEMORY
            self._index.add(token)
            if is_hit:
                self._next += 1
                self._matched = min(self._matched + 1, MOST_COMPARED)
                return
        else:
            self._index.add(token)
        self._look()

    def drafts(self, skipped: int, most: int) -> Drafts | None:
        """Return what is expected next, as far as it is likely; None: nothing.

        Args:
            skipped: so many tokens are being computed already; the drafts come behind them.
            most: drafts, if that is less than always.
        """
        if not self._matched:
            return None
        tokens, most = self._index.tokens, min(self.most, most)
        period = len(tokens) - self._next  # a row that has come to its own end goes on with what it is repeating
        chance, drafts, chances = 1.0, [], []
        for step in range(skipped + most):
            chance *= self._chances[min(self._matched + step, MOST_COMPARED)]
            if chance < LEAST_CHANCE:
                break
            if step >= skipped:
                drafts.append(tokens[self._next + step % period])
                chances.append(chance)
        return Drafts(drafts, chances) if drafts else None


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
                self.rows[row] = Predictor([*row.history, *row.source], most)

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
