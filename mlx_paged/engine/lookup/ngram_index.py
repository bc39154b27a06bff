"""NgramIndex: where a row's latest tokens have stood before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Tokens at the end that are looked for, most first. What a single one was followed by says next to nothing.
SIZES = (3, 2)
MOST_COMPARED = 8  # further back a match is not measured
MOST_AT_ONCE = 1 << 16  # tokens of a prompt that are indexed, its last ones: some 10 ms


class NgramIndex:
    """A row's tokens, and where each run of 2 and of 3 of them ended last, but for the run at the end. A token is added
    in constant time.

    Args:
        tokens: of the row so far.

    Attributes:
        tokens: all of them.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = list(tokens)
        first = max(0, len(self.tokens) - MOST_AT_ONCE)
        recent = self.tokens[first:]
        # From a run to the position behind it; the last one of equal runs stays. The run at the end waits for add().
        self._ends: list[dict[tuple[int, ...], int]] = [
            dict(
                zip(
                    zip(*(recent[start:-1] for start in range(size)), strict=False),
                    range(first + size, len(self.tokens)),
                    strict=False,
                )
            )
            for size in SIZES
        ]
        self._latest = [tuple(self.tokens[-size:]) for size in SIZES]  # the runs at the end, or all there is

    def add(self, token: int) -> None:
        """The row's next token."""
        tokens = self.tokens
        end = len(tokens)
        (long, short), (long_ends, short_ends) = self._latest, self._ends
        long_ends[long], short_ends[short] = end, end
        tokens.append(token)
        self._latest = [(*long[-2:], token), (*short[-1:], token)]

    def find(self) -> tuple[int, int] | None:
        """Where what stands at the end has stood before: the position behind it, and how many tokens are the same, up
        to 8."""
        for size, ends, run in zip(SIZES, self._ends, self._latest, strict=True):
            found = ends.get(run)
            if found is not None and len(run) == size:
                end = len(self.tokens)
                return found, size + _common_end(self.tokens, found - size, end - size)
        return None


def _common_end(tokens: Sequence[int], a: int, b: int) -> int:
    """How many tokens before two positions are the same, as far as is looked."""
    length = 0
    most = min(a, MOST_COMPARED - SIZES[0])
    while length < most and tokens[a - length - 1] == tokens[b - length - 1]:
        length += 1
    return length
