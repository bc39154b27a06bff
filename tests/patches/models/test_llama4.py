"""Llama 4: layers that see chunks and layers that see everything, against plain masks over all keys."""

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream
from mlx_lm.models import llama4 as llama4_module

import mlx_paged
from mlx_paged import PagedConfig, TrimError
from mlx_paged.patches.cache.layout import why_one_by_one
from mlx_paged.patches.cache.prompt_cache import factory_of
from mlx_paged.patches.models import model_calls
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick, slow
from tests.support.models import llama4
from tests.support.models.batch_runs import (
    generator,
    mlx_lm_generate,
    packing_generator,
    run_requests,
)
from tests.support.models.builders import greedy

pytestmark = pytest.mark.usefixtures("no_fall_through")
BLOCK = 8
CHUNKS = [24, 20]  # a multiple of the block size, and none
model_of = functools.cache(llama4.build)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, llama4.VOCAB, length).tolist()


@pytest.mark.parametrize(
    ("step", "length", "chunk"), quick(crossed([16, 512], [1, 23, 53], CHUNKS), (16, 53, 24), (512, 23, 20))
)  # fmt: skip
def test_single_runs_equal_the_dense_reference(chunk: int, length: int, step: int) -> None:
    model, prompt = model_of(chunk), prompt_of(length)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    tokens, logprobs = greedy(model, mx.array(prompt), 30, prefill_step_size=step)
    llama4.check(model, prompt, tokens, logprobs)
    pool = mlx_paged.pool_of(model)
    assert [(group.spec.name, len(group.spec.layers)) for group in pool.groups] == [
        (f"chunk {chunk}", 6),
        ("global", 2),
    ]
    assert pool.stats().live_blocks == 0


@pytest.mark.parametrize(("packs", "chunk"), quick(crossed([False, True], CHUNKS), (True, 20)))
def test_ragged_batches_decode_together_in_the_kernel(chunk: int, packs: bool, kernels: Any) -> None:
    model = model_of(chunk)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    prompts = [prompt_of(length, seed=length) for length in (5, chunk - 1, chunk, 53, 70)]
    gen = packing_generator(model, 40, prefill_step_size=32) if packs else generator(model, prefill_step_size=32)
    assert why_one_by_one(model, factory_of(model, None)._stock()) is None
    for prompt, outcome in zip(prompts, run_requests(gen, prompts, [30, 12, 25, 30, 8]), strict=True):
        llama4.check(model, prompt, outcome.tokens, np.stack(outcome.logprobs))
    paths = {(choice.path, choice.reason) for choice in mlx_paged.dispatch_counts()}
    assert ("kernel", "one new token per sequence") in paths
    if kernels is not None:  # the kernel for packs takes only 16 bits; its stand-in takes any dtype
        assert (("kernel", "new tokens of several sequences") in paths) == packs
    assert {reason for path, reason in paths if path == "gather"} <= {"several new tokens after a prefix"}
    gen.close()
    mlx_paged.pool_of(model).check_integrity()


def test_decode_steps_are_compiled(kernels: Any) -> None:
    model, prompt = llama4.build(20), prompt_of(30)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    tokens, logprobs = greedy(model, mx.array(prompt), 40)
    llama4.check(model, prompt, tokens, logprobs)
    step = model_calls.step_of(mlx_paged.pool_of(model), llama4_module.Model.__call__)
    assert step.failure is None and step._functions


# Prefixes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", quick(CHUNKS, 24))
def test_prefixes_are_found_in_whole_blocks_or_to_their_chunks_start(chunk: int, kernels: Any) -> None:
    model = model_of(chunk)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    pool = mlx_paged.pool_of(model)
    tree = PrefixCache(pool)
    gen = generator(model, prefill_step_size=512, prefixes=SharedPrefixes(tree))
    first = prompt_of(5)
    (outcome,) = run_requests(gen, [first], [3 * chunk])
    llama4.check(model, first, outcome.tokens, np.stack(outcome.logprobs))
    first = [*first, *outcome.tokens]
    # The last chunk is held. A prefix that ends before it is found up to its chunk's start, where no keys are needed.
    for common, found in ((3 * chunk + 3, 3 * chunk + 3), (3 * chunk + 1, 3 * chunk + 1), (2 * chunk + 3, 2 * chunk)):
        prompt = [*first[:common], *prompt_of(9, seed=common)]
        prompt[common] = (first[common] + 1) % llama4.VOCAB
        hits = tree.hit_tokens
        (outcome,) = run_requests(gen, [prompt], [chunk // 2 + 3])  # into the next chunk
        llama4.check(model, prompt, outcome.tokens, np.stack(outcome.logprobs))
        whole = found // BLOCK * BLOCK
        # If it ends in a chunk whose blocks have gone, it is found to the start, until a request computes them.
        assert tree.hit_tokens - hits in (whole, whole // chunk * chunk // BLOCK * BLOCK)
    gen.close()
    tree.clear()
    pool.check_integrity()


# Taking tokens back ---------------------------------------------------------------------------------------------------


def test_trim_to_dropped_tokens_is_refused_and_wrong_in_stock() -> None:
    """Stock keeps one chunk of tokens: trimmed to before a chunk's start, the chunk before is incomplete."""
    chunk = 12
    model, prompt = model_of(chunk), prompt_of(40)

    def after_trim(cache: list[Any]) -> np.ndarray:
        model(mx.array(prompt[:20])[None], cache=cache)
        for token in prompt[20:26]:  # 24 begins a chunk
            model(mx.array([[token]]), cache=cache)
        assert upstream.can_trim_prompt_cache(cache)
        upstream.trim_prompt_cache(cache, 4)
        logits = model(mx.array([prompt[22:23]]), cache=cache)[0, -1]
        return np.array(logits - mx.logsumexp(logits))

    right = llama4.dense_logprobs(model, prompt[:23])[-1]
    assert np.abs(after_trim(upstream.make_prompt_cache(model)) - right).max() > 1e-3
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    with pytest.raises(TrimError):
        after_trim(upstream.make_prompt_cache(model))


def test_drafts_do_not_change_a_token(kernels: Any) -> None:
    """The draft model's chunk is longer than the run: a paged one cannot be trimmed to before a chunk's start."""
    model, prompt = model_of(20), prompt_of(33)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    draft = llama4.build(64)
    steps = mlx_lm_generate.speculative_generate_step(mx.array(prompt), model, draft, num_draft_tokens=3, max_tokens=12)
    found = list(steps)
    llama4.check(model, prompt, [int(token) for token, *_ in found], np.stack([np.array(p) for _, p, _ in found]))
    assert any(drafted for *_, drafted in found)
    mlx_paged.pool_of(model).check_integrity()


# To and from mlx-lm's caches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [47, *slow(5, 13, 20, 33, 40, 41)])
def test_caches_continue_as_saved_adopted_and_without_the_patches(length: int, tmp_path: Any) -> None:
    model, prompt, more = model_of(20), prompt_of(length), prompt_of(1, seed=5)
    file, stock = str(tmp_path / "cache.safetensors"), upstream.make_prompt_cache(model)
    for token in prompt:
        model(mx.array([[token]]), cache=stock)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    adopted, paged = mlx_paged.adopt_prompt_cache(model, stock), upstream.make_prompt_cache(model)
    model(mx.array(prompt)[None], cache=paged)
    assert isinstance(adopted[0], upstream.ChunkedKVCache) and isinstance(adopted[3], upstream.KVCache)
    assert adopted[0].chunk_size == 20 and adopted[0].start_position == length // 20 * 20
    assert not hasattr(adopted[0], "max_size") and not hasattr(adopted[3], "chunk_size")
    upstream.save_prompt_cache(file, paged)
    saved = upstream.load_prompt_cache(file)
    for given in (adopted, mlx_paged.adopt_prompt_cache(model, upstream.load_prompt_cache(file)), saved, paged):
        if given is saved:
            mlx_paged.remove_patches()
        tokens, logprobs = greedy(model, mx.array(more), 25, prompt_cache=given)
        llama4.check(model, [*prompt, *more], tokens, logprobs)


def test_pages_of_chunks_are_quantised_and_max_kv_size_has_no_effect() -> None:
    model, prompt = model_of(20), prompt_of(50)
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_bits=8, kv_group_size=32))
    tokens, logprobs = greedy(model, mx.array(prompt), 20, max_kv_size=16)  # as in stock
    dense = llama4.dense_logprobs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    assert all(group.is_quantized for group in mlx_paged.pool_of(model).groups)
    assert 0 < np.sqrt(np.mean((dense - logprobs) ** 2)) < 2e-2
