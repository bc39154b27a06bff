"""Rotation of queries and keys on CUDA: a prompt's position is an array that all layers share."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged.patches.models import attention


@pytest.mark.parametrize(("length", "offset", "makes_array"), [(5, 0, True), (5, 2048, True), (1, 7, False)])
def test_a_prompts_position_is_one_array_on_cuda(length, offset, makes_array, monkeypatch):
    """A single token's is not: to compute it would wait for the step before."""
    monkeypatch.setattr(attention, "backend", lambda: "cuda")
    monkeypatch.setattr("mlx_paged.kernels.build.backend", lambda: "cuda")
    attention.constant_rows.cache_clear()
    rope, given = nn.RoPE(16), []

    def rotate(x: mx.array, offset: int | mx.array) -> mx.array:
        given.append(offset)
        return rope(x, offset=offset)

    queries, keys = (mx.random.normal((1, heads, length, 16)) for heads in (4, 2))
    keys = keys.astype(mx.float16)  # of another type, so that one token's are not rotated together on a CPU
    rotated = attention.rotated(rotate, queries, keys, offset)
    for got, x in zip(rotated, (queries, keys), strict=True):
        assert np.array_equal(np.array(got), np.array(rope(x, offset=offset)))
    assert all(isinstance(each, mx.array) == makes_array for each in given) and given[0] is given[1]
    assert attention.constant_rows.cache_info().currsize == makes_array
    attention.constant_rows.cache_clear()
