"""Prompts of models with multi-head latent attention in packs, against stock's run of each alone."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig, dispatch_counts, reset_dispatch_counts
from mlx_paged.attention.dispatch import Dispatch
from mlx_paged.cache.batch import Batch, NotPackableError
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.engine import engine
from mlx_paged.engine.request import RequestOptions
from mlx_paged.patches.cache import layout
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from scripts.support import model_configs
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels
from tests.support.models.batch_runs import assert_released, generator, run_all, run_requests
from tests.support.models.builders import build_latent as build
from tests.support.models.builders import rms, small_prompt
from tests.support.models.oracle import oracles
from tests.support.models.packs import expected_of, insert, note_packs, packing, prompts_for

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ["deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_vl", "mistral4"]
STORAGES = ["functional", "kernel"]
ROWS = Dispatch("kernel", "a few new tokens per sequence")
LENGTHS = (2, 70, 33, 1, 97, 40)
VOCAB, TOLERANCE = model_configs.VOCAB, 5e-3


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable packs on a CPU, where they are off."""
    monkeypatch.setattr(engine, "packs_by_default", lambda pool: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    return note_packs(monkeypatch)


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use blocks on the host, or the stand-in kernels."""
    with nullcontext() if request.param == "functional" else fake_kernels():
        yield request.param


def config(storage: str, **options: Any) -> PagedConfig:
    return PagedConfig(block_size=16, kernel="off" if storage == "functional" else "on", **options)


def assert_alike(outcomes: Any, expected: list[tuple[list[int], np.ndarray]], limit: float = TOLERANCE) -> None:
    for outcome, (tokens, logprobs) in zip(outcomes.values(), expected, strict=True):
        assert outcome.tokens == tokens
        assert rms(np.stack(outcome.logprobs), logprobs) < limit


@pytest.mark.parametrize(
    ("name", "storage"), quick(crossed(NAMES, STORAGES), ("deepseek_v3", "functional"),
    ("mistral4", "kernel")), indirect=["storage"]
)  # fmt: skip
def test_requests_in_packs_get_their_solo_tokens(name: str, storage: str, calls: list[list[int]]) -> None:
    model, prompts = build(name), prompts_for(VOCAB, LENGTHS)
    expected = expected_of(model, prompts)
    mlx_paged.apply_patches(config(storage))
    gen = packing(model, 128, prefill_step_size=48)
    outcomes = insert(gen, prompts, 8)
    reset_dispatch_counts()
    run_all(gen, outcomes)
    assert_alike(outcomes, expected, 1e-5 if storage == "functional" else TOLERANCE)
    assert max(map(len, calls)) >= 3 and gen._engine.prefill.packs
    assert "apart" in {choice.path for choice in dispatch_counts()}
    assert_released(model)


def test_few_tokens_after_a_long_prefix_attend_to_unexpanded_latents(calls: list[list[int]]) -> None:
    model = build("glm4_moe_lite")
    first = small_prompt(96, seed=1).tolist()
    others = [first[:80] + small_prompt(n, seed=n).tolist() for n in (5, 30)]
    expected = expected_of(model, others)
    with fake_kernels():
        mlx_paged.apply_patches(config("kernel"))
        tree = PrefixCache(mlx_paged.pool_of(model))
        gen = packing(model, 128, prefill_step_size=96, prefixes=SharedPrefixes(tree))
        run_all(gen, insert(gen, [first], 2))
        reset_dispatch_counts()
        outcomes = insert(gen, others, 8)
        run_all(gen, outcomes)
        assert_alike(outcomes, expected)
        assert ROWS in dispatch_counts()


@pytest.mark.parametrize(
    ("name", "storage"), quick(crossed(["deepseek_v3", "deepseek_v32", "mistral4"], STORAGES), ("mistral4", "kernel")),
    indirect=["storage"]
)  # fmt: skip
def test_looked_up_drafts_give_solo_tokens(name: str, storage: str) -> None:
    model, prompts = build(name), prompts_for(VOCAB, (3, 37, 12))
    expected = expected_of(model, prompts, 26)
    with oracles(VOCAB) as oracle:
        oracle.answers.update({tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, expected, strict=True)})
        mlx_paged.apply_patches(config(storage))
        gen = generator(model)
        asked = [RequestOptions(prompt_lookup=4)] * len(prompts)
        outcomes = run_requests(gen, prompts, [22] * len(prompts), options=asked)
    assert_alike(dict(enumerate(outcomes)), [(tokens[:22], logprobs[:22]) for tokens, logprobs in expected])
    stats = mlx_paged.pool_of(model).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert_released(model)


# When packs are used ------------------------------------------------------------------------------------------------


def test_layer_without_an_adapter_disables_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v3")
    mlx_paged.apply_patches(config("functional"))
    assert generator(model)._engine.packs
    monkeypatch.setattr(layout, "latent_caches_of", lambda module: 0)
    assert not generator(model)._engine.packs


def test_pack_of_latents_refuses_masks_and_wrong_writes(kernels: FakeKernels | None) -> None:
    model = build("deepseek_v3")
    mlx_paged.apply_patches(config("functional"))
    caches = make_prompt_cache(model)
    pack = Batch(caches[0].pool, [caches[0].sequence], [5])
    pack.reserve()
    attention, x = model.layers[0].self_attn, mx.zeros((5, 1, model.args.hidden_size))
    with pytest.raises(NotPackableError, match="a mask of its own"):
        attention(x, mx.ones((5, 1)), PagedBatchKVCache(pack, 0))
    part = PagedBatchKVCache(pack, 0).apart()[0]
    with pytest.raises(mlx_paged.GeometryError, match=r"do not match 5 token\(s\)"):
        part.update_and_fetch(mx.zeros((1, 1, 4, 64)), mx.zeros((1, 1, 4, 64)))
    with pytest.raises(NotPackableError, match="writes twice"):
        PagedBatchKVCache(pack, 0).apart()
