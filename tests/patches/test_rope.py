"""Rotary positions of a decode step on a CPU: computed once for all layers, bit for bit as by MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

import mlx_paged
from mlx_paged.kernels.products.inference import Inference
from mlx_paged.patches import rope
from mlx_paged.patches.models.attention import rotated
from scripts.support import model_configs
from tests.support.models.builders import greedy, prompt_of

plain = nn.RoPE.__call__
shared = rope.adapt(plain)


def bits(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16))


@pytest.mark.parametrize("offset", [0, 5, 77_777, [3, 700, 65_000]])
@pytest.mark.parametrize(("head_dim", "dims"), [(16, 16), (64, 16), (128, 128), (80, 20)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_one_token_is_rotated_bit_for_bit_as_by_mlx(
    dtype: mx.Dtype, head_dim: int, dims: int, offset: int | list[int]
) -> None:
    mx.random.seed(head_dim)
    x = mx.random.normal((3, 4, 1, head_dim)).astype(dtype)
    where = mx.array(offset) if isinstance(offset, list) else offset
    for module in (nn.RoPE(dims), nn.RoPE(dims, base=1e6, scale=0.25), nn.RoPE(dims, traditional=True)):
        with Inference(allowed=False, shares_angles=True):
            got = shared(module, x, offset=where)
        expected = plain(module, x, offset=where)
        assert got.dtype == dtype and np.array_equal(bits(got), bits(expected))


def test_angles_are_computed_once_for_each_kind_of_rotation_and_offset() -> None:
    calls: list[Any] = []

    def counting(self: nn.RoPE, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        calls.append(x.shape)
        return plain(self, x, offset)

    rotate, x = rope.adapt(counting), mx.ones((2, 4, 1, 16))
    same, other = mx.array([3, 4]), mx.array([3, 5])
    with Inference(allowed=False, shares_angles=True):
        for module in (nn.RoPE(16), nn.RoPE(16), nn.RoPE(16, base=10.0)):
            for offset in (3, 4, same, same, other):
                assert mx.array_equal(rotate(module, x, offset), plain(module, x, offset))
        assert len(calls) == 2 * 4  # bases, offsets
        rotate(nn.RoPE(16), mx.ones((1, 4, 2, 16)), 3)  # several tokens
        assert calls.pop() == (1, 4, 2, 16)
    for _ in range(2):  # outside of Inference
        rotate(nn.RoPE(16), x, 3)
    assert calls[8:] == [x.shape] * 2


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_models_compute_angles_once_per_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_configs.build(name)
    prompt = prompt_of(20, 0) % model_configs.VOCAB
    expected = greedy(model, prompt, 8)
    mlx_paged.apply_patches(mlx_paged.PagedConfig(block_size=8))
    made: list[int] = []
    turned = rope._cos_sin

    def counted(*args: Any) -> tuple[mx.array, mx.array]:
        made.append(1)
        return turned(*args)

    monkeypatch.setattr(rope, "_cos_sin", counted)
    assert greedy(model, prompt, 8)[0] == expected[0]
    assert 7 <= len(made) <= 9  # one per step, including the step ahead


HEADS, KV_HEADS, DIM = 6, 2, 32
SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"type": "linear", "factor": 2.0},
    {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "plain" if scaling is None else scaling["type"])
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 1), (1, 5)])
def test_rotating_together_equals_rotating_apart_bit_for_bit(
    scaling: dict[str, Any] | None, traditional: bool, dtype: mx.Dtype, rows: int, length: int
) -> None:
    rope = initialize_rope(DIM, 10_000.0, traditional, scaling, 1024)
    mx.random.seed(0)
    queries, keys = (mx.random.normal((rows, heads, length, DIM)).astype(dtype) for heads in (HEADS, KV_HEADS))
    offset = 77 if rows == 1 else mx.array([5, 900, 0])
    apart = rope(queries, offset=offset), rope(keys, offset=offset)
    calls = []

    def counted(x: mx.array, *, offset: int | mx.array) -> mx.array:
        calls.append(x.shape)
        return rope(x, offset=offset)

    for expected, found in zip(apart, rotated(counted, queries, keys, offset), strict=True):
        assert found.shape == expected.shape and found.dtype == dtype
        assert mx.array_equal(found, expected)
    if length == 1 and mx.default_device().type == mx.DeviceType.cpu:
        assert calls == [(rows, HEADS + KV_HEADS, 1, DIM)]
    else:
        assert len(calls) == 2
