"""Stop strings: find where an answer ends while its text arrives."""

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
            raise ValueError("a stop string must not be empty")
        self._known = frozenset(self.strings)
        self._lengths = sorted({len(string) for string in self.strings}, reverse=True)

    def __bool__(self) -> bool:
        return bool(self.strings)

    def longest_at(self, text: str, place: int) -> str | None:
        """Return the longest stop string that begins in ``text`` at ``place``, or None."""
        for length in self._lengths:
            part = text[place : place + length]
            if len(part) == length and part in self._known:
                return part
        return None

    def may_begin_with(self, text: str) -> bool:
        """Return whether a stop string longer than ``text`` begins with it."""
        place = bisect_right(self.strings, text)
        return place < len(self.strings) and self.strings[place].startswith(text)


class StopScanner:
    """Cuts the text of one answer before the first stop string, however the text is divided into pieces.

    The first stop string is the one that begins first. Text is held back only while a stop string may still begin in
    it. A position at which none can begin is not looked at again.

    Attributes:
        found: the stop string that ended the answer; the longest of several that begin there.
    """

    def __init__(self, stops: StopList) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Add the next text, and return what can be shown now.

        Args:
            text: next text of the answer.
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
