"""Penalties of rows that join, leave and come back, against a count of their histories in NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from mlx_paged.engine.sampling.batch_sampler import BatchSampler, SampledRow
from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.errors import ConfigError
from tests.support import sampling_model

VOCAB = 24

sizes = st.sampled_from([None, 0, 1, 2, 5, 20])
params_of = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([None, 0.0, 0.5, 1.3]),
    repetition_context_size=sizes,
    presence_penalty=st.sampled_from([None, 0.7, -0.4]),
    presence_context_size=sizes,
    frequency_penalty=st.sampled_from([None, 0.25, -1.0]),
    frequency_context_size=sizes,
    logit_bias=st.sampled_from([{}, {3: 2.5}, {0: -100.0, 7: 1.0}]),
)
histories = st.lists(st.integers(0, VOCAB - 1), max_size=12)


class Rows:
    """Rows of a sampler, with the tokens that they have seen."""

    def __init__(self) -> None:
        self.sampler = BatchSampler()
        self.rows: list[tuple[SamplingParams, list[int]]] = []

    def add(self, rows: list[tuple[SamplingParams, list[int]]]) -> None:
        self.sampler.add([SampledRow(params, list(history), 0) for params, history in rows])
        self.rows += [(params, list(history)) for params, history in rows]

    def keep(self, indices: list[int]) -> None:
        self.sampler.keep(indices)
        self.rows = [self.rows[index] for index in indices]

    def step(self, rng: np.random.Generator, dtype: mx.Dtype = mx.float32) -> None:
        inputs = [int(token) for token in rng.integers(0, VOCAB, len(self.rows))]
        logits = mx.array(rng.normal(size=(len(self.rows), VOCAB)) * 3).astype(dtype)
        before = np.array(logits.astype(mx.float32))
        for (_, history), token in zip(self.rows, inputs, strict=True):
            history.append(token)
        found = np.array(self.sampler.penalised(logits, mx.array(inputs, mx.uint32)).astype(mx.float32))
        for index, (params, history) in enumerate(self.rows):
            expected = sampling_model.penalised(before[index], params, history)
            np.testing.assert_allclose(found[index], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.array(logits.astype(mx.float32)), before, "the logits that were given")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(params_of, histories), min_size=1, max_size=4),
    st.lists(st.one_of(st.tuples(params_of, histories), st.integers(0, 5), st.none()), max_size=8),
    st.integers(0, 1000),
    st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_penalties_match_the_histories_as_rows_join_and_leave(
    first: list[tuple[SamplingParams, list[int]]],
    events: list[tuple[SamplingParams, list[int]] | int | None],
    seed: int,
    dtype: mx.Dtype,
) -> None:
    """A tuple is a row that joins. A number is a row that leaves and returns with its history at the next event, as
    after a preemption."""
    rng = np.random.default_rng(seed)
    rows, away = Rows(), []
    rows.add(first)
    for event in events:
        back, away = away, []
        if isinstance(event, tuple):
            rows.add([event])
        elif isinstance(event, int) and event < len(rows.rows) and len(rows.rows) > 1:
            away = [rows.rows[event]]
            rows.keep([index for index in range(len(rows.rows)) if index != event])
        rows.add(back)
        for _ in range(int(rng.integers(1, 5))):
            rows.step(rng, dtype)


def test_long_histories_grow_the_capacity_and_windows_do_not() -> None:
    rng = np.random.default_rng(0)
    rows = Rows()
    history = [int(token) for token in rng.integers(0, VOCAB, 500)]
    whole = SamplingParams(repetition_penalty=1.2, repetition_context_size=None, frequency_penalty=0.1)
    window = SamplingParams(presence_penalty=1.0, presence_context_size=7)
    rows.add([(whole, history), (window, history)])
    for _ in range(280):
        rows.step(rng)
    rows.keep([1])
    for _ in range(260):
        rows.step(rng)
    assert rows.sampler._penalties.capacity <= 256


@pytest.mark.parametrize("size", [0, 1, 6, 20])
def test_penalties_equal_mlx_lms_processors_in_float32(size: int) -> None:
    """A context size of 0 means all tokens, as in mlx-lm."""
    rng = np.random.default_rng(1)
    options = dict(
        zip(("repetition_context_size", "presence_context_size", "frequency_context_size"), [size] * 3, strict=True)
    )
    options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {3: 2.0}}
    history = [int(token) for token in rng.integers(0, VOCAB, 11)]
    logits = mx.array(rng.normal(size=(1, VOCAB)).astype(np.float32) * 3)
    sampler = BatchSampler()
    sampler.add([SampledRow(SamplingParams(**options), history[:-1], 0)])
    found = sampler.penalised(logits, mx.array(history[-1:], mx.uint32))
    expected = mx.array(logits)
    for processor in make_logits_processors(**options):
        expected = processor(mx.array(history), expected)
    assert mx.array_equal(found, expected)


@pytest.mark.parametrize("context", [3, None])
def test_drafts_are_penalised_like_tokens_one_by_one(context: int | None) -> None:
    rng = np.random.default_rng(2)
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, repetition_context_size=context)
    given = [(params, [1, 2, 3]), (SamplingParams(), []), (SamplingParams(presence_penalty=0.5), [4])]
    counts = [3, 1, 2]
    ahead, single = Rows(), Rows()
    ahead.add(given)
    single.add(given)
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    for accepted in ([0, 0, 0], [2, 0, 1], [1, 0, 1], [1, 0, 0]) * 40:
        inputs = rng.integers(0, VOCAB, len(owners)).tolist()
        logits = rng.normal(size=(len(owners), VOCAB)).astype(np.float32)
        found = np.array(ahead.sampler.penalised(mx.array(logits), mx.array(inputs, mx.uint32), owners))
        for place, row in enumerate(owners):
            first = owners.index(row)
            history = [*single.rows[row][1], *inputs[first : place + 1]]
            expected = sampling_model.penalised(logits[place], single.rows[row][0], history)
            np.testing.assert_allclose(found[place], expected, rtol=1e-5, atol=1e-5)
        ahead.sampler.note_accepted(accepted)
        for row, count in enumerate(accepted):
            first = owners.index(row)
            single.rows[row][1].extend(inputs[first : first + count + 1])


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"min_p": 1.5},
        {"min_tokens_to_keep": 0},
        {"top_k": 2.5},
        {"xtc_probability": 1.5},
        {"xtc_probability": 0.5, "xtc_threshold": 0.7},
        {"repetition_penalty": -1.0},
        {"presence_context_size": -3},
        {"seed": "1"},
    ],
    ids=str,
)
def test_invalid_sampling_parameters_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(field))):
        SamplingParams(**field)  # type: ignore[arg-type]


def test_parameters_beyond_the_vocabulary_are_refused() -> None:
    for params in (
        SamplingParams(1.0, top_k=8),
        SamplingParams(logit_bias={8: 1.0}),
        SamplingParams(logit_bias={-1: 1.0}),
    ):
        with pytest.raises(ConfigError):
            params.check_vocabulary(8)
    SamplingParams(0.0, top_k=8).check_vocabulary(8)
