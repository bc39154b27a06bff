"""GrammarProcessor: a grammar as a logits processor, for a sequence that is computed alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .compiled_grammar import CompiledGrammar
from .token_mask import masked


class GrammarProcessor:
    """Processes the logits of one answer. It finds out from the tokens where the answer is, so that tokens may be taken
    back between calls, as when a draft model's are refused.

    To be the first processor, or penalties would have what is not allowed to choose from.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._grammar = compiled.start()
        self._prompt_length: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Args: tokens: the prompt, or its end, and the answer so far, ``[n]``; logits: ``[1, vocab]``.

        Raises:
            GrammarError: the answer is not what the grammar allows, or cannot be followed.
        """
        mx.async_eval(logits)
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        self._grammar.follow(tokens[self._prompt_length :].tolist())  # type: ignore[arg-type]
        words = np.zeros((1, -(-logits.shape[-1] // 32)), np.uint32)
        self._grammar.mask(words[0])
        return masked(logits, mx.array(words))
