"""Stop strings: where an answer ends, found as its text comes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


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
