"""The demo model answers with stock mlx-lm's exact tokens."""

from __future__ import annotations

import functools
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

import mlx_paged

PROMPTS = {
    "short": "Write two sentences about the sea.",
    "list": "Name five colours and say where in nature each is seen.",
    "long": "Here are notes of a voyage. "
    + " ".join(f"On day {day} the wind was {day % 7} and we sailed {3 * day} miles." for day in range(1, 60))
    + " Sum up the voyage in a few words.",
}


@functools.cache
def load_demo(folder: Path):
    return load(str(folder))


@pytest.mark.demo_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(PROMPTS))
def test_demo_model_gives_stocks_tokens(name: str, demo_model_folder: Path) -> None:
    model, tokenizer = load_demo(demo_model_folder)
    messages = [{"role": "user", "content": PROMPTS[name]}]
    prompt = mx.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    assert (prompt.size > 1000) == (name == "long")

    def run() -> list[int]:
        return [token for token, _ in generate_step(prompt, model, max_tokens=200)]

    expected = run()
    mlx_paged.apply_patches()
    got = run()
    assert mlx_paged.last_dispatch().path == "gather"
    assert got == expected
    assert len(got) == 200
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().peak_live_blocks == -(-(prompt.size + 200) // 32)
