"""Layers with states: prompts of gated delta nets by chunks, as mlx-lm's loop over tokens; n-grams of short prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta

import mlx_paged
from mlx_paged.kernels import delta_rule
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.warn import NotPagedWarning
from scripts.support import model_configs
from tests.support.models.batch_runs import model_of
from tests.support.models.builders import greedy, prompt_of

Arrays = tuple[mx.array, ...]


@pytest.fixture(autouse=True)
def no_known_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delta_rule, "_passed", {})
    yield


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


@pytest.mark.parametrize("size", (16, 64))
@pytest.mark.parametrize("tokens", (1, 15, 16, 17, 64, 65, 130))
@pytest.mark.parametrize("shape", ((2, 2, 32, 16), (2, 4, 32, 32), (1, 3, 48, 64)))
def test_chunks_give_what_the_loop_gives(
    shape: tuple[int, int, int, int], tokens: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_rule, "chunk_size", lambda: size)
    given = arguments(2, tokens, *shape)
    assert_close(delta_rule.chunked(*given), gated_delta.gated_delta_ops(*given))
    assert_close(delta_rule.chunked(*given[:5]), gated_delta.gated_delta_ops(*given[:5]))


def test_tokens_that_a_mask_leaves_out_change_nothing() -> None:
    q, k, v, g, beta, state = arguments(3, 40, 2, 4, 32, 16)
    mask = mx.arange(40)[None] < mx.array([[40], [0], [23]])
    k = mx.where(mask[..., None, None], k, mx.nan)  # whatever is there
    wanted = gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask)
    assert_close(delta_rule.chunked(q, k, v, g, beta, state, mask), wanted, mask)


@pytest.mark.parametrize("decay", (0.0, 1e-30, 1.0))
def test_decays_at_their_ends_give_what_the_loop_gives(decay: float) -> None:
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


@pytest.mark.parametrize("case", ("few tokens", "a decay for each channel"))
def test_arguments_without_a_chunked_form_go_to_the_loop(case: str) -> None:
    q, _, v, g, *_ = arguments(1, 8 if case == "few tokens" else 20, 2, 4, 32, 16)
    if case != "few tokens":
        g = mx.broadcast_to(g[..., None], (*g.shape, 32))
    calls: list[Any] = []

    def loop(*given: Any) -> Any:
        calls.append(given)
        return gated_delta.gated_delta_ops(*given)

    assert delta_rule.unsupported_reason(q, v, g, loop) == case
    assert not calls


def test_a_form_that_fails_its_check_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = delta_rule.chunked

    def wrong(*given: Any) -> Arrays:
        out, state = chunked(*given)
        return out, state * 1.001

    model = model_of("qwen3_next")
    expected, _ = greedy(model, prompt_of(70, seed=1), 4)
    monkeypatch.setattr(delta_rule, "chunked", wrong)
    mlx_paged.apply_patches()
    with pytest.warns(NotPagedWarning, match="mlx-lm's loop"):
        assert greedy(model, prompt_of(70, seed=1), 4)[0] == expected
    assert list(delta_rule._passed.values()) == [False]


def test_a_prompt_goes_by_chunks_and_answers_as_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_next")
    expected, logprobs = greedy(model, prompt_of(150, seed=1), 6)
    chunked, lengths = delta_rule.chunked, []

    def counted(*given: Any) -> Any:
        lengths.append(given[0].shape[1])
        return chunked(*given)

    monkeypatch.setattr(delta_rule, "chunked", counted)
    mlx_paged.apply_patches()
    tokens, given = greedy(model, prompt_of(150, seed=1), 6)
    assert tokens == expected and np.abs(given - logprobs).max() < 1e-4
    assert max(lengths) >= 149


def test_prompts_shorter_than_an_ngram_go_beside_longer_ones() -> None:
    model = model_configs.build("longcat_flash_ngram")
    prompts = [list(range(3, 3 + length)) for length in (1, 2, 3, 4, 9, 2)]
    expected = [greedy(model, mx.array(prompt), 5)[0] for prompt in prompts]
    mlx_paged.apply_patches()
    gen = PagedBatchGenerator(model)
    uids = gen.insert(prompts, [5] * len(prompts))
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(answer := gen.next()):
        for response in answer[1]:
            tokens[response.uid].append(response.token)
    assert [tokens[uid] for uid in uids] == expected
