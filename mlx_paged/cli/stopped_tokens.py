"""StoppedTokens: where an answer ends whose text is decoded as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..server.stops import StopList, StopScanner


def first_stop(text: str, stops: StopList) -> int | None:
    """Return where the first stop string begins in a whole text."""
    return min((place for stop in stops.strings if (place := text.find(stop)) >= 0), default=None)


class StoppedTokens:
    """Collects an answer whose text is decoded as a whole at the end, and says when it may end.

    The text is followed as it would be streamed. That may differ from the whole text at borders (a space before the
    first word, characters that are not complete); the whole text is what is cut, before the first stop string in it.

    Args:
        tokenizer: of mlx-lm.
        stop_strings: to stop at; without any, nothing is followed.

    Attributes:
        tokens: so far.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._stops = StopList(stop_strings)
        self._scanner = StopScanner(self._stops)
        self._detokenizer = tokenizer.detokenizer if self._stops else None
        self._streamed = ""

    def add(self, token: int) -> bool:
        """Take the next token, end tokens excepted. Return whether no more are needed."""
        self.tokens.append(token)
        if self._detokenizer is not None:
            self._detokenizer.add_token(token)
            self._streamed += self._scanner.feed(self._detokenizer.last_segment)
        return self._scanner.found is not None and self._is_decided()

    def _is_decided(self) -> bool:
        """Return whether the whole text is cut where it is by what comes next, too: a stop string that begins before
        the first one may still become whole, if the streamed text lacks what it begins with."""
        text: str = self._tokenizer.decode(self.tokens).rstrip("\ufffd")  # without a character that is not complete
        first = first_stop(text, self._stops) or 0
        return not any(
            stop.startswith(text[begin:])
            for stop in self._stops.strings
            for begin in range(max(0, len(text) - len(stop) + 1), first)
        )

    def text(self) -> tuple[str, bool]:
        """Return the answer's text before the first stop string, and whether there was one."""
        text: str = self._tokenizer.decode(self.tokens)
        first = first_stop(text, self._stops)
        if first is not None:
            return text[:first], True
        return (self._streamed, True) if self._scanner.found is not None else (text, False)
