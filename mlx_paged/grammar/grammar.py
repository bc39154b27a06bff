"""Compiled grammars, thinking budgets, the state of one answer, and masks of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from ..engine.constraint import ALL
from ..errors import GrammarError

# CPU time of a token and its mask, which all rows of a batch wait for. Most take less than 1 ms; the first ones of a
# grammar, which fill caches of its lexer, may take 10.
SECONDS_PER_TOKEN = 0.005
MAX_EXCESS_SECONDS = 0.2


def reason(matcher: Any) -> str:
    """Return why a matcher failed, without the parser state that llguidance appends."""
    return str(matcher.get_error()).partition("\n<")[0].strip()


class ThinkingBudget(NamedTuple):
    """A limit on an answer's reasoning, at which its end is forced.

    Attributes:
        num_tokens: most tokens of reasoning, the end tokens not counted.
        begin, end: tokens that reasoning begins and ends with.
        is_open: the prompt ends inside the reasoning.
    """

    num_tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_open: bool = False


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar compiled for one tokenizer, shared by any number of answers. Immutable.

    Attributes:
        matcher: llguidance's matcher at the start; answers advance copies of it. None: the answer is unconstrained.
        num_tokens: size of the tokenizer's vocabulary, and so of a matcher's mask.
        eos_tokens: tokens that end an answer.
        after: the grammar begins after these tokens, e.g. the end of a model's reasoning; empty: at once.
        trigger: tokens that begin a part which the grammar describes, any number of times, in an otherwise
            unconstrained answer; empty: the grammar describes the whole answer.
        thinking: limit on the reasoning; None: no limit.
    """

    matcher: Any = field(repr=False)
    num_tokens: int
    eos_tokens: Sequence[int]
    after: tuple[int, ...] = ()
    trigger: tuple[int, ...] = ()
    thinking: ThinkingBudget | None = None

    def begins_after(self, tokens: Sequence[int]) -> CompiledGrammar:
        """Return the grammar for an answer that is unconstrained up to these tokens."""
        return replace(self, after=tuple(tokens))

    def start(self) -> Grammar:
        """Return the state at the beginning of an answer."""
        return Grammar(self)


class Part(Enum):
    """The part of an answer that its next token belongs to."""

    BEFORE = "unconstrained, before the grammar begins"
    BETWEEN = "unconstrained, between parts that the grammar describes"
    WITHIN = "described by the grammar"
    ENDED = "after the end of the grammar: nothing"


class Grammar:
    """The state of one answer. It depends only on the tokens so far, not on preemptions in between.

    Attributes:
        tokens: the answer so far.
        part: what the next token belongs to.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._excess = 0.0
        self._begin()

    def _begin(self) -> None:
        self.tokens: list[int] = []
        self._matcher: Any = None
        thinking = self._compiled.thinking
        self._num_thought = 0 if thinking is not None and thinking.is_open else None  # None: not inside reasoning
        if self._compiled.after:
            self.part = Part.BEFORE
        else:
            self._enter()

    def _enter(self) -> None:
        """Begin the part of the answer after ``after``."""
        if self._compiled.trigger or self._compiled.matcher is None:
            self.part = Part.BETWEEN
        else:
            self.part, self._matcher = Part.WITHIN, self._compiled.matcher.deep_copy()

    def fork(self) -> Grammar:
        """Return a copy, to advance by drafts that may be rejected."""
        copy = object.__new__(Grammar)
        copy.__dict__.update(self.__dict__)
        copy.tokens = list(self.tokens)
        copy._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return copy

    def accept(self, token: int) -> None:
        """Advance by a token of the answer.

        Raises:
            GrammarError: the token is not allowed, or the grammar takes more work than is allowed for a token.
        """
        compiled = self._compiled
        self.tokens.append(token)
        if compiled.thinking is not None and self.part in (Part.BEFORE, Part.BETWEEN):
            self._count_thought(compiled.thinking)
        if self.part is Part.BEFORE:
            if tuple(self.tokens[-len(compiled.after) :]) == compiled.after:
                self._enter()
        elif self.part is Part.BETWEEN:
            if compiled.trigger and self._ends_with(compiled.trigger):
                self.part, self._matcher = Part.WITHIN, compiled.matcher.deep_copy()
        elif self.part is Part.WITHIN:
            if token in compiled.eos_tokens and self._matcher.is_accepting():
                self.part = Part.ENDED
            elif not self._matcher.consume_token(token):
                raise self._failure(f"the grammar does not allow token {token}")
            elif compiled.trigger and self._matcher.is_stopped():
                self.part = Part.BETWEEN

    def _count_thought(self, thinking: ThinkingBudget) -> None:
        if self._num_thought is None:
            self._num_thought = 0 if self._ends_with(thinking.begin) else None
        else:
            self._num_thought = None if self._ends_with(thinking.end) else self._num_thought + 1

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return tuple(self.tokens[-len(tokens) :]) == tokens

    @property
    def _forced(self) -> int | None:
        """The token forced next because the reasoning has used up its budget; else None."""
        thinking = self._compiled.thinking
        if thinking is None or self._num_thought is None or self._num_thought < thinking.num_tokens:
            return None
        end = thinking.end
        return next(end[n] for n in range(len(end) - 1, -1, -1) if n == 0 or self._ends_with(end[:n]))

    def follow(self, tokens: Sequence[int]) -> None:
        """Set the state to the end of these tokens, starting over if they lack some that were accepted before.

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
        """Write the mask of tokens that may come next.

        Args:
            out: uint32 ``[words]``, contiguous: token t is bit t % 32 of word t // 32. Where the grammar applies,
                tokens that the tokenizer lacks are not allowed.

        Raises:
            GrammarError: no token may come next, or the grammar takes more work than is allowed for a token.
        """
        if self.part is Part.WITHIN:
            self._fill(out)
            if not out.any():
                raise GrammarError("the grammar allows none of the model's tokens")
            return
        if (token := self._forced) is not None and token // 32 < len(out):
            out[:] = 0
            out[token // 32] = np.uint32(1 << token % 32)
            return
        out[:] = 0 if self.part is Part.ENDED else ALL
        if self.part is not Part.BETWEEN:  # EOS is forbidden before the grammar begins, and forced after its end
            for token in self._compiled.eos_tokens:
                if token // 32 < len(out):
                    out[token // 32] ^= np.uint32(1 << token % 32)

    def _fill(self, out: np.ndarray) -> None:
        words = -(-self._compiled.num_tokens // 32)
        fits = words <= len(out)
        target = out[:words] if fits else np.zeros(words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._matcher.is_error():
            raise self._failure("the tokens that the grammar allows cannot be computed")
        if fits:
            out[words:] = 0
        else:  # the tokenizer has tokens that the model does not
            out[:] = target[: len(out)]

    def record_time(self, seconds: float) -> None:
        """Record the CPU time of a token and its mask.

        Raises:
            GrammarError: the last tokens took over :data:`MAX_EXCESS_SECONDS` more than :data:`SECONDS_PER_TOKEN` each.
        """
        self._excess = max(0.0, self._excess + seconds - SECONDS_PER_TOKEN)
        if self._excess > MAX_EXCESS_SECONDS:
            raise GrammarError(
                f"the grammar takes too much work: the last token took {seconds:.3f} s of CPU time; "
                f"allowed are {SECONDS_PER_TOKEN:g} s per token on average"
            )

    def _failure(self, what: str) -> GrammarError:
        why = reason(self._matcher)
        if "too many" in why.lower() or "; max is" in why:  # llguidance has no other sign of it
            what = "the grammar takes too much work"
        return GrammarError(f"{what}: {why}")
