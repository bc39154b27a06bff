"""Constraint: what an answer has to be: a format of the text, or tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..grammar.compiler import GrammarSource


class Tool(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: name of the function.
        schema: JSON schema of its arguments.
        param: where the schema is in the request.
    """

    name: str
    schema: Any
    param: str


class Tools(NamedTuple):
    """The tool calls that an answer may or must have.

    Attributes:
        callable: the tools that may be called.
        required: whether the answer must be one or more calls.
        parallel: whether several calls may follow each other.
        strict: whether calls are constrained even if none is required.
    """

    callable: Sequence[Tool]
    required: bool
    parallel: bool
    strict: bool


class Constraint(NamedTuple):
    """The constraint on an answer, independent of the model.

    Attributes:
        answer: grammar of its text; None: any text.
        param: the parameter that requires it.
        schema: JSON schema of ``answer``, if it has one.
        tools: required or constrained tool calls; None: there are none.
    """

    answer: GrammarSource | None
    param: str
    schema: Any = None
    tools: Tools | None = None
