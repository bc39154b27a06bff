"""StepLogits: log-probabilities on demand, of all rows and of one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.step_logits import StepLogits, TokenLogits


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


@pytest.mark.parametrize("is_normalised", [False, True])
def test_a_kept_row_is_as_it_was_and_has_no_others(is_normalised: bool) -> None:
    step = StepLogits(logits_of(mx.float32))
    if is_normalised:
        step.logprobs()
    kept = step.kept(2)
    assert kept.logprobs().shape == (1, 50)
    np.testing.assert_array_equal(np.array(kept.row(0)), np.array(step.row(2)))


def test_a_token_that_is_kept_holds_its_own_row_only() -> None:
    mx.random.seed(0)
    step = StepLogits(mx.random.normal((64, 100_000)))
    tokens = [TokenLogits(step, index) for index in (3, 60)]
    expected = [np.array(token.logprobs()) for token in tokens]
    del step
    before = mx.get_active_memory()
    for token in tokens:
        token.detach()
        token.detach()
    mx.synchronize()
    assert mx.get_active_memory() < before - 60 * 400_000
    for token, logprobs in zip(tokens, expected, strict=True):
        np.testing.assert_array_equal(np.array(token.logprobs()), logprobs)
