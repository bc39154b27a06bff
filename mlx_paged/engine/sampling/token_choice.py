"""TokenChoice: chooses a token of each row from the logits of a decode step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ...errors import ConfigError, check_device
from ..request import Request
from ..step_logits import Sampler, StepLogits
from ..upstream import Upstream
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
        step: the logits that they were chosen from.
        tokens: one for each of the logits, ``[T]``.
        contexts: tokens passed to rows' own processors; to be computed with the step.
        broken: errors of the rows' processors and samplers, by index of the logits.
        inputs: the step's input tokens, if they had to be read; else empty.
    """

    step: StepLogits
    tokens: mx.array
    contexts: list[mx.array]
    broken: dict[int, Exception]
    inputs: list[int]


class _Row(NamedTuple):
    """A row of the batch, its own sampler, and whether it has processors of its own; these are called for it alone."""

    request: Request
    sampler: Sampler | None
    has_processors: bool


class TokenChoice:
    """Chooses the tokens of a batch's rows. Samplers and processors made by mlx-lm are computed for all rows together.
    The caller's own are called for their rows alone; if they raise, only those rows fail.

    Args:
        upstream: mlx-lm's classes and functions.

    Attributes:
        vocab_size: of the model; None before its first step. The rows' parameters are checked against it.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.sampler = BatchSampler()
        self._rows: list[_Row] = []
        self._is_together: bool | None = True  # no row has a sampler or processors of its own; None: not known yet
        self.vocab_size: int | None = None

    def add(self, requests: Sequence[Request]) -> None:
        """Append rows. Their caches hold their tokens up to the next input."""
        rows, sampled = [], []
        for request in requests:
            row, params = self._known(request)
            rows.append(row)
            if row.has_processors:
                request.context = self.upstream.token_buffer(request.cached_tokens())
            history = request.cached_tokens() if params.has_penalties else []
            position = request.num_generated + (request.logits is not None)  # one token may be chosen but not delivered
            sampled.append(SampledRow(params, history, position))
        self.sampler.add(sampled)
        self._rows = [*self._rows, *rows]
        self._is_together = None

    def _known(self, request: Request) -> tuple[_Row, SamplingParams]:
        if (own := request.options.sampling) is not None:
            if self.vocab_size is not None:
                own.check_vocabulary(self.vocab_size)
            return _Row(request, None, False), own
        chooses = self._usable(self.upstream.known_sampler(request.sampler))
        changes = self._usable(self.upstream.known_processors(request.processors)) if request.processors else {}
        params = SamplingParams(**(chooses or {}), **(changes or {}), seed=request.options.seed)
        return _Row(request, request.sampler if chooses is None else None, changes is None), params

    def _usable(self, fields: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the fields; None if invalid, so that mlx-lm's own function is called for its row and raises."""
        if fields is None:
            return None
        try:
            params = SamplingParams(**fields)
            if self.vocab_size is not None:
                params.check_vocabulary(self.vocab_size)
        except ConfigError:
            return None
        return fields

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these, ascending."""
        self._rows = [self._rows[index] for index in indices]
        self.sampler.keep(indices)
        self._is_together = None

    def clear(self) -> None:
        """Remove all rows."""
        self._rows = []
        self.sampler = BatchSampler()
        self._is_together = True

    @property
    def _all_together(self) -> bool:
        if self._is_together is None:
            self._is_together = not any(row.sampler is not None or row.has_processors for row in self._rows)
        return self._is_together

    def takes_drafts(self, request: Request) -> bool:
        """Return whether several tokens of the request can be chosen in one step: it has no sampler or processors of
        the caller's own, which would have to be called for each token in order."""
        if request.options.sampling is not None:
            return True
        if self._usable(self.upstream.known_sampler(request.sampler)) is None:
            return False
        return not request.processors or self._usable(self.upstream.known_processors(request.processors)) is not None

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
        penalised = self.sampler.penalised(logits, inputs, None if places is None else places.rows)
        if self._all_together:
            tokens = self.sampler.sample(penalised) if places is None else self.sampler.sample(penalised, *places)
            return Choice(StepLogits(penalised), tokens, [], broken, [])
        rows = self._rows if places is None else [self._rows[row] for row in places.rows]
        logits, contexts = self._process(rows, penalised, inputs, broken)
        step = StepLogits(logits)
        return Choice(step, self._sample(rows, places, logits, step, broken), contexts, broken, [])

    def _learn(self, vocab_size: int) -> None:
        """Set the vocabulary size, known since the first step, and check the rows' parameters against it."""
        self.vocab_size = vocab_size
        requests = [row.request for row in self._rows]
        self.clear()
        self.add(requests)

    def _process(
        self, rows: Sequence[_Row], logits: mx.array, inputs: mx.array, broken: dict[int, Exception]
    ) -> tuple[mx.array, list[mx.array]]:
        """Return the logits after the rows' own processors, and the tokens passed to these."""
        contexts: list[mx.array] = []
        if not any(row.has_processors for row in rows):
            return logits, contexts
        processed = []
        for index, row in enumerate(rows):
            sample = logits[index : index + 1]
            if row.has_processors:
                request = row.request
                context = request.context.update_and_fetch(inputs[index : index + 1])
                contexts.append(context)
                try:
                    for processor in request.processors:
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
        rows: Sequence[_Row],
        places: Places | None,
        logits: mx.array,
        step: StepLogits,
        broken: dict[int, Exception],
    ) -> mx.array:
        """Return a token from each of the logits, chosen together except in rows with a sampler of their own."""
        groups: dict[int, tuple[Sampler | None, list[int]]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(id(row.sampler), (row.sampler, []))[1].append(index)
        if len(groups) == 1:
            ((sampler, whole),) = groups.values()
            if sampler is not None:
                return self._call(sampler, step, whole, broken)
            return self.sampler.sample(logits) if places is None else self.sampler.sample(logits, *places)
        order, found = [], []
        for sampler, part in groups.values():
            order += part
            if sampler is not None:  # one row per call, as in mlx-lm: not every sampler takes several
                found += [self._call(sampler, step, [index], broken) for index in part]
            elif places is None:
                found.append(self.sampler.sample(logits[mx.array(part)], part))
            else:
                own = [places.rows[index] for index in part], [places.ahead[index] for index in part]
                found.append(self.sampler.sample(logits[mx.array(part)], *own))
        return mx.concatenate(found)[mx.argsort(mx.array(order))]

    def _call(self, sampler: Sampler, step: StepLogits, rows: list[int], broken: dict[int, Exception]) -> mx.array:
        logprobs = step.logprobs()
        try:
            tokens = sampler(logprobs if len(rows) == step.num_rows else logprobs[mx.array(rows)])
            _check_result("sampler", tokens, (len(rows),), mx.integer)
            return tokens
        except Exception as error:
            check_device(error)
            if len(rows) == 1:
                broken.setdefault(rows[0], error)
                return mx.zeros((1,), mx.uint32)
            return mx.concatenate([self._call(sampler, step, [row], broken) for row in rows])


def _check_result(what: str, result: Any, shape: tuple[int, ...], kind: mx.DtypeCategory) -> None:
    """Raise TypeError or ValueError if a caller's sampler or processor returned the wrong type, shape or dtype."""
    if not isinstance(result, mx.array):
        raise TypeError(f"a {what} must return an mx.array, got {type(result).__name__}")
    if result.shape != shape or not mx.issubdtype(result.dtype, kind):
        name = "integers" if kind is mx.integer else "floats"
        raise ValueError(f"a {what} must return {name} of shape {shape}, got {result.dtype} of shape {result.shape}")
