"""Requests with different salts share no prefix: not by the cache, not with each other while they run, not on disk."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.request import RequestOptions
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.spill import SpillStore
from mlx_paged.prefix.store import SharedPrefixes
from tests.support.models.batch_runs import model_of
from tests.support.models.builders import KINDS, WINDOW, build, greedy, prompt_of
from tests.support.models.recurrent import RECURRENT

BLOCK = 8
KEY = ("model", None, None)
SALTS = [None, "a", "b", None, "a", "b"]


def run(gen: Any, prompts: list[list[int]], salts: list[Any]) -> tuple[list[list[int]], list[int]]:
    """The answers, and how many tokens each request found."""
    uids = gen.insert_segments(
        [[prompt] for prompt in prompts], [5] * len(prompts), options=[RequestOptions(salt=salt) for salt in salts]
    )
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    cached = dict.fromkeys(uids, 0)
    while any(answer := gen.next()):
        for response in answer[1]:
            tokens[response.uid].append(response.token)
            cached[response.uid] = response.num_cached
    return [tokens[uid] for uid in uids], [cached[uid] for uid in uids]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", [*KINDS, *RECURRENT])
def test_a_burst_shares_within_a_salt(kind: str) -> None:
    system = prompt_of(2 * WINDOW + 5, seed=1).tolist()
    prompts = [system + prompt_of(5 + n, seed=10 + n).tolist() for n in range(len(SALTS))]
    expected = [greedy(model_of(kind), mx.array(prompt), 5)[0] for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    model = model_of(kind)
    prefixes = SharedPrefixes(RadixTree(prefix_pool_of(model)))
    gen = PagedBatchGenerator(model, prefixes=prefixes, prefill_step_size=64)
    answers, cached = run(gen, prompts, SALTS)
    assert answers == expected
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) >= len(system) // BLOCK * BLOCK - BLOCK
    # And later, when all are done: a new salt finds nothing, the old ones everything.
    again, found = run(gen, prompts[:3], ["c", "a", None])
    assert again == expected[:3] and found[0] == 0 and min(found[1:]) >= len(system) // BLOCK * BLOCK - BLOCK


@pytest.mark.parametrize("paged", [True, False])
def test_the_prompt_cache_keeps_salts_apart(paged: bool) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    model, store = build("llama"), PagedPromptCache()
    tokens = prompt_of(30).tolist()
    caches = upstream.make_prompt_cache(model) if paged else [upstream.KVCache() for _ in model.layers]
    mx.eval(model(mx.array(tokens)[None], cache=caches))
    with store.salted("a"):
        store.insert_cache(KEY, tokens, caches)
        assert store.fetch_nearest_cache(KEY, [*tokens, 1])[1] == [1]
        with store.salted("b"):
            assert store.fetch_nearest_cache(KEY, [*tokens, 1])[0] is None
    assert store.fetch_nearest_cache(KEY, [*tokens, 1])[0] is None
    assert len(store) == 1 and store.nbytes > 0
    assert sum(kind["n_sequences"] for kind in store.stats_by_type().values()) == 1
    store.trim_to(n_sequences=0)
    assert len(store) == 0


def test_salts_are_apart_on_disk(tmp_path: Path) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    model, tokens = build("llama"), prompt_of(4 * BLOCK + 3).tolist()

    def new_store() -> PagedPromptCache:
        store = PagedPromptCache(spill=SpillStore(tmp_path), identify=lambda key: "weights")
        store.learn_layout(KEY, upstream.make_prompt_cache(model))
        return store

    store = new_store()
    caches = upstream.make_prompt_cache(model)
    mx.eval(model(mx.array(tokens)[None], cache=caches))
    with store.salted("a"):
        store.insert_cache(KEY, tokens, caches)
    del caches
    store.close()
    mlx_paged.patches.cache.pools.forget_pools()
    gc.collect()

    store = new_store()
    pool = upstream.make_prompt_cache(model)[0].pool
    shared = store.shared_prefixes(KEY, pool)
    assert [shared.adopt([*tokens, 1], salt)[0] for salt in (None, "b", "a")] == [0, 0, len(tokens)]
    with store.salted("b"):
        assert store.fetch_nearest_cache(KEY, [*tokens, 1])[0] is None
    with store.salted("a"):
        assert store.fetch_nearest_cache(KEY, [*tokens, 1])[1] == [1]
    pool.check_integrity()
