"""Packs with a failing request or a model that cannot pack: the other requests get their solo tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import phi3

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.errors import RequestFailedError
from scripts.support import model_configs
from tests.support.models.batch_runs import Outcome, assert_released, run_all
from tests.support.models.builders import build, greedy
from tests.support.models.packs import assert_alike, insert, note_packs, packing, prompts_for


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    return note_packs(monkeypatch)


def run_with_failures(gen: Any, outcomes: dict[int, Outcome]) -> dict[int, BaseException | None]:
    failed: dict[int, BaseException | None] = {}
    while True:
        try:
            run_all(gen, outcomes)
            return failed
        except RequestFailedError as error:
            failed[error.uid] = error.__cause__


POISON = 7


class RaisingNorm(nn.Module):
    """A norm that raises in calls in which the embedding has seen a poisoned token."""

    def __init__(self, inner: nn.Module, embedding: NotingEmbedding) -> None:
        super().__init__()
        self.inner = inner
        self._embedding = embedding

    def __call__(self, x: mx.array) -> mx.array:
        if self._embedding.poisoned:
            raise RuntimeError("injected: model")
        return self.inner(x)


class NotingEmbedding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.poisoned = False

    def __call__(self, tokens: mx.array) -> mx.array:
        self.poisoned = bool(mx.any(tokens == POISON).item())
        return self.inner(tokens)


@pytest.mark.parametrize("when", ["before a layer", "after all layers"])
def test_model_error_fails_the_requests_of_the_pack(when: str, calls: list[list[int]]) -> None:
    model = build("llama")
    prompts = [[token + (token == POISON) for token in prompt] for prompt in prompts_for(320, (40, 25, 61, 30, 18))]
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    prompts[2][35] = POISON  # in its second or third part
    model.model.embed_tokens = NotingEmbedding(model.model.embed_tokens)
    place, name = (model.model, "norm") if when == "after all layers" else (model.layers[1], "post_attention_layernorm")
    setattr(place, name, RaisingNorm(getattr(place, name), model.model.embed_tokens))
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 6)
    failed = run_with_failures(gen, outcomes)
    uids = list(outcomes)
    assert uids[2] in failed
    assert all(str(error) == "injected: model" for error in failed.values())
    served = [i for i, uid in enumerate(uids) if uid not in failed]
    assert_alike({uids[i]: outcomes[uids[i]] for i in served}, [expected[i] for i in served])
    assert max(map(len, calls)) >= 3
    assert gen._engine.prefill.packs, "the model still packs"
    del failed
    assert_released(model)


def test_request_without_blocks_is_left_out_of_the_pack(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]
) -> None:
    model = build("llama-sliding")  # two groups
    prompts = prompts_for(320, (40, 25, 61, 30))
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 6)
    uids = list(outcomes)
    pool = mlx_paged.pool_of(model)
    original = pool.append_tokens

    def fails_once(table: Any, num_tokens: int) -> None:
        row = gen._engine.requests.get(uids[1])
        if row is not None and table is row.table:
            raise OSError("injected: no block")
        original(table, num_tokens)

    pool.append_tokens = fails_once
    failed = run_with_failures(gen, outcomes)
    assert list(failed) == [uids[1]]
    assert len(calls[0]) == 3, "the pack starts without it"
    del outcomes[uids[1]], failed
    assert_alike(outcomes, [one for i, one in enumerate(expected) if i != 1])
    del pool.append_tokens
    assert_released(model)


def test_model_that_cannot_pack_is_computed_one_by_one(monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]) -> None:
    """Its attention changes the fetched keys in calls of 8 rows or more, which no probe has seen."""
    original = phi3.Attention.__call__

    class Copying:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def __getattr__(self, name: str) -> Any:
            return getattr(self.cache, name)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self.cache.update_and_fetch(keys, values)
            return keys + 0, values

    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return original(self, x, mask, cache if cache is None or x.shape[0] < 8 else Copying(cache))

    monkeypatch.setattr(phi3.Attention, "__call__", attention)
    model = model_configs.build("phi3")
    prompts = prompts_for(model_configs.VOCAB, (20, 30, 9))
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 6)
    with pytest.warns(mlx_paged.NotPagedWarning, match="prefilled one at a time for models of mlx_lm.models.phi3"):
        run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert len(calls) == 1 and not gen._engine.prefill.packs
    assert not packing(model)._engine.prefill.packs, "that is remembered"
    assert_released(model)


@pytest.mark.parametrize("lengths", [(20, 30, 9), (20,)], ids=["together", "alone"])
def test_chunks_that_see_more_than_caches_keep_run_one_by_one(calls: list[list[int]], lengths: tuple[int, ...]) -> None:
    model = model_configs.build("plamo3")
    prompts = prompts_for(model_configs.VOCAB, lengths)
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model, 128, prefill_step_size=128)
    outcomes = insert(gen, prompts, 6)
    with pytest.warns(mlx_paged.NotPagedWarning, match="prefilled one at a time for models of mlx_lm.models.plamo3"):
        run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    assert len(calls) == 1 and not gen._engine.prefill.packs
    assert_released(model)
