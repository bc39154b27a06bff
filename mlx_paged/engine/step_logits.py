"""StepLogits: what a decode step computed for its rows, and what samplers choose from."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]


class StepLogits:
    """The logits ``[B, vocab]`` of one step. Log-probabilities are computed when somebody asks for them, and take the
    logits' place."""

    def __init__(self, logits: mx.array, *, is_normalised: bool = False) -> None:
        self._values = logits
        self._is_normalised = is_normalised

    def logprobs(self) -> mx.array:
        """Of all rows, ``[B, vocab]``."""
        if not self._is_normalised:
            self._values, self._is_normalised = normalised(self._values), True
        return self._values

    def row(self, index: int) -> mx.array:
        """Of one row, ``[vocab]``."""
        values = self._values[index]
        return values if self._is_normalised else normalised(values)

    def ranking(self) -> mx.array:
        """``[B, vocab]``, whose largest in a row is the token that mlx-lm chooses. That is the first of the largest
        log-probabilities as they are rounded: in 16 bits, logits that differ can have the same. In float32 it is the
        largest logit but for two within some 1e-6, and nothing is normalised for them (docs/adr/0015)."""
        return self._values if self._values.dtype == mx.float32 else self.logprobs()

    def kept(self, index: int) -> StepLogits:
        """One row of it, without the others' memory."""
        return StepLogits(mx.contiguous(self._values[index : index + 1]), is_normalised=self._is_normalised)


def normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
