"""StopStrings: finds the first of some strings in text that comes in pieces, and says what may be shown meanwhile."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """The text of one answer, cut before the first stop string, wherever the borders of the pieces fall.

    First is the one that begins first: what is shown is the whole text up to the least position at which some stop
    string occurs in it. So where one is completed while another that began earlier may still become whole, the next
    characters decide. Held back is the longest end of the text that a stop string begins with, and no more. A character
    takes constant time (amortised), whatever the number and length of the strings (Aho-Corasick).

    Args:
        strings: to stop at; without any, everything is shown.

    Attributes:
        cut: characters before the first stop string known so far, or None.
        is_found: the first stop string is known for certain, and generation can end.

    Raises:
        ValueError: a string is empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.cut: int | None = None
        self.is_found = False
        self._strings: list[str] = []
        self._length = 0
        self._held = ""  # the end of the text so far
        self._node = 0  # the longest end of the text that some string begins with
        # Of each node of the trie, the root first: children, characters to it, where to go on if no child fits, and the
        # length of the longest string that ends there.
        self._children: list[dict[str, int]] = [{}]
        self._depth, self._fallback, self._longest = [0], [0], [0]
        for string in strings:
            self._add(string)
        self._link()

    def feed(self, text: str) -> str:
        """Take the next characters. Returns those that can be shown now, of these and the ones held back."""
        if self.is_found:
            return ""
        before = self._length - len(self._held)
        for character in text:
            self._length += 1
            self._node = self._next(character)
            longest = self._longest[self._node]
            if longest and (self.cut is None or self._length - longest < self.cut):
                self.cut = self._length - longest
            if self.cut is not None and self._length - self._depth[self._node] >= self.cut:
                self.is_found = True
                break
        self._held += text
        end = self._length - self._depth[self._node]
        return self._show((end if self.cut is None else min(end, self.cut)) - before)

    def finish(self) -> str:
        """The text is at its end. Returns what was held back of it, up to the first stop string."""
        if self.is_found:
            return ""
        self.is_found = self.cut is not None
        return self._show(len(self._held) if self.cut is None else self.cut - (self._length - len(self._held)))

    @property
    def found(self) -> str | None:
        """The stop string at which the text is cut, once it is certain; the longest of those that begin there."""
        if not self.is_found:
            return None
        return max(filter(self._held.startswith, self._strings), key=len)

    def _show(self, num_characters: int) -> str:
        shown, self._held = self._held[:num_characters], self._held[num_characters:]
        return shown

    def _next(self, character: str) -> int:
        node = self._node
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)

    def _add(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string is empty")
        self._strings.append(string)
        node = 0
        for character in string:
            child = self._children[node].get(character)
            if child is None:
                child = self._children[node][character] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._longest.append(0)
            node = child
        self._longest[node] = len(string)

    def _link(self) -> None:
        """Set where each node goes on: the longest end of its characters that some string begins with."""
        level = list(self._children[0].values())
        while level:
            for parent in level:
                for character, child in self._children[parent].items():
                    node = self._fallback[parent]
                    while node and character not in self._children[node]:
                        node = self._fallback[node]
                    self._fallback[child] = node = self._children[node].get(character, 0)
                    self._longest[child] = self._longest[child] or self._longest[node]
            level = [child for parent in level for child in self._children[parent].values()]
