"""Models with multi-head latent attention: decode steps attend over pages of latents, with stock's tokens."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig, dispatch_counts, reset_dispatch_counts
from mlx_paged.engine.compiled_step import compiled_steps
from scripts.support import model_configs
from tests.support.cases import quick
from tests.support.models.builders import build_latent as build
from tests.support.models.builders import greedy, prompt_of, rms

COMPILED = ["deepseek_v3", "glm4_moe_lite", "kimi_k25"]
FEW = ("kernel", "a few new tokens per sequence")
TOLERANCE = 5e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["deepseek_v3", "longcat_flash", "bailing_moe_v3", "mistral4"])
def test_few_tokens_after_a_prefix_attend_in_the_kernel(name: str) -> None:
    """This is how drafts are verified."""
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", quick(COMPILED, "kimi_k25"))
def test_decode_uses_the_compiled_step_and_gives_stock_tokens(name: str) -> None:
    model = build(name)
    prompt = prompt_of(9, 3) % model_configs.VOCAB
    expected, _ = greedy(model, prompt, 24)
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    got, _ = greedy(model, prompt, 24)
    step = compiled_steps.get(mlx_paged.pool_of(model))
    assert step.failure is None and step._functions
    assert got == expected
