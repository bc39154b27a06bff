"""Tool calls that a model writes otherwise than its parser expects: without marks, without an end or arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import TextParts

BEGIN, END = "<function=", "</function>"  # of Qwen3-Coder's calls, which it often writes without the mark before them
OBJECT = '{"name":'  # what a call in JSON begins with
MOST_HELD = 1 << 16  # characters of what may be a call
CLOSINGS = ("", END, "}", "}}", "]}}")
_NAME = re.compile(r"\s*([\w.:-]+)\s*(?:\(\s*\))?\s*")


def names_of(tools: Any) -> frozenset[str]:
    """Return the names of functions."""
    functions = (tool.get("function") for tool in tools or () if isinstance(tool, dict))
    return frozenset(str(each.get("name")) for each in functions if isinstance(each, dict))


def loose_calls(
    text: str, names: Collection[str], parse: Callable[[str], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the calls of a text that ``parse`` alone does not read: one whose end lacks, or a bare name.

    Args:
        text: of a call, which the model has ended.
        names: of the tools.
        parse: of the model.

    Raises:
        Exception: ``parse`` raised; it is no call.
    """
    bare = _NAME.fullmatch(text)
    if bare is not None and bare[1] in names:
        return [{"name": bare[1], "arguments": {}}]
    if text.count("<parameter=") != text.count("</parameter>"):
        raise ValueError("an argument was cut off")
    for closing in CLOSINGS[1:]:
        for read in (parse, _read):
            try:
                calls = read(text.rstrip() + closing)
            except Exception:  # parsers raise what they like
                continue
            if calls and all(call.get("name") in names for call in calls):
                return calls
    return _known(_read(text), names)


def _read(text: str) -> list[dict[str, Any]]:
    """Return calls as JSON, or as Qwen3-Coder's tags. Raises ValueError."""
    begin = text.find(BEGIN)
    if begin < 0:
        value = json.loads(text)
        return [each.get("function", each) for each in (value if isinstance(value, list) else [value])]
    if text.count("<parameter=") != text.count("</parameter>"):
        raise ValueError("an argument was cut off")
    name, _, rest = text[begin + len(BEGIN) :].partition(">")
    given = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", rest, re.DOTALL)
    return [{"name": name.strip(), "arguments": {key: _value(value) for key, value in given}}]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _known(calls: list[dict[str, Any]], names: Collection[str]) -> list[dict[str, Any]]:
    if not calls or any(call.get("name") not in names for call in calls):
        raise ValueError("it names no tool of the request")
    return calls


class LooseParts:
    """Parts of an answer's text, with calls that no mark begins among them.

    Args:
        parts: of the model.
        names: of the tools; what names no other is text.
    """

    def __init__(self, parts: TextParts, names: Collection[str]) -> None:
        self._parts, self._names = parts, names
        self._held, self._is_first = "", True  # the first text of the answer

    def feed(self, text: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for state, part in self._parts.feed(text):
            if state == "normal":
                self._held += part
                found += [("normal", ""), *self._scan()]  # a call before it is at its end, whatever is held
            else:
                found += [*self._release(), (state, part)]
        return found

    def flush(self) -> tuple[str, str]:
        state, rest = self._parts.flush()
        if state != "normal":
            return state, rest
        held, self._held = self._held + rest, ""
        return ("tool", held) if self._is_call(held) else ("normal", held)

    def cut_off(self) -> None:
        """Take the rest for text: the answer ends because it is long enough, and not because the model ended it."""
        self._names = frozenset()

    def _scan(self) -> list[tuple[str, str]]:
        """Return what is known to be text or a call of what is held."""
        found: list[tuple[str, str]] = []
        while self._held:
            begin = self._held.find(BEGIN)
            if begin > 0:
                found.append(self._text(begin))
            elif begin == 0:
                end = self._held.find(END)
                if end < 0:
                    return found if len(self._held) < MOST_HELD else [*found, *self._release()]
                call, self._held = self._held[: end + len(END)], self._held[end + len(END) :]
                found += [("tool" if self._is_call(call) else "normal", call), ("normal", "")]
            elif self._is_first and _may_begin(self._held.lstrip(), OBJECT) and len(self._held) < MOST_HELD:
                return found  # until the answer's end says what it is
            else:
                pending = next((n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n])), 0)
                if len(self._held) > pending:
                    found.append(self._text(len(self._held) - pending))
                return found
        return found

    def _text(self, end: int) -> tuple[str, str]:
        text, self._held = self._held[:end], self._held[end:]
        self._is_first = self._is_first and not text.strip()
        return "normal", text

    def _release(self) -> list[tuple[str, str]]:
        return [self._text(len(self._held))] if self._held else []

    def _is_call(self, text: str) -> bool:
        text = text.strip()
        if not text.startswith((BEGIN, "{")):
            return False
        for closing in CLOSINGS:
            try:
                return bool(_known(_read(text + closing), self._names))
            except (ValueError, AttributeError, RecursionError):
                continue
        return False


def _may_begin(text: str, mark: str) -> bool:
    text = re.sub(r"^\{\s+", "{", text).replace('" :', '":', 1)
    return text.startswith(mark) or mark.startswith(text)
