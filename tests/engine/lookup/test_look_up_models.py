"""Look-up over real models and every form of storage gives the tokens and probabilities of stock mlx-lm."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import make_logits_processors

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.request import RequestOptions
from mlx_paged.engine.sampling.params import SamplingParams
from scripts.support import model_configs
from tests.fuzz.cases import PACKING_HYBRIDS
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import FakeKernels
from tests.support.models.batch_runs import Outcome, collect, generator, run_all, run_requests
from tests.support.models.builders import KINDS, VOCAB, build, greedy, prompt_of
from tests.support.models.compiled_steps import compiled_steps_taken
from tests.support.models.oracle import Oracle, oracles
from tests.support.models.packs import assert_alike
from tests.support.models.recurrent import build_recurrent

MOST, TOKENS = 4, 22
PAGED_HYBRIDS = tuple(name for name in PACKING_HYBRIDS if name not in ("mamba", "mamba2", "rwkv7"))
LENGTHS = (3, 37, 12)  # shorter than the windows; longer with the answer


@pytest.fixture
def oracle() -> Iterator[type[Oracle]]:
    with oracles(VOCAB) as fresh:
        yield fresh


@functools.cache
def model_of(kind: str) -> Any:
    return build(kind, head_dim=64)


@functools.cache
def solos(kind: str) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Return prompts and the answers of stock mlx-lm."""
    assert not mlx_paged.is_applied()
    prompts = [prompt_of(length, seed=length).tolist() for length in LENGTHS]
    return [(p, *greedy(model_of(kind), mx.array(p, mx.uint32), TOKENS + MOST)) for p in prompts]


def insert(gen: Any, prompts: Sequence[list[int]], num_tokens: int, lookup: int = MOST, **options: Any) -> Any:
    """Queue requests that look tokens up. Returns their outcomes by uid."""
    count = len(prompts)
    asked = [RequestOptions(prompt_lookup=lookup)] * count
    uids = gen.insert_segments([[p] for p in prompts], [num_tokens] * count, options=asked, **options)
    return {uid: Outcome() for uid in uids}


def run_alike(kind: str, config: PagedConfig, oracle: type[Oracle]) -> Any:
    """Run the kind's prompts, which must give stock's tokens and log-probabilities. Returns the pool's statistics."""
    expected = solos(kind)
    oracle.answers.update({tuple(prompt): tokens for prompt, tokens, _ in expected})
    mlx_paged.apply_patches(config)
    gen = generator(model_of(kind))
    outcomes = insert(gen, [prompt for prompt, _, _ in expected], TOKENS)
    run_all(gen, outcomes)
    assert_alike(outcomes, [(tokens[:TOKENS], logprobs[:TOKENS]) for _, tokens, logprobs in expected])
    assert [each.all_tokens for each in outcomes.values()] == [p + tokens[:TOKENS] for p, tokens, _ in expected]
    pool = mlx_paged.pool_of(model_of(kind))
    pool.check_integrity()
    stats = pool.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens and stats.live_blocks == 0
    return stats


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize("kind", quick(KINDS, "qwen3"))
def test_functional_pools_give_the_tokens_of_mlx_lm(kind: str, oracle: type[Oracle]) -> None:
    solos(kind)
    run_alike(kind, PagedConfig(block_size=8), oracle)


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize("kind", quick(KINDS, "llama", "qwen3"))
def test_in_place_pools_give_the_tokens_of_mlx_lm(kind: str, kernels: FakeKernels | None, oracle: type[Oracle]) -> None:
    solos(kind)
    with compiled_steps_taken(patience=1) as taken:
        run_alike(kind, PagedConfig(block_size=8, kernel="on"), oracle)
    paths = {choice.path for choice in mlx_paged.dispatch_counts()}
    # On CUDA prompts are packs, and those in f32 go through MLX's attention, sequence by sequence.
    assert paths <= {"kernel", "prefill"} | ({"apart"} if kernels is None else set()), "nothing is gathered"
    assert taken.count_of("pack") > 0


@functools.cache
def hybrid_solos(name: str) -> tuple[Any, list[list[int]], list[tuple[list[int], np.ndarray]]]:
    """Return a model with states, prompts and the answers of stock mlx-lm."""
    assert not mlx_paged.is_applied()
    model, vocab = model_configs.build(name), model_configs.VOCAB
    prompts = [(prompt_of(length, seed=length) % vocab).tolist() for length in LENGTHS]
    return model, prompts, [greedy(model, mx.array(prompt, mx.uint32), TOKENS + MOST) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "stops"), quick(crossed(PAGED_HYBRIDS, [False, True]), ("qwen3_next", True), ("falcon_h1", False))
)
def test_states_end_at_the_last_token_of_the_answer(name: str, stops: bool) -> None:
    """An answer that ends at a stop token leaves the state after that token, even if later drafts were right."""
    model, prompts, expected = hybrid_solos(name)
    ends = [tokens.index(tokens[11]) + 1 if stops else TOKENS for tokens, _ in expected]
    continued = [p + tokens[:end] + [3, 1] for p, (tokens, _), end in zip(prompts, expected, ends, strict=True)]
    later = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in continued]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    with oracles(model_configs.VOCAB) as oracle:
        oracle.answers.update({tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)})
        gen = generator(model)
        options = {"stop_sequences": [StopSequences([[tokens[11]]]) for tokens, _ in expected]} if stops else {}
        outcomes, caches = insert(gen, prompts, TOKENS, **options), {}
        while any(told := gen.next()):
            collect(outcomes, *told)
            caches.update({each.uid: each.prompt_cache for each in told[1] if each.finish_reason})
    assert_alike(
        outcomes.values(), [(t[:end], logprobs[:end]) for (t, logprobs), end in zip(expected, ends, strict=True)]
    )
    stats = mlx_paged.pool_of(model).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    # The caches of the answers continue as if nothing had been drafted.
    gen = generator(model)
    given = {"caches": [caches[uid] for uid in outcomes], "all_tokens": [each.all_tokens for each in outcomes.values()]}
    assert_alike(run_requests(gen, [[3, 1]] * len(prompts), [6] * len(prompts), **given), later)


def test_look_up_has_no_effect_on_models_without_paged_layers() -> None:
    model = build_recurrent("mamba")
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [3, 3, 3, 3]]
    expected = [greedy(model, mx.array(prompt, mx.uint32), 10)[0] for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model)
    with pytest.warns(mlx_paged.NotPagedWarning, match="prompt_lookup has no effect"):
        outcomes = insert(gen, prompts, 10)
    run_all(gen, outcomes)
    assert [outcome.tokens for outcome in outcomes.values()] == expected


def test_requests_default_to_the_configured_prompt_lookup() -> None:
    model = model_of("llama")
    mlx_paged.apply_patches(PagedConfig(block_size=8, prompt_lookup=3))
    gen = generator(model)
    assert gen.prompt_lookup == 3
    (uid,) = gen.insert([[1, 2, 3]], [4])
    (other,) = insert(gen, [[1, 2, 3]], 4, 0)
    requests = gen._engine.requests
    assert (requests[uid].options.prompt_lookup, requests[other].options.prompt_lookup) == (3, 0)
    run_all(gen, {uid: Outcome(), other: Outcome()})


def test_penalties_apply_to_looked_up_tokens(oracle: type[Oracle]) -> None:
    """Penalties are given as numbers, as by the server; each position counts the drafts before it."""
    model, prompt = model_of("llama"), prompt_of(12, seed=3).tolist()
    processors = make_logits_processors(None, repetition_penalty=1.5)
    expected, _ = greedy(model, mx.array(prompt, mx.uint32), TOKENS + MOST, logits_processors=processors)
    oracle.answers[tuple(prompt)] = expected
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    asked = RequestOptions(prompt_lookup=MOST, sampling=SamplingParams(repetition_penalty=1.5))
    (uid,) = (gen := generator(model)).insert_segments([[prompt]], [TOKENS], options=[asked])
    outcomes = {uid: Outcome()}
    run_all(gen, outcomes)
    assert outcomes[uid].tokens == expected[:TOKENS]
    assert mlx_paged.pool_of(model).stats().accepted_tokens > 4
