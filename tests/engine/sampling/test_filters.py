"""Which tokens are kept, and how tokens are drawn, against the formulas in NumPy."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from mlx_paged.engine.sampling.batch_sampler import (
    BatchSampler,
    RowParameters,
    SampledRow,
    bits_of,
    draw,
    kept_tokens,
    largest,
    largest_above,
)
from mlx_paged.engine.sampling.params import SamplingParams
from tests.support import sampling_model
from tests.support.cases import crossed, quick

VOCAB = 300
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def logits_of(rows: int, seed: int, dtype: mx.Dtype = mx.float32, *, spread: float = 3.0) -> mx.array:
    return (mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * spread).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kth_largest_value_is_found_by_its_bits(dtype: mx.Dtype) -> None:
    x = logits_of(6, 0, dtype).astype(mx.float32)
    x[0, 3], x[1, :290], x[2] = -math.inf, -math.inf, x[2] * 0 + 1.5
    x[3] = mx.abs(x[3])
    x[4] = -mx.abs(x[4])
    x[5, 0], x[5, 1] = 0.0, -0.0
    counts = mx.array([[VOCAB], [50], [1], [7], [299], [100]])
    found = np.array(largest_above(x, None, counts, bits_of(dtype)))
    chosen = np.array(largest(x, counts, bits_of(dtype)))
    for row in range(6):
        values, count = np.array(x[row]), counts[row].item()
        least = np.sort(values)[::-1][count - 1]
        assert ((values >= found[row]) == (values >= least)).all()
        assert set(np.flatnonzero(chosen[row])) == set(np.argsort(-values, kind="stable")[:count])


params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    min_tokens_to_keep=st.sampled_from([1, 3, 40]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.3]),
    xtc_special_tokens=st.sampled_from([(), (0, 5, 17)]),
    top_k=st.sampled_from([0, 1, 2, 30, VOCAB - 1]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(params_of, min_size=1, max_size=5),
    st.sampled_from(DTYPES),
    st.integers(0, 20),
    st.sampled_from([0.5, 4.0]),
)
def test_every_row_keeps_the_tokens_of_its_own_parameters(
    rows: list[SamplingParams], dtype: mx.Dtype, seed: int, spread: float
) -> None:
    logits = logits_of(len(rows), seed, dtype, spread=spread)
    before = np.array(logits.astype(mx.float32))
    kept = kept_tokens(logits, RowParameters(rows, VOCAB), mx.full((len(rows), 1), 0.5))
    for index, row in enumerate(rows):
        if not row.draws:
            continue
        x = before[index].astype(np.float64)
        found = np.ones(VOCAB, bool) if kept is None else np.array(kept[index])
        exact = sampling_model.likely_words(x, row, xtc=True)
        if (found == exact).all():
            continue
        # If probabilities reach the limit within rounding, or one is at a threshold, either result is right.
        near = [sampling_model.likely_words(x, row, xtc=True, slack=slack) for slack in (-1e-5, 1e-5)]
        assert (near[0] != near[1]).any(), "no probability was near a limit"
        assert any((found == one).all() for one in near)
    np.testing.assert_array_equal(np.array(logits.astype(mx.float32)), before)


@pytest.mark.parametrize(
    ("dtype", "top_p"), quick(crossed([mx.float32, mx.bfloat16], [0.1, 0.5, 0.9, 0.99]), (mx.bfloat16, 0.5),
    (mx.float32, 0.99))
)  # fmt: skip
def test_top_p_keeps_the_tokens_that_mlx_lm_keeps(dtype: mx.Dtype, top_p: float) -> None:
    """Ties at the limit are kept together."""
    logits = mx.round(logits_of(64, 3, mx.float32) * 4) / 4
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    expected = sample_utils.apply_top_p(logprobs, top_p) > -math.inf
    kept = kept_tokens(logits.astype(dtype), RowParameters([SamplingParams(1.0, top_p)] * 64, VOCAB), mx.zeros((64, 1)))
    assert mx.array_equal(kept, expected)


def test_masked_tokens_are_never_drawn() -> None:
    logits = mx.full((4, VOCAB), -math.inf)
    for row, words in enumerate(([0], [VOCAB - 1], [5, 200], [127, 128])):
        logits[row, words] = mx.array([float(index) for index in range(len(words))])
    for params in (SamplingParams(1.0), SamplingParams(0.7, top_p=0.9, top_k=50), SamplingParams(5.0, min_p=0.01)):
        seen: list[set[int]] = [set() for _ in range(4)]
        for seed in range(60):
            numbers = mx.random.uniform(shape=(4, 3), key=mx.random.key(seed))
            numbers[:2] = mx.array([[0.0] * 3, [1 - 2**-24] * 3])
            rows = RowParameters([params] * 4, VOCAB)
            kept = kept_tokens(logits, rows, numbers[:, 2:])
            for row, token in enumerate(draw(logits, kept, rows.temperature, numbers, keeps_top=True).tolist()):
                seen[row].add(token)
        assert seen == [{0}, {VOCAB - 1}, {5, 200}, {127, 128}]


CHI_SQUARE = [
    SamplingParams(1.0),
    SamplingParams(0.6, top_p=0.8),
    SamplingParams(1.5, top_k=12),
    SamplingParams(1.0, min_p=0.1, min_tokens_to_keep=3),
    SamplingParams(1.3, top_p=0.9, min_p=0.02, top_k=30),
    SamplingParams(1.0, xtc_probability=0.5, xtc_threshold=0.05, xtc_special_tokens=(1,)),
]


@pytest.mark.parametrize("params", quick(CHI_SQUARE, CHI_SQUARE[0], CHI_SQUARE[3]), ids=str)
def test_tokens_are_drawn_with_their_probabilities(params: SamplingParams) -> None:
    num_rows, logits = 400, logits_of(1, 11, spread=1.5)
    sampler = BatchSampler()
    sampler.add([SampledRow(params, (), 0)] * num_rows)
    mx.random.seed(5)
    batch, found = mx.broadcast_to(logits, (num_rows, VOCAB)), []
    for _ in range(100):
        sampler.penalised(batch, mx.zeros((num_rows,), mx.uint32))
        found.append(np.array(sampler.sample(batch)))
    sampling_model.assert_drawn_as(np.concatenate(found), np.array(logits[0]).astype(np.float64), params, 6)
