"""Short prompt chunks one by one over in-place pools, on a GPU or with fake kernels."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as stock_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.attention import dispatch
from mlx_paged.engine import prefill as prefill_module
from mlx_paged.errors import RequestFailedError
from tests.support.models.batch_runs import Outcome, collect, generator, run_all
from tests.support.models.builders import WINDOW, build, greedy, prompt_of


@pytest.fixture(params=["in the kernel", "row by row"])
def in_kernel(request: pytest.FixtureRequest, kernels: object, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether short chunks go through the decode kernel, as on devices where MLX's attention prepares a plan per shape.
    No chunk is packed, as without a kernel for packs."""
    chosen = bool(request.param == "in the kernel")
    monkeypatch.setattr(prefill_module, "backend", lambda: None)
    monkeypatch.setattr(dispatch, "backend", lambda: "cuda" if chosen else None)
    return chosen


@pytest.mark.usefixtures("in_kernel", "no_fall_through")
def test_second_turns_give_the_tokens_of_mlx_lm_without_packs() -> None:
    """Short chunks follow prompts of different lengths, past a window and in the middle of blocks."""
    model = build("gemma3", head_dim=64)
    lengths, turns = (WINDOW + 5, 3 * WINDOW, 21), (30, 9, 64)
    firsts = [prompt_of(n, seed=n).tolist() for n in lengths]
    seconds = [prompt_of(n, seed=100 + n).tolist() for n in turns]
    expected = []
    for first, second in zip(firsts, seconds, strict=True):
        cache = stock_cache.make_prompt_cache(model)
        tokens, _ = greedy(model, mx.array(first), 6, prompt_cache=cache)
        expected.append((tokens, greedy(model, mx.array(second), 8, prompt_cache=cache)[0]))
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on"))
    gen = generator(model, prefill_step_size=64)
    uids = gen.insert(firsts, [6] * 3)
    outcomes = {uid: Outcome() for uid in uids}
    caches = {}
    while len(caches) < 3:
        prompts, generated = gen.next()
        collect(outcomes, prompts, generated)
        caches.update({r.uid: r.prompt_cache for r in generated if r.finish_reason})
    again = gen.insert(seconds, [8] * 3, [caches[uid] for uid in uids])
    more = {uid: Outcome() for uid in again}
    run_all(gen, more)
    for first, second, (one, two) in zip(uids, again, expected, strict=True):
        assert outcomes[first].tokens == one
        assert more[second].tokens == two


def test_host_runs_one_step_ahead_and_waits_for_the_last(kernels: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one step with prompts is in flight, and none once all prompts are computed."""
    model = build("llama", head_dim=64)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on"))
    gen = generator(model, prefill_step_size=32)
    prefill = gen._engine.prefill
    waits: list[int] = []
    original = prefill.wait
    monkeypatch.setattr(prefill, "wait", lambda: waits.append(len(prefill._under_way)) or original())
    (uid,) = gen.insert([prompt_of(32 * 3 + 1).tolist()], [2])
    outcomes = {uid: Outcome()}
    under_way = []
    while not outcomes[uid].tokens:
        collect(outcomes, *gen.next())
        under_way.append(bool(prefill._under_way))
    assert under_way[:3] == [True, True, False] and not any(under_way[3:])
    assert [count > 0 for count in waits] == [False, True, True, True], "before the second and third, and at the end"


@pytest.mark.parametrize("at_launch", [False, True])
def test_failure_during_evaluation_fails_only_that_request(
    at_launch: bool, kernels: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", head_dim=64)
    prompt = prompt_of(40).tolist()
    expected = greedy(model, mx.array(prompt), 6)[0]
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on"))
    gen = generator(model)
    computed, launch = prefill_module._fences, mx.async_eval
    too_large: list[Any] = []

    def fences(requests: Any) -> list[mx.array]:
        found = computed(requests)
        if any(request.uid == bad for request in requests):
            too_large.append(found)
            if not at_launch:
                raise MemoryError("injected: no room for what a chunk needs")
        return found

    def launched(*arrays: Any) -> None:
        if any(array is each for array in arrays for each in too_large):
            raise MemoryError("injected: no room for what a chunk needs")
        launch(*arrays)

    monkeypatch.setattr(prefill_module, "_fences", fences)
    monkeypatch.setattr(mx, "async_eval", launched)
    (bad,) = gen.insert([prompt_of(50, seed=1).tolist()], [6])
    with pytest.raises(RequestFailedError, match="injected"):
        gen.next()
    (uid,) = gen.insert([prompt], [6])
    outcomes = {uid: Outcome()}
    run_all(gen, outcomes)
    assert outcomes[uid].tokens == expected
    assert mlx_paged.pool_of(model).stats().live_blocks == 0
