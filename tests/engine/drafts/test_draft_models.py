"""Draft models in batches: every family gives the same tokens as without drafts, whatever the draft model says."""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import ConfigError, PagedConfig, RequestFailedError
from mlx_paged.drafts.draft_model import MOST_BEHIND, DraftModel
from mlx_paged.engine.request import RequestOptions
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from scripts.support import model_configs
from tests.support.cases import crossed, quick, slow
from tests.support.models.batch_runs import Outcome, answers, collect, generator, kv_budget, run_all
from tests.support.models.builders import build, greedy
from tests.support.models.drafting import (
    DRAFTS,
    check_nothing_left,
    drafted,
    drafting_generator,
    model_of,
    noisy,
    prompts_of,
    vocab_of,
)
from tests.support.models.packs import assert_alike
from tests.support.models.recurrent import build_recurrent

TOKENS = 30
LENGTHS = (3, 37, 12)  # shorter than the windows; longer with the answer
# Windows, windows and sinks, soft caps, latents, latents with an index, experts, chunks.
FAMILIES = [
    *["llama", "llama-sliding", "qwen3", "gemma3", "gemma2", "gpt_oss", "phi3", "phi", "gemma", "mistral3", "cohere2"],
    *["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mixtral", "qwen2_moe", "olmo2", "starcoder2"],
    *["exaone4", "qwen3_moe"],
]
SCALES = {"llama-sliding": 0.1, "deepseek_v3": 0.02, "gpt_oss": 0.02, "gemma": 2.0, "gemma2": 0.3, "starcoder2": 1.0}


@functools.cache
def solos(name: str) -> list[tuple[list[int], list[int], np.ndarray]]:
    """Return prompts and the answers of stock mlx-lm."""
    assert not mlx_paged.is_applied()
    prompts = prompts_of(name, LENGTHS)
    return [(p, *greedy(model_of(name), mx.array(p, mx.uint32), TOKENS)) for p in prompts]


def run_alike(name: str, config: PagedConfig, scale: float = 0.03) -> Any:
    """Run prompts with a draft model, which must give stock's tokens and log-probabilities. Returns the statistics."""
    expected = solos(name)
    model, draft = model_of(name), noisy(name, scale)
    mlx_paged.apply_patches(config)
    outcomes, gen = drafted(model, draft, [p for p, _, _ in expected], [TOKENS] * 3)
    assert_alike(outcomes, [(tokens, logprobs) for _, tokens, logprobs in expected])
    assert [each.all_tokens for each in outcomes] == [prompt + tokens for prompt, tokens, _ in expected]
    stats = mlx_paged.pool_of(model).stats()
    check_nothing_left(gen, model, draft)
    return stats


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(FAMILIES, "gemma3", "gpt_oss"))
def test_every_family_gives_the_same_tokens_with_drafts(name: str) -> None:
    stats = run_alike(name, PagedConfig(block_size=8), SCALES.get(name, 0.03))
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_a_draft_that_is_always_right_fills_every_step() -> None:
    stats = run_alike("llama", PagedConfig(block_size=8), 0.0)
    assert stats.accepted_tokens == stats.drafted_tokens >= 3 * (TOKENS - 1) * DRAFTS // (1 + DRAFTS)


@pytest.mark.parametrize("name", quick(["llama", "llama-sliding", "qwen3", "gemma3"], "llama-sliding"))
def test_in_place_pools_give_the_same_tokens_with_drafts(name: str, kernels: Any) -> None:
    stats = run_alike(f"wide {name}", PagedConfig(block_size=8, kernel="on"), 0.3 if name == "qwen3" else 0.1)
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("kv_bits", [*slow(8), (8, 4)])
def test_quantised_pages_give_the_same_tokens_with_drafts(kv_bits: Any) -> None:
    """Compare with the same batch without drafts: the contents of pages depend on the token only."""
    prompts = prompts_of("llama", LENGTHS)
    model, draft = model_of("llama"), noisy("llama", 0.02)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_bits=kv_bits, kv_group_size=32))
    plain = answers(generator(model), prompts, [TOKENS] * 3)
    outcomes, gen = drafted(model, draft, prompts, [TOKENS] * 3)
    assert [outcome.tokens for outcome in outcomes] == plain
    stats = mlx_paged.pool_of(model).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens and stats.quantized_tokens > 0
    check_nothing_left(gen, model, draft)


def test_rows_join_leave_and_refuse_drafts() -> None:
    expected = solos("llama") * 3
    model, draft = model_of("llama"), noisy("llama", 0.03)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = drafting_generator(model, draft, completion_batch_size=4)
    outcomes: dict[int, Outcome] = {}
    lengths = [5, 30, 1, 17, 9, 22, 3, 30, 11]
    for index, ((prompt, _, _), length) in enumerate(zip(expected, lengths, strict=True)):
        (uid,) = gen.insert_segments(
            [[prompt]], [length], options=[RequestOptions(num_draft_tokens=(None, 0, 2)[index % 3])]
        )
        outcomes[uid] = Outcome()
        for _ in range(index % 3):
            collect(outcomes, *gen.next())
            assert all(row.options.num_draft_tokens != 0 for row in gen._engine.drafts.proposer.rows)
    cancelled = uid
    gen.remove([cancelled])
    run_all(gen, outcomes)
    for uid, (_, tokens, _), length in zip(outcomes, expected, lengths, strict=True):
        assert outcomes[uid].tokens == tokens[: length if uid != cancelled else len(outcomes[uid].tokens)]
    assert mlx_paged.pool_of(model).stats().accepted_tokens > 0
    check_nothing_left(gen, model, draft)


def test_preempted_rows_continue_with_drafts() -> None:
    expected = solos("llama")
    model, draft = model_of("llama"), noisy("llama", 0.01)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = drafting_generator(model, draft)
    outcomes = {uid: Outcome() for uid in gen.insert([p for p, _, _ in expected], [TOKENS] * 3)}
    for step in range(40):
        collect(outcomes, *gen.next())
        if step % 3 == 2:
            gen.preempt_last()
    run_all(gen, outcomes)
    assert [outcome.tokens for outcome in outcomes.values()] == [tokens for _, tokens, _ in expected]
    stats = mlx_paged.pool_of(model).stats()
    assert stats.preemptions > 1 and stats.accepted_tokens > 0
    check_nothing_left(gen, model, draft)


@pytest.mark.parametrize("is_shared", [True, False])
def test_pools_keep_to_the_budget_and_rows_without_room_get_no_drafts(is_shared: bool) -> None:
    """The draft model's pool has half of a budget, or has room for few tokens."""
    expected = solos("llama")
    model, draft = model_of("llama"), noisy("llama", 0.01)
    budget = 2 * kv_budget(model, 14, 8)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=budget if is_shared else None))
    gen = drafting_generator(model, draft)
    own, other = (mlx_paged.pool_of(each) for each in (model, draft))
    if is_shared:
        assert own.memory_budget == other.memory_budget == budget // 2
    else:
        other.memory.budget = kv_budget(draft, 7, 8)
    assert answers(gen, [p for p, _, _ in expected], [TOKENS] * 3) == [tokens for _, tokens, _ in expected]
    assert is_shared or own.stats().preemptions == 0
    check_nothing_left(gen, model, draft)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "has_room"), [("llama", True), ("llama", False), *slow(*((name, True) for name in FAMILIES[1:]))]
)
def test_prompts_of_several_rows_are_read_in_one_call(
    name: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for both prompts in the draft model's pool, one row gets no drafts, and the other does."""
    model, draft, prompts = model_of(name), noisy(name, SCALES.get(name, 0.03)), prompts_of(name, (41, 53))
    expected = [greedy(model, mx.array(prompt, mx.uint32), TOKENS)[0] for prompt in prompts]
    read: list[int] = []  # rows in each call for prompts
    original = DraftModel.forward

    def count(self: DraftModel, tokens: mx.array, layers: list[Any], spans: Any = (), before: Any = None) -> Any:
        if any(span.end - span.begin > MOST_BEHIND for span in spans):
            read.append(len(spans))
        return original(self, tokens, layers, spans, before)

    monkeypatch.setattr(DraftModel, "forward", count)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = drafting_generator(model, draft)
    if not has_room:
        mlx_paged.pool_of(draft).memory.budget = kv_budget(draft, 13, 8)
    assert answers(gen, prompts, [TOKENS] * 2) == expected
    assert (2 in read) == has_room and read
    assert mlx_paged.pool_of(model).stats().accepted_tokens > 0
    check_nothing_left(gen, model, draft)


def test_budget_is_divided_once_for_each_draft_model() -> None:
    model, draft = model_of("llama"), noisy("llama", 0.01)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=1 << 20))
    pool = mlx_paged.pool_of(model)
    for _ in range(2):
        generator(model, draft_model=draft)
        assert pool.memory_budget == mlx_paged.pool_of(draft).memory_budget == 1 << 19
    other = noisy("llama", 0.5)
    generator(model, draft_model=other)
    assert {mlx_paged.pool_of(each).memory_budget for each in (model, draft, other)} == {(1 << 20) // 3}


def test_pool_gives_back_what_a_draft_model_needs() -> None:
    model, draft = model_of("llama"), noisy("llama", 0.01)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=kv_budget(model, 40, 8)))
    pool = mlx_paged.pool_of(model)
    prefixes = SharedPrefixes(PrefixCache(pool))
    gen = generator(model, prefixes=prefixes)
    answers(gen, prompts_of("llama", (120, 130)), [2, 2])
    assert pool.stats().bytes_reserved > pool.memory_budget // 2, "prefixes fill the budget"
    gen = generator(model, draft_model=draft, prefixes=prefixes)
    both = [pool, mlx_paged.pool_of(draft)]
    assert all(each.stats().bytes_reserved <= each.memory_budget for each in both)
    pool.check_integrity()


def test_draft_model_reuses_its_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = model_of("llama"), noisy("llama", 0.01)
    ((first, tokens, _), *_) = [solo for solo in solos("llama") if len(solo[0]) == 37]
    second = [*first, *tokens[:10], 5, 6]
    expected = greedy(model, mx.array(second, mx.uint32), 12)[0]
    computed: list[int] = []
    original = DraftModel.forward

    def count(self: DraftModel, tokens: mx.array, *rest: Any) -> Any:
        computed.append(tokens.size if tokens.shape[1] > 1 else 0)  # of prompts
        return original(self, tokens, *rest)

    monkeypatch.setattr(DraftModel, "forward", count)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    prefixes = SharedPrefixes(PrefixCache(mlx_paged.pool_of(model)))
    gen = drafting_generator(model, draft, prefixes=prefixes)
    answers(gen, [first], [10])
    assert sum(computed) >= 36
    computed.clear()
    assert answers(gen, [second], [12]) == [expected]
    assert sum(computed) == 0, "less is missing than a draft step computes"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3_next", *slow("falcon_h1", "lfm2")])
def test_models_with_states_verify_drafts(name: str) -> None:
    model, draft = model_of(name), model_of("llama-of-mlx-lm")
    prompts = prompts_of(name, LENGTHS)
    expected = [greedy(model, mx.array(prompt, mx.uint32), 16)[0] for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    outcomes, gen = drafted(model, draft, prompts, [16] * 3)
    assert [outcome.tokens for outcome in outcomes] == expected
    assert mlx_paged.pool_of(model).stats().drafted_tokens > 0
    assert not gen._engine.drafts.proposer.rows


# Samples ----------------------------------------------------------------------------------------------------------


SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {"temp": 0.25},
    "top_p": {"temp": 0.2, "top_p": 0.9},
    "min_p": {"temp": 0.3, "min_p": 0.05, "top_k": 20},
    "xtc": {"temp": 0.25, "xtc_probability": 0.5, "xtc_threshold": 0.05},
}


@pytest.mark.parametrize(
    ("sampler", "penalised"),
    quick(crossed(list(SAMPLERS), [False, True]), ("min_p", True), ("xtc", False)),
)
def test_seeded_samples_are_the_same_with_drafts(sampler: str, penalised: bool) -> None:
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4} if penalised else {}
    model, draft = model_of("llama"), noisy("llama", 0.03)
    prompts = prompts_of("llama", LENGTHS)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    processors = make_logits_processors({7: 2.0, 9: -3.0} if penalties else None, **penalties)
    rest: dict[str, Any] = {
        "samplers": [make_sampler(**SAMPLERS[sampler])] * 3,
        "logits_processors": [processors, [], processors],
        "options": [RequestOptions(seed=seed) for seed in (5, 6, 7)],
    }
    gen = generator(model)
    plain = {u: Outcome() for u in gen.insert_segments([[p] for p in prompts], [TOKENS] * 3, **rest)}
    run_all(gen, plain)
    outcomes, gen = drafted(model, draft, prompts, [TOKENS] * 3, **rest)
    assert_alike(outcomes, [(each.tokens, np.stack(each.logprobs)) for each in plain.values()])
    assert mlx_paged.pool_of(model).stats().accepted_tokens > 0
    check_nothing_left(gen, model, draft)


# Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 65, True, 2.5])
def test_invalid_num_draft_tokens_is_refused(number: Any) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    with pytest.raises(ConfigError, match="num_draft_tokens must be from 0 to 64"):
        generator(model_of("llama"), draft_model=noisy("llama", 0.0), num_draft_tokens=number)


@pytest.mark.filterwarnings("ignore")
def test_unsupported_pairs_of_model_and_draft_model_are_refused() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    states, llama = build_recurrent("mamba"), build("llama")
    budget = mlx_paged.pool_of(llama).memory_budget
    with pytest.raises(ConfigError, match="cannot verify drafts: no layer is paged"):
        generator(states, draft_model=llama)
    with pytest.raises(ConfigError, match="afm7 cannot verify drafts"):  # its rows are computed one by one
        generator(model_configs.build("afm7"), draft_model=llama)
    with pytest.raises(ConfigError, match="cannot be a draft model"):
        generator(llama, draft_model=states)
    with pytest.raises(ConfigError, match="cannot be its own draft"):
        generator(llama, draft_model=llama)
    assert mlx_paged.pool_of(llama).memory_budget == budget


def test_error_of_the_draft_model_fails_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = model_of("llama"), noisy("llama", 0.01)
    mlx_paged.apply_patches(PagedConfig(block_size=8))

    def failing(*_: object) -> None:
        raise ValueError("of its own")

    monkeypatch.setattr(DraftModel, "_first_step", failing)
    gen = drafting_generator(model, draft)
    for _ in gen.insert(prompts_of("llama", (5, 20)), [TOKENS] * 2):
        with pytest.raises(RequestFailedError, match="of its own"):
            while gen.next() != ([], []):
                pass
    assert gen.next() == ([], [])
    check_nothing_left(gen, model, draft)


def test_larger_vocabulary_of_the_draft_model_is_cut() -> None:
    expected = solos("llama")
    model, draft = model_of("llama"), build("llama", vocab_size=vocab_of("llama") + 64)
    draft.lm_head.weight[vocab_of("llama") :] *= 50.0  # which it would always choose
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    outcomes, _ = drafted(model, draft, [p for p, _, _ in expected], [12] * 3)
    assert [outcome.tokens for outcome in outcomes] == [tokens[:12] for _, tokens, _ in expected]
