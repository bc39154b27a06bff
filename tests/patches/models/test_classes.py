"""One model of each class with all that is built on caches: speculative decoding, prompt caches over turns and in
files, prefixes shared in a batch, and preemption. Prompts are longer than windows unless stated otherwise."""

import gc
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache
from mlx_paged.cache.composites import leaves
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from scripts.model_matrix import lines_of_page
from scripts.support import model_configs
from scripts.support.model_configs import CHUNK, WINDOW
from tests.support.cases import quick
from tests.support.models.batch_runs import answers, generator, run_requests
from tests.support.models.builders import greedy, rms, with_noise
from tests.support.models.builders import small_prompt as prompt_of
from tests.support.models.tokenizers import plain_tokenizer

MODELS = {
    "global": "qwen3",
    "sliding": "gemma3_text",
    "sinks": "gpt_oss",
    "hybrid": "falcon_h1",  # states beside attention in each layer
    "hybrid in turn": "qwen3_next",
    "experts": "qwen3_moe",
    "shared keys": "gemma4_text",
    "soft cap": "gemma2",
    "latent": "deepseek_v3",
    "index keys": "deepseek_v32",
}
WINDOWED = ("sliding", "sinks", "shared keys")
BLOCK = 8
CONFIG = PagedConfig(block_size=BLOCK)


class Case(NamedTuple):
    """A class of models and its model."""

    kind: str
    model: Any

    @property
    def sharing(self) -> str:
        """How its prefixes are shared, by docs/models.md: "yes" or "checkpoints"."""
        return lines_of_page()[MODELS[self.kind]].split(" | ")[11]

    @property
    def has_windows(self) -> bool:
        return self.kind in WINDOWED

    @property
    def has_states(self) -> bool:
        return self.kind.startswith("hybrid")


def always(*kinds: str) -> pytest.MarkDecorator:
    """Run these classes in every run; the others take the same path here or are covered by other tests."""
    return pytest.mark.parametrize("case", quick(MODELS, *kinds), indirect=True)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Build the model of a class, and fail if anything falls through to stock mlx-lm."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", mlx_paged.NotPagedWarning)
        yield Case(request.param, model_configs.build(MODELS[request.param]))


def assert_paged_and_whole(model: Any, path: str = "gather") -> None:
    """Check that attention last took ``path``, and that all of the pool's blocks are free again."""
    assert mlx_paged.last_dispatch().path == path
    gc.collect()
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().peak_live_blocks > 0 == pool.stats().live_blocks


# Speculative decoding ---------------------------------------------------------------------------------------------


def draft_of(case: Case) -> Any:
    """Return a model of which some drafts are accepted, and some are rejected."""
    return with_noise(model_configs.build(MODELS[case.kind]), 0.05 if case.kind == "sliding" else 0.2)


def speculate(case: Case, draft: Any, length: int, num_tokens: int, **options: Any) -> Any:
    """Return each token, whether it was drafted, and the log probabilities; or the error's type and text."""
    tokenizer, prompt = plain_tokenizer(), prompt_of(length)
    try:
        responses = list(
            stream_generate(case.model, tokenizer, prompt, num_tokens, draft, num_draft_tokens=2, **options)
        )
    except Exception as error:
        return type(error), str(error).split(" (got")[0]
    return [(r.token, r.from_draft) for r in responses], np.stack([np.array(r.logprobs) for r in responses])


def assert_speculated_alike(got: Any, expected: Any) -> None:
    assert got[0] == expected[0]
    assert got[1] == expected[1] if isinstance(expected[1], str) else rms(got[1], expected[1]) <= 1e-6


@always("global", "hybrid")
def test_speculative_decoding_equals_stock(case: Case) -> None:
    """Run within a window, across its edge, and beyond it, where mlx-lm cannot trim."""
    draft = draft_of(case)
    runs = ((5, WINDOW - 5), (9, 20), (2 * WINDOW + 6, 16))
    alone = greedy(case.model, prompt_of(5), WINDOW - 5)[0]
    expected = [speculate(case, draft, *run) for run in runs]
    if case.has_states:
        assert {error for error, _ in expected} == {ValueError}
    else:
        assert [token for token, _ in expected[0][0]] == alone
        from_draft = [is_drafts for tokens, _ in expected for _, is_drafts in tokens]
        assert any(from_draft) and not all(from_draft)
    mlx_paged.apply_patches(CONFIG)
    for run, run_expected in zip(runs, expected, strict=True):
        assert_speculated_alike(speculate(case, draft, *run), run_expected)
    if not case.has_states:
        for model in (case.model, draft):
            assert_paged_and_whole(model)


@always("global", "shared keys")
def test_speculative_decoding_on_a_prompt_cache_equals_stock(case: Case) -> None:
    """Refused, as by mlx-lm, if the cache cannot be trimmed: a full window, or states."""
    draft = draft_of(case)

    def run() -> Any:
        caches = [upstream.make_prompt_cache(model) for model in (case.model, draft)]
        for model, cache in zip((case.model, draft), caches, strict=True):
            model(prompt_of(WINDOW + 7, seed=1)[None], cache=cache)
        return speculate(case, draft, 6, 12, prompt_cache=caches[0] + caches[1])

    expected = run()
    assert (expected[0] is ValueError) == (case.has_windows or case.has_states)
    mlx_paged.apply_patches(CONFIG)
    assert_speculated_alike(run(), expected)
    assert_paged_and_whole(case.model, "prefill" if expected[0] is ValueError else "gather")


# Prompt caches ----------------------------------------------------------------------------------------------------


@always("sliding", "index keys")
def test_prompt_cache_over_turns_and_files_equals_stock(case: Case, tmp_path: Path) -> None:
    files = {by: str(tmp_path / f"{by}.safetensors") for by in ("stock", "paged")}

    def turn(number: int, cache: list[Any]) -> tuple[list[int], np.ndarray]:
        prompt = prompt_of((3 * WINDOW + 4, 1, 7)[number], seed=number)
        return greedy(case.model, prompt, 10, prompt_cache=cache, prefill_step_size=CHUNK)

    def two_turns_and_save(by: str) -> tuple[list[Any], list[Any]]:
        cache = upstream.make_prompt_cache(case.model)
        results = [turn(0, cache), turn(1, cache)]
        upstream.save_prompt_cache(files[by], cache, {"by": by})
        return results, cache

    def assert_same(got: tuple[list[int], np.ndarray], wanted: tuple[list[int], np.ndarray]) -> None:
        # Past the window mlx-lm sums in the order of its ring, so the last bits differ.
        assert got[0] == wanted[0] and rms(got[1], wanted[1]) <= (1e-5 if case.has_windows else 1e-6)

    expected, _ = two_turns_and_save("stock")
    third = turn(2, upstream.load_prompt_cache(files["stock"]))
    forgotten = turn(2, upstream.make_prompt_cache(case.model))
    assert forgotten[0] != third[0]  # the cache affects the tokens

    mlx_paged.apply_patches(CONFIG)
    got, cache = two_turns_and_save("paged")
    for got_turn, expected_turn in zip(got, expected, strict=True):
        assert_same(got_turn, expected_turn)
    assert_same(turn(2, cache), third)
    for by, file in files.items():
        loaded, metadata = upstream.load_prompt_cache(file, return_metadata=True)
        assert metadata == {"by": by}
        adopted = mlx_paged.adopt_prompt_cache(case.model, loaded)
        is_paged = [isinstance(part, PagedKVCache) for part in leaves(adopted)]
        assert any(is_paged) and (all(is_paged) or case.has_states)
        assert_same(turn(2, adopted), third)
        assert_same(turn(2, upstream.load_prompt_cache(file)), third)
    del cache, adopted, loaded
    mlx_paged.reset_dispatch_counts()
    assert_same(turn(2, mlx_paged.adopt_prompt_cache(case.model, upstream.load_prompt_cache(files["paged"]))), third)
    assert_paged_and_whole(case.model)
    mlx_paged.remove_patches()
    assert_same(turn(2, upstream.load_prompt_cache(files["paged"])), third)


# Prefixes ---------------------------------------------------------------------------------------------------------


def answers_of(gen: Any, requests: list[list[int]], new: int) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each request, and how many tokens of its prompt were cached."""
    outcomes = run_requests(gen, requests, [new] * len(requests))
    return [outcome.tokens for outcome in outcomes], [outcome.num_cached for outcome in outcomes]


@always("hybrid in turn", "soft cap", "index keys")
def test_prefixes_are_shared_in_a_burst_and_later(case: Case) -> None:
    """Shared by the requests of a burst, by the first one repeated, and by a chat that continues it."""
    system, new = prompt_of(3 * WINDOW + 9, seed=1).tolist(), 12
    prompts = [[*system, n, *prompt_of(5, seed=n).tolist()] for n in (2, 3, 4)]
    expected = [greedy(case.model, mx.array(p), new, prefill_step_size=CHUNK)[0] for p in prompts]
    later = [*prompts[0], *expected[0], 5, 6, 7]
    expected_later = greedy(case.model, mx.array(later), new, prefill_step_size=CHUNK)[0]

    mlx_paged.apply_patches(CONFIG)
    upstream.make_prompt_cache(case.model)
    pool = mlx_paged.pool_of(case.model)
    tree = PrefixCache(pool)
    gen = generator(case.model, prefill_step_size=CHUNK, prefixes=SharedPrefixes(tree))
    assert ("yes" if gen._engine.all_paged else "checkpoints") == case.sharing

    got, num_cached = answers_of(gen, prompts, new)
    assert got == expected
    slack = BLOCK  # prefixes are whole blocks
    assert num_cached[0] == 0 and all(len(system) - slack <= found <= len(system) for found in num_cached[1:])
    got, num_cached = answers_of(gen, prompts[:1], new)
    assert got == expected[:1] and num_cached[0] >= len(prompts[0]) - 1 - BLOCK
    got, num_cached = answers_of(gen, [later], new)
    assert got == [expected_later]
    assert num_cached[0] >= len(prompts[0]) + new - 1 - BLOCK
    tree.check_integrity()
    if not case.has_states:
        assert pool.stats().live_blocks == pool.stats().cached_blocks > 0
    gen.close()
    tree.clear()
    del gen, tree
    assert_paged_and_whole(case.model)


# Preemption -------------------------------------------------------------------------------------------------------


@always("global", "sliding", "index keys")
def test_preempted_requests_give_their_solo_tokens(case: Case) -> None:
    """Rows that decode together or one by one, partly or fully paged, are recomputed; no token is delivered twice."""
    prompts = [prompt_of(n, seed=n) for n in (20, 25, 30, 9)]
    expected = [greedy(case.model, prompt, 40)[0] for prompt in prompts]
    mlx_paged.apply_patches(CONFIG)
    greedy(case.model, prompts[0], 1)
    memory = mlx_paged.pool_of(case.model).memory
    step = sum(group.bytes_per_block for group in memory.groups)
    # A little more than the longest request needs alone, in each group's part.
    budget = next(n for n in count(step, step) if min(memory.capacities(n)) > -(-75 // BLOCK) + 2)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=budget))
    gen = generator(case.model, prefill_step_size=16)
    assert answers(gen, [prompt.tolist() for prompt in prompts], [40] * 4) == expected
    assert gen.preemptions == mlx_paged.pool_of(case.model).stats().preemptions > 0
    del gen
    assert_paged_and_whole(case.model)
