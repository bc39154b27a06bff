"""Proposer: the tokens that a row is expected to repeat, and how likely each is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..request import Request
from ..sampling.token_choice import TokenChoice
from .ngram_index import MOST_COMPARED, NgramIndex

# What it costs to verify a draft, in tokens of a step without: on a GPU, and on a CPU, where each takes its time.
PRICE, CPU_PRICE = 1 / 8, 1 / 2
MEMORY = 8  # predictions that an estimate goes by, roughly


class Drafts(NamedTuple):
    """Tokens proposed for a row.

    Attributes:
        tokens: in order.
        gain: how many of them are expected to be accepted, less what they cost.
    """

    tokens: list[int]
    gain: float


class Proposer:
    """Follows what stood behind a row's latest tokens before, as long as the row repeats it.

    Each token of the row tells whether it was the one predicted, be it that it was proposed or not. How often that is
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
        """Whether anything is predicted."""
        return self._matched > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that are known here."""
        return len(self._index.tokens)

    def _look(self) -> None:
        self._next, self._matched = self._index.find() or (0, 0)

    def follow(self, row: Request) -> None:
        """Those of the row's tokens that are not known here yet."""
        for place in range(self.num_tokens - len(row.history), len(row.source)):
            self.add(row.source[place])

    def add(self, token: int) -> None:
        """The row's next token, delivered or about to be."""
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

    def drafts(self, skipped: int, most: int, price: float = PRICE) -> Drafts | None:
        """What is expected next, as far as it is worth its price; None: nothing.

        Args:
            skipped: so many tokens are being computed already; the drafts come behind them.
            most: drafts, if that is less than always.
            price: of each, in tokens.
        """
        if not self._matched:
            return None
        tokens, most = self._index.tokens, min(self.most, most)
        period = len(tokens) - self._next  # a row that has come to its own end goes on with what it is repeating
        chance, gain, drafts = 1.0, 0.0, []
        for step in range(skipped + most):
            chance *= self._chances[min(self._matched + step, MOST_COMPARED)]
            if chance <= price:
                break
            if step >= skipped:
                gain += chance - price
                drafts.append(tokens[self._next + step % period])
        return Drafts(drafts, gain) if drafts else None


def proposers_of(rows: Iterable[Request], choice: TokenChoice) -> Iterator[tuple[Request, Proposer]]:
    """Proposers of those rows that ask for one, and whose next token depends on nothing but the tokens before it and on
    chance."""
    for row in rows:
        most = row.options.prompt_lookup or 0
        if most > 0 and not row.processors and row.grammar is None and choice.samples(row):
            yield row, Proposer([*row.history, *row.source], most)
