"""A dropped model and its pool are freed at once, without Python's cyclic collector."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import mlx_paged
from mlx_paged import PagedConfig
from scripts.support import model_configs
from tests.support.cases import quick
from tests.support.models.batch_runs import answers, generator
from tests.support.models.builders import KINDS, any_model
from tests.support.without_collector import without_collector

PROMPT = list(range(1, 30))
# Their attention computes with the fetched keys itself: several kinds of latent attention, and others.
FETCHING = (
    "deepseek_v3", "kimi_linear", "kimi_k3", "longcat_flash", "phi3small", "bailing_hybrid", "deepseek_v32",
    "stablelm", "plamo", "plamo2",
)  # fmt: skip
OTHERS = ("qwen2", "gpt_oss", "gemma3n", "jamba", "qwen3_next", "mamba", "llama4")
SAMPLE = (*FETCHING, *KINDS, *OTHERS)
# Families that are loaded and dropped repeatedly: seam, adapter, latent attention, shared keys, states.
FLAT = ("qwen2", "gemma3", "deepseek_v3", "gemma3n", "jamba")
MORE_FLAT = ("llama", "stablelm", "qwen3_next")
# Some modules cannot be batched or cannot run on this machine, even with stock mlx-lm.
NOT_RUN = (RuntimeError, ValueError)


def alone(model: Any) -> None:
    for _ in generate_step(mx.array(PROMPT), model, max_tokens=3):
        pass


def alone_dropped(model: Any) -> None:
    steps = generate_step(mx.array(PROMPT), model, max_tokens=9)
    next(steps)
    next(steps)


def batched(model: Any) -> None:
    answers(generator(model), [PROMPT, PROMPT[:9]], [3, 5])


def batch_dropped(model: Any) -> None:
    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:9]], [30, 50])
    for _ in range(3):
        gen.next()


def batch_failed(model: Any) -> None:
    def bad(logprobs: mx.array) -> mx.array:
        raise ValueError("no token")

    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:9]], [30, 50], samplers=[bad, None])
    with pytest.raises((mlx_paged.RequestFailedError, ValueError)):
        while gen.next_generated():
            pass


USES: tuple[Callable[[Any], None], ...] = (alone, alone_dropped, batched, batch_dropped, batch_failed)


def check(name: str) -> None:
    try:
        model = any_model(name)
    except (Exception, SystemExit):
        pytest.skip("cannot be built here")
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=64 << 20))
    pool = None  # stays None if the model does not run here
    with without_collector():
        for use in USES:
            try:
                use(model)
            except NOT_RUN:
                continue
            pool = mlx_paged.pool_of(model)
            assert pool is None or pool.stats().live_blocks == 0, use.__name__
        gone = [weakref.ref(each) for each in (model, mlx_paged.pool_of(model)) if each is not None]
        del model, pool
        assert [ref() for ref in gone] == [None] * len(gone)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(SAMPLE, "deepseek_v3", "bailing_hybrid", "llama-sliding", "gemma3n"))
def test_dropped_model_is_freed_with_its_pool_and_blocks(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(model_configs.modules()) - set(SAMPLE)))
def test_dropped_model_of_every_other_family_is_freed(name: str) -> None:
    check(name)


def load_and_drop(name: str, in_mid_run: bool) -> None:
    model = any_model(name)
    alone(model)
    (batch_dropped if in_mid_run else batched)(model)


def check_flat(name: str, times: int) -> None:
    """Load and drop a model ``times`` times without the collector; memory must not exceed that after the first."""
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=64 << 20))
    gc.collect()
    gc.disable()
    try:
        load_and_drop(name, False)
        before = mx.get_active_memory()
        for turn in range(times - 1):
            load_and_drop(name, turn % 2 == 0)
        until = time.monotonic() + 10  # the last step of a dropped batch may still be running
        while (grown := mx.get_active_memory() - before) > 0 and time.monotonic() < until:
            time.sleep(0.05)
        assert grown <= 0, f"{grown} bytes more after {times} loads"
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(FLAT, "qwen2", "jamba"))
def test_four_loads_and_drops_do_not_grow_memory(name: str) -> None:
    check_flat(name, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FLAT + MORE_FLAT)
def test_two_hundred_loads_and_drops_do_not_grow_memory(name: str) -> None:
    check_flat(name, 200)
