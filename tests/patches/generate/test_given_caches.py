"""Requests that come with a prompt cache: it is forked at insertion, and shared if its tokens were told."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import mlx_paged
from mlx_paged import ConfigError, PagedConfig
from mlx_paged.engine.request import RequestOptions
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.store import SharedPrefixes
from tests.support.models.batch_runs import mlx_lm_generate
from tests.support.models.builders import build, prompt_of
from tests.support.models.recurrent import build_recurrent

HISTORY, PROMPT = prompt_of(40, seed=1).tolist(), prompt_of(30, seed=2).tolist()
# Has no token in common with the others at its beginning.
OTHER = [1, 2, 3]


def stock(model: Any, tokens: list[int], num_tokens: int) -> list[int]:
    mlx_paged.remove_patches()
    steps = mlx_lm_generate.generate_step(mx.array(tokens), model, max_tokens=num_tokens)
    return [token for token, _ in steps]


def filled(model: Any, tokens: list[int]) -> list[Any]:
    caches = mlx_lm_cache.make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def drain(generator: Any, tokens: dict[int, list[int]]) -> None:
    while responses := generator.next_generated():
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)


@pytest.mark.parametrize("preempts", [False, True])
def test_the_owner_of_a_cache_may_go_on_with_it(preempts: bool) -> None:
    model = build("llama")
    expected = stock(model, HISTORY + PROMPT, 12)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=16 << 20))
    try:
        caches = filled(model, HISTORY)
        tree = RadixTree(mlx_paged.pool_of(model))
        generator = PagedBatchGenerator(model, prefixes=SharedPrefixes(tree))
        tokens: dict[int, list[int]] = {}
        generator.insert([OTHER], [30])
        (uid,) = generator.insert([PROMPT], [12], caches=[caches], all_tokens=[HISTORY])
        for _ in mlx_lm_generate.generate_step(mx.array([7, 8, 9]), model, max_tokens=3, prompt_cache=caches):
            pass
        while not tokens.get(uid):
            for response in generator.next()[1]:
                tokens.setdefault(response.uid, []).append(response.token)
        if preempts:
            assert generator._engine.scheduler.preempt_youngest()
        drain(generator, tokens)
        assert tokens[uid] == expected
        (again,) = generator.insert([HISTORY + PROMPT], [12])  # finds what the first one left
        drain(generator, tokens)
        assert tokens[again] == expected
        generator.close()
        del caches
    finally:
        mlx_paged.remove_patches()


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "rwkv7"])
def test_a_state_of_unknown_tokens_serves_nobody_else(kind: str) -> None:
    model = build_recurrent(kind)
    alone, continued = stock(model, PROMPT, 8), stock(model, HISTORY + PROMPT, 8)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=16 << 20))
    try:
        generator = PagedBatchGenerator(model, prefixes=SharedPrefixes(RadixTree(prefix_pool_of(model))))
        tokens: dict[int, list[int]] = {}
        for told in (None, [HISTORY]):  # what is known is shared
            (first,) = generator.insert([PROMPT], [8], caches=[filled(model, HISTORY)], all_tokens=told)
            drain(generator, tokens)
            (second,) = generator.insert([PROMPT], [8])
            drain(generator, tokens)
            assert [tokens[uid] for uid in (first, second)] == [continued, alone]
        generator.close()
    finally:
        mlx_paged.remove_patches()


def bad_stops(stops: Any) -> dict[str, Any]:
    return {"stop_sequences": [None, stops(), stops()]}


CASES = {
    "stop sequences": bad_stops,
    "tokens": lambda _: {"all_tokens": [None, [], []]},
    "too few options": lambda _: {"options": [RequestOptions()]},
    "a grammar that is none": lambda _: {"options": [RequestOptions(grammar=3), RequestOptions(), RequestOptions()]},
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_an_insertion_that_fails_leaves_nothing(case: Any) -> None:
    model = build("llama")
    expected = stock(model, [7, 8], 5)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=16 << 20))
    try:
        generator = mlx_lm_generate.BatchGenerator(model)
        with pytest.raises((ConfigError, TypeError, AttributeError)):
            generator.insert([[1, 2], [3, 4], [5, 6]], [3, 3, 3], **case(mlx_lm_generate.StopSequences))
        (uid,) = generator.insert([[7, 8]], [5], options=[RequestOptions(salt="mine", seed=1)])
        tokens: dict[int, list[int]] = {}
        drain(generator, tokens)
        assert tokens == {uid: expected}
        generator.close()
    finally:
        mlx_paged.remove_patches()
