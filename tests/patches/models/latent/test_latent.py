"""Models with multi-head latent attention: decode steps attend over pages of latents, with stock's tokens."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig, dispatch_counts, reset_dispatch_counts
from mlx_paged.attention import latent_prompts
from mlx_paged.patches.models import compiled
from scripts import model_matrix
from scripts.model_matrix import alone, batched
from scripts.support import model_configs
from tests.support.kernels.fake_kernels import FakeKernels
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.builders import greedy, prompt_of, rms

# All whose attention has an adapter; those that share one of another module, too.
NAMES = [
    "deepseek_v3", "glm4_moe_lite", "longcat_flash", "longcat_flash_ngram", "kimi_k25", "kimi_vl", "kimi_linear",
    "kimi_k3", "bailing_hybrid", "bailing_moe_v3", "mistral4",
]  # fmt: skip
COMPILED = ["deepseek_v3", "glm4_moe_lite", "kimi_k25"]
WIDE = {"kv_lora_rank": 64, "qk_rope_head_dim": 64}  # that the kernels take
KERNEL = ("kernel", "one new token per sequence")
FEW = ("kernel", "a few new tokens per sequence")
FRESH = ("prefill", "no prefix: the new keys are all there is")
TOLERANCE = 5e-3


def build(name: str) -> Any:
    with mock.patch.dict(model_configs.COMMON, WIDE):
        override = model_configs.OVERRIDES.get(name, {})
        inner = override.get("text_config", {})
        with mock.patch.dict(inner, WIDE) if isinstance(inner, dict) and inner else mock.patch.dict(override, {}):
            return model_configs.build(name)


@pytest.mark.sample(every=5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_steps_run_in_kernels_and_give_stocks_tokens(name: str, kernels: FakeKernels | None) -> None:
    model = build(name)
    prompts = [prompt_of(n, 3) % model_configs.VOCAB for n in (1, 7, 60)]
    expected = [greedy(model, prompt, 20, prefill_step_size=16) for prompt in prompts]
    rows = [alone(model, n, 20) for n in (5, 30, 45)]
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    for prompt, (tokens, logprobs) in zip(prompts, expected, strict=True):
        reset_dispatch_counts()
        got, got_logprobs = greedy(model, prompt, 20, prefill_step_size=16)
        assert got == tokens
        assert rms(got_logprobs, logprobs) < TOLERANCE
        # The real one attends to prompts in 16 bits only.
        of_prompt = {7: {FRESH if kernels else FEW}, 60: {latent_prompts.KERNEL} if kernels else set()}
        assert set(dispatch_counts()) == {KERNEL} | of_prompt.get(len(prompt), set())
    pool = mlx_paged.pool_of(model)
    assert all(group.in_place and group.spec.latent for group in pool.groups)
    reset_dispatch_counts()
    got_rows, _ = batched(model, 20)
    for (got, got_logprobs), (tokens, logprobs) in zip(got_rows, rows, strict=True):
        assert got == tokens
        assert rms(got_logprobs, logprobs) < TOLERANCE
    assert KERNEL in dispatch_counts()
    pool.check_integrity()


@pytest.mark.sample(every=3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "num_rows"), [("deepseek_v3", 17), ("glm4_moe_lite", 6), ("mistral4", 2)])
def test_ragged_batches_give_stocks_tokens(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    lengths = [1 + 7 * n % 40 for n in range(num_rows)]
    monkeypatch.setattr(model_matrix, "PROMPTS", lengths)
    rows = [alone(model, n, 12) for n in lengths]
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    got, _ = batched(model, 12)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in rows]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["deepseek_v3", "longcat_flash", "bailing_moe_v3", "mistral4"])
def test_a_few_tokens_behind_a_prefix_attend_to_latents(name: str) -> None:
    """As drafts do that a model verifies."""
    model = build(name)
    tokens = (prompt_of(50, 3) % model_configs.VOCAB)[None]

    def logits() -> mx.array:
        cache = make_prompt_cache(model)
        model(tokens[:, :40], cache=cache)
        reset_dispatch_counts()
        return mx.concatenate([model(tokens[:, 40:47], cache=cache), model(tokens[:, 47:], cache=cache)], axis=1)

    expected = logits()
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    got = logits()
    assert set(dispatch_counts()) == {FEW}
    assert rms(np.array(got), np.array(expected)) < TOLERANCE


@pytest.mark.sample(every=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", COMPILED)
def test_decode_steps_are_those_of_the_compiled_step(name: str) -> None:
    model = build(name)
    prompt = prompt_of(9, 3) % model_configs.VOCAB
    expected, _ = greedy(model, prompt, 24)
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    got, _ = greedy(model, prompt, 24)
    step = compiled._steps[mlx_paged.pool_of(model)]
    assert step.failure is None and step._functions
    assert got == expected


@pytest.mark.sample(every=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPILED)
def test_decode_steps_can_be_traced(name: str) -> None:
    model = build(name)
    with traceable_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=16))
        greedy(model, prompt_of(9, 3) % model_configs.VOCAB, 12)
        step = compiled._steps[mlx_paged.pool_of(model)]
        assert step.failure is None and step._functions
