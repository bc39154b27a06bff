"""Embeddings under the patches for CUDA, in force on whatever device: the same rows, and stock's where none is due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.kernels import embedding_rows
from mlx_paged.kernels.products.inference import Inference
from mlx_paged.patches import registry
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels
from tests.support.models.batch_runs import generator
from tests.support.models.builders import build, prompt_of


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernels]:
    monkeypatch.setattr(registry, "backend", lambda: "cuda")
    with fake_kernels() as fake:
        mlx_paged.apply_patches(PagedConfig(block_size=16))
        yield fake


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rows_in_a_models_call_come_from_the_kernel(patched: FakeKernels, dtype: mx.Dtype) -> None:
    layer, tokens = nn.Embedding(50, 64), mx.array([[3], [0], [49]])
    layer.set_dtype(dtype)
    want = layer(tokens)
    assert not patched.calls["embedding_rows"]
    with Inference():
        assert mx.array_equal(layer(tokens), want)
    assert patched.calls["embedding_rows"] == 1


@pytest.mark.parametrize(("mode", "bits", "parts"), [("affine", 4, 3), ("affine", 8, 3), ("mxfp4", 4, None)])
def test_quantised_rows(patched: FakeKernels, mode: str, bits: int, parts: int | None) -> None:
    layer = nn.Embedding(50, 64).to_quantized(32, bits, mode=mode)
    tokens = mx.array([[3, 7], [0, 49]])
    want = layer(tokens)
    with Inference():
        assert mx.array_equal(layer(tokens), want)
    if parts is not None:  # scales of other modes are bytes, which MLX copies
        assert patched.calls["embedding_rows"] == parts


def test_gradients_flow(patched: FakeKernels) -> None:
    layer, tokens = nn.Embedding(5, 8), mx.array([1, 1, 4])
    grads = nn.value_and_grad(layer, lambda layer: layer(tokens).sum())(layer)[1]
    assert grads["weight"].sum(axis=1).tolist() == [0, 16, 0, 0, 8] and not patched.calls["embedding_rows"]


def test_a_generation_takes_both_kernels_from_its_first_call_on(patched: FakeKernels) -> None:
    model = build("llama", head_dim=64)
    model.set_dtype(mx.bfloat16)
    gen: Any = generator(model, completion_batch_size=2)
    gen.insert([prompt_of(40).tolist(), prompt_of(9).tolist()], [3, 3])
    finished = 0
    while finished < 2:
        finished += sum(response.finish_reason is not None for response in gen.next()[1])
    assert patched.calls["embedding_rows"] > 2 and patched.calls["silu_product"] >= len(model.layers)
    assert embedding_rows.embedding_rows(mx.ones((2, 8)), mx.zeros((1,), mx.uint32)) is None  # outside of a call
