"""Compiled steps over quantised pages, rotated ones too: the tokens of the path without kernels."""

from __future__ import annotations

from typing import Any

import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import compiled_step
from mlx_paged.kv.storage.in_place import InPlaceStorage
from tests.support.models.builders import KINDS, build, greedy, prompt_of, rms

pytestmark = pytest.mark.usefixtures("no_fall_through")


@pytest.mark.sample(every=5)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("options", [{"kv_bits": 8}, {"kv_bits": 8, "kv_rotate": True}], ids=["plain", "rotated"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_gather_path(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    original = compiled_step.CompiledStep._compiled

    def count(self: Any, *inputs: Any) -> Any:
        logits = original(self, *inputs)
        if logits is not None:
            taken.append(logits.shape[0])
        return logits

    monkeypatch.setattr(compiled_step.CompiledStep, "_compiled", count)
    model, prompt = build(kind, head_dim=64), prompt_of(70)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="off", **options))
    tokens, logprobs = greedy(model, prompt, 20)
    assert not taken
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on", **options))
    got, got_logprobs = greedy(model, prompt, 20)
    assert got == tokens
    assert rms(got_logprobs, logprobs) < 5e-3
    assert taken == [1] * 20
    pool = mlx_paged.pool_of(model)
    storages = [storage for group in pool.groups for storage in group.storages]
    assert all(isinstance(storage, InPlaceStorage) for storage in storages)
    assert all(storage.rotates == ("kv_rotate" in options) for storage in storages)
    assert pool.stats().quantized_tokens == 70 + 20
    pool.check_integrity()
