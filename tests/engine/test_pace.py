"""Prompts beside others are computed in chunks that take about as long as somebody may wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.engine import engine as engine_module
from mlx_paged.engine import prefill as pace
from mlx_paged.engine.prefill import ALONE_SECONDS, BESIDE_SECONDS, GRID, LEAST_TOKENS, PrefillPace
from tests.support.models.toy_engine import ToyEngine, answer, make_pool, prompt_of


def model_of(num_weights: int) -> Any:
    return SimpleNamespace(parameters=lambda: {"w": mx.zeros((num_weights,))})


def test_the_first_estimate_follows_the_models_size() -> None:
    assert PrefillPace(SimpleNamespace()).most_tokens(False) is None
    small, large = PrefillPace(model_of(1000)), PrefillPace(model_of(100_000_000))
    assert (small.most_tokens(False) or 0) > 1 << 20
    assert large.most_tokens(False) == int(BESIDE_SECONDS * pace.ASSUMED_SPEED / 2e8) // GRID * GRID
    quantized = SimpleNamespace(parameters=lambda: {"w": mx.zeros((100_000_000 // 8,), mx.uint32)})
    assert PrefillPace(quantized).most_tokens(False) == LEAST_TOKENS  # they take a CPU much longer


def test_it_learns_from_steps_and_alone_there_is_more_time() -> None:
    learner = PrefillPace(model_of(1_000_000))
    for _ in range(20):
        learner.note(1024, 32.0)
    assert learner.most_tokens(True) == int(ALONE_SECONDS * 32) // GRID * GRID
    assert learner.most_tokens(False) == LEAST_TOKENS  # not 16
    learner.note(3, 100.0)  # a few tokens say nothing
    assert learner.most_tokens(True) == int(ALONE_SECONDS * 32) // GRID * GRID


class Clock:
    """Time in which each prompt token of a toy model takes a second."""

    def __init__(self, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        call = engine.engine.prefill.call

        def counted(tokens: mx.array, **options: Any) -> Any:
            self.now += tokens.size
            return call(tokens, **options)

        engine.engine.prefill.call = counted
        monkeypatch.setattr(engine_module.time, "perf_counter", lambda: self.now)


def chunks_of(engine: ToyEngine, uid: int) -> list[int]:
    """Tokens of each chunk of a prompt."""
    ends = [done for done, _ in engine.progress[uid]]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def test_a_slow_prompt_lets_others_decode_between_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "LEAST_TOKENS", 8)
    monkeypatch.setattr(pace, "GRID", 4)
    monkeypatch.setattr(pace, "BESIDE_SECONDS", 10.0)
    monkeypatch.setattr(pace, "ALONE_SECONDS", 40.0)
    engine = ToyEngine(make_pool(), prefill_step_size=200)
    assert engine.engine._pace is not None
    engine.engine._pace.seconds_per_token = 1.0
    Clock(engine, monkeypatch)
    first = engine.add(prompt_of(150), max_tokens=60)
    while not engine.responses[first]:
        engine.step()
    assert max(chunks_of(engine, first)) == 40, "alone it has more time"
    second = engine.add(prompt_of(151, seed=1), max_tokens=4)
    before = len(engine.responses[first])
    while not engine.responses[second]:
        engine.step()
    assert len(engine.responses[first]) - before >= 151 // 8
    assert max(chunks_of(engine, second)) == 8
    engine.run()
    assert engine.tokens(first) == answer(prompt_of(150), 60) and engine.tokens(second) == answer(prompt_of(151, 1), 4)
