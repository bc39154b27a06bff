"""Models with adapters, behind the seam and with latents, over in-place pools: single runs, chunks and ragged batches
against stock's solo runs. On a CPU with stand-ins for the kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlx_paged
from mlx_paged import PagedConfig, dispatch_counts, reset_dispatch_counts
from mlx_paged.attention import dispatch
from mlx_paged.kernels.launch_shape import HEAD_DIMS
from scripts import model_matrix
from scripts.model_matrix import alone, batched
from scripts.support import model_configs
from tests.support.kernels.fake_kernels import FakeKernels
from tests.support.models.builders import KINDS, build, build_latent, greedy, prompt_of, rms, wide

TOLERANCE, TOKENS = 5e-3, 6
KERNEL = ("kernel", "one new token per sequence")
FRESH = ("prefill", "no prefix: only new keys")
# Global, sliding windows, sinks, shared keys, soft caps, loops over layers, attention beside states.
SEAM = ["qwen2", "exaone4", "gpt_oss", "gemma3n", "iquestloopcoder", "falcon_h1", "jamba"]
# All with the adapter for latents, including those that use the attention of another module.
LATENTS = [
    "deepseek_v3", "glm4_moe_lite", "longcat_flash", "longcat_flash_ngram", "kimi_k25", "kimi_vl", "kimi_linear",
    "kimi_k3", "bailing_hybrid", "bailing_moe_v3", "mistral4",
]  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    **{kind: partial(build, kind, head_dim=64) for kind in KINDS},
    **{name: partial(wide, name) for name in ["gemma2", *SEAM]},
    **{name: partial(build_latent, name) for name in LATENTS},
}
ALWAYS = ("gemma3", "deepseek_v3")  # gemma3 has windows beside global layers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_tokens_equal_stock_alone_and_in_a_batch(
    name: str, kernels: FakeKernels | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Send more than a few new tokens to MLX's attention on every device; test_prefill.py tests the other choice.
    monkeypatch.setattr(dispatch, "backend", lambda: None)
    lengths = (30, 5, 45, 8) if "ngram" in name else (1, 30, 45, 8)  # in a batch mlx-lm needs 3 tokens for n-grams
    monkeypatch.setattr(model_matrix, "PROMPTS", lengths)
    model = MODELS[name]()
    sizes = ((1, 2048), (7, 2048), (60, 16), (130, 50), (130, 2048))  # prompt length, chunk size
    cases = [(prompt_of(length, 3) % model_configs.VOCAB, step) for length, step in sizes]
    expected = [greedy(model, prompt, TOKENS, prefill_step_size=step) for prompt, step in cases]
    rows = [alone(model, n, TOKENS) for n in lengths]
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on"))

    def assert_alike(got: tuple[list[int], np.ndarray], wanted: tuple[list[int], np.ndarray]) -> None:
        assert got[0] == wanted[0] and rms(got[1], wanted[1]) < TOLERANCE

    for (prompt, step), wanted in zip(cases, expected, strict=True):
        reset_dispatch_counts()
        assert_alike(greedy(model, prompt, TOKENS, prefill_step_size=step), wanted)
        assert mlx_paged.last_dispatch() == KERNEL
        pool = mlx_paged.pool_of(model)
        layers = sum(len(group.spec.layers) for group in pool.groups)
        assert dispatch_counts()[KERNEL] >= (TOKENS - 1) * layers
        if name in KINDS:
            gathered = sum(count for choice, count in dispatch_counts().items() if choice.path == "gather")
            chunks = -(-(len(prompt) - 1) // step)
            assert gathered >= (chunks - 1) * layers if chunks > 1 else gathered == 0
        if name in LATENTS and kernels is not None and len(prompt) < 130:
            assert KERNEL in dispatch_counts() and (FRESH in dispatch_counts()) == (len(prompt) == 7)
    reset_dispatch_counts()
    for got, wanted in zip(batched(model, TOKENS)[0], rows, strict=True):
        assert_alike(got, wanted)
    assert KERNEL in dispatch_counts()
    assert name in LATENTS or all(group.geometry.k_head_dim in HEAD_DIMS for group in pool.groups)  # as on a GPU
    assert all(group.in_place and group.spec.latent == (name in LATENTS) for group in pool.groups)
    if kernels is not None:
        assert kernels.calls["append"] > 0
        assert (kernels.rewound > 0) == (name in SEAM)  # the gather is dropped if attention read the blocks
    pool.check_integrity()
    assert pool.stats().live_blocks == 0 < pool.stats().peak_live_blocks
