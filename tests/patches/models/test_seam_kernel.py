"""Models without an adapter, with heads the kernels take: decode steps run in the kernel, alone and in batches."""

from __future__ import annotations

import pytest

import mlx_paged
from mlx_paged import PagedConfig
from scripts import model_matrix
from scripts.model_matrix import alone, batched
from scripts.support import model_configs
from tests.support.models.builders import greedy, prompt_of, rms, wide

# Global, sliding windows, windows with sinks, keys shared between layers, and attention beside states.
NAMES = ["qwen2", "exaone4", "gpt_oss", "gemma3n", "falcon_h1"]
TOLERANCE = 5e-3
TOKENS = 8


@pytest.mark.sample(every=3)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", NAMES)
def test_decode_runs_in_the_kernel_and_gives_stocks_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = wide(name), (7, model_configs.WINDOW + 20)
    prompts = [prompt_of(n, 3) % model_configs.VOCAB for n in lengths]
    expected = [greedy(model, prompt, TOKENS, prefill_step_size=16) for prompt in prompts]
    monkeypatch.setattr(model_matrix, "PROMPTS", (5, 45))
    rows = [alone(model, n, TOKENS) for n in model_matrix.PROMPTS]
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    for prompt, (tokens, logprobs) in zip(prompts, expected, strict=True):
        got, got_logprobs = greedy(model, prompt, TOKENS, prefill_step_size=16)
        assert mlx_paged.last_dispatch() == ("kernel", "one new token per sequence")
        assert got == tokens
        assert rms(got_logprobs, logprobs) < TOLERANCE
    pool = mlx_paged.pool_of(model)
    assert all(group.in_place for group in pool.groups)
    got_rows, _ = batched(model, TOKENS)
    assert mlx_paged.last_dispatch() == ("kernel", "one new token per sequence")
    for (got, got_logprobs), (tokens, logprobs) in zip(got_rows, rows, strict=True):
        assert got == tokens
        assert rms(got_logprobs, logprobs) < TOLERANCE
    pool.check_integrity()
