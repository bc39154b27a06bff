"""StoppedAnswer: the tokens of an answer, as its stop strings let them be told to mlx-lm's request handler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .stop_strings import StopStrings


class LastText(str):
    """A text with which an answer ends, in the middle of whatever was being said."""

    __slots__ = ()


class StoppedAnswer:
    """Cuts an answer before the first of its stop strings. They are looked for in all that the model writes: reasoning,
    tool calls and markers included.

    Args:
        stop_strings: none of them empty.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._strings = StopStrings(stop_strings)
        self._starts: list[int] = []  # of each token's text, in characters
        self._length = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the answer is at its end because of a stop string: no more tokens are wanted."""
        return self._strings.is_found

    @property
    def stop_string(self) -> str | None:
        """The one that has ended the answer."""
        return self._strings.found

    @property
    def num_shown(self) -> int:
        """Tokens with some text before the stop string."""
        return len(self._starts) if self._strings.cut is None else bisect_left(self._starts, self._strings.cut)

    def take(self, response: Any) -> Any:
        """What is told instead of mlx-lm's ``Response`` for the next token: the text that can be shown by now.

        mlx-lm's handler drops the text of a response whose ``finish_reason`` is "stop", but takes "stop" for granted
        where no response gives a reason; so what was held back is told without one.
        """
        text, reason = response.text, response.finish_reason
        if reason == "stop":
            text, reason = "", None
        self._starts.append(self._length)
        self._length += len(text)
        shown = self._strings.feed(text)
        if response.finish_reason is not None:
            shown += self._strings.finish()
        if self.is_stopped:
            return replace(response, text=LastText(shown), finish_reason=None)
        return replace(response, text=shown, finish_reason=reason)
