"""Steps of a prompt of a single sequence on Metal get shorter with its context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import prefill
from mlx_paged.patches.cache.prompt_cache import factory_of
from mlx_paged.patches.generate import steps
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.builders import build


@pytest.mark.parametrize(
    ("prompt", "cached", "given", "expected"),
    [
        (1000, 0, {}, 2048),
        (32_768, 0, {}, 2048),
        (65_536, 0, {}, 1024),
        (65_536, 0, {"prefill_step_size": 512}, 512),
        (65_000, 36, {}, 1031),
        (1 << 20, 0, {}, 128),
    ],
)
def test_steps_of_long_prompts_are_short_on_metal(
    monkeypatch: pytest.MonkeyPatch, prompt: int, cached: int, given: dict[str, int], expected: int
) -> None:
    monkeypatch.setattr(steps, "on_metal", lambda: True)
    monkeypatch.setattr(prefill, "on_metal", lambda: True)
    taken: list[Any] = []

    def original(prompt: mx.array, model: Any, *, prefill_step_size: int = 2048, **_: Any) -> Iterator[Any]:
        taken.append(prefill_step_size)
        yield from ()

    model = build("llama", head_dim=64)
    with fake_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
        caches = factory_of(model, None)()
        if cached:
            model(mx.ones((1, cached), mx.uint32), cache=caches)
        list(steps.adapt(original)(mx.ones((prompt,), mx.uint32), model, prompt_cache=caches, **given))
    assert taken == [expected]
