"""constrain(): what the grammars of a step's rows leave of its logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..request import Request
from .grammar import ALL


def constrain(
    logits: mx.array, rows: Sequence[Request], inputs: Sequence[int]
) -> tuple[mx.array, dict[int, Exception]]:
    """The logits ``[B, vocab]``, at minus infinity where a row's grammar does not allow the token; and the rows whose
    grammar raised, which are left as they are.

    The logits may still be being computed: the host is at the masks meanwhile.

    Args:
        logits: of the step.
        rows: of the batch, with or without a grammar.
        inputs: the token that each row's logits come after.
    """
    vocab = logits.shape[-1]
    words = np.full((len(rows), -(-vocab // 32)), ALL, np.uint32)
    broken: dict[int, Exception] = {}
    for index, (row, token) in enumerate(zip(rows, inputs, strict=True)):
        grammar = row.grammar
        if grammar is None:
            continue
        try:
            # What was delivered before, if the grammar has not seen it, and then this step's input. The first input is
            # the last token of the prompt.
            for delivered in row.source[row.prompt_length + len(grammar.tokens) :]:
                grammar.accept(delivered)
            if row.logits is not None and len(grammar.tokens) == len(row.source) - row.prompt_length:
                grammar.accept(token)
            grammar.mask(words[index])
        except Exception as error:
            broken[index] = error
            words[index] = ALL
    return masked(logits, mx.array(words)), broken


def masked(logits: mx.array, words: mx.array) -> mx.array:
    """Logits ``[B, vocab]`` where a bit of words ``[B, ceil(vocab / 32)]`` is set, minus infinity elsewhere."""
    rows, vocab = logits.shape
    allowed = (words[:, :, None] & _bits()).reshape(rows, -1)[:, :vocab]
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))


@functools.cache
def _bits() -> mx.array:
    bits = mx.array([1 << bit for bit in range(32)], mx.uint32)
    mx.eval(bits)
    return bits
