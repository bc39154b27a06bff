"""GrammarSource: what an answer has to be, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

ANY_OBJECT = {"type": "object"}
# Between the parts of JSON. Without an end, a small model that has begun to indent does nothing else.
WHITE_SPACE = r"[ \t\r\n]{1,32}"


def json_in_lark(schema: Any) -> str:
    """JSON of a schema, as a term of a Lark grammar."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": False}
    return "%json " + json.dumps({**schema, "x-guidance": options})


class GrammarSource(NamedTuple):
    """What an answer has to be, as text: the same for every model.

    Attributes:
        kind: ``json`` (a JSON schema), ``regex`` or ``lark``.
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
        return cls("lark", "start: " + " | ".join(json.dumps(answer, ensure_ascii=False) for answer in answers))
