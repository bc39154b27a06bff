"""Responses of a batch, and requests that are finished by their client."""

import copy
import dataclasses
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.errors import PromptCacheError
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import quick
from tests.support.models.batch_runs import (
    Outcome,
    Spec,
    collect,
    generator,
    make_solos,
    mlx_lm_generate,
    model_of,
    run_all,
    solo,
)
from tests.support.models.builders import prompt_of
from tests.support.models.recurrent import RECURRENT


def last_response(gen: Any, length: int = 20) -> Any:
    gen.insert([prompt_of(length).tolist()], [2])
    last = None
    while responses := gen.next_generated():
        last = responses[0]
    return last


def test_response_is_a_dataclass_like_mlx_lms() -> None:
    model = model_of("llama")
    stock = last_response(generator(model))
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    ours = last_response(generator(model))
    assert [field.name for field in dataclasses.fields(ours)] == [field.name for field in dataclasses.fields(stock)]
    assert sorted(dataclasses.asdict(ours)) == sorted(dataclasses.asdict(stock))
    assert isinstance(ours, type(stock)) and ours.all_tokens == stock.all_tokens and ours.token == stock.token
    assert copy.copy(ours).token == ours.token and "token=" in repr(ours)
    assert mx.array_equal(type(ours)(**dict(_fields(ours))).logprobs, stock.logprobs)


def _fields(response: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(response, field.name)) for field in dataclasses.fields(response)]


def test_replace_keeps_the_cache_and_log_probabilities() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    response = last_response(generator(model_of("llama")))
    other = dataclasses.replace(response, token=5)
    assert (other.token, other.uid, other.finish_reason) == (5, response.uid, "length")
    assert other.prompt_cache is response.prompt_cache and other.all_tokens == response.all_tokens
    assert mx.array_equal(other.logprobs, response.logprobs)
    zeros = mx.zeros_like(response.logprobs)
    assert dataclasses.replace(response, logprobs=zeros, prompt_cache=None).prompt_cache is None
    response.logprobs = zeros
    assert response.logprobs is zeros


def test_setting_prompt_cache_to_none_releases_its_blocks() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    model = model_of("llama")
    gen = generator(model)
    response = last_response(gen)
    pool = mlx_paged.pool_of(model)
    assert pool.stats().live_blocks > 0
    response.prompt_cache = None
    assert response.prompt_cache is None
    pool.lock.collect()
    assert pool.stats().live_blocks == 0
    pool.check_integrity()


def test_prompt_cache_can_be_set_after_it_was_dropped() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    response = last_response(generator(model_of("llama")))
    assert response.drop_cache()
    with pytest.raises(PromptCacheError):
        _ = response.prompt_cache
    response.prompt_cache = None
    assert response.prompt_cache is None and not response.drop_cache()


BLOCK = 8


def sharing_generator(kind: str) -> tuple[Any, Any]:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    model = model_of(kind)
    pool = getattr(mlx_lm_generate.make_prompt_cache(model)[0], "pool", None)
    prefixes = SharedPrefixes(PrefixCache(prefix_pool_of(model)))
    return PagedBatchGenerator(model, prefixes=prefixes), pool


def tokens_until(gen: Any, uid: int, count: int) -> list[int]:
    """Return tokens of one request, until there are ``count`` or it has finished."""
    tokens: list[int] = []
    while len(tokens) < count:
        mine = [response for response in gen.next()[1] if response.uid == uid]
        tokens += [response.token for response in mine]
        if any(response.finish_reason is not None for response in mine):
            break
    return tokens


@pytest.mark.parametrize("kind", quick(["llama", "gemma3", *RECURRENT], "llama", "mamba", "qwen3_next"))
def test_finish_caches_as_many_tokens_as_reaching_the_limit(kind: str) -> None:
    prompt, count = prompt_of(21, seed=1).tolist(), 10
    found = []
    for wanted in (count, 1000):
        gen, _ = sharing_generator(kind)
        (uid,) = gen.insert([prompt], [wanted])
        tokens = tokens_until(gen, uid, count)
        gen.finish([uid])  # no effect if it has already ended
        (uid,) = gen.insert([[*prompt, *tokens, *prompt_of(9, seed=2).tolist()]], [1])
        (response,) = [r for _ in range(9) for r in gen.next()[1]][:1]
        found.append((tokens, response.token, response.num_cached))
        assert gen.next() == ([], [])
        gen.close()
    assert found[0] == found[1]
    assert found[0][2] >= 21 + count - 1 - 8


def test_finish_frees_blocks_at_once_and_other_rows_continue() -> None:
    specs = [Spec(20 + n, 24, seed=n) for n in range(4)]
    make_solos("llama", specs)
    gen, pool = sharing_generator("llama")
    uids = gen.insert([spec.prompt for spec in specs], [24, 24, 1000, 24])
    outcomes = {uid: Outcome() for uid in uids}
    while len(outcomes[uids[2]].tokens) < 7:
        collect(outcomes, *gen.next())
    gen.finish([uids[2], uids[2], 12345])
    assert uids[2] not in gen._engine.requests and len(gen.progress()) == 3
    held = {block for row in gen._engine.requests.values() for ids in row.table.block_ids for block in ids if block}
    stats = pool.stats()
    assert stats.live_blocks == len(held) + stats.cached_blocks  # of the other rows, and of the prefix cache
    rest = {uid: outcome for uid, outcome in outcomes.items() if uid != uids[2]}
    run_all(gen, rest)
    for uid, spec in zip(uids, specs, strict=True):
        if uid != uids[2]:
            assert outcomes[uid].tokens == solo("llama", spec)[0]
    assert pool.stats().live_blocks == pool.stats().cached_blocks


def test_sampling_failure_after_finish_is_not_reported() -> None:
    """The step that delivers a token also samples the next one, which may fail after the request is finished."""
    gen, pool = sharing_generator("llama")
    calls = 0

    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise ValueError("no more")
        return mx.argmax(logprobs, axis=-1)

    (uid,) = gen.insert([prompt_of(12, seed=1).tolist()], [100], samplers=[sampler])
    assert len(tokens_until(gen, uid, 3)) == 3
    gen.finish([uid])
    assert gen.next() == ([], [])
    assert pool.stats().live_blocks == pool.stats().cached_blocks


def test_waiting_request_can_be_finished() -> None:
    gen, pool = sharing_generator("llama")
    (uid,) = gen.insert([[1, 2, 3]], [5])
    gen.finish([uid])
    assert gen.next() == ([], []) and pool.stats().live_blocks == 0


def test_finish_without_patches_removes_the_request() -> None:
    gen = PagedBatchGenerator(model_of("llama"))  # the patches are not applied: nothing is paged
    uids = gen.insert([[1, 2, 3], [4, 5, 6]], [5, 5])
    assert len(tokens_until(gen, uids[0], 2)) == 2
    gen.finish([uids[0]])
    assert tokens_until(gen, uids[1], 9)
    assert not any(gen.next())
