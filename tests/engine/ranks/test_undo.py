"""Writes that a model call has built, and that are forgotten because the call has failed on another rank."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as cache_module

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.ranks.ranks import checkpoint
from mlx_paged.kv.turn import Stepwise
from tests.support.models.builders import build, prompt_of


@pytest.mark.parametrize(
    ("options", "in_place"),
    [({"kernel": "off"}, False), ({"kernel": "off", "kv_bits": 8}, False), ({}, True), ({"kv_bits": 8}, True)],
)
def test_what_was_built_is_forgotten(options: dict[str, Any], in_place: bool, kernels: Any) -> None:
    model, tokens = build("llama", head_dim=64), prompt_of(30)[None]
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory="8MB", **options))
    cache = cache_module.make_prompt_cache(model)
    mx.eval(model(tokens[:, :20], cache=cache))
    pool = mlx_paged.pool_of(model)
    assert pool is not None and pool.groups[0].in_place == in_place
    storages = pool.groups[0].storages
    fences = [storage.latest() for storage in storages] if in_place else []
    quantized = [storage.num_quantized for storage in storages]
    written = _written(storages)
    with Stepwise():
        undo = checkpoint(pool)
        model(tokens[:, 20:25], cache=cache)
        assert [storage.num_quantized for storage in storages] != quantized or "kv_bits" not in options
        undo()
        del undo
    assert [storage.num_quantized for storage in storages] == quantized
    if in_place:  # a launch that is not computed does not write
        assert all(now[0] is then[0] for now, then in zip(map(_latest, storages), fences, strict=True))
        return
    assert all(np.array_equal(now, then) for now, then in zip(_written(storages), written, strict=True))
    for layer in cache:  # the tables are their owner's to put back
        layer.trim(5)
    found = model(tokens[:, 20:], cache=cache)
    expected = model(tokens, cache=cache_module.make_prompt_cache(model))[:, 20:]
    assert np.abs(np.array(found) - np.array(expected)).max() < (2e-1 if "kv_bits" in options else 1e-4)


def _latest(storage: Any) -> list[mx.array]:
    return storage.latest()


def _written(storages: Any) -> list[np.ndarray]:
    return [np.array(array) for storage in storages for array in storage.latest()]
