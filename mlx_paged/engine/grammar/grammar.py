"""Grammar: where one answer is in its grammar, and what it may go on with."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import GrammarError
from .check import reason

if TYPE_CHECKING:
    from .compiled_grammar import CompiledGrammar

ALL = np.uint32(0xFFFFFFFF)


class Part(Enum):
    """The part of an answer that a grammar is at."""

    BEFORE = "what comes before it, and is free"
    BETWEEN = "what comes between the parts that it describes, and is free"
    WITHIN = "what it describes"
    ENDED = "what comes after its end: nothing"


class Grammar:
    """The state of one answer: a function of its tokens so far, whatever became of the request in between.

    Attributes:
        tokens: those of the answer so far.
        part: that the next token belongs to.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._begin()

    def _begin(self) -> None:
        self.tokens: list[int] = []
        self._matcher: Any = None
        if self._compiled.after:
            self.part = Part.BEFORE
        else:
            self._enter()

    def _enter(self) -> None:
        """The grammar's own part of the answer begins."""
        if self._compiled.trigger is not None:
            self.part = Part.BETWEEN
        else:
            self.part, self._matcher = Part.WITHIN, self._compiled.matcher.deep_copy()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""
        return self.part is Part.ENDED or (self.part is Part.WITHIN and self._matcher.is_stopped())

    def accept(self, token: int) -> None:
        """The answer goes on with a token.

        Raises:
            GrammarError: it may not, or the grammar takes more work than is allowed for a token.
        """
        compiled = self._compiled
        self.tokens.append(token)
        if self.part is Part.BEFORE:
            if tuple(self.tokens[-len(compiled.after) :]) == compiled.after:
                self._enter()
        elif self.part is Part.BETWEEN:
            if token == compiled.trigger:
                self.part, self._matcher = Part.WITHIN, compiled.matcher.deep_copy()
        elif self.part is Part.WITHIN:
            if token in compiled.eos_tokens and self._matcher.is_accepting():
                self.part = Part.ENDED
            elif not self._matcher.consume_token(token):
                raise self._failure(f"token {token} is not what the grammar allows")
            elif compiled.trigger is not None and self._matcher.is_stopped():
                self.part = Part.BETWEEN

    def follow(self, tokens: Sequence[int]) -> None:
        """Be where an answer of these tokens is, which may have taken back some that were accepted.

        Raises:
            GrammarError: as :meth:`accept`.
        """
        known = len(self.tokens)
        if list(tokens[:known]) != self.tokens:
            self._begin()
            known = 0
        for token in tokens[known:]:
            self.accept(token)

    def mask(self, out: np.ndarray) -> None:
        """Write which tokens may come next.

        Args:
            out: uint32 ``[words]``, contiguous: token t is bit t % 32 of word t // 32. Tokens that the tokenizer does
                not have are not allowed where the grammar says what is.

        Raises:
            GrammarError: none, or the grammar takes more work than is allowed for a token.
        """
        if self.part is Part.WITHIN:
            self._fill(out)
            if not out.any():
                raise GrammarError("the grammar allows none of the model's tokens")
            return
        out[:] = 0 if self.part is Part.ENDED else ALL
        if self.part is not Part.BETWEEN:  # an answer does not end before its grammar has begun
            for token in self._compiled.eos_tokens:
                if token // 32 < len(out):
                    out[token // 32] ^= np.uint32(1 << token % 32)

    def _fill(self, out: np.ndarray) -> None:
        words = -(-self._compiled.num_tokens // 32)
        fits = words <= len(out)
        target = out[:words] if fits else np.zeros(words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._matcher.is_error():
            raise self._failure("the grammar cannot be followed")
        if fits:
            out[words:] = 0
        else:  # the tokenizer has tokens that the model does not
            out[:] = target[: len(out)]

    def _failure(self, what: str) -> GrammarError:
        why = reason(self._matcher)
        if "too many" in why.lower() or "; max is" in why:  # llguidance has no other sign of it
            what = "the grammar takes more work for a token than is allowed"
        return GrammarError(f"{what}: {why}")
