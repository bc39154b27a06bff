"""``max_kv_size`` uses mlx-lm's own rotating caches, in single runs and row by row in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick
from tests.support.models.batch_runs import answers, fall_throughs, generator, run_requests
from tests.support.models.builders import greedy, prompt_of, rms
from tests.support.processes.bounded import KINDS, SIZE, STEP, conversation, model_of, solo

LENGTHS = (1, 5, SIZE, SIZE + 2, 75)


@pytest.mark.parametrize(("kind", "size"), quick(crossed(KINDS, [5, SIZE]), (KINDS[1], 5), (KINDS[0], SIZE)))
def test_single_runs_give_stock_tokens_and_one_warning(kind: str, size: int) -> None:
    expected = [solo(kind, length, 24, size, 7) for length in LENGTHS]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    messages = []
    for length, (tokens, logprobs) in zip(LENGTHS, expected, strict=True):
        prompt = prompt_of(length, seed=length)
        got, told = fall_throughs(
            lambda prompt=prompt: greedy(model_of(kind), prompt, 24, max_kv_size=size, prefill_step_size=7)
        )
        messages += told
        assert got[0] == tokens
        assert rms(got[1], logprobs) == 0.0
    assert len(messages) == 1 and "max_kv_size" in messages[0] and "keeps a sequence's first tokens" in messages[0]


@pytest.mark.parametrize("kind", quick(KINDS, KINDS[0]))
def test_rows_of_a_batch_equal_single_runs_of_stock(kind: str) -> None:
    """mlx-lm's own batches forget which tokens to keep, so their rows differ from single runs."""
    counts = dict(zip(LENGTHS, (60, 50, 20, 40, 30), strict=True))
    for length, num_tokens in counts.items():
        solo(kind, length, num_tokens)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    upstream.make_prompt_cache(model_of(kind))
    prefixes = SharedPrefixes(PrefixCache(mlx_paged.pool_of(model_of(kind))))  # of the unbounded pool
    sizes = {"prefill_step_size": STEP, "completion_batch_size": 3}
    gen, messages = fall_throughs(lambda: generator(model_of(kind), max_kv_size=SIZE, prefixes=prefixes, **sizes))
    assert any("do not keep the first tokens" in message for message in messages)
    assert not gen._engine.batch.takes_rows and gen._engine.pool is None and gen._engine.sharing is None
    outcomes = run_requests(gen, [prompt_of(n, seed=n).tolist() for n in counts], list(counts.values()))
    for outcome, (length, num_tokens) in zip(outcomes, counts.items(), strict=True):
        tokens, logprobs = solo(kind, length, num_tokens)
        assert outcome.tokens == tokens
        assert np.abs(np.stack(outcome.logprobs) - logprobs).max() <= 1e-5


@pytest.mark.filterwarnings("ignore")
def test_bounded_cache_from_a_file_stays_stock_alone_and_in_a_batch(tmp_path: Path) -> None:
    model, tail = model_of("qwen3"), prompt_of(30, seed=9)
    file = str(tmp_path / "stock.safetensors")
    upstream.save_prompt_cache(file, conversation(model, (SIZE + 5, 1, 1))[0])
    expected = greedy(model, tail, 30, prompt_cache=upstream.load_prompt_cache(file), prefill_step_size=64)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    adopted = mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file))
    assert all(type(cache) is upstream.RotatingKVCache for cache in adopted)
    assert greedy(model, tail, 30, prompt_cache=adopted, prefill_step_size=64)[0] == expected[0]
    gen = generator(model, max_kv_size=SIZE, prefill_step_size=64)
    assert answers(gen, [tail.tolist()], [30], caches=[upstream.load_prompt_cache(file)]) == [expected[0]]


@pytest.mark.filterwarnings("ignore")
def test_prompt_cache_store_returns_bounded_caches_as_stock_does() -> None:
    model = model_of("qwen3")
    tokens = prompt_of(60, seed=4).tolist()

    def run(store: Any) -> list[np.ndarray]:
        store.insert_cache("m", tokens[:50], conversation(model, (50,))[0])
        cache, rest = store.fetch_nearest_cache("m", tokens)
        logits = [np.array(model(mx.array(rest)[None], cache=cache))]
        assert len(rest) == 10
        cache, rest = store.fetch_nearest_cache("m", [*tokens[:20], 1, 2, 3])
        return [*logits, np.array([cache is None, len(rest)])]

    expected = run(upstream.LRUPromptCache())
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    store = PagedPromptCache()
    for got, want in zip(run(store), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(store) == 1
    assert store.fetch_nearest_cache("m", tokens[:50]) == (None, tokens[:50])  # it cannot be trimmed by a token
    store.close()
