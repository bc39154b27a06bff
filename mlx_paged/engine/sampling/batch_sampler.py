"""BatchSampler: chooses the next token of every row of a batch, in one set of operations and without sorting.

The rows' parameters are arrays. Filters mask the tokens that may be drawn; then one of these is drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ...kernels import draw_rows
from ...kernels.draw_rows import WIDTH, DrawnRow
from ..request import normalised
from .params import SamplingParams
from .penalties import Penalties

NUM_SEEDS = 1 << 64  # seeds are taken modulo this


class RowParameters:
    """Sampling parameters of some rows, as arrays. A parameter that no row uses is None; rows that do not use one have
    a neutral value.

    Args:
        rows: in the order of the logits.
        vocab_size: of the model.

    Attributes:
        draws: some rows draw their tokens at random.
        greedy: which rows do not, ``[R, 1]``; None: all rows draw.
        temperature, top_p, log_min_p, xtc_probability, xtc_threshold: ``[R, 1]``, float32.
        top_k, min_kept: ``[R, 1]``, int32; ``top_k`` is the size of the vocabulary in rows without.
        xtc_special: ``[R, vocab]``, tokens that XTC never drops; None: there are none.
        drops_tokens: some row has a filter.
        keys: random keys of the rows' seeds, ``[R, 2]``; None: no row has a seed.
        seeded: which rows have a seed, ``[R, 1]``; None: all, if there are keys.
    """

    def __init__(self, rows: Sequence[SamplingParams], vocab_size: int) -> None:
        drawn = [row for row in rows if row.draws]
        self.draws = bool(drawn)
        self.greedy = _column([not row.draws for row in rows], mx.bool_) if len(drawn) < len(rows) else None
        self.temperature = _column([row.temperature if row.draws else 1.0 for row in rows])
        self.top_p = self.log_min_p = self.min_kept = self.top_k = None
        self.xtc_probability = self.xtc_threshold = self.xtc_special = None
        self.keys = self.seeded = None
        if any(row.uses_top_p for row in drawn):
            self.top_p = _column([row.top_p if row.draws and row.uses_top_p else math.inf for row in rows])
        if any(row.min_p for row in drawn):
            self.log_min_p = _column([math.log(row.min_p) if row.draws and row.min_p else -math.inf for row in rows])
            if any(row.min_p and row.min_tokens_to_keep > 1 for row in drawn):
                self.min_kept = _column([min(row.min_tokens_to_keep, vocab_size) for row in rows], mx.int32)
        if any(row.uses_xtc for row in drawn):
            self.xtc_probability = _column(
                [row.xtc_probability if row.draws and row.uses_xtc else -1.0 for row in rows]
            )
            self.xtc_threshold = _column([row.xtc_threshold for row in rows])
            special = np.zeros((len(rows), vocab_size), np.bool_)
            for index, row in enumerate(rows):
                if row.draws and row.uses_xtc:
                    special[index, list(row.xtc_special_tokens)] = True
            self.xtc_special = mx.array(special) if special.any() else None
        if any(row.top_k > 0 for row in drawn):
            self.top_k = _column([row.top_k if row.draws and row.top_k > 0 else vocab_size for row in rows], mx.int32)
        filters = (self.top_p, self.log_min_p, self.xtc_probability, self.top_k)
        self.drops_tokens = any(parameter is not None for parameter in filters)
        seeds = [row.seed if row.draws else None for row in rows]
        if any(seed is not None for seed in seeds):
            self.keys = mx.stack([mx.random.key((seed or 0) % NUM_SEEDS) for seed in seeds])
            if any(seed is None for seed in seeds):
                self.seeded = _column([seed is not None for seed in seeds], mx.bool_)


def _column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(list(values), dtype)[:, None]


_LOG2_E = 1.4426950408889634
_SIGN = 0x80000000
# Leading bits of a float32 that distinguish values of these dtypes.
_BITS = {mx.bfloat16: 16, mx.float16: 19}


def exponential(x: mx.array) -> mx.array:
    """Return e to the power of x. On a CPU ``mx.exp`` takes four times as long as ``mx.power``."""
    return mx.exp(x) if mx.default_device() == mx.Device(mx.gpu) else mx.power(2.0, x * _LOG2_E)


def bits_of(dtype: mx.Dtype) -> int:
    """Return how many leading bits of a float32 distinguish values of a dtype."""
    return _BITS.get(dtype, 32)


def largest_above(x: mx.array, weights: mx.array | None, target: mx.array, bits: int = 32) -> mx.array:
    """Return the largest value t of each row of x such that the weights of all values >= t sum to at least ``target``.
    With weights of 1 and a target of k, this is the k-th largest value.

    Args:
        x: ``[R, n]`` float32.
        weights: ``[R, n]``, non-negative or boolean; None: 1 each.
        target: ``[R, 1]``, positive.
        bits: number of leading bits that distinguish the values of x.

    Returns:
        ``[R, 1]``; minus infinity where the sum of all weights is less.
    """
    # The key is built from its highest bit down; keys, as unsigned integers, have the order of the floats they encode.
    key = mx.zeros(target.shape, mx.uint32)
    for bit in range(31, 31 - bits, -1):
        candidate = key | mx.array(1 << bit, mx.uint32)
        above = x >= _float_of(candidate)
        weight = (above if weights is None else above * weights).sum(axis=-1, keepdims=True)
        key = mx.where(weight >= target, candidate, key)
    is_least = key <= mx.array(0x007FFFFF, mx.uint32)  # the key of minus infinity; lower ones encode NaN
    return mx.where(is_least, -mx.inf, _float_of(key))


def _float_of(key: mx.array) -> mx.array:
    sign = mx.array(_SIGN, mx.uint32)
    return mx.where(key >= sign, key ^ sign, ~key).view(mx.float32)


def largest(x: mx.array, count: mx.array, bits: int, among: mx.array | None = None) -> mx.array:
    """Return a mask ``[R, n]`` of the ``count`` ``[R, 1]`` largest values in each row of x ``[R, n]``, or of all if
    there are fewer; of equal ones the first. Only values in the mask ``among`` ``[R, n]`` count (None: all)."""
    least = largest_above(x, among, count, bits)
    above, equal = x > least, x == least
    if among is not None:
        above, equal = above & among, equal & among
    num_missing = count - above.sum(axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= num_missing))


def kept_tokens(logits: mx.array, rows: RowParameters, drawn: mx.array) -> mx.array | None:
    """Return a mask of the tokens left after top-p, min-p, XTC and top-k, in mlx-lm's order. The filters see the logits
    before the temperature is applied.

    Args:
        logits: ``[R, vocab]``; their probabilities, which XTC and top-p need, are computed in float32.
        rows: their parameters.
        drawn: ``[R, 1]``, uniform in [0, 1), for XTC.

    Returns:
        ``[R, vocab]``, or None if no row has a filter.
    """
    if not rows.drops_tokens:
        return None
    kept: mx.array | None = None
    bits = bits_of(logits.dtype)
    x = logits.astype(mx.float32)
    top = x.max(axis=-1, keepdims=True)
    probs = exponential(x - top) if rows.top_p is not None or rows.xtc_probability is not None else None
    if rows.top_p is not None:
        assert probs is not None
        kept = x >= largest_above(x, probs, rows.top_p * probs.sum(axis=-1, keepdims=True), bits)
    if rows.log_min_p is not None:
        likely = x >= top + rows.log_min_p
        if rows.min_kept is not None:
            likely = likely | largest(x, rows.min_kept, bits)
        kept = _both(kept, likely)
    if rows.xtc_probability is not None:
        assert probs is not None and rows.xtc_threshold is not None
        if kept is not None:
            probs = probs * kept
        likely = probs > rows.xtc_threshold * probs.sum(axis=-1, keepdims=True)
        left = probs <= mx.where(likely, probs, mx.inf).min(axis=-1, keepdims=True)
        if rows.xtc_special is not None:
            left = left | rows.xtc_special
        kept = _both(kept, left | (drawn > rows.xtc_probability))
    if rows.top_k is not None:
        kept = _both(kept, largest(x, rows.top_k, bits, kept))
    return kept


def _both(first: mx.array | None, second: mx.array) -> mx.array:
    return second if first is None else first & second


_BLOCK = 128  # tokens; about the square root of a vocabulary's size, and a divisor of most sizes

_uniforms = mx.vmap(lambda key: mx.random.uniform(shape=(3,), key=key))


def uniforms(rows: RowParameters, positions: mx.array) -> mx.array:
    """Return three numbers in [0, 1) for the token at ``positions`` ``[R]`` (uint32) of each answer, ``[R, 3]``."""
    if rows.keys is None:
        return mx.random.uniform(shape=(positions.shape[0], 3))
    # The seed is hashed before the position is mixed in, or neighbouring seeds would share keys at other positions.
    mixed = _uniforms(rows.keys)[:, :2].view(mx.uint32)
    own = _uniforms(mx.stack([mixed[:, 0], mixed[:, 1] ^ positions], axis=-1))
    if rows.seeded is None:
        return own
    return mx.where(rows.seeded, own, mx.random.uniform(shape=own.shape))


def draw(
    logits: mx.array, kept: mx.array | None, temperature: mx.array, numbers: mx.array, *, keeps_top: bool
) -> mx.array:
    """Return a token of each row, drawn with probabilities ``softmax(logits / temperature)`` among those kept. A block
    of tokens is drawn first, then one of its tokens: sums stay short, so that float32 does not lose unlikely tokens.

    Args:
        logits: ``[R, vocab]``.
        kept: which tokens may be drawn, ``[R, vocab]``; None: all.
        temperature: ``[R, 1]``.
        numbers: at least two per row in [0, 1), ``[R, 2]``.
        keeps_top: the largest logit of every row is kept.

    Returns:
        ``[R]``, uint32.
    """
    num_rows, vocab = logits.shape
    x = logits.astype(mx.float32)
    top = (x if keeps_top or kept is None else mx.where(kept, x, -mx.inf)).max(axis=-1, keepdims=True)
    weights = exponential(mx.minimum(x - top, 0) / temperature)
    if kept is not None:
        weights = weights * kept
    if vocab % _BLOCK:
        weights = mx.pad(weights, [(0, 0), (0, -vocab % _BLOCK)])
    blocks = weights.reshape(num_rows, -1, _BLOCK)
    block = _place(blocks.sum(axis=-1), numbers[:, :1])
    token = _place(mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0], numbers[:, 1:2])
    return (block * _BLOCK + token)[:, 0].astype(mx.uint32)


def _place(weights: mx.array, numbers: mx.array) -> mx.array:
    """Return the indices ``[R, 1]`` of the weights ``[R, n]`` that the numbers ``[R, 1]`` fall on, none of weight 0."""
    ends = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0)  # a parallel sum may not be monotonic in its last bits
    return mx.argmax((ends > numbers * ends.max(axis=-1, keepdims=True)).astype(mx.int32), axis=-1, keepdims=True)


class KernelRows:
    """Sampling parameters of some rows, for the kernel that chooses all their tokens in one launch. A row's token
    depends only on its logits, key and position, not on the other rows. The kernel does not support XTC, whose tokens
    are not the most likely ones: MLX's operations filter the rows that use it.

    Args:
        rows: in the order of the logits.
        vocab_size: of the model.

    Attributes:
        draws: some rows draw their tokens at random.
        greedy: which rows do not, ``[R, 1]``; None: all rows draw.
    """

    def __init__(self, rows: Sequence[SamplingParams], vocab_size: int) -> None:
        drawn = [_drawn_row(row) for row in rows]
        self.draws = any(row.draws for row in rows)
        self.greedy = None if all(row.draws for row in rows) else mx.array([not row.draws for row in rows])[:, None]
        self._params = mx.array([row.params() for row in drawn], mx.float32)
        # Rows without a seed draw a key from mx.random's state once; after that only their positions advance.
        words = np.array([row.key_words() for row in drawn], np.uint32)
        self._keys = mx.array(words)
        has_none = [row.seed is None for row in rows]
        if any(has_none):
            own = mx.random.uniform(shape=(len(rows), WIDTH)).view(mx.uint32)
            self._keys = mx.where(mx.array(has_none)[:, None], own, self._keys)
        self._filtered: RowParameters | None = None
        if any(map(_needs_operations, rows)):
            filtered = [row if _needs_operations(row) else SamplingParams() for row in rows]
            self._filtered = RowParameters(filtered, vocab_size)

    def draw(self, logits: mx.array, positions: mx.array) -> mx.array:
        """Return a token of each row, ``[R]`` uint32.

        Args:
            logits: ``[R, vocab]``.
            positions: positions of the tokens in their answers, ``[R]`` uint32.
        """
        if self._filtered is not None:
            kept = kept_tokens(logits, self._filtered, uniforms(self._filtered, positions)[:, 2:])
            assert kept is not None
            logits = mx.where(kept, logits, mx.array(-mx.inf, logits.dtype))
        return draw_rows.draw_rows(logits, self._params, self._keys, positions)


def _needs_operations(row: SamplingParams) -> bool:
    """Return whether MLX's operations must filter a row's tokens; they then apply all of its filters."""
    return row.draws and row.uses_xtc


def _drawn_row(row: SamplingParams) -> DrawnRow:
    key = (row.seed or 0) % NUM_SEEDS
    if not row.draws:
        return DrawnRow(0.0)
    if _needs_operations(row):
        return DrawnRow(row.temperature, key=key)
    return DrawnRow(
        row.temperature,
        top_p=row.top_p if row.uses_top_p else DrawnRow(0.0).top_p,
        min_p=row.min_p,
        top_k=row.top_k if row.top_k > 0 else None,
        min_kept=row.min_tokens_to_keep,
        key=key,
    )


MOST_SELECTIONS = 8  # selections of rows whose parameter arrays are cached


class SampledRow(NamedTuple):
    """A row to add.

    Attributes:
        params: its request's parameters.
        tokens: its tokens before the next step's input; only needed for penalties.
        position: position in its answer of the token that the next step chooses.
    """

    params: SamplingParams
    tokens: Sequence[int]
    position: int


class BatchSampler:
    """Samples the rows of a batch, in its order. Arrays of their parameters are made when the rows change; a step
    computes only what some row needs, e.g. just an argmax if all are greedy.

    Logits are ``[B, vocab]``, in any float dtype, and never changed.
    """

    def __init__(self) -> None:
        self.rows: list[SamplingParams] = []
        self._positions: list[int] = []  # of the rows' next tokens, minus the steps so far
        self._num_steps = 0
        self._penalties = Penalties()
        self._is_prepared = True
        self._draws = False  # whether any row draws at random
        # Positions of the last step: its rows, its number, and the array.
        self._counted: tuple[tuple[int, ...], int, mx.array] | None = None
        self._biased: list[int] = []  # indices of rows
        self._bias: tuple[mx.array, mx.array] | None = None  # tokens [R, n] and values
        # Parameter arrays by rows, and by whether the kernel draws.
        self._parameters: dict[tuple[tuple[int, ...], bool], RowParameters | KernelRows] = {}

    # Rows -----------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[SampledRow]) -> None:
        """Append rows."""
        self._penalties.add([(row.params, row.tokens) for row in rows])
        self.rows = [*self.rows, *(row.params for row in rows)]
        self._positions += [row.position - self._num_steps for row in rows]
        self._is_prepared = False

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these, ascending."""
        self._penalties.keep(indices)
        self.rows = [self.rows[index] for index in indices]
        self._positions = [self._positions[index] for index in indices]
        self._is_prepared = False

    def _prepare(self) -> None:
        """Prepare what steps need, once after the rows have changed."""
        self._is_prepared = True
        self._parameters.clear()
        self._draws = any(row.draws for row in self.rows)
        self._counted = None
        self._biased = [index for index, row in enumerate(self.rows) if row.logit_bias]
        self._bias = None
        if self._biased:
            every = [self.rows[index].logit_bias for index in self._biased]
            biases = {id(bias): bias for bias in every}  # several answers to one request share a mapping
            most, place = max(map(len, biases.values())), {name: index for index, name in enumerate(biases)}
            tokens = mx.array([[*bias, *[next(iter(bias))] * (most - len(bias))] for bias in biases.values()])
            values = mx.array([[*bias.values(), *[0.0] * (most - len(bias))] for bias in biases.values()], mx.float32)
            of = mx.array([place[id(bias)] for bias in every])
            self._bias = tokens[of], values[of]

    # Steps ----------------------------------------------------------------------------------------------------

    def penalised(self, logits: mx.array, inputs: mx.array, rows: Sequence[int] | None = None) -> mx.array:
        """Begin a step. Returns its logits ``[T, vocab]`` with biases and penalties, in float32 if any row has some.

        Args:
            logits: of the step.
            inputs: the step's input tokens, ``[T]``; they join the history.
            rows: the row of each of the logits, ascending, if rows have several: those that follow drafts, which
                the row may not keep (see :meth:`note_accepted`). None: one per row.
        """
        if not self._is_prepared:
            self._prepare()
        self._num_steps += 1
        if self._bias is not None:
            tokens, values = self._bias
            at = self._biased if rows is None else [place for place, row in enumerate(rows) if row in self._biased]
            if rows is not None:
                order = {row: index for index, row in enumerate(self._biased)}
                own = mx.array([order[rows[place]] for place in at])
                tokens, values = tokens[own], values[own]
            logits = logits.astype(mx.float32).at[mx.array(at)[:, None], tokens].add(values)
        if not self._penalties.are_on:
            return logits
        if rows is None:
            return self._penalties.step(logits, inputs)
        return self._penalties.step_ahead(logits, inputs, rows)

    def note_accepted(self, counts: Sequence[int]) -> None:
        """Note how many tokens of the last step each row has kept beyond the first, ``[B]``; drop the others."""
        self._positions = [position + count for position, count in zip(self._positions, counts, strict=True)]
        self._penalties.note_accepted(counts)
        self._counted = None

    def _positions_of(self, of: tuple[int, ...], ahead: Sequence[int] | None) -> mx.array:
        """Return the positions of a step's tokens, ``[T]``. From step to step they are advanced on the device: an array
        from the host costs a GPU some 0.3 ms."""
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
        """Return the tokens ``[T]`` uint32 of the step begun by :meth:`penalised`.

        Args:
            logits: ``[T, vocab]``, with the penalties.
            rows: the row of each of the logits; a row may have none or several. None: one per row.
            ahead: offset of each from the row's next position, ``[T]``; None: 0.
        """
        if not self._draws:
            return greedy(logits)
        of = tuple(range(len(self.rows))) if rows is None else tuple(rows)
        is_supported = draw_rows.is_supported(logits)
        params = self._parameters.get((of, is_supported))
        if params is None:
            make = KernelRows if is_supported else RowParameters
            params = make([self.rows[row] for row in of], logits.shape[-1])
            if len(self._parameters) >= MOST_SELECTIONS:
                self._parameters.clear()
            self._parameters[of, is_supported] = params
        if not params.draws:
            return greedy(logits)
        positions = self._positions_of(of, ahead)
        if isinstance(params, KernelRows):
            drawn = params.draw(logits, positions)
            if logits.dtype == mx.float32:  # the kernel takes the largest logit in greedy rows
                return drawn
        else:
            numbers = uniforms(params, positions)
            kept = kept_tokens(logits, params, numbers[:, 2:])
            drawn = draw(logits, kept, params.temperature, numbers, keeps_top=params.xtc_probability is None)
        if params.greedy is None:
            return drawn
        return mx.where(params.greedy[:, 0], greedy(logits), drawn)


def greedy(logits: mx.array) -> mx.array:
    """Return the most likely token of each row ``[T, vocab]``.

    In 16 bits, tokens with different logits can have the same log-probability in mlx-lm, which takes the first of them
    (docs/adr/0006).
    """
    return mx.argmax(logits if logits.dtype == mx.float32 else normalised(logits), axis=-1)


@functools.cache
def _one() -> mx.array:
    one = mx.array(1, mx.uint32)
    mx.eval(one)
    return one
