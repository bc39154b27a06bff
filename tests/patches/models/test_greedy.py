"""Greedy tokens: the ones that mlx-lm chooses for the same logits, also where rounding makes several equal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.step_logits import StepLogits, normalised
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


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_the_same_logits_give_mlx_lms_token(dtype: mx.Dtype, spread: float) -> None:
    mx.random.seed(0)
    logits = (mx.random.normal((256, 8000)) * spread).astype(dtype)
    expected = greedy_sampler(normalised(logits))
    step = StepLogits(logits)
    assert mx.array_equal(mx.argmax(step.ranking(), axis=-1), expected)
    one = step.kept(7)
    assert mx.array_equal(one.row(0), normalised(logits)[7]) and mx.array_equal(one.ranking()[0], step.ranking()[7])
    if dtype == mx.bfloat16 and spread < 3:
        assert not mx.array_equal(mx.argmax(logits, axis=-1), expected), "nothing has been rounded here"


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_row_alone_in_a_batch_gives_the_tokens_of_a_solo_run(dtype: mx.Dtype) -> None:
    """Of stock mlx-lm and under the patches, bit for bit. Random models have many words that are nearly even."""
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
        assert [response.token for response in responses] == stock
        assert mx.array_equal(mx.stack([r.logprobs for r in responses]).astype(mx.float32), mx.array(logprobs))
        mlx_paged.remove_patches()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_greedy_rows_beside_sampled_ones_choose_alike(dtype: mx.Dtype) -> None:
    model = build("llama", vocab_size=8000)
    model.set_dtype(dtype)
    prompts = [prompt_of(12, seed=seed).tolist() for seed in range(3)]
    mlx_paged.apply_patches(PagedConfig())
    alike = batch_tokens(model, prompts)

    def other(logprobs: mx.array) -> mx.array:
        return mx.argmax(logprobs, axis=-1)

    assert batch_tokens(model, prompts, samplers=[greedy_sampler, other, greedy_sampler]) == alike
    assert batch_tokens(model, prompts, samplers=[other] * 3) == alike
