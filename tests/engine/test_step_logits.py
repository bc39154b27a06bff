"""StepLogits: log-probabilities on demand, of all rows and of one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.step_logits import StepLogits


def logits_of(dtype: mx.Dtype) -> mx.array:
    return (mx.random.normal((4, 50), key=mx.random.key(0)) * 5).astype(dtype)


def test_logprobs_are_normalised_logits_whoever_asks_first() -> None:
    logits = logits_of(mx.float32)
    expected = np.array(logits) - np.log(np.exp(np.array(logits)).sum(axis=-1, keepdims=True))
    for asks_for_all in (False, True):
        step = StepLogits(logits)
        if asks_for_all:
            np.testing.assert_allclose(np.array(step.logprobs()), expected, atol=1e-5)
        for index in range(4):
            np.testing.assert_allclose(np.array(step.row(index)), expected[index], atol=1e-5)
        np.testing.assert_allclose(np.array(step.logprobs()), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_first_of_a_ranking_is_the_first_of_the_logprobs(dtype: mx.Dtype) -> None:
    """In 16 bits, logits that differ may be the same log-probability: the first of these counts."""
    logits = mx.ones((1, 50), dtype)
    logits[0, 7] = 1 + mx.finfo(dtype).eps
    assert mx.argmax(logits).item() == 7
    assert mx.argmax(StepLogits(logits).logprobs()).item() == 0
    assert mx.argmax(StepLogits(logits).ranking()).item() == 0


@pytest.mark.parametrize("is_normalised", [False, True])
def test_a_kept_row_is_as_it_was_and_has_no_others(is_normalised: bool) -> None:
    step = StepLogits(logits_of(mx.float32))
    if is_normalised:
        step.logprobs()
    kept = step.kept(2)
    assert kept.logprobs().shape == (1, 50)
    np.testing.assert_array_equal(np.array(kept.row(0)), np.array(step.row(2)))
