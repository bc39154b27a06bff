"""Stop strings: where an answer ends, found as its text comes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any


class StopList:
    """Strings that end an answer; made once for a request, shared by its answers, never changed.

    Raises:
        ValueError: a string is empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(sorted(set(strings)))
        if "" in self.strings:
            raise ValueError("a stop string is empty")
        self._known = frozenset(self.strings)
        self._lengths = sorted({len(string) for string in self.strings}, reverse=True)

    def __bool__(self) -> bool:
        return bool(self.strings)

    def longest_at(self, text: str, place: int) -> str | None:
        """Return the longest string that stands in ``text`` at ``place``."""
        for length in self._lengths:
            part = text[place : place + length]
            if len(part) == length and part in self._known:
                return part
        return None

    def may_begin_with(self, text: str) -> bool:
        """Return whether a string that is longer than ``text`` begins with it."""
        place = bisect_right(self.strings, text)
        return place < len(self.strings) and self.strings[place].startswith(text)


class StopScanner:
    """The text of one answer, cut before the first stop string, wherever the borders of the pieces fall.

    The first stop string is the one that begins first. Text is held back as long as a stop string may still begin in
    it, and no longer. Each character is looked at once, since a place where no string can begin is left behind.

    Attributes:
        found: the stop string that has ended the answer; of several that begin there, the longest.
    """

    def __init__(self, stops: StopList) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Take the next text. Return what can be shown now of all that was held back and this.

        Args:
            text: of the answer.
            is_last: nothing follows.
        """
        if self.found is not None:
            return ""
        self._held += text
        place = 0
        while place < len(self._held):
            self.found = self._stops.longest_at(self._held, place)
            if self.found is not None:  # whatever comes, the answer ends here
                break
            if not is_last and self._stops.may_begin_with(self._held[place:]):
                break
            place += 1
        return self._show(place)

    def _show(self, num_characters: int) -> str:
        shown, self._held = self._held[:num_characters], self._held[num_characters:]
        return shown


def _first_stop(text: str, stops: StopList) -> int | None:
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
        first = _first_stop(text, self._stops) or 0
        return not any(
            stop.startswith(text[begin:])
            for stop in self._stops.strings
            for begin in range(max(0, len(text) - len(stop) + 1), first)
        )

    def text(self) -> tuple[str, bool]:
        """Return the answer's text before the first stop string, and whether there was one."""
        text: str = self._tokenizer.decode(self.tokens)
        first = _first_stop(text, self._stops)
        if first is not None:
            return text[:first], True
        return (self._streamed, True) if self._scanner.found is not None else (text, False)
