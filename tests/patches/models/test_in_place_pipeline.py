"""Pipelined decode over in-place pools: a large pool stays in place, and reused blocks give no wrong token."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from tests.support.models.batch_runs import assert_released
from tests.support.models.builders import VOCAB, build, prompt_of

pytestmark = pytest.mark.usefixtures("no_fall_through")
ON = {"kernel": "on"}


@pytest.fixture
def schedules(kernels: object) -> int:
    """How many random schedules to run."""
    return 100 if kernels is None else 2


def test_tokens_are_right_while_sequences_join_finish_and_reuse_blocks(schedules: int) -> None:
    """Two sequences at a time, each one step ahead of what has been read; a finished one leaves its blocks to the next
    while its last step is still in flight."""
    model = build("llama", head_dim=64)
    rng = np.random.default_rng(0)
    jobs = [(int(rng.integers(1, 90)), seed) for seed in range(8)]
    lengths = 16
    stock = {}
    for length, seed in jobs:
        steps = generate_step(prompt_of(length, seed), model, max_tokens=lengths)
        stock[length, seed] = [token for token, _ in steps]
    # Blocks of 8 for two of the longest jobs and no more, so that each newcomer takes blocks just given back.
    per_block = 8 * 2 * 2 * 64 * 4 * len(model.layers)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=per_block * 34, **ON))
    for schedule in range(schedules):
        rng = np.random.default_rng(schedule)
        waiting = [jobs[i] for i in rng.permutation(len(jobs))[:5]]
        running: list[tuple[tuple[int, int], object, list[int], int]] = []
        while waiting or running:
            if waiting and len(running) < 2 and (not running or rng.random() < 0.3):
                job = waiting.pop(0)
                steps = generate_step(prompt_of(*job), model, max_tokens=lengths, prompt_cache=make_prompt_cache(model))
                running.append((job, steps, [], int(rng.integers(1, lengths + 1))))
            index = int(rng.integers(len(running)))
            job, steps, tokens, count = running[index]
            tokens.append(next(steps)[0])
            if len(tokens) == count:
                steps.close()  # its next step has been dispatched already
                running.pop(index)
                assert tokens == stock[job][:count], (schedule, job)
                del steps
        assert mlx_paged.last_dispatch().path == "kernel"
    assert_released(model)


@pytest.mark.gpu
def test_large_pool_is_decoded_in_place_with_flat_memory() -> None:
    """24 layers, several GB of blocks, 200 pipelined steps: flat peak memory, the tokens of gather-then-SDPA."""
    args = llama.ModelArgs(
        model_type="llama", hidden_size=512, num_hidden_layers=24, intermediate_size=1024, num_attention_heads=16,
        num_key_value_heads=8, rms_norm_eps=1e-5, vocab_size=VOCAB, head_dim=128,
    )  # fmt: skip
    mx.random.seed(3)
    model = llama.Model(args)
    mx.eval(model.parameters())
    prompt = prompt_of(300)

    def run(use_kernel: bool) -> tuple[list[int], list[int], int]:
        mlx_paged.apply_patches(PagedConfig(kernel="on" if use_kernel else "off"))
        cache = make_prompt_cache(model)
        tokens, active = [], []
        for step, (token, _) in enumerate(generate_step(prompt, model, max_tokens=201, prompt_cache=cache)):
            tokens.append(token)
            if step == 0:  # other sequences' blocks: the pool is far larger than what this one needs
                pool = mlx_paged.pool_of(model)
                pool.allocate(0, 4_000_000_000 // pool.groups[0].bytes_per_block)
            if step == 20:
                mx.reset_peak_memory()
            active.append(mx.get_active_memory())
        peak = mx.get_peak_memory()
        assert pool.stats().bytes_reserved > 4_000_000_000
        path = mlx_paged.last_dispatch().path
        assert path == ("kernel" if use_kernel else "gather")
        mlx_paged.remove_patches()
        return tokens, active[20:], peak

    tokens, active, peak = run(True)
    assert max(active) - min(active) < 20_000_000
    assert peak - min(active) < 50_000_000  # no copy of a layer's blocks (170 MB), ever
    assert run(False)[0] == tokens
