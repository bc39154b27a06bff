"""Layers with states: chunked prompts of gated delta nets, single tokens as in mlx-lm, n-grams of short prompts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, ssm

import mlx_paged
from mlx_paged.kernels import delta_rule
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from scripts.support import model_configs
from tests.support.cases import crossed, quick
from tests.support.models.batch_runs import answers, model_of
from tests.support.models.builders import greedy, prompt_of

Arrays = tuple[mx.array, ...]


def arguments(
    batch: int, tokens: int, key_heads: int, heads: int, key_size: int, value_size: int, least: float = 0.3
) -> Arrays:
    mx.random.seed(tokens)
    q, k = (mx.random.normal((batch, tokens, key_heads, key_size)) for _ in range(2))
    q, k = gated_delta.normalize_qk(q, k, inv_scale=key_size**-0.5, eps=1e-6)
    v = mx.random.normal((batch, tokens, heads, value_size))
    g, beta = mx.random.uniform(least, 1, (batch, tokens, heads)), mx.random.uniform(0, 2, (batch, tokens, heads))
    return q, k, v, g, beta, mx.random.normal((batch, heads, value_size, key_size))


def assert_close(given: Arrays, wanted: Arrays, live: mx.array | None = None) -> None:
    for a, b in zip(given, wanted, strict=True):
        a, b = np.array(a), np.array(b)
        if live is not None and a.shape[1] == live.shape[1]:
            a, b = a[np.array(live)], b[np.array(live)]
        assert a.shape == b.shape and np.abs(a - b).max() < 1e-4 * max(1.0, np.abs(b).max())


@pytest.mark.parametrize(
    ("shape", "tokens", "size"),
    quick(
        crossed([(2, 2, 32, 16), (2, 4, 32, 32), (1, 3, 48, 64)], (1, 15, 16, 17, 64, 65, 130), (16, 64)),
        *[((2, 2, 32, 16), 130, 16), ((2, 4, 32, 32), 17, 16), ((1, 3, 48, 64), 1, 64), ((2, 2, 32, 16), 65, 64)],
        *[((2, 4, 32, 32), 15, 64), ((1, 3, 48, 64), 64, 16), ((1, 3, 48, 64), 16, 16)],
    ),
)
def test_chunked_delta_rule_equals_the_loop(
    shape: tuple[int, int, int, int], tokens: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_rule, "chunk_size", lambda: size)
    given = arguments(2, tokens, *shape)
    assert_close(delta_rule.chunked(*given), gated_delta.gated_delta_ops(*given))
    assert_close(delta_rule.chunked(*given[:5]), gated_delta.gated_delta_ops(*given[:5]))


def test_masked_tokens_have_no_effect() -> None:
    q, k, v, g, beta, state = arguments(3, 40, 2, 4, 32, 16)
    mask = mx.arange(40)[None] < mx.array([[40], [0], [23]])
    k = mx.where(mask[..., None, None], k, mx.nan)  # masked keys may hold anything
    wanted = gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask)
    assert_close(delta_rule.chunked(q, k, v, g, beta, state, mask), wanted, mask)


@pytest.mark.parametrize("decay", (0.0, 1e-30, 1.0))
def test_extreme_decays_give_the_results_of_the_loop(decay: float) -> None:
    q, k, v, g, beta, state = arguments(1, 50, 2, 4, 32, 16)
    g = mx.where(mx.arange(50)[None, :, None] % 7 == 3, decay, g)
    wanted = gated_delta.gated_delta_ops(q, k, v, g, beta, state)
    assert_close(delta_rule.chunked(q, k, v, g, beta, state), wanted)


@pytest.mark.parametrize(("dtype", "bound"), ((mx.float16, 4e-3), (mx.bfloat16, 3e-2)))
def test_half_precision_keeps_its_dtypes(dtype: mx.Dtype, bound: float) -> None:
    given = arguments(1, 50, 2, 4, 32, 16)
    q, k, v = (each.astype(dtype) for each in given[:3])
    out, state = delta_rule.chunked(q, k, v, *given[3:])
    wanted, wanted_state = gated_delta.gated_delta_ops(q, k, v, *given[3:])
    assert (out.dtype, state.dtype) == (wanted.dtype, wanted_state.dtype)
    assert mx.abs(out.astype(mx.float32) - wanted.astype(mx.float32)).max().item() < bound * 4


def assert_equal(given: Arrays, wanted: Arrays) -> None:
    for a, b in zip(given, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and mx.array_equal(a, b).item()


def state_space(batch: int, tokens: int, shape: tuple[int, int, int, int], dtype: mx.Dtype) -> list[mx.array]:
    heads, groups, size, state_size = shape
    mx.random.seed(batch)
    shapes = (
        (batch, tokens, heads, size), (heads,), (batch, tokens, groups, state_size),
        (batch, tokens, groups, state_size), (heads,), (batch, tokens, heads), (heads,),
        (batch, heads, size, state_size),
    )  # fmt: skip
    return [mx.random.normal(each).astype(dtype) for each in shapes]


@pytest.mark.parametrize(
    ("batch", "shape", "dtype"),
    [
        (1, (4, 1, 16, 8), mx.float32), (3, (4, 2, 16, 8), mx.float16), (1, (24, 1, 64, 128), mx.bfloat16),
        (3, (6, 3, 64, 64), mx.bfloat16), (1, (5, 5, 8, 4), mx.float16), (3, (5, 5, 8, 4), mx.float32),
    ],
)  # fmt: skip
def test_one_token_of_a_state_space_equals_upstream_bit_for_bit(
    batch: int, shape: tuple[int, int, int, int], dtype: mx.Dtype
) -> None:
    given = state_space(batch, 1, shape, dtype)
    wanted = ssm.ssm_attn(*given), ssm.ssm_attn(*given[:7], given[7].astype(mx.float32), (0.0, float("inf")))
    mlx_paged.apply_patches()
    assert_equal(ssm.ssm_attn(*given), wanted[0])
    assert_equal(ssm.ssm_attn(*given[:7], given[7].astype(mx.float32), (0.0, float("inf"))), wanted[1])


@pytest.mark.parametrize("case", ("several tokens", "no state", "a mask", "lengths"))
def test_state_space_without_a_short_form_equals_upstream(case: str) -> None:
    given = state_space(2, 3 if case == "several tokens" else 1, (4, 2, 16, 8), mx.float32)
    options: dict[str, Any] = {"mask": mx.ones((2, 1))} if case == "a mask" else {}
    if case == "lengths":
        options = {"lengths": mx.array([1, 0])}
    if case == "no state":
        del given[7]
    wanted = ssm.ssm_attn(*given, **options)
    mlx_paged.apply_patches()
    assert_equal(ssm.ssm_attn(*given, **options), wanted)


def test_float32_takes_the_loop_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, v, g, *_ = arguments(1, 20, 2, 4, 16, 16)
    assert delta_rule.is_supported(q, v, g) and not delta_rule.is_supported(q[:, :15], v, g)
    monkeypatch.setattr(delta_rule, "_on_gpu", lambda: True)
    assert not delta_rule.is_supported(q, v, g) and delta_rule.is_supported(q.astype(mx.bfloat16), v, g)


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1"])
def test_prompts_and_steps_have_the_tokens_of_the_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, chunked = model_of(kind), [], delta_rule.chunked
    monkeypatch.setattr(delta_rule, "chunked", lambda *given: calls.append(1) or chunked(*given))
    expected, logprobs = greedy(model, prompt_of(150, seed=1), 6)
    mlx_paged.apply_patches()
    tokens, given = greedy(model, prompt_of(150, seed=1), 6)
    assert tokens == expected and np.abs(given - logprobs).max() < 1e-4
    assert kind == "falcon_h1" or calls, "in chunks"


def test_prompts_shorter_than_an_ngram_are_batched_with_longer_ones() -> None:
    model = model_configs.build("longcat_flash_ngram")
    prompts = [list(range(3, 3 + length)) for length in (1, 2, 3, 4, 9, 2)]
    expected = [greedy(model, mx.array(prompt), 5)[0] for prompt in prompts]
    mlx_paged.apply_patches()
    assert answers(PagedBatchGenerator(model), prompts, [5] * len(prompts)) == expected
