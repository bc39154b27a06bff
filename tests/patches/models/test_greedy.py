"""Greedy tokens: the largest logits, which are the ones that mlx-lm chooses but where rounding makes several equal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.sampling.batch_sampler import BatchSampler, SampledRow
from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.engine.step_logits import normalised
from tests.support.models.batch_runs import generator
from tests.support.models.builders import build, greedy, prompt_of

NEW = 24


def batch_tokens(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    gen = generator(model)
    uids = gen.insert(prompts, [NEW] * len(prompts), **options)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := gen.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    return [tokens[uid] for uid in uids]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_the_largest_logit_is_chosen(dtype: mx.Dtype, spread: float) -> None:
    """mlx-lm takes the first of the largest log-probabilities, rounded to the logits' dtype: in 16 bits, logits
    that differ may have the same. In float32 it is the same word."""
    mx.random.seed(0)
    logits = (mx.random.normal((256, 8000)) * spread).astype(dtype)
    sampler = BatchSampler()
    sampler.add([SampledRow(SamplingParams(), (), 0)] * 256)
    chosen = sampler.sample(sampler.penalised(logits, mx.zeros((256,), mx.uint32)))
    assert mx.array_equal(chosen, mx.argmax(logits.astype(mx.float32), axis=-1))
    logprobs = normalised(logits)
    theirs = greedy_sampler(logprobs)
    if dtype == mx.float32:
        assert mx.array_equal(chosen, theirs)
    assert is_tie(logprobs, chosen, theirs)
    if dtype == mx.bfloat16 and spread < 3:
        assert not mx.array_equal(chosen, theirs), "nothing has been rounded here"


def is_tie(logprobs: mx.array, ours: mx.array, theirs: mx.array) -> bool:
    """Whether in each row the two tokens have the same log-probability, as it is rounded."""
    both = mx.take_along_axis(logprobs, mx.stack([ours, theirs], axis=-1), axis=-1)
    return bool(mx.array_equal(both[:, 0], both[:, 1]))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_row_alone_in_a_batch_gives_the_tokens_of_a_solo_run(dtype: mx.Dtype) -> None:
    """Of stock mlx-lm and under the patches, bit for bit, until mlx-lm's rounded log-probabilities are a tie. Random
    models have many words that are nearly even."""
    num_ties = 0
    for seed in range(4):
        model = build("llama", seed=seed, vocab_size=8000)
        model.set_dtype(dtype)
        prompt = prompt_of(12, seed=seed)
        stock, logprobs = greedy(model, prompt, NEW)
        mlx_paged.apply_patches(PagedConfig())
        assert greedy(model, prompt, NEW)[0] == stock
        gen = generator(model)
        gen.insert([prompt.tolist()], [NEW])
        responses: list[Any] = []
        while found := gen.next_generated():
            responses += found
        for response, token, theirs in zip(responses, stock, mx.array(logprobs), strict=True):
            assert mx.array_equal(response.logprobs.astype(mx.float32), theirs)
            if response.token != token:
                assert theirs[response.token] == theirs[token] == theirs.max(), "not a tie"
                num_ties += 1
                break  # another answer from here on
        mlx_paged.remove_patches()
    assert num_ties < 4


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_greedy_rows_beside_sampled_ones_choose_alike(dtype: mx.Dtype) -> None:
    model = build("llama", vocab_size=8000)
    model.set_dtype(dtype)
    prompts = [prompt_of(12, seed=seed).tolist() for seed in range(3)]
    mlx_paged.apply_patches(PagedConfig())
    alike = batch_tokens(model, prompts)

    def other(logprobs: mx.array) -> mx.array:
        return mx.argmax(logprobs, axis=-1)

    beside = batch_tokens(model, prompts, samplers=[greedy_sampler, other, greedy_sampler])
    assert (beside[0], beside[2]) == (alike[0], alike[2])
    if dtype == mx.float32:  # a sampler of the caller's own gets log-probabilities, rounded in 16 bits
        assert beside == alike
        assert batch_tokens(model, prompts, samplers=[other] * 3) == alike
