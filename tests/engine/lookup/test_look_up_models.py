"""Look-up over real models and every form of storage gives the tokens and probabilities of stock mlx-lm."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.batch import Batch
from mlx_paged.drafts import look_up
from mlx_paged.drafts.look_up import Drafts
from mlx_paged.engine import compiled_step
from mlx_paged.engine.request import RequestOptions
from mlx_paged.engine.sampling.params import SamplingParams
from scripts.support import model_configs
from tests.fuzz.cases import PACKING_HYBRIDS
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.fake_kernels import FakeKernels
from tests.support.models.batch_runs import Outcome, collect, generator, run_all
from tests.support.models.builders import KINDS, VOCAB, build, greedy, prompt_of
from tests.support.models.drafting import in_every_step
from tests.support.models.oracle import Oracle, oracles
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
    assert not mlx_paged.patches.is_applied()
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
    for outcome, (prompt, tokens, logprobs) in zip(outcomes.values(), expected, strict=True):
        assert outcome.tokens == tokens[:TOKENS] and outcome.all_tokens == prompt + outcome.tokens
        assert np.abs(np.stack(outcome.logprobs) - logprobs[:TOKENS]).max() < 1e-4
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
def test_in_place_pools_give_the_tokens_of_mlx_lm(
    kind: str, kernels: FakeKernels | None, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    solos(kind)
    compiled: Counter[str] = Counter()
    original = compiled_step.CompiledStep._compiled

    def count(self: Any, rows: Any, *rest: Any) -> Any:
        logits = original(self, rows, *rest)
        compiled["pack" if isinstance(rows, Batch) and rows.is_pack else "rows"] += logits is not None
        return logits

    monkeypatch.setattr(compiled_step.CompiledStep, "_compiled", count)
    monkeypatch.setattr(compiled_step, "PATIENCE", 1)
    run_alike(kind, PagedConfig(block_size=8, kernel="on"), oracle)
    paths = {choice.path for choice in mlx_paged.dispatch_counts()}
    # On CUDA prompts are packs, and those in f32 go through MLX's attention, sequence by sequence.
    assert paths <= {"kernel", "prefill"} | ({"apart"} if kernels is None else set()), "nothing is gathered"
    assert compiled["pack"] > 0


@pytest.mark.parametrize("options", [{}, *slow({"kernel": "on"})], ids=["functional", "in place"])
def test_quantised_pages_give_the_same_tokens_with_look_up(
    options: dict[str, Any], oracle: type[Oracle], request: pytest.FixtureRequest
) -> None:
    """Compare with the same batch without look-up: the contents of pages depend on the token only."""
    if options:
        request.getfixturevalue("fake")
    config = PagedConfig(block_size=8, kv_bits=8, kv_group_size=32, **options)
    prompts = [prompt for prompt, _, _ in solos("llama")]
    mlx_paged.apply_patches(config)
    model = model_of("llama")
    plain = insert(gen := generator(model), prompts, TOKENS + MOST, 0)
    run_all(gen, plain)
    for prompt, outcome in zip(prompts, plain.values(), strict=True):
        oracle.answers[tuple(prompt)] = outcome.tokens
    quantized = mlx_paged.pool_of(model).stats().quantized_tokens
    outcomes = insert(gen := generator(model), prompts, TOKENS)
    run_all(gen, outcomes)
    for outcome, expected in zip(outcomes.values(), plain.values(), strict=True):
        assert outcome.tokens == expected.tokens[:TOKENS]
        assert np.abs(np.stack(outcome.logprobs) - np.stack(expected.logprobs)[:TOKENS]).max() < 1e-4
    stats = mlx_paged.pool_of(model).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.quantized_tokens > quantized
    mlx_paged.pool_of(model).check_integrity()


@pytest.fixture
def fake() -> Iterator[FakeKernels]:
    from tests.support.kernels.fake_kernels import fake_kernels

    with fake_kernels() as kernels:
        yield kernels


@pytest.mark.parametrize("name", ["gemma2", *slow("phi3", "gpt_oss")])
def test_models_without_an_adapter_give_the_tokens_of_mlx_lm(name: str) -> None:
    model = model_configs.build(name)
    vocab = model_configs.VOCAB
    prompts = [(prompt_of(length, seed=length) % vocab).tolist() for length in LENGTHS]
    expected = [greedy(model, mx.array(prompt, mx.uint32), TOKENS + MOST)[0] for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    with oracles(vocab) as oracle:
        oracle.answers.update({tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)})
        gen = generator(model)
        outcomes = insert(gen, prompts, TOKENS)
        run_all(gen, outcomes)
    assert [outcome.tokens for outcome in outcomes.values()] == [tokens[:TOKENS] for tokens in expected]
    stats = mlx_paged.pool_of(model).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@functools.cache
def hybrid_solos(name: str) -> tuple[Any, list[list[int]], list[tuple[list[int], np.ndarray]]]:
    """Return a model with states, prompts and the answers of stock mlx-lm."""
    assert not mlx_paged.patches.is_applied()
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
    for outcome, (tokens, logprobs), end in zip(outcomes.values(), expected, ends, strict=True):
        assert outcome.tokens == tokens[:end]
        assert np.abs(np.stack(outcome.logprobs) - logprobs[:end]).max() < 1e-4
    stats = mlx_paged.pool_of(model).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    # The caches of the answers continue as if nothing had been drafted.
    gen = generator(model)
    given = {"caches": [caches[uid] for uid in outcomes], "all_tokens": [each.all_tokens for each in outcomes.values()]}
    uids = gen.insert([[3, 1]] * len(prompts), [6] * len(prompts), **given)
    again = {uid: Outcome() for uid in uids}
    run_all(gen, again)
    for outcome, (tokens, logprobs) in zip(again.values(), later, strict=True):
        assert outcome.tokens == tokens and np.abs(np.stack(outcome.logprobs) - logprobs).max() < 1e-4


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


# Sampling ---------------------------------------------------------------------------------------------------------

DRAWN, POSITIONS = 800, 3


class Guess(Oracle):
    """Always propose the same likely tokens."""

    words: tuple[int, ...] = ()

    def drafts(self, skipped: int, most: int) -> Any:
        found = self.words[: min(self.most, most)]
        return None if not found else Drafts(list(found), [1.0] * len(found))


@pytest.mark.parametrize(
    "options", slow({"temp": 1.0}, {"temp": 0.7, "top_p": 0.9, "top_k": 5}), ids=["plain", "filters"]
)  # fmt: skip
def test_samples_have_the_same_distribution_with_look_up(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the first tokens of many answers to one prompt with samples of the model's own probabilities."""
    model = build("llama", vocab_size=6, num_hidden_layers=1, hidden_size=32, intermediate_size=32, head_dim=32)
    model.lm_head.weight = model.lm_head.weight * 1.5
    prompt, sampler = [1, 2, 3], make_sampler(**options)
    mx.random.seed(11)
    # Every continuation of POSITIONS tokens and its probability, by the model's own code without caches.
    chances = {(): 1.0}
    for _ in range(POSITIONS):
        longer = {}
        for tokens, chance in chances.items():
            logits = model(mx.array([prompt + list(tokens)], mx.uint32))[:, -1]
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            drawn = np.bincount(np.array(sampler(mx.repeat(logprobs, 10_000, axis=0))), minlength=6) / 10_000
            longer.update({(*tokens, token): chance * p for token, p in enumerate(drawn) if p > 0})
        chances = longer
    guess = max(chances, key=lambda tokens: chances[tokens])
    monkeypatch.setattr(Guess, "words", guess)
    monkeypatch.setattr(look_up, "Predictor", Guess)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    with in_every_step():
        gen = generator(model, completion_batch_size=100)
    outcomes: dict[int, Outcome] = {}
    for _ in range(DRAWN // 100):
        batch = insert(gen, [prompt] * 100, POSITIONS, samplers=[make_sampler(**options)] * 100)
        run_all(gen, batch)
        outcomes.update(batch)
    found = Counter(tuple(outcome.tokens) for outcome in outcomes.values())
    stats = mlx_paged.pool_of(model).stats()
    assert 0.1 < stats.accepted_tokens / stats.drafted_tokens < 0.95
    assert set(found) <= set(chances)
    # Continuations that are rare count together.
    rare = [tokens for tokens, chance in chances.items() if chance * DRAWN < 8]
    groups = [[tokens] for tokens in chances if tokens not in rare] + ([rare] if rare else [])
    expected_counts = np.array([DRAWN * sum(chances[t] for t in group) for group in groups])
    counts = np.array([sum(found[t] for t in group) for group in groups])
    chi_square = float((((counts - expected_counts) ** 2) / np.maximum(expected_counts, 1)).sum())
    freedom = len(groups) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom), f"{chi_square} with {freedom} degrees of freedom"
