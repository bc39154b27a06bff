"""StepLogits and TokenLogits: the logits of a decode step, and of one token in it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]


class StepLogits:
    """The logits ``[B, vocab]`` of one step. Log-probabilities are computed only on request; those of all rows replace
    the logits."""

    def __init__(self, logits: mx.array, *, is_normalised: bool = False) -> None:
        self._values = logits
        self._is_normalised = is_normalised

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self._values.shape[0])

    def logprobs(self) -> mx.array:
        """Return the log-probabilities of all rows, ``[B, vocab]``."""
        if not self._is_normalised:
            self._values, self._is_normalised = normalised(self._values), True
        return self._values

    def row(self, index: int) -> mx.array:
        """Return the log-probabilities of one row, ``[vocab]``."""
        values = self._values[index]
        return values if self._is_normalised else normalised(values)

    def copy_row(self, index: int) -> StepLogits:
        """Return a copy of one row, without the memory of the others."""
        return StepLogits(mx.contiguous(self._values[index : index + 1]), is_normalised=self._is_normalised)


class TokenLogits:
    """One row of a step's logits, which a token is chosen from. The rows of a step share memory: to keep one for
    longer, copy it (:meth:`detach`).

    Args:
        step, index: the step's logits, and the index of the row.
    """

    __slots__ = ("__weakref__", "_index", "_is_detached", "_step")

    def __init__(self, step: StepLogits, index: int) -> None:
        self._step, self._index = step, index
        self._is_detached = False

    def logprobs(self) -> mx.array:
        """Return the log-probabilities ``[vocab]`` that the token was chosen from."""
        return self._step.row(self._index)

    def detach(self) -> None:
        """Copy the row, and drop the reference to the step."""
        if not self._is_detached:
            self._step, self._index, self._is_detached = self._step.copy_row(self._index), 0, True
            mx.async_eval(self._step._values)


def normalised(logits: mx.array) -> mx.array:
    """Return log-probabilities of logits ``[..., vocab]``."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
