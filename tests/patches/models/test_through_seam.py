"""What stands between blocks and attention for no reason of theirs is replaced, and only over paged caches."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches.cache.layout import PADDING_MATTERS, layout_of, why_one_by_one
from scripts.support import model_configs
from tests.support.models.builders import greedy, prompt_of

ATTENTION = ("stablelm", "phi", "phixtral", "plamo", "plamo2")
ROWS = {"gpt_bigcode": "GPTBigCodeModel", "afm7": "AFMModel"}


def prompt(length: int) -> mx.array:
    return prompt_of(length) % model_configs.VOCAB


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_reads_the_blocks(name: str) -> None:
    model = model_configs.build(name)
    expected, _ = greedy(model, prompt(21), 12, prefill_step_size=8)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    tokens, _ = greedy(model, prompt(21), 12, prefill_step_size=8)
    layout = layout_of(model)
    assert tokens == expected and layout is not None
    assert all(heads is not None for _, heads in layout.geometries) and not any(g.latent for g in layout.groups)


@pytest.mark.parametrize("name", [*ATTENTION, *ROWS])
def test_stock_caches_take_upstreams_way(name: str) -> None:
    model, tokens = model_configs.build(name), prompt(9)[None]

    def logits() -> mx.array:
        cache = model.make_cache() if hasattr(model, "make_cache") else [upstream.KVCache() for _ in model.layers]
        model(tokens, cache=cache)
        return mx.concatenate([model(tokens[:, :1], cache=cache), model(tokens)[:, -1:]])

    expected = logits()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert mx.array_equal(logits(), expected)


@pytest.mark.parametrize("name", ["stablelm", "phi"])
def test_queries_have_the_dtype_of_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm casts to f32, and no kernel takes that over blocks of 16 bits."""
    model = model_configs.build(name)
    model.set_dtype(mx.bfloat16)
    _, expected = greedy(model, prompt(21), 3, prefill_step_size=8)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    attend, seen = base.scaled_dot_product_attention, set()

    def watched(queries: mx.array, *others: Any, **options: Any) -> mx.array:
        seen.add(queries.dtype)
        return attend(queries, *others, **options)

    monkeypatch.setattr(base, "scaled_dot_product_attention", watched)
    _, found = greedy(model, prompt(21), 3, prefill_step_size=8)
    assert seen == {mx.bfloat16}
    assert abs(found[0] - expected[0]).max() < 0.1  # of log-probabilities: roundings


@pytest.mark.parametrize("name", list(ROWS))
def test_rows_decode_together_only_with_the_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_configs.build(name)

    def reason() -> str | None:
        upstream.make_prompt_cache(model)
        layers = model.layers if not hasattr(model, "make_cache") else model.make_cache()
        return why_one_by_one(model, [upstream.KVCache() for _ in layers])

    original: Any = getattr(importlib.import_module(f"mlx_lm.models.{name}"), ROWS[name]).__call__
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert reason() is None
    monkeypatch.setattr(getattr(importlib.import_module(f"mlx_lm.models.{name}"), ROWS[name]), "__call__", original)
    assert reason() == PADDING_MATTERS.get(f"mlx_lm.models.{name}", reason()) and reason() is not None
