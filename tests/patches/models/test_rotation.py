"""Queries and keys of one token are rotated together on a CPU, with the bits of rotating them apart."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from mlx_paged.patches.models.attention import rotated

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
def test_bits_are_those_of_rotating_apart(
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
