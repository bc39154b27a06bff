"""NgramIndex: where a row's latest tokens have stood before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

# Tokens at the end that are looked for, most first. What a single one was followed by says next to nothing.
SIZES = (3, 2)
MOST_COMPARED = 8  # further back a match is not measured
MOST_AT_ONCE = 1 << 16  # tokens of a prompt that are indexed, its last ones: some 10 ms
TOKEN_BITS = 21  # of a token id: three fit a key of 64 bits


class _Runs(NamedTuple):
    """Runs of tokens in a prompt.

    Attributes:
        keys: int64, ascending, each once.
        ends: int32, the position behind the last run with that key.
    """

    keys: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, size: int, first: int) -> _Runs:
        """Return those of ``size`` tokens in tokens that begin at position ``first``, but for the run at the end."""
        count = max(0, len(tokens) - size)
        keys = np.zeros(count, np.int64)
        for place in range(size):
            keys = keys << TOKEN_BITS | tokens[place : place + count]
        latest, places = np.unique(keys[::-1], return_index=True)  # the first of the reversed ones is the last
        return cls(latest, (first + size + count - 1 - places).astype(np.int32))

    def end_of(self, run: tuple[int, ...]) -> int | None:
        key = 0
        for token in run:
            key = key << TOKEN_BITS | token
        place = int(np.searchsorted(self.keys, key))
        return int(self.ends[place]) if place < len(self.keys) and self.keys[place] == key else None


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
        """The row's next token."""
        tokens = self.tokens
        end = len(tokens)
        (long, short), (long_ends, short_ends) = self._latest, self._later
        long_ends[long], short_ends[short] = end, end
        tokens.append(token)
        self._latest = [(*long[-2:], token), (*short[-1:], token)]

    def find(self) -> tuple[int, int] | None:
        """Where what stands at the end has stood before: the position behind it, and how many tokens are the same, up
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
    """How many tokens before two positions are the same, as far as is looked."""
    length = 0
    most = min(a, MOST_COMPARED - SIZES[0])
    while length < most and tokens[a - length - 1] == tokens[b - length - 1]:
        length += 1
    return length
