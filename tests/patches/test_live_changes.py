"""Changes of the configuration, the patches and the model's dtype between generations and during them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig, PromptCacheError, pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import Outcome, collect, run_all
from tests.support.models.builders import build, greedy, prompt_of
from tests.support.processes.bounded import build_qwen2

KINDS = ("llama", "gemma3", "qwen2")  # one group, two groups, the seam
PROMPTS = [prompt_of(length, seed=length) for length in (40, 33, 70, 21)]
TOKENS = 12
CONFIG = PagedConfig(block_size=16, kv_cache_memory=64 << 20)


def model_of(kind: str) -> Any:
    return build_qwen2() if kind == "qwen2" else build(kind)


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> Iterator[None]:
    with fake_kernels() if request.param == "in place" else nullcontext():
        yield
        mlx_paged.remove_patches()


@functools.cache
def solos(kind: str) -> list[list[int]]:
    """Stock mlx-lm's tokens of each prompt."""
    assert not mlx_paged.is_applied()
    return [greedy(model_of(kind), prompt, TOKENS)[0] for prompt in PROMPTS]


def other_block_size() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=32, kv_cache_memory=64 << 20))


def other_budget() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=32 << 20))


def applied_anew() -> None:
    mlx_paged.remove_patches()
    mlx_paged.apply_patches(CONFIG)


ALL = crossed(["functional", "in place"], KINDS)
CASES = quick(ALL, ("functional", "qwen2"), ("in place", "gemma3"))
CHANGES = [other_block_size, other_budget, mlx_paged.remove_patches, applied_anew]


@pytest.mark.parametrize(("storage", "kind"), CASES, indirect=["storage"])
@pytest.mark.usefixtures("storage")
class TestLiveBatches:
    @pytest.mark.parametrize("change", CHANGES)
    def test_running_batch_keeps_its_configuration(self, kind: str, change: Callable[[], Any]) -> None:
        model = model_of(kind)
        solo = solos(kind)
        mlx_paged.apply_patches(CONFIG)
        generator = PagedBatchGenerator(model)
        outcomes = {uid: Outcome() for uid in generator.insert([p.tolist() for p in PROMPTS[:2]], [TOKENS] * 2)}
        for _ in range(3):
            collect(outcomes, *generator.next())
        change()
        outcomes |= {uid: Outcome() for uid in generator.insert([p.tolist() for p in PROMPTS[2:]], [TOKENS] * 2)}
        run_all(generator, outcomes)
        assert [outcome.tokens for outcome in outcomes.values()] == solo

    def test_cache_made_under_other_options_is_refused_and_others_continue(self, kind: str) -> None:
        model = model_of(kind)
        solo = greedy(model, PROMPTS[0], TOKENS)[0]
        mlx_paged.apply_patches(CONFIG)
        generator = PagedBatchGenerator(model)
        (uid,) = generator.insert([PROMPTS[0].tolist()], [TOKENS])
        other_block_size()
        cache = upstream.make_prompt_cache(model)
        model(PROMPTS[1][None], cache=cache)
        with pytest.raises(PromptCacheError, match="other options"):
            generator.insert([[1, 2]], [TOKENS], caches=[cache])
        outcomes = {uid: Outcome()}
        run_all(generator, outcomes)
        assert outcomes[uid].tokens == solo


@pytest.mark.parametrize(("storage", "kind"), quick(ALL, ("functional", "qwen2")), indirect=["storage"])
@pytest.mark.usefixtures("storage")
def test_generation_after_set_dtype_has_pages_of_the_dtype(kind: str) -> None:
    expected, model = [], model_of(kind)
    for dtype in (mx.float32, mx.bfloat16, mx.float32):
        model.set_dtype(dtype)
        expected.append(greedy(model, PROMPTS[1], TOKENS)[0])
    mlx_paged.apply_patches(CONFIG)
    model, found, dtypes = model_of(kind), [], []
    for dtype in (mx.float32, mx.bfloat16, mx.float32):
        model.set_dtype(dtype)
        found.append(greedy(model, PROMPTS[1], TOKENS)[0])
        pool = pool_of(model)
        assert pool is not None and pool.stats().live_blocks == 0
        dtypes.append({group.geometry.dtype for group in pool.groups if group.geometry is not None})
    assert found[0] == expected[0] and found[2] == expected[2]
    assert dtypes == [{mx.float32}, {mx.bfloat16}, {mx.float32}]


@pytest.mark.parametrize(("storage", "kind"), quick(ALL, ("functional", "qwen2")), indirect=["storage"])
@pytest.mark.usefixtures("storage")
def test_running_generation_continues_when_the_dtype_changes(kind: str) -> None:
    def run(model: Any) -> list[int]:
        found = []
        for token, _ in generate_step(PROMPTS[0], model, max_tokens=TOKENS):
            found.append(token)
            if len(found) == 4:
                model.set_dtype(mx.bfloat16)
        return found

    expected = run(model_of(kind))
    mlx_paged.apply_patches(CONFIG)
    found = run(model_of(kind))
    assert found[:4] == expected[:4] and len(found) == TOKENS
