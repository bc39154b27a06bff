"""CompiledGrammar: a grammar for one tokenizer's tokens, which any number of requests start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .grammar import Grammar


@dataclass(frozen=True)
class CompiledGrammar:
    """What the tokens of an answer have to be, or of parts of it. Never changes.

    Attributes:
        matcher: llguidance's, at the beginning; only copies of it move.
        num_tokens: of the tokenizer, which a matcher's mask is as long as.
        eos_tokens: those that end an answer.
        after: tokens behind which the grammar begins, as those that end a model's reasoning; none: it begins at once.
        trigger: a token that begins what the grammar describes, again and again, within an answer that is free
            otherwise; None: the grammar describes the whole answer.
    """

    matcher: Any = field(repr=False)
    num_tokens: int
    eos_tokens: Sequence[int]
    after: tuple[int, ...] = ()
    trigger: int | None = None

    def begins_after(self, tokens: Sequence[int]) -> CompiledGrammar:
        """The same grammar for an answer that is free up to these tokens."""
        return replace(self, after=tuple(tokens))

    def start(self) -> Grammar:
        """The grammar at the beginning of an answer."""
        return Grammar(self)
