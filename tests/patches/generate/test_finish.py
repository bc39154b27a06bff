"""PagedBatchGenerator.finish: a request of which no more tokens are wanted leaves like one that ended by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.store import SharedPrefixes
from tests.support.models.batch_runs import Outcome, Spec, collect, make_solos, mlx_lm_generate, model_of, run_all, solo
from tests.support.models.builders import prompt_of
from tests.support.models.recurrent import RECURRENT

BLOCK = 8


def generator(kind: str) -> tuple[Any, Any]:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    model = model_of(kind)
    pool = getattr(mlx_lm_generate.make_prompt_cache(model)[0], "pool", None)
    prefixes = SharedPrefixes(RadixTree(prefix_pool_of(model)))
    return PagedBatchGenerator(model, prefixes=prefixes), pool


def tokens_until(gen: Any, uid: int, count: int) -> list[int]:
    """Tokens of one request, until there are so many or it has finished."""
    tokens: list[int] = []
    while len(tokens) < count:
        mine = [response for response in gen.next()[1] if response.uid == uid]
        tokens += [response.token for response in mine]
        if any(response.finish_reason is not None for response in mine):
            break
    return tokens


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kind", ["llama", "gemma3", *RECURRENT])
def test_after_finish_as_much_is_found_as_after_an_end_token(kind: str) -> None:
    prompt, count = prompt_of(21, seed=1).tolist(), 10
    found = []
    for wanted in (count, 1000):
        gen, _ = generator(kind)
        (uid,) = gen.insert([prompt], [wanted])
        tokens = tokens_until(gen, uid, count)
        gen.finish([uid])  # nothing to do where it has ended already
        (uid,) = gen.insert([[*prompt, *tokens, *prompt_of(9, seed=2).tolist()]], [1])
        (response,) = [r for _ in range(9) for r in gen.next()[1]][:1]
        found.append((tokens, response.token, response.num_cached))
        assert gen.next() == ([], [])
        gen.close()
    assert found[0] == found[1]
    assert found[0][2] >= 21 + count - 1


def test_its_blocks_are_free_at_once_and_the_others_go_on() -> None:
    specs = [Spec(20 + n, 24, seed=n) for n in range(4)]
    make_solos("llama", specs)
    gen, pool = generator("llama")
    uids = gen.insert([spec.prompt for spec in specs], [24, 24, 1000, 24])
    outcomes = {uid: Outcome() for uid in uids}
    while len(outcomes[uids[2]].tokens) < 7:
        collect(outcomes, *gen.next())
    gen.finish([uids[2], uids[2], 12345])
    assert uids[2] not in gen._engine.requests and len(gen.progress()) == 3
    held = {
        block for row in gen._engine.requests.values() for table in row.tables for block in table.block_ids if block
    }
    stats = pool.stats()
    assert stats.live_blocks == len(held) + stats.cached_blocks  # beyond the other rows' own: the prefix cache's only
    rest = {uid: outcome for uid, outcome in outcomes.items() if uid != uids[2]}
    run_all(gen, rest)
    for uid, spec in zip(uids, specs, strict=True):
        if uid != uids[2]:
            assert outcomes[uid].tokens == solo("llama", spec)[0]
    assert pool.stats().live_blocks == pool.stats().cached_blocks


def test_a_failure_of_the_token_after_the_last_is_not_reported() -> None:
    """The step that delivers a token samples the next one, and that may fail: the request is over by then."""
    gen, pool = generator("llama")
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


def test_a_request_that_waits_can_be_finished() -> None:
    gen, pool = generator("llama")
    (uid,) = gen.insert([[1, 2, 3]], [5])
    gen.finish([uid])
    assert gen.next() == ([], []) and pool.stats().live_blocks == 0


def test_where_mlx_lm_computes_the_request_is_removed() -> None:
    gen = PagedBatchGenerator(model_of("llama"))  # the patches are not applied: nothing is paged
    uids = gen.insert([[1, 2, 3], [4, 5, 6]], [5, 5])
    assert len(tokens_until(gen, uids[0], 2)) == 2
    gen.finish([uids[0]])
    assert tokens_until(gen, uids[1], 9)
    assert not any(gen.next())
