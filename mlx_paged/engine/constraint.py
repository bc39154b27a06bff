"""Constraint: what a row's answer may be; the masks of a step's logits."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from ..errors import check_device

if TYPE_CHECKING:  # only a request's attributes are used here
    from .request import Request

ALL = np.uint32(0xFFFFFFFF)


class Constraint(Protocol):
    """Which tokens one answer may have next. Its state depends only on the tokens so far.

    Attributes:
        tokens: the answer so far.
    """

    tokens: list[int]

    def accept(self, token: int) -> None:
        """Advance by a token of the answer. Raises Exception: it is not allowed."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Set the state to the end of these tokens. Raises Exception: they are not allowed."""

    def mask(self, out: np.ndarray) -> None:
        """Write the mask of tokens that may come next into uint32 ``[words]``: token t is bit t % 32 of word t // 32.
        Raises Exception: there is none, or it takes too much work."""

    def fork(self) -> Constraint:
        """Return a copy, to advance by drafts that may be rejected."""

    def record_time(self, seconds: float) -> None:
        """Record the CPU time of a token and its mask. Raises Exception: the answer takes too much."""


class Constraining(Protocol):
    """Begins constraints of answers; one may serve many requests."""

    def start(self) -> Constraint:
        """Return the constraint at the beginning of an answer."""


def constrain(
    logits: mx.array, rows: Sequence[Request], inputs: Sequence[int], *, is_timed: bool = True
) -> tuple[mx.array, dict[int, Exception]]:
    """Return the logits ``[B, vocab]`` with minus infinity for tokens that a row's grammar forbids, and by index the
    errors of rows whose grammar raised; these rows are unchanged.

    The logits need not be computed yet: the host computes the masks meanwhile.

    Args:
        logits: of the step.
        rows: the row of each of the logits, with or without a grammar; one with drafts comes once for its next token
            and then once for each draft.
        inputs: the token that each of the logits follows.
        is_timed: fail rows whose grammars take too much CPU time; not over ranks, which must decide alike.
    """
    vocab = logits.shape[-1]
    words = np.full((len(rows), -(-vocab // 32)), ALL, np.uint32)
    broken: dict[int, Exception] = {}
    ahead: Constraint | None = None  # state after the drafts so far; None: one of them was not allowed
    for index, (row, token) in enumerate(zip(rows, inputs, strict=True)):
        grammar = row.grammar
        if grammar is None:
            continue
        begin = time.thread_time()
        try:
            if index and rows[index - 1] is row:
                ahead = _behind_draft(ahead, token, words[index - 1], words[index])
                continue
            # First the delivered tokens that the grammar has not seen, then this step's input, unless that is the last
            # token of the prompt.
            for delivered in row.source[row.prompt_length + len(grammar.tokens) :]:
                grammar.accept(delivered)
            if row.logits is not None and len(grammar.tokens) == len(row.source) - row.prompt_length:
                grammar.accept(token)
            grammar.mask(words[index])
            if is_timed:
                grammar.record_time(time.thread_time() - begin)
        except Exception as error:
            check_device(error)
            broken[index] = error
            words[index], ahead = ALL, None
        else:
            has_drafts = index + 1 < len(rows) and rows[index + 1] is row
            ahead = grammar.fork() if has_drafts else None
    return masked(logits, mx.array(words)), broken


def _behind_draft(ahead: Constraint | None, draft: int, allowed: np.ndarray, out: np.ndarray) -> Constraint | None:
    """Write the mask of tokens that may follow a draft.

    Args:
        ahead: the state before the draft; None: an earlier draft was not allowed, and this mask is not used.
        draft: the token.
        allowed: the mask at the draft's position.
        out: see :meth:`Constraint.mask`.

    Returns:
        The state after the draft; None if it is not allowed and will be rejected.

    Raises:
        Exception: as :meth:`Constraint.accept` and :meth:`Constraint.mask`.
    """
    if ahead is None or draft // 32 >= len(allowed) or not allowed[draft // 32] >> np.uint32(draft % 32) & 1:
        return None
    ahead.accept(draft)
    ahead.mask(out)
    return ahead


def masked(logits: mx.array, words: mx.array) -> mx.array:
    """Return logits ``[B, vocab]`` where a bit of words ``[B, ceil(vocab / 32)]`` is set, minus infinity elsewhere."""
    rows, vocab = logits.shape
    allowed = (words[:, :, None] & _bits()).reshape(rows, -1)[:, :vocab]
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))


@functools.cache
def _bits() -> mx.array:
    bits = mx.array([1 << bit for bit in range(32)], mx.uint32)
    mx.eval(bits)
    return bits


class GrammarProcessor:
    """A logits processor for a sequence outside a batch. Tokens may be taken back between calls, e.g. when a draft
    model's are rejected.

    It must be the first processor: penalties come after the mask.
    """

    def __init__(self, grammar: Constraining) -> None:
        self._grammar = grammar.start()
        self._prompt_length: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the masked logits.

        Args:
            tokens: the prompt, or its end, and the answer so far, ``[n]``.
            logits: ``[1, vocab]``.

        Raises:
            Exception: see :meth:`Constraint.follow` and :meth:`Constraint.mask`.
        """
        mx.async_eval(logits)
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        self._grammar.follow(tokens[self._prompt_length :].tolist())  # type: ignore[arg-type]
        words = np.zeros((1, -(-logits.shape[-1] // 32)), np.uint32)
        self._grammar.mask(words[0])
        return masked(logits, mx.array(words))
