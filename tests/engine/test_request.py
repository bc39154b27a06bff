"""Requests: their chunks, the pace of prefill, and the logits of a step."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine import engine as engine_module
from mlx_paged.engine import prefill
from mlx_paged.engine.prefill import PrefillPace
from mlx_paged.engine.request import TokenLogits
from tests.support.models.toy_engine import (
    ToyEngine,
    answer,
    make_pool,
    prompt_of,
)
from tests.support.requests import request_of


@pytest.mark.parametrize(
    ("length", "boundaries", "most", "grid", "chunks"),
    [
        (1, (), None, None, []),  # its only token is decoded
        (20, (), None, None, [19]),
        (20, (), 8, None, [8, 8, 3]),
        (20, (5, 6), None, None, [5, 1, 13]),
        (20, (5, 6), 4, None, [4, 1, 1, 4, 4, 4, 1]),
        (20, (), None, 8, [8, 8, 3]),
        (20, (5,), 6, 8, [5, 3, 8, 3]),
        (50, (), 8, 8, [8, 8, 8, 8, 8, 8, 1]),
        (50, (), 20, 8, [16, 16, 17]),
        (50, (3, 30), 20, 8, [3, 13, 14, 19]),
        (20, (19,), None, None, [19]),
    ],
)
def test_chunks_end_at_segments_and_at_the_grid(
    length: int, boundaries: tuple[int, ...], most: int | None, grid: int | None, chunks: list[int]
) -> None:
    request, found = request_of(0, length, boundaries), []
    while not request.is_prefilled:
        found.append(request.chunk_length(most, grid))
        request.length += found[-1]
    assert found == chunks
    assert request.length == length - 1 and request.segment_ends == set(boundaries)


def test_pace_halves_and_doubles_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = PrefillPace(100)
    assert pace.tokens == 128
    pace.note(128, 0.2)
    assert pace.tokens == 64
    pace.note(64, 0.07)  # within the latency
    pace.note(512, 30.0)  # alone: says nothing of the latency
    pace.note(3, 0.001)  # a prompt's end
    assert pace.tokens == 64
    for _ in range(9):
        pace.note(pace.tokens, 9.0)
    assert pace.tokens == 32
    for _ in range(9):
        pace.note(pace.tokens, 0.01)
    assert pace.tokens == 2048
    monkeypatch.setattr(prefill, "on_metal", lambda: True)
    assert (PrefillPace().tokens, PrefillPace().least, PrefillPace(most=300).tokens) == (512, 128, 300)


class Clock:
    """A clock on which each prompt token of a toy model takes a second."""

    def __init__(self, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        call = engine.engine.batch.forward

        def counted(tokens: mx.array, **options: Any) -> Any:
            self.now += tokens.size if tokens.shape[1] > 1 else 0
            return call(tokens, **options)

        engine.engine.batch.forward = counted
        monkeypatch.setattr(engine_module.time, "perf_counter", lambda: self.now)


def lengths_of_chunks(engine: ToyEngine, uid: int) -> list[int]:
    """Return the number of tokens of each chunk of a prompt."""
    ends = [done for done, _ in engine.progress[uid]]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def test_a_slow_prompt_lets_others_decode_between_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CPU_TOKENS", (16, 8))
    monkeypatch.setattr(engine_module, "UNCUT_TOKENS", 40)
    engine = ToyEngine(make_pool(), prefill_step_size=200)
    assert engine.engine.prefill.pace is not None
    engine.engine.prefill.pace.latency = 10.0
    Clock(engine, monkeypatch)
    first = engine.add(prompt_of(150), max_tokens=60)
    while not engine.responses[first]:
        engine.step()
    assert max(lengths_of_chunks(engine, first)) == 40, "alone it is not cut below that"
    second = engine.add(prompt_of(151, seed=1), max_tokens=4)
    before = len(engine.responses[first])
    while not engine.responses[second]:
        engine.step()
    assert len(engine.responses[first]) - before >= 151 // 8 - 1
    assert max(lengths_of_chunks(engine, second)[1:]) == 8
    engine.run()
    assert engine.tokens(first) == answer(prompt_of(150), 60) and engine.tokens(second) == answer(prompt_of(151, 1), 4)


def test_lengths_are_those_of_the_picture_in_docs_architecture() -> None:
    engine = ToyEngine(make_pool(16))
    uids = [engine.add(prompt_of(20 + uid, uid), max_tokens=24) for uid in range(3)]
    seen = set()
    while engine.step():
        for request in engine.engine.requests.values():
            assert request.kept <= request.length <= request.kept + len(request.source)
            assert len(request.source) == request.prompt_length + request.num_generated
            assert request.cached_tokens() == request.source[: request.length]
            is_decoding = request in engine.engine.batch.members
            assert request.is_prefilled or not is_decoding
            if is_decoding:
                assert request.length == request.kept + request.prompt_length + request.num_generated
            seen.add((is_decoding, request.num_generated > 0))
    assert engine.engine.scheduler.preemptions and seen == {(False, False), (True, False), (True, True), (False, True)}
    assert all(engine.tokens(uid) == answer(prompt_of(20 + uid, uid), 24) for uid in uids)


def test_short_prompts_of_one_client_deliver_their_first_tokens_together() -> None:
    engine = ToyEngine(make_pool(), prefill_step_size=2048)
    assert engine.engine.prefill.pace is not None
    engine.engine.prefill.pace.tokens = 32  # a slow CPU
    for seed in range(4):
        engine.add(prompt_of(30 + 9 * seed, seed), max_tokens=3)
    while not any(engine.responses.values()):
        engine.step()
    assert [len(engine.responses[uid]) for uid in range(4)] == [1] * 4
    engine.run()


def test_logprobs_are_normalised_logits() -> None:
    logits = mx.random.normal((4, 50), key=mx.random.key(0)) * 5
    expected = np.array(logits) - np.log(np.exp(np.array(logits)).sum(axis=-1, keepdims=True))
    for index in range(4):
        np.testing.assert_allclose(np.array(TokenLogits(logits, index).logprobs()), expected[index], atol=1e-5)


def test_detached_token_holds_only_its_own_row() -> None:
    mx.random.seed(0)
    logits = mx.random.normal((64, 100_000))
    tokens = [TokenLogits(logits, index) for index in (3, 60)]
    expected = [np.array(token.logprobs()) for token in tokens]
    del logits
    before = mx.get_active_memory()
    for token in tokens:
        token.detach()
        token.detach()
    mx.synchronize()
    assert mx.get_active_memory() < before - 60 * 400_000
    for token, logprobs in zip(tokens, expected, strict=True):
        np.testing.assert_array_equal(np.array(token.logprobs()), logprobs)
