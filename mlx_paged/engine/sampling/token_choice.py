"""TokenChoice: chooses a token of each row from the logits of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ...errors import ConfigError, check_device
from ..request import Request, Sampler, normalised
from .batch_sampler import BatchSampler, SampledRow
from .params import SamplingParams


class Places(NamedTuple):
    """Rows and positions of a step's logits, if rows do not come once each, in order.

    Attributes:
        rows: the batch's row of each of the logits, ascending; rows with processors of their own come once.
        ahead: offset of each from its row's next position.
    """

    rows: list[int]
    ahead: list[int]


class Choice(NamedTuple):
    """The tokens chosen in a step.

    Attributes:
        logits: those that they were chosen from.
        tokens: one for each of the logits, ``[T]``.
        contexts: tokens passed to rows' own processors; to be computed with the step.
        broken: errors of the rows' processors and samplers, by index of the logits.
        inputs: the step's input tokens, if they had to be read; else empty.
    """

    logits: mx.array
    tokens: mx.array
    contexts: list[mx.array]
    broken: dict[int, Exception]
    inputs: list[int]


class TokenChoice:
    """Chooses the tokens of a batch's rows. Rows are sampled together by their parameters. Samplers and processors of
    the caller's own are called for their rows alone; if they raise, only those rows fail.

    Args:
        token_buffer: keeps a request's tokens for its logits processors.

    Attributes:
        vocab_size: of the model; None before its first step. The rows' parameters are checked against it.
    """

    def __init__(self, token_buffer: Callable[[Sequence[int]], Any]) -> None:
        self._token_buffer = token_buffer
        self.sampler = BatchSampler()
        self.vocab_size: int | None = None
        self._rows: list[Request] = []
        self._all_together = True  # no row has a sampler or processors of its own
        self._invalid: dict[Request, ConfigError] = {}  # rows whose parameters do not suit the vocabulary

    def add(self, rows: Sequence[Request]) -> None:
        """Append rows. Their caches hold their tokens up to the next input."""
        sampled = []
        for row in rows:
            if row.processors:
                row.context = self._token_buffer(row.cached_tokens())
            params = self._checked(row)
            history = row.cached_tokens() if params.has_penalties else []
            position = row.num_generated + (row.logits is not None)  # one token may be chosen but not delivered
            sampled.append(SampledRow(params, history, position))
        self.sampler.add(sampled)
        self._set_rows([*self._rows, *rows])

    def _checked(self, row: Request) -> SamplingParams:
        """Return a row's parameters. If they do not suit the vocabulary, it gets others, and will fail."""
        try:
            if self.vocab_size is not None:
                row.sampling.check_vocabulary(self.vocab_size)
        except ConfigError as error:
            self._invalid[row] = error
            return SamplingParams()
        return row.sampling

    def _set_rows(self, rows: list[Request]) -> None:
        self._rows = rows
        self._all_together = all(row.takes_drafts for row in rows)
        self._invalid = {row: error for row, error in self._invalid.items() if row in rows}

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these, ascending."""
        self.sampler.keep(indices)
        self._set_rows([self._rows[index] for index in indices])

    def clear(self) -> None:
        """Remove all rows."""
        self.sampler = BatchSampler()
        self._set_rows([])

    # Steps ----------------------------------------------------------------------------------------------------

    def choose(self, logits: mx.array, inputs: mx.array, places: Places | None = None) -> Choice:
        """Return the next token of each row.

        Args:
            logits: of the step, ``[B, vocab]``, or ``[T, vocab]`` with ``places``.
            inputs: the step's input tokens, ``[B]`` or ``[T]``.
            places: rows and positions of the logits; None: one per row, in order.
        """
        if self.vocab_size != logits.shape[-1]:
            self._learn(logits.shape[-1])
        broken: dict[int, Exception] = {}
        if self._invalid:
            owners = self._rows if places is None else [self._rows[row] for row in places.rows]
            broken = {index: self._invalid[row] for index, row in enumerate(owners) if row in self._invalid}
        penalised = self.sampler.penalised(logits, inputs, None if places is None else places.rows)
        if self._all_together:
            tokens = self.sampler.sample(penalised) if places is None else self.sampler.sample(penalised, *places)
            return Choice(penalised, tokens, [], broken, [])
        rows = self._rows if places is None else [self._rows[row] for row in places.rows]
        logits, contexts = self._process(rows, penalised, inputs, broken)
        return Choice(logits, self._sample(rows, places, logits, broken), contexts, broken, [])

    def _learn(self, vocab_size: int) -> None:
        """Set the vocabulary size, known since the first step, and check the rows' parameters against it."""
        rows, self.vocab_size = self._rows, vocab_size
        self.clear()
        self.add(rows)

    def _process(
        self, rows: Sequence[Request], logits: mx.array, inputs: mx.array, broken: dict[int, Exception]
    ) -> tuple[mx.array, list[mx.array]]:
        """Return the logits after the rows' own processors, and the tokens passed to these."""
        contexts: list[mx.array] = []
        if not any(row.processors for row in rows):
            return logits, contexts
        processed = []
        for index, row in enumerate(rows):
            sample = logits[index : index + 1]
            if row.processors:
                context = row.context.update_and_fetch(inputs[index : index + 1])
                contexts.append(context)
                try:
                    for processor in row.processors:
                        sample = processor(context, sample)
                    _check_result("logits processor", sample, (1, logits.shape[-1]), mx.floating)
                except Exception as error:
                    check_device(error)
                    broken[index] = error
                    sample = logits[index : index + 1]
            processed.append(sample)
        return mx.concatenate(processed, axis=0), contexts

    def _sample(
        self,
        rows: Sequence[Request],
        places: Places | None,
        logits: mx.array,
        broken: dict[int, Exception],
    ) -> mx.array:
        """Return a token from each of the logits, chosen together except in rows with a sampler of their own. These are
        called for one row at a time, as in mlx-lm, unless all rows share one: not every sampler takes several."""
        own = [(index, row.sampler) for index, row in enumerate(rows) if row.sampler is not None]
        logprobs = normalised(logits)
        if len(own) == len(rows) and all(sampler is own[0][1] for _, sampler in own):
            return self._call(own[0][1], logprobs, list(range(len(rows))), broken)
        rest = [index for index, row in enumerate(rows) if row.sampler is None]
        of = rest if places is None else [places.rows[index] for index in rest]
        ahead = None if places is None else [places.ahead[index] for index in rest]
        if not own:
            return self.sampler.sample(logits, of, ahead)
        found = [self._call(sampler, logprobs, [index], broken) for index, sampler in own]
        if rest:
            found.append(self.sampler.sample(logits[mx.array(rest)], of, ahead))
        return mx.concatenate(found)[mx.argsort(mx.array([*(index for index, _ in own), *rest]))]

    def _call(self, sampler: Sampler, logprobs: mx.array, rows: list[int], broken: dict[int, Exception]) -> mx.array:
        try:
            tokens = sampler(logprobs if len(rows) == len(logprobs) else logprobs[mx.array(rows)])
            _check_result("sampler", tokens, (len(rows),), mx.integer)
            return tokens
        except Exception as error:
            check_device(error)
            if len(rows) == 1:
                broken.setdefault(rows[0], error)
                return mx.zeros((1,), mx.uint32)
            return mx.concatenate([self._call(sampler, logprobs, [row], broken) for row in rows])


def _check_result(what: str, result: Any, shape: tuple[int, ...], kind: mx.DtypeCategory) -> None:
    """Raise TypeError or ValueError if a caller's sampler or processor returned the wrong type, shape or dtype."""
    if not isinstance(result, mx.array):
        raise TypeError(f"a {what} must return an mx.array, got {type(result).__name__}")
    if result.shape != shape or not mx.issubdtype(result.dtype, kind):
        name = "integers" if kind is mx.integer else "floats"
        raise ValueError(f"a {what} must return {name} of shape {shape}, got {result.dtype} of shape {result.shape}")
