"""Greedy tokens equal mlx-lm's, also if rounding makes several equally likely."""

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.request import normalised
from mlx_paged.engine.sampling.batch_sampler import BatchSampler, SampledRow
from mlx_paged.engine.sampling.params import SamplingParams
from tests.support.cases import crossed, quick, slow
from tests.support.models.batch_runs import generator
from tests.support.models.builders import build, greedy, prompt_of

NEW = 24


@pytest.mark.parametrize(
    ("dtype", "spread"), quick(crossed([mx.float32, mx.bfloat16, mx.float16], [0.3, 1.0, 3.0]), (mx.float32, 0.3),
    (mx.bfloat16, 1.0), (mx.float16, 3.0))
)  # fmt: skip
def test_greedy_takes_the_first_of_equal_largest_log_probabilities(dtype: mx.Dtype, spread: float) -> None:
    """In 16 bits, different logits may round to equal log probabilities. In float32 none of these do, and nothing is
    normalised."""
    mx.random.seed(0)
    logits = (mx.random.normal((256, 8000)) * spread).astype(dtype)
    sampler = BatchSampler()
    sampler.add([SampledRow(SamplingParams(), (), 0)] * 256)
    chosen = sampler.sample(sampler.penalised(logits, mx.zeros((256,), mx.uint32)))
    assert mx.array_equal(chosen, greedy_sampler(normalised(logits)))
    if dtype == mx.bfloat16 and spread < 3:
        assert not mx.array_equal(chosen, mx.argmax(logits, axis=-1)), "rounding made no difference here"


@pytest.mark.parametrize("dtype", [mx.bfloat16, *slow(mx.float16)])
def test_a_row_alone_in_a_batch_gives_the_tokens_of_a_solo_run(dtype: mx.Dtype) -> None:
    """Equal to stock mlx-lm bit for bit. Random models have many tokens that are nearly tied."""
    for seed in range(4):
        model = build("llama", seed=seed, vocab_size=8000)
        model.set_dtype(dtype)
        prompt = prompt_of(12, seed=seed)
        stock, logprobs = greedy(model, prompt, NEW)
        mlx_paged.apply_patches(PagedConfig())
        assert greedy(model, prompt, NEW)[0] == stock
        gen = generator(model)
        gen.insert([prompt.tolist()], [NEW])
        responses = [response for found in iter(gen.next_generated, []) for response in found]
        assert [response.token for response in responses] == stock
        for response, theirs in zip(responses, mx.array(logprobs), strict=True):
            assert mx.array_equal(response.logprobs.astype(mx.float32), theirs)
        mlx_paged.remove_patches()
