"""Batches under the patches: each row equals stock mlx-lm's solo run; caches that are given and returned."""

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import ConfigError, PagedConfig
from mlx_paged.engine.request import RequestOptions
from mlx_paged.errors import PromptCacheError, RequestTooLargeError
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick
from tests.support.models.batch_runs import (
    Outcome,
    Spec,
    answers,
    check,
    check_released,
    collect,
    generator,
    insert,
    kv_budget,
    make_solos,
    mlx_lm_generate,
    model_of,
    run_all,
    run_requests,
    solo,
)
from tests.support.models.builders import KINDS, WINDOW, build, greedy, prompt_of
from tests.support.models.recurrent import RECURRENT, build_recurrent

# Lengths around those of blocks, chunks and windows; 17 rows of 1 to 300 tokens.
LENGTHS = (1, 300, 2, 33, 8, 40, 7, 150, 64, 1, 41, 129, 39, 16, 80, 5, 100)


COUNTS = (1, 2, 17)


def specs_of(count: int, num_tokens: int = 12) -> list[Spec]:
    return [Spec(length, num_tokens + index % 5, seed=index) for index, length in enumerate(LENGTHS[:count])]


def run_batch(kind: str, specs: list[Spec], config: PagedConfig | None = None, **options: Any) -> Any:
    """Run all requests at once, compare each with its solo run, and return the generator."""
    make_solos(kind, specs)
    mlx_paged.apply_patches(config or PagedConfig(block_size=8))
    gen = generator(model_of(kind), **options)
    outcomes: dict[int, Outcome] = {}
    uids = insert(gen, specs, outcomes)
    run_all(gen, outcomes)
    for uid, spec in zip(uids, specs, strict=True):
        check(kind, spec, outcomes[uid])
    return gen


def filled(model: Any, tokens: list[int]) -> list[Any]:
    caches = mlx_lm_cache.make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize(("kind", "count"), quick(crossed(KINDS, COUNTS), ("llama", 1), ("gemma3", 2)))
def test_rows_equal_their_solo_runs(kind: str, count: int) -> None:
    run_batch(kind, specs_of(count), prefill_step_size=128)
    assert mlx_paged.last_dispatch().path == "gather"
    check_released(kind)


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize("kind", quick(RECURRENT, "mamba"))
def test_recurrent_states_are_not_padded(kind: str) -> None:
    run_batch(kind, specs_of(9, 6), prefill_step_size=100)


# Arguments -----------------------------------------------------------------------------------------------------


def test_request_larger_than_budget_is_refused_before_any_change() -> None:
    model = model_of("llama")
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=kv_budget(model, 10, 8)))
    gen = generator(model)
    with pytest.raises(RequestTooLargeError, match="80 tokens"):
        gen.insert([prompt_of(5).tolist(), prompt_of(80).tolist()])
    assert gen.next() == ([], [])
    assert gen.insert([prompt_of(5).tolist()], [2]) == [0]
    assert sum(len(generated) for _, generated in iter(gen.next, ([], []))) == 2


# Options ---------------------------------------------------------------------------------------------------------


def test_each_row_has_its_own_sampler_processors_and_stop_sequences() -> None:
    model = model_of("llama")
    specs = [Spec(20, 24, seed=n) for n in range(5)]
    make_solos("llama", specs)
    stop = solo("llama", specs[4])[0][5:7]
    processors = [None, None, make_logits_processors(repetition_penalty=1.5, repetition_context_size=8), None, None]
    least = lambda logprobs: mx.argmin(logprobs, axis=-1)  # noqa: E731
    samplers = [None, least, None, make_sampler(temp=0.0), None]
    machines = [mlx_lm_generate.StopSequences()] * 4 + [mlx_lm_generate.StopSequences([stop])]

    def run() -> list[tuple[list[int], str | None]]:
        options = {"samplers": samplers, "logits_processors": processors, "stop_sequences": machines}
        outcomes = run_requests(generator(model), [s.prompt for s in specs], [24] * 5, **options)
        return [(outcome.tokens, outcome.reason) for outcome in outcomes]

    expected = run()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    got = run()
    assert got == expected
    assert got[4][1] == "stop" and len(got[4][0]) < 24
    assert got[0][0] == solo("llama", specs[0])[0]
    # Again in a pool so small that rows are preempted.
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=kv_budget(model, 17, 8)))
    assert run() == expected
    assert mlx_paged.pool_of(model).stats().preemptions > 0


def test_batch_generate_equals_stock(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.models.tokenizers import plain_tokenizer

    model, tokenizer = model_of("llama"), plain_tokenizer()
    prompts = [prompt_of(n, seed=n).tolist() for n in (3, 40, 17)]
    options = {"max_tokens": [9, 5, 7], "return_prompt_caches": True, "return_token_ids": True}

    def run() -> Any:
        return mlx_lm_generate.batch_generate(model, tokenizer, prompts, return_logprobs=True, verbose=True, **options)

    expected = run()
    mlx_paged.apply_patches()
    got = run()
    assert (got.texts, got.token_ids) == (expected.texts, expected.token_ids)
    np.testing.assert_allclose(np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-4)
    assert got.stats.prompt_tokens == sum(len(p) - 1 for p in prompts)
    assert got.stats.generation_tokens == expected.stats.generation_tokens == 21
    assert got.stats.prompt_time > 0 and got.stats.decode_time > 0
    assert [cache[0].offset for cache in got.caches] == [12, 45, 24]
    assert "Finished processing 3/3" in capsys.readouterr().out


def test_graph_does_not_grow_with_the_number_of_steps(tmp_path) -> None:
    for kind in ("gemma3", "falcon_h1"):
        mlx_paged.apply_patches(PagedConfig(block_size=8))
        model = model_of(kind)
        gen = generator(model)
        gen.insert([prompt_of(n).tolist() for n in (1, 5, WINDOW)], [400] * 3)
        for _ in range(80):
            gen.next()
        batch = gen._engine.batch
        held = [x for cache in batch._call.layers for x in _arrays(cache)] + [batch.inputs]
        mx.export_to_dot(str(tmp_path / "graph.dot"), *held)
        nodes = (tmp_path / "graph.dot").read_text().count("shape=rectangle")
        assert nodes <= 4 * len(model.layers), f"{kind}: {nodes} nodes"
        mlx_paged.remove_patches()


def _arrays(cache: Any) -> list[mx.array]:
    found = []
    for leaf in getattr(cache, "caches", (cache,)):
        for value in (*getattr(leaf, "cache", ()), *leaf.__dict__.values(), getattr(leaf, "offset", None)):
            if isinstance(value, mx.array):
                found.append(value)
        if hasattr(leaf, "pool"):
            found += [x for x in leaf.pool.blocks_of(leaf.layer).__dict__.values() if isinstance(x, mx.array)]
    return found


# Prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "num_blocks"), quick(crossed(["llama", "gemma3"], [None, 16]), ("gemma3", 16))
)  # fmt: skip
def test_prefixes_are_shared_and_evicted_when_blocks_run_out(kind: str, num_blocks: int | None) -> None:
    model = model_of(kind)
    specs = [Spec(60, 8, seed=1), Spec(60, 20, seed=1), Spec(37, 8, seed=2), Spec(1, 4, seed=3), Spec(60, 8, seed=1)]
    make_solos(kind, specs)
    budget = None if num_blocks is None else kv_budget(model, num_blocks * (1 if kind == "llama" else 2), 8)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=budget))
    pool = mlx_lm_generate.make_prompt_cache(model)[0].pool
    store = SharedPrefixes(PrefixCache(pool))
    gen = generator(model, prefixes=store, completion_batch_size=3, prefill_batch_size=3)
    for part in (specs[:1], specs[1:]):
        outcomes: dict[int, Outcome] = {}
        insert(gen, part, outcomes)
        run_all(gen, outcomes)
        for outcome, spec in zip(outcomes.values(), part, strict=True):
            assert outcome.tokens == solo(kind, spec)[0]
            assert np.abs(np.stack(outcome.logprobs) - solo(kind, spec)[1]).max() < 1e-4
            assert outcome.all_tokens == spec.prompt + outcome.tokens
        pool.check_integrity()
    stats = pool.stats()
    if kind == "llama":  # behind a window, a prefix shorter than the donated one may no longer be held
        assert stats.prefix_hit_tokens >= 2 * 56
        assert num_blocks is None or stats.evictions > 0
    assert stats.live_blocks == stats.cached_blocks > 0


# Handed in ------------------------------------------------------------------------------------------------------


def test_chunks_end_at_segments_and_caches_can_be_extracted_there() -> None:
    model, prompt = model_of("llama"), prompt_of(60).tolist()
    spec = Spec(60, 8)
    make_solos("llama", [spec])
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model, prefill_step_size=25)
    (uid,) = gen.insert_segments([[prompt[:30], prompt[30:41], prompt[41:]]], [8])
    outcomes = {uid: Outcome()}
    at_ends = []
    while True:
        prompts, generated = gen.next()
        if not prompts and not generated:
            break
        collect(outcomes, prompts, generated)
        for response in prompts:
            if response.end_of_segment and not response.end_of_prompt:
                cache, tokens = gen.extract_cache([uid])[uid]
                assert tokens == prompt[: response.progress[0]]
                assert cache[0].offset == response.progress[0]
                at_ends.append((response.progress[0], cache))
    assert [end for end, _ in at_ends] == [30, 41, 59]
    assert outcomes[uid].progress == [(25, 60), (30, 60), (41, 60), (59, 60), (60, 60)]
    check("llama", spec, outcomes[uid])
    for end, cache in at_ends:
        (outcome,) = run_requests(gen, [prompt[end:]], [8], caches=[cache], all_tokens=[prompt[:end]])
        assert outcome.tokens == solo("llama", spec)[0]
        assert outcome.all_tokens == prompt + solo("llama", spec)[0]
        assert cache[0].offset == end, "a cache handed in is not written to"
    del at_ends, cache
    check_released("llama")


@pytest.mark.parametrize(
    ("kind", "paged"), quick(crossed(["llama", "gemma3"], [True, False]), ("llama", True), ("gemma3", False))
)  # fmt: skip
def test_given_caches_are_continued_from_their_end(kind: str, paged: bool) -> None:
    model, spec = model_of(kind), Spec(70, 10)
    make_solos(kind, [spec])
    cache = filled(model, spec.prompt[:53])
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    if paged:
        cache = filled(model, spec.prompt[:53])
    given = [spec.prompt[53:], spec.prompt]
    assert answers(generator(model), given, [10, 10], caches=[cache, None]) == [solo(kind, spec)[0]] * 2
    assert cache[0].offset == 53


def test_unusable_caches_are_named_and_nothing_is_inserted() -> None:
    model, other = (model_of(kind, num_hidden_layers=3) for kind in ("llama", "qwen3"))
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model)
    good = mlx_lm_generate.make_prompt_cache(model)
    foreign = mlx_lm_generate.make_prompt_cache(other)
    model(prompt_of(9)[None], cache=good)
    mixed = [*good[:2], ConcatenateKVCache()]
    for bad, message in (
        (good[:2], "2 layers"),
        (foreign, "another model"),
        (mixed, "layer 2 of.*ConcatenateKVCache"),
        ([ArraysCache(2) for _ in range(3)], "layer 0 of.*ArraysCache"),
    ):
        with pytest.raises(PromptCacheError, match=message):
            gen.insert([[1, 2], [3, 4]], [2, 2], caches=[good, bad])
        assert gen.next() == ([], [])
    assert gen.insert([[1, 2]], [2], caches=[good]) == [0]


# Given back ------------------------------------------------------------------------------------------------------


def test_remove_releases_and_returns_caches() -> None:
    model = model_of("llama")
    specs = [Spec(20, 10, seed=n) for n in range(4)]
    make_solos("llama", specs)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model, completion_batch_size=3, prefill_batch_size=3, prefill_step_size=30)
    outcomes: dict[int, Outcome] = {}
    uids = insert(gen, specs, outcomes)
    assert gen.prompt_cache_nbytes == 0
    for _ in range(3):
        collect(outcomes, *gen.next())
    assert gen.prompt_cache_nbytes > 0
    caches = gen.remove([uids[0], uids[1], uids[3], 99], return_prompt_caches=True)
    assert sorted(caches) == [uids[0], uids[1], uids[3]]
    for index in (0, 1, 3):
        cache, tokens = caches[uids[index]]
        assert cache[0].offset == len(tokens)
        assert tokens == (specs[index].prompt + solo("llama", specs[index])[0])[: len(tokens)]
    run_all(gen, outcomes)
    check("llama", specs[2], outcomes[uids[2]])
    del caches, cache
    check_released("llama")


def test_finished_caches_hold_one_row_until_dropped_and_can_be_reused() -> None:
    model, specs = model_of("llama"), [Spec(20, 4, seed=1), Spec(33, 4, seed=2)]
    longer = [Spec(20, 12, seed=1), Spec(33, 12, seed=2)]
    make_solos("llama", specs + longer)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model)
    uids = gen.insert([s.prompt for s in specs], [4, 4])
    finished = {r.uid: r for _, generated in iter(gen.next, ([], [])) for r in generated if r.finish_reason}
    pool = mlx_paged.pool_of(model)
    assert pool.stats().live_blocks == 3 + 5
    assert pool.stats().cow_forks == 0
    cache = finished.pop(uids[0]).prompt_cache
    finished.clear()
    gc.collect()
    assert pool.stats().live_blocks == 3
    tokens = solo("llama", longer[0])[0]
    mlx_lm_cache.trim_prompt_cache(cache, 1)
    assert answers(gen, [tokens[3:4]], [8], caches=[cache]) == [tokens[4:]]


HISTORY, PROMPT = prompt_of(40, seed=1).tolist(), prompt_of(30, seed=2).tolist()
OTHER = [1, 2, 3]  # its first token differs from those of the others
CONFIG = PagedConfig(block_size=16, kv_cache_memory=16 << 20)


def stock(model: Any, tokens: list[int], num_tokens: int) -> list[int]:
    return greedy(model, mx.array(tokens), num_tokens)[0]


@pytest.mark.parametrize(("preempts", "told"), [(False, [HISTORY]), (True, [HISTORY]), (True, None)])
def test_caller_may_continue_a_cache_after_inserting_it(preempts: bool, told: list[list[int]] | None) -> None:
    """The cache of unknown tokens cannot be recomputed: preemption keeps it and releases only what was added."""
    model = build("llama")
    expected = stock(model, HISTORY + PROMPT, 12)
    mlx_paged.apply_patches(CONFIG)
    caches = filled(model, HISTORY)
    gen = PagedBatchGenerator(model, prefixes=SharedPrefixes(PrefixCache(mlx_paged.pool_of(model))))
    gen.insert([OTHER], [30])
    (uid,) = gen.insert([PROMPT], [12], caches=[caches], all_tokens=told)
    for _ in mlx_lm_generate.generate_step(mx.array([7, 8, 9]), model, max_tokens=3, prompt_cache=caches):
        pass
    tokens: list[int] = []
    while not tokens:
        tokens += [response.token for response in gen.next()[1] if response.uid == uid]
    if preempts:
        assert gen._engine.scheduler.preempt_last()
    while responses := gen.next_generated():
        tokens += [response.token for response in responses if response.uid == uid]
    assert tokens == expected
    assert answers(gen, [HISTORY + PROMPT], [12]) == [expected]  # finds what the first one left


@pytest.mark.parametrize("kind", quick(["mamba", "mamba2", "rwkv7"], "mamba"))
def test_states_of_unknown_tokens_are_not_shared(kind: str) -> None:
    model = build_recurrent(kind)
    alone, continued = stock(model, PROMPT, 8), stock(model, HISTORY + PROMPT, 8)
    mlx_paged.apply_patches(CONFIG)
    gen = PagedBatchGenerator(model, prefixes=SharedPrefixes(PrefixCache(prefix_pool_of(model))))
    for told in (None, [HISTORY]):  # states of known tokens are shared
        assert answers(gen, [PROMPT], [8], caches=[filled(model, HISTORY)], all_tokens=told) == [continued]
        assert answers(gen, [PROMPT], [8]) == [alone]


BAD = {
    "no tokens": {"prompts": [[1, 2], [3, 4], []]},
    "no answer": {"max_tokens": [3, 3, 0]},
    "too few lengths": {"max_tokens": [3]},
    "stop sequences": {"stop_sequences": [None, mlx_lm_generate.StopSequences(), mlx_lm_generate.StopSequences()]},
    "tokens": {"all_tokens": [None, [], []]},
    "too few options": {"options": [RequestOptions()]},
    "a grammar that is none": {"options": [RequestOptions(grammar=3), RequestOptions(), RequestOptions()]},
}


@pytest.mark.parametrize("options", BAD.values(), ids=list(BAD))
def test_failed_insertion_leaves_no_request(options: dict[str, Any]) -> None:
    model = build("llama")
    expected = stock(model, [7, 8], 5)
    mlx_paged.apply_patches(CONFIG)
    gen = generator(model)
    given = {"prompts": [[1, 2], [3, 4], [5, 6]], "max_tokens": [3, 3, 3], **options}
    with pytest.raises((ConfigError, ValueError, TypeError, AttributeError)):
        gen.insert(given.pop("prompts"), given.pop("max_tokens"), **given)
    assert gen.next() == ([], [])
    assert answers(gen, [[7, 8]], [5]) == [expected]
