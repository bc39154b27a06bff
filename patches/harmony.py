"""HarmonyParts: answers in OpenAI's Harmony format (gpt-oss), which mlx-lm's text state machine does not support."""

from __future__ import annotations

import json
import re
from typing import Any

HARMONY_TOKENS = {"<|channel|>", "<|message|>", "<|start|>", "<|return|>", "<|call|>"}
HARMONY_CALL = "<|channel|>commentary to=functions."
HEADERS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    " to=",
)  # what a header begins with; the prompt may already contain its start
BODY = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = (*ENDS, "<|start|>", "<|channel|>")  # what ends a body
MOST_HEADER = 1000  # characters; a longer header is treated as text
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyParts:
    """Splits one answer into messages, each a header (role, channel, recipient) and a body. The channel ``analysis`` is
    reasoning, a body with a recipient is a tool call, and text without a header is normal text.

    Args:
        state: the state that the prompt ends in.
    """

    def __init__(self, state: str) -> None:
        self._held, self._state = "", state
        self._place = "start" if state == "normal" else "body"  # or "header"

    def feed(self, text: str) -> list[tuple[str, str]]:
        """Take the next piece of the answer. Returns the parts recognised since the last call as (state, text)."""
        self._held += text
        parts: list[tuple[str, str]] = []
        consume = {"start": self._consume_start, "header": self._consume_header, "body": self._consume_body}
        while consume[self._place](parts):
            pass
        return parts

    def flush(self) -> tuple[str, str]:
        """Return the state and the remaining text, without an incomplete header."""
        rest, self._held = "" if self._place == "header" else self._held, ""
        return self._state, rest

    # Each consumes one element of the held text and returns True, or returns False if it needs more text.

    def _consume_start(self, parts: list[tuple[str, str]]) -> bool:
        if self._held.startswith(HEADERS):
            self._place = "header"
        elif _begins_one_of(self._held, HEADERS):
            return False
        else:
            self._begin("normal", parts)
        return True

    def _consume_header(self, parts: list[tuple[str, str]]) -> bool:
        header, mark, body = self._held.partition(BODY)
        if not mark:
            if len(header) > MOST_HEADER:
                self._begin("normal", parts)
                parts.append(("normal", header))
                self._held = ""
            return False
        self._held = body
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            self._begin("reasoning" if "<|channel|>analysis" in header else "normal", parts)
        else:
            self._begin("tool", parts)
            parts.append(("tool", recipient[1] + BODY))
        return True

    def _consume_body(self, parts: list[tuple[str, str]]) -> bool:
        found = _MARK.search(self._held)
        end = len(self._held) - _num_pending(self._held) if found is None else found.start()
        if end:
            parts.append((self._state, self._held[:end]))
        self._held = self._held[end:]
        if found is None:
            return False
        if found[0] in ENDS:
            self._held = self._held[len(found[0]) :]
        self._begin("normal", parts)  # ends the call, even if another follows
        self._place = "start"
        return True

    def _begin(self, state: str, parts: list[tuple[str, str]]) -> None:
        self._state, self._place = state, "body"
        parts.append((state, ""))


def _begins_one_of(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark.startswith(text) for mark in marks)


def _num_pending(text: str) -> int:
    """Return how many characters at the end may be the beginning of a mark."""
    longest = min(len(text), max(map(len, MARKS)) - 1)
    return next((n for n in range(longest, 0, -1) if _begins_one_of(text[-n:], MARKS)), 0)


def harmony_call(text: str) -> dict[str, Any]:
    """Parse a call ``NAME<|message|>{...}``; the arguments may be empty. Raises ValueError if it is not one."""
    name, mark, arguments = text.partition(BODY)
    if not mark:
        raise ValueError("the call has no message")
    return {"name": name, "arguments": json.loads(arguments) if arguments.strip() else {}}
