"""BatchSampler: chooses the next token of every row of a batch, in one set of operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ...kernels.sampling import draw_rows
from ..step_logits import normalised
from .draw import draw, uniforms
from .filters import kept_words
from .kernel_rows import KernelRows
from .params import SamplingParams
from .penalties import Penalties
from .row_parameters import RowParameters

MOST_KEPT = 8  # selections of rows whose arrays are kept


class SampledRow(NamedTuple):
    """A row that joins.

    Attributes:
        params: of its request.
        tokens: that it has seen, without the one that the next step is given; needed if there are penalties.
        position: in its answer, of the token that the next step chooses.
    """

    params: SamplingParams
    tokens: Sequence[int]
    position: int


class BatchSampler:
    """The rows of a batch, in its order. Arrays of their parameters are made when the rows change; a step computes only
    what some row needs: an argmax if all are greedy.

    Logits are ``[B, vocab]``, in any float dtype, and never changed.
    """

    def __init__(self) -> None:
        self.rows: list[SamplingParams] = []
        self._positions: list[int] = []  # of the rows' next tokens, less the steps until now
        self._num_steps = 0
        self._penalties = Penalties()
        self._penalised: list[int] = []  # rows, in the order of the penalties
        self._draws = False  # whether some row does
        # The last step's positions: whose they are, which step that was, and the array.
        self._counted: tuple[tuple[int, ...], int, mx.array] | None = None
        self._biased: list[int] = []  # rows
        self._bias: tuple[mx.array, mx.array, mx.array] | None = None  # rows [R, 1], tokens [R, n] and values
        # By rows, and whether the kernel draws for them.
        self._parameters: dict[tuple[tuple[int, ...], bool], RowParameters | KernelRows] = {}

    # Rows -----------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[SampledRow]) -> None:
        """Rows join at the end."""
        first = len(self.rows)
        self._penalties.add([(row.params, row.tokens) for row in rows if row.params.has_penalties])
        self._penalised += [first + i for i, row in enumerate(rows) if row.params.has_penalties]
        self.rows = [*self.rows, *(row.params for row in rows)]
        self._positions += [row.position - self._num_steps for row in rows]
        self._settle()

    def keep(self, indices: Sequence[int]) -> None:
        """All rows leave but these, ascending."""
        place = {index: i for i, index in enumerate(indices)}
        self._penalties.keep([i for i, index in enumerate(self._penalised) if index in place])
        self._penalised = [place[index] for index in self._penalised if index in place]
        self.rows = [self.rows[index] for index in indices]
        self._positions = [self._positions[index] for index in indices]
        self._settle()

    def _settle(self) -> None:
        self._parameters.clear()
        self._draws = any(row.draws for row in self.rows)
        self._counted = None
        self._biased = [index for index, row in enumerate(self.rows) if row.logit_bias]
        self._bias = None
        if self._biased:
            every = [self.rows[index].logit_bias for index in self._biased]
            biases = {id(bias): bias for bias in every}  # answers to one request share theirs
            most, place = max(map(len, biases.values())), {name: index for index, name in enumerate(biases)}
            tokens = mx.array([[*bias, *[next(iter(bias))] * (most - len(bias))] for bias in biases.values()])
            values = mx.array([[*bias.values(), *[0.0] * (most - len(bias))] for bias in biases.values()], mx.float32)
            of = mx.array([place[id(bias)] for bias in every])
            self._bias = mx.array(self._biased)[:, None], tokens[of], values[of]

    @property
    def only_compares(self) -> bool:
        """Whether tokens are chosen from the logits as they are, by comparing them."""
        return not (self._draws or self._penalised or self._biased)

    # Steps ----------------------------------------------------------------------------------------------------

    def penalised(self, logits: mx.array, inputs: mx.array, places: Sequence[int] | None = None) -> mx.array:
        """Begin a step: the logits ``[B, vocab]`` with biases and penalties, in float32 if any row has some.

        Args:
            logits: of the step.
            inputs: the tokens that the step was given, ``[B]``; they are part of the history from now on.
            places: which row each of the logits is of, where rows come several times: not those with any of that.
        """
        self._num_steps += 1
        at = {} if places is None else {row: place for place, row in enumerate(places)}
        if self._bias is not None:
            rows, tokens, values = self._bias
            if at:
                rows = mx.array([at[row] for row in self._biased])[:, None]
            logits = logits.astype(mx.float32).at[rows, tokens].add(values)
        if self._penalised:
            rows_of = [at[row] for row in self._penalised] if at else self._penalised
            logits = self._penalties.step(logits, inputs, rows_of)
        return logits

    def skip(self, counts: Sequence[int]) -> None:
        """Rows have taken so many tokens more than one of the last step, ``[B]``."""
        self._positions = [position + count for position, count in zip(self._positions, counts, strict=True)]
        self._counted = None

    def _positions_of(self, of: tuple[int, ...], ahead: Sequence[int] | None) -> mx.array:
        """Of the tokens of a step, ``[T]``. From step to step they are counted on the device: an array from the host
        takes a GPU some 0.3 ms to get at."""
        begun = self._num_steps - 1
        if ahead is None and self._counted is not None and self._counted[:2] == (of, begun - 1):
            positions = self._counted[2] + _one()
        else:
            first = [self._positions[row] + begun for row in of]
            places = first if ahead is None else [place + n for place, n in zip(first, ahead, strict=True)]
            positions = mx.array([place % (1 << 32) for place in places], mx.uint32)
        self._counted = (of, begun, positions) if ahead is None else None
        return positions

    def sample(
        self, logits: mx.array, rows: Sequence[int] | None = None, ahead: Sequence[int] | None = None
    ) -> mx.array:
        """The tokens of the step, ``[T]`` uint32.

        Args:
            logits: ``[T, vocab]``, with the penalties.
            rows: which row each is of; a row may have several, or none. None: one of each row.
            ahead: how many tokens behind the row's next one each stands, ``[T]``; None: 0.
        """
        if not self._draws:
            return greedy(logits)
        of = tuple(range(len(self.rows))) if rows is None else tuple(rows)
        serves = draw_rows.serves(logits)
        params = self._parameters.get((of, serves))
        if params is None:
            make = KernelRows if serves else RowParameters
            params = make([self.rows[row] for row in of], logits.shape[-1])
            if len(self._parameters) >= MOST_KEPT:
                self._parameters.clear()
            self._parameters[of, serves] = params
        if not params.draws:
            return greedy(logits)
        positions = self._positions_of(of, ahead)
        if isinstance(params, KernelRows):
            drawn = params.draw(logits, positions)
            if logits.dtype == mx.float32:  # the kernel takes the largest logit in greedy rows
                return drawn
        else:
            numbers = uniforms(params, positions)
            kept = kept_words(logits, params, numbers[:, 2:])
            drawn = draw(logits, kept, params.temperature, numbers, keeps_top=params.xtc_probability is None)
        if params.greedy is None:
            return drawn
        return mx.where(params.greedy[:, 0], greedy(logits), drawn)


def greedy(logits: mx.array) -> mx.array:
    """Return the most likely token of each row ``[T, vocab]``.

    In 16 bits, mlx-lm's log-probabilities make several tokens equally likely that logits tell apart, and it takes the
    first of them (docs/adr/0015).
    """
    return mx.argmax(logits if logits.dtype == mx.float32 else normalised(logits), axis=-1)


@functools.cache
def _one() -> mx.array:
    one = mx.array(1, mx.uint32)
    mx.eval(one)
    return one
