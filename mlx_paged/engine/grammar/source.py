"""GrammarSource: what an answer has to be, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from .check import JSON_OPTIONS

ANY_OBJECT = {"type": "object"}


def json_in_lark(schema: Any) -> str:
    """Return JSON of a schema, as a term of a Lark grammar."""
    return "%json " + _escaped(json.dumps({**schema, "x-guidance": JSON_OPTIONS}))


def text_in_lark(text: str) -> str:
    """Return a text as a term of a Lark grammar."""
    return _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Escape what JSON may have as it is, and Lark may not: DEL."""
    return text.replace("\x7f", "\\u007f")


class GrammarSource(NamedTuple):
    """What an answer has to be, as text: the same for every model.

    Attributes:
        kind: ``json`` (a JSON schema), ``regex``, ``lark``, or ``tools``: Lark that was made from schemas of tools.
        text: the schema, expression or grammar.
    """

    kind: str
    text: str

    @classmethod
    def json(cls, schema: Any) -> GrammarSource:
        """JSON of a schema, which is a value of parsed JSON."""
        return cls("json", json.dumps(schema))

    @classmethod
    def regex(cls, expression: str) -> GrammarSource:
        """The whole answer matches a regular expression."""
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> GrammarSource:
        """A context-free grammar as in Lark, whose start rule is ``start``."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, answers: Sequence[str]) -> GrammarSource:
        """One of some texts."""
        # One terminal: as a rule, each answer takes an item of the parser's, which are bounded.
        return cls("lark", "start: ANSWER\nANSWER: " + " | ".join(map(text_in_lark, answers)))
