"""Caches that go into the batch generator and come out of it: handed in, extracted, returned, left unread."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.errors import PromptCacheError
from tests.support.models.batch_runs import (
    Outcome,
    Spec,
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
    solo,
)
from tests.support.models.builders import prompt_of

# Handed in ------------------------------------------------------------------------------------------------------


def test_segments_end_chunks_and_their_caches_can_be_extracted() -> None:
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
        (again,) = gen.insert([prompt[end:]], [8], caches=[cache], all_tokens=[prompt[:end]])
        outcomes = {again: Outcome()}
        run_all(gen, outcomes)
        assert outcomes[again].tokens == solo("llama", spec)[0]
        assert outcomes[again].all_tokens == prompt + solo("llama", spec)[0]
        assert cache[0].offset == end, "a cache handed in is not written to"
    del at_ends, cache
    check_released("llama")


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("paged", [True, False])
def test_caches_handed_in_go_on_where_they_end(kind: str, paged: bool) -> None:
    model, spec = model_of(kind), Spec(70, 10)
    make_solos(kind, [spec])
    stock = make_prompt_cache(model)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = mlx_lm_generate.make_prompt_cache(model) if paged else stock
    if paged:
        model(prompt_of(70)[None, :53], cache=cache)
    else:
        mlx_paged.remove_patches()
        model(prompt_of(70)[None, :53], cache=cache)
        mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model)
    uids = gen.insert([spec.prompt[53:], spec.prompt], [10, 10], caches=[cache, None])
    outcomes = {uid: Outcome() for uid in uids}
    run_all(gen, outcomes)
    for uid in uids:
        assert outcomes[uid].tokens == solo(kind, spec)[0]
    assert cache[0].offset == 53


def test_given_cache_survives_preemption() -> None:
    """Without the tokens behind it, it cannot be computed again: it is kept, only what was added makes room."""
    model, first, second = model_of("llama"), Spec(30, 40, seed=1), Spec(60, 40, seed=2)
    make_solos("llama", [first, second])
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=kv_budget(model, 20, 8)))
    cache = mlx_lm_generate.make_prompt_cache(model)
    model(mx.array(second.prompt)[None, :50], cache=cache)
    gen = generator(model)
    uids = gen.insert([first.prompt, second.prompt[50:]], [40, 40], caches=[None, cache])
    del cache
    outcomes = {uid: Outcome() for uid in uids}
    run_all(gen, outcomes)
    assert gen.preemptions > 0
    assert [outcomes[uid].tokens for uid in uids] == [solo("llama", first)[0], solo("llama", second)[0]]
    check_released("llama")


def test_unusable_caches_are_named_and_nothing_is_inserted() -> None:
    model, other = model_of("llama"), model_of("qwen3")
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model)
    good = mlx_lm_generate.make_prompt_cache(model)
    foreign = mlx_lm_generate.make_prompt_cache(other)
    model(prompt_of(9)[None], cache=good)
    mixed = [*good[:2], ConcatenateKVCache()]
    for bad, message in (
        (good[:2], "2 layers"),
        (foreign, "another model"),
        (mixed, r"layer 2 \(model.layers.2\).*ConcatenateKVCache"),
        ([ArraysCache(2) for _ in range(3)], r"layer 0 \(model.layers.0\).*ArraysCache"),
    ):
        with pytest.raises(PromptCacheError, match=message):
            gen.insert([[1, 2], [3, 4]], [2, 2], caches=[good, bad])
        assert gen.next() == ([], [])
    assert gen.insert([[1, 2]], [2], caches=[good]) == [0]


def test_caches_that_have_no_form_for_batches_are_computed_one_by_one() -> None:
    class Odd(type(model_of("llama"))):
        def make_cache(self) -> list[Any]:
            return [KVCache(), ConcatenateKVCache(), KVCache()]

    specs = [Spec(20, 6), Spec(5, 9, 1)]
    make_solos("llama", specs)
    odd = Odd(model_of("llama").args)
    odd.update(model_of("llama").parameters())
    mlx_paged.apply_patches()
    with pytest.warns(mlx_paged.NotPagedWarning, match="one by one"):
        gen = generator(odd)
    outcomes: dict[int, Outcome] = {}
    uids = insert(gen, specs, outcomes)
    run_all(gen, outcomes)
    for uid, spec in zip(uids, specs, strict=True):
        check("llama", spec, outcomes[uid])
    gen.close()


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


def test_finished_caches_keep_one_row_until_dropped_and_can_go_on() -> None:
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
    (uid,) = gen.insert([tokens[3:4]], [8], caches=[_without_last(cache)])
    outcomes = {uid: Outcome()}
    run_all(gen, outcomes)
    assert outcomes[uid].tokens == tokens[4:]


def _without_last(cache: list[Any]) -> list[Any]:
    for layer in cache:
        layer.trim(1)
    return cache


def test_a_finished_cache_that_nobody_read_makes_room() -> None:
    model, specs = model_of("llama"), [Spec(60, 2, seed=1), Spec(60, 2, seed=2)]
    make_solos("llama", specs)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=kv_budget(model, 12, 8)))
    gen = generator(model)
    gen.insert([s.prompt for s in specs], [2, 2])
    kept = [r for _, generated in iter(gen.next, ([], [])) for r in generated]
    assert [r.token for r in kept] == [t for s in specs for t in solo("llama", s)[0]]
    with pytest.raises(PromptCacheError, match="given up"):
        _ = kept[1].prompt_cache
    assert kept[3].prompt_cache[0].offset == 62
