"""Prompt caches: files from and for mlx-lm, the replacement of LRUPromptCache, and salts that separate prefixes."""

import copy
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import KVCache, LRUPromptCache, RotatingKVCache

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache, PoolExhaustedError, PromptCacheError
from mlx_paged.engine.request import RequestOptions
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.identity import model_identity
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from mlx_paged.prefix.shelf import Shelf
from tests.support.cases import crossed, quick
from tests.support.models.batch_runs import assert_released, model_of, run_requests
from tests.support.models.builders import KINDS, WINDOW, assert_same, build, greedy, prompt_of, rms, tolerance_of
from tests.support.models.recurrent import RECURRENT

# Below, at and past the window; after prefill only, and after decode steps that wrapped mlx-lm's ring.
HISTORIES = [(5, 0), (WINDOW - 1, 0), (WINDOW, 0), (WINDOW + 1, 3), (90, 0), (90, 1), (90, 17), (3, WINDOW + 9)]


def history(model, prompt_tokens: int, decoded: int):
    """Return a prompt cache after a prefill and ``decoded`` single-token steps; paged if the patches are applied."""
    cache = upstream.make_prompt_cache(model)
    tokens = prompt_of(prompt_tokens + decoded, seed=4)
    model(tokens[None, :prompt_tokens], cache=cache)
    for i in range(decoded):
        model(tokens[None, prompt_tokens + i : prompt_tokens + i + 1], cache=cache)
    mx.eval([c.state for c in cache])
    return cache


def goes_on(model, cache):
    return greedy(model, prompt_of(6, seed=5), 10, prompt_cache=cache)


def assert_same_contents(got: list[Any], expected: list[Any], tolerance: float = 0.0) -> None:
    """Compare two of mlx-lm's prompt caches by position, in all that the next token can see."""
    for ours, theirs in zip(got, expected, strict=True):
        assert type(ours) is type(theirs) and ours.offset == theirs.offset
        for new, old in zip(by_position(ours), by_position(theirs), strict=True):
            assert new.shape == old.shape and rms(np.array(new), np.array(old)) <= tolerance


def by_position(cache: Any) -> list[mx.array]:
    if not isinstance(cache, RotatingKVCache):
        return list(cache.keys_and_values())
    seen = min(cache.offset, cache.max_size - 1)
    return [cache._temporal_order(x)[:, :, -seen:] for x in (cache.keys, cache.values)]


# The quick cases include kinds with and without windows.
@pytest.mark.parametrize(
    ("kind", "tokens"), quick(crossed(KINDS, HISTORIES), ("llama", (90, 0)),
    ("llama-sliding", (5, 0)), ("qwen3", (39, 0)), ("gemma3", (90, 17))), ids=str
)  # fmt: skip
def test_prompt_cache_files_round_trip_with_stock(kind: str, tokens: tuple[int, int], tmp_path: Path) -> None:
    model, (prompt_tokens, decoded) = build(kind), tokens
    file, paged_file = str(tmp_path / "stock.safetensors"), str(tmp_path / "paged.safetensors")
    upstream.save_prompt_cache(file, history(model, prompt_tokens, decoded), {"model": "m"})
    expected = goes_on(model, upstream.load_prompt_cache(file))
    tolerance = tolerance_of(kind, prompt_tokens + decoded + 16)

    mlx_paged.apply_patches(PagedConfig(block_size=8))
    # Stock file, adopted into the pool.
    loaded, metadata = upstream.load_prompt_cache(file, return_metadata=True)
    assert metadata == {"model": "m"}
    adopted = mlx_paged.adopt_prompt_cache(model, loaded)
    assert all(isinstance(c, PagedKVCache) for c in adopted)
    assert_same_contents([c.to_stock() for c in adopted], upstream.load_prompt_cache(file))
    assert_same(goes_on(model, adopted), expected, tolerance)
    # Stock file, used as the stock cache it is.
    got = goes_on(model, upstream.load_prompt_cache(file))
    assert got[0] == expected[0]
    # Paged file, saved again after being adopted, and made by paged generation.
    upstream.save_prompt_cache(paged_file, history(model, prompt_tokens, decoded), {"model": "m"})
    mlx_paged.pool_of(model).check_integrity()
    mlx_paged.remove_patches()
    ours = upstream.load_prompt_cache(paged_file)
    own = tolerance_of(kind, prompt_tokens + decoded) if decoded else 0.0  # decode past the window reorders the ring
    assert_same_contents(ours, upstream.load_prompt_cache(file), own)
    assert_same(goes_on(model, ours), expected, tolerance)


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("llama", {"num_hidden_layers": 1}, "has 1 layers, the model 2"),
        ("llama", {"num_key_value_heads": 3}, "3 KV heads of dimension 32, the model has 2 of 32"),
        ("llama", {"head_dim": 64}, "2 KV heads of dimension 64, the model has 2 of 32"),
        ("gemma3", {"sliding_window": 24}, r"has the window .*size=24"),
    ],
)
def test_prompt_cache_of_another_model_is_refused(
    kind: str, other: dict[str, int], message: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "other.safetensors")
    upstream.save_prompt_cache(file, history(build(kind, **other), 20, 0))
    model = build(kind)
    mlx_paged.apply_patches()
    with pytest.raises(PromptCacheError, match=message):
        mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file))
    assert_released(model)
    assert len(greedy(model, prompt_of(5), 4)[0]) == 4


def test_prompt_cache_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "c.safetensors")
    model = build("llama")
    upstream.save_prompt_cache(file, history(model, 200, 0))
    mlx_paged.apply_patches(PagedConfig(kv_cache_memory=100_000))
    with pytest.raises(PoolExhaustedError):
        mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file))
    assert mlx_paged.pool_of(model).stats().live_blocks == 0


def test_mlx_lm_merges_paged_caches_into_its_own_batch() -> None:
    model = build("gemma3")
    stock = [history(model, count, 2) for count in (9, 20)]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    paged = [history(model, count, 2) for count in (9, 20)]
    for layer, (one, two) in enumerate(zip(*paged, strict=True)):
        with pytest.warns(mlx_paged.NotPagedWarning, match="own batch generator") if layer == 0 else nullcontext():
            got = one.merge([one, two])
        expected = stock[0][layer].merge([row[layer] for row in stock])
        assert type(got) is type(expected)
        assert got.offset.tolist() == expected.offset.tolist() == [11, 22]
        for new, old in zip(got.state[:2], expected.state[:2], strict=True):
            np.testing.assert_array_equal(new, old)


def test_merging_quantised_caches_is_refused() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_bits=8, kv_group_size=32))
    model = build("llama")
    caches = [history(model, 20, 0)[0] for _ in range(2)]
    with pytest.raises(PromptCacheError, match="batch generator does not support QuantizedKVCache"):
        caches[0].merge(caches)


@pytest.mark.parametrize("kind", ["llama-sliding", "llama"])
def test_isinstance_of_a_paged_cache_answers_as_for_stock(kind: str) -> None:
    """Attributes of those classes exist too; ``type`` is the paged class, which inherits nothing from them."""
    model = build(kind)
    stock = upstream.make_prompt_cache(model)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    for old, new in zip(stock, upstream.make_prompt_cache(model), strict=True):
        assert type(new) is not type(old) and isinstance(new, PagedKVCache)
        for each in (KVCache, RotatingKVCache):
            assert isinstance(new, each) == isinstance(old, each)
        for name in ("max_size", "keep"):
            assert getattr(new, name, None) == getattr(old, name, None)
        assert isinstance(copy.deepcopy(new), PagedKVCache)


BLOCK = 8
KEY = ("model", None, None)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    return build(getattr(request, "param", "llama"))


def forward(model: Any, tokens: list[int], caches: list[Any]) -> np.ndarray:
    logits = model(mx.array(tokens)[None], cache=caches)
    mx.eval(logits, [c.state[0] for c in caches])
    return np.array(logits[0, -1])


def serve(model: Any, store: Any, tokens: list[int], num_new: int) -> tuple[list[int], int]:
    """Answer a prompt as the server does. Return all tokens, and the number of prompt tokens that were computed."""
    caches, rest = store.fetch_nearest_cache(KEY, tokens)
    if caches is None:
        caches = upstream.make_prompt_cache(model)
    assert tokens[len(tokens) - len(rest) :] == rest and rest
    row, out = forward(model, rest, caches), list(tokens)
    for _ in range(num_new):
        out.append(int(row.argmax()))
        row = forward(model, out[-1:], caches)
    store.insert_cache(KEY, out, caches)
    return out, len(rest)


def test_common_prefixes_are_found_and_stored_once(model: Any) -> None:
    store, stock = PagedPromptCache(), LRUPromptCache()
    system = prompt_of(5 * BLOCK + 3, seed=1).tolist()
    prompts = [system + prompt_of(9, seed=10 + n).tolist() for n in range(6)]
    for number, prompt in enumerate(prompts):
        _, computed = serve(model, store, prompt, 2)
        assert computed == (len(prompt) if number == 0 else 3 + 9)
    pool = mlx_paged.pool_of(model)
    assert pool is not None
    mlx_paged.remove_patches()
    for prompt in prompts:
        serve(model, stock, prompt, 2)
    assert len(store) == len(stock) == 6
    gc.collect()
    # Five whole blocks, and for each prompt one of its own: the last one is not whole.
    assert pool.stats().live_blocks == 5 + 6 and store.nbytes == pool.stats().bytes_in_use < stock.nbytes / 2
    store.close()
    assert (len(store), store.nbytes, pool.stats().live_blocks) == (0, 0, 0)


def test_trimmable_caches_are_found_within_a_block_of_stocks(model: Any) -> None:
    """Random prompts over two tokens: whole blocks of what mlx-lm finds, and a token is left to compute."""
    store, stock = PagedPromptCache(max_size=None), LRUPromptCache(max_size=1000)
    rng = np.random.default_rng(0)
    for _ in range(40):
        tokens = rng.integers(1, 3, rng.integers(1, 12 + 2 * BLOCK)).tolist()
        found, rest = store.fetch_nearest_cache(KEY, tokens)
        stock_rest = stock.fetch_nearest_cache(KEY, tokens)[1]
        known = len(tokens) - len(stock_rest)
        assert len(tokens) - len(rest) == min(known, len(tokens) - 1) // BLOCK * BLOCK
        assert rest == tokens[len(tokens) - len(rest) :] and (found is None) == (len(rest) == len(tokens))
        assert found is None or found[0].offset == len(tokens) - len(rest)
        caches = upstream.make_prompt_cache(model)
        forward(model, tokens, caches)
        store.insert_cache(KEY, tokens, caches)
        stock.insert_cache(KEY, tokens, copy.deepcopy(caches))
    assert len(store) <= len(stock)


def test_changing_a_fetched_cache_leaves_the_stored_one_unchanged(model: Any) -> None:
    store = PagedPromptCache()
    tokens = prompt_of(2 * BLOCK).tolist()
    serve(model, store, tokens, 0)
    first, second = (store.fetch_nearest_cache(KEY, [*tokens, 1])[0] for _ in range(2))
    expected = forward(model, [1], second)
    forward(model, [7, 8, 9], first)
    np.testing.assert_array_equal(forward(model, [1], store.fetch_nearest_cache(KEY, [*tokens, 1])[0]), expected)
    assert upstream.can_trim_prompt_cache(first) and upstream.trim_prompt_cache(first, 5) == 5
    assert first[0].offset == 2 * BLOCK - 2 and store.fetch_nearest_cache(KEY, [*tokens, 1])[1] == [1]


def test_least_recently_used_entries_are_evicted_beyond_the_limits(model: Any) -> None:
    store = PagedPromptCache(max_size=3)
    prompts = [[n, *prompt_of(17, seed=n).tolist()] for n in range(5)]
    for prompt in prompts[:3]:
        serve(model, store, prompt, 0)
    store.fetch_nearest_cache(KEY, [*prompts[0], 1])
    serve(model, store, prompts[3], 0)
    found = [store.fetch_nearest_cache(KEY, [*prompt, 1])[0] is not None for prompt in prompts]
    assert found == [True, False, True, True, False]
    store.trim_to(n_sequences=2)
    assert len(store) == 2
    store.trim_to(n_bytes=store.nbytes - 1)
    assert len(store) == 1
    store.trim_to(n_bytes=-5)
    assert len(store) == store.nbytes == 0


def test_caches_of_a_draft_model_are_stored_with_the_models(model: Any) -> None:
    draft, store = build("gemma3", seed=1), PagedPromptCache()
    tokens = prompt_of(4 * BLOCK).tolist()
    target_caches, draft_caches = (upstream.make_prompt_cache(m) for m in (model, draft))
    forward(model, tokens, target_caches)
    forward(draft, tokens[: 3 * BLOCK + 2], draft_caches)  # behind by a few, as after a rejected draft
    store.insert_cache(KEY, tokens, target_caches + draft_caches)
    assert len(store) == 1
    caches, rest = store.fetch_nearest_cache(KEY, [*tokens, 1])
    assert len(caches) == len(target_caches) + len(draft_caches)
    assert {c.offset for c in caches} == {3 * BLOCK} and rest == [*tokens[3 * BLOCK :], 1]
    assert caches[0].pool is mlx_paged.pool_of(model) and caches[-1].pool is mlx_paged.pool_of(draft)


def test_unloading_a_model_removes_its_prefixes() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    store, model = PagedPromptCache(), build("llama")
    serve(model, store, prompt_of(20).tolist(), 0)
    assert len(store) == 1
    del model
    gc.collect()
    assert len(store) == store.nbytes == 0
    assert store.fetch_nearest_cache(KEY, [1, 2]) == (None, [1, 2])


@pytest.mark.parametrize("model", ["llama", "gemma3"], indirect=True)
def test_prefixes_are_restored_from_disk_after_a_restart(model: Any, tmp_path: Path) -> None:
    prompt = prompt_of(2 * WINDOW + 5).tolist()

    def new_store(model: Any) -> PagedPromptCache:
        return PagedPromptCache(disk=DiskTier(Shelf(tmp_path)), identify=lambda key: model_identity(model))

    store = new_store(model)
    with store.salted("a"):
        tokens, _ = serve(model, store, prompt, 3)
        expected = forward(model, [1, 2, 3], store.fetch_nearest_cache(KEY, [*tokens, 1, 2, 3])[0])
    store.close()
    mlx_paged.patches.cache.pools.forget_pools()
    gc.collect()

    store = new_store(model)
    store.learn_layout(KEY, upstream.make_prompt_cache(model))
    for salt in (None, "b", "a"):
        with store.salted(salt):
            caches, rest = store.fetch_nearest_cache(KEY, [*tokens, 1, 2, 3])
        assert rest == ([1, 2, 3] if salt == "a" else [*tokens, 1, 2, 3])
    np.testing.assert_array_equal(forward(model, [1, 2, 3], caches), expected)
    caches[0].pool.check_integrity()
    other = build("llama", seed=9)
    assert model_identity(other) != model_identity(model) == model_identity(model)


SALTS = [None, "a", "b", None, "a", "b"]


@pytest.mark.parametrize("kind", quick([*KINDS, *RECURRENT], "llama", "mamba"))
def test_burst_shares_prefixes_only_within_a_salt(kind: str) -> None:
    system = prompt_of(2 * WINDOW + 5, seed=1).tolist()
    prompts = [system + prompt_of(5 + n, seed=10 + n).tolist() for n in range(len(SALTS))]
    expected = [greedy(model_of(kind), mx.array(prompt), 5)[0] for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    model = model_of(kind)
    prefixes = SharedPrefixes(PrefixCache(prefix_pool_of(model)))
    gen = PagedBatchGenerator(model, prefixes=prefixes, prefill_step_size=64)

    def cached(salts: list[Any]) -> list[int]:
        """Check the answers of as many requests; return the number of cached tokens of each."""
        count, options = len(salts), [RequestOptions(salt=salt) for salt in salts]
        outcomes = run_requests(gen, prompts[:count], [5] * count, options=options)
        assert [outcome.tokens for outcome in outcomes] == expected[:count]
        return [outcome.num_cached for outcome in outcomes]

    whole = len(system) // BLOCK * BLOCK - BLOCK
    found = cached(SALTS)
    assert found[:3] == [0, 0, 0] and min(found[3:]) >= whole
    # And later, when all are done: a new salt finds nothing, the old ones everything.
    found = cached(["c", "a", None])
    assert found[0] == 0 and min(found[1:]) >= whole


@pytest.mark.parametrize("paged", [True, False])
def test_prompt_cache_separates_salts_and_models(paged: bool) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    model, store = build("llama"), PagedPromptCache()
    tokens = prompt_of(4 * BLOCK).tolist()
    caches = upstream.make_prompt_cache(model) if paged else [upstream.KVCache() for _ in model.layers]
    mx.eval(model(mx.array(tokens)[None], cache=caches))
    with store.salted("a"):
        store.insert_cache(KEY, tokens, caches)
        assert store.fetch_nearest_cache(KEY, [*tokens, 1])[1] == [1]
        assert store.fetch_nearest_cache(KEY, tokens)[1] == tokens[-BLOCK if paged else -1 :]  # a token is computed
        with store.salted("b"):
            assert store.fetch_nearest_cache(KEY, [*tokens, 1])[0] is None
        for other in (("model", "adapter", None), ("other", None, None)):
            assert store.fetch_nearest_cache(other, [*tokens, 1]) == (None, [*tokens, 1])
    assert store.fetch_nearest_cache(KEY, [*tokens, 1])[0] is None
    assert len(store) == 1 and store.nbytes > 0
    store.trim_to(n_sequences=0)
    assert len(store) == 0
