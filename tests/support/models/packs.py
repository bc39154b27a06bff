"""Prompts that go through a model in packs, compared with each prompt's run alone."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.cache.batch import NoBlocksError
from mlx_paged.engine.prefill import Prefill
from mlx_paged.engine.request import Request
from mlx_paged.engine.scheduler import Chunk
from tests.support.models.batch_runs import TOLERANCE, Outcome, packing_generator
from tests.support.models.builders import greedy, prompt_of

# Shorter and longer than windows and chunks, ending at their ends and in the middle.
LENGTHS = (2, 70, 33, 1, 17, 12, 129, 40, 16, 51)


def note_packs(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets, for each pack from now on, the number of tokens of each request in it."""
    noted: list[list[int]] = []
    original = Prefill._run

    def noting(self: Prefill, call: Sequence[Chunk], requests: Sequence[Request]) -> None:
        if self._is_pack(call):
            noted.append([num_tokens for _, num_tokens in call])
        try:
            original(self, call, requests)
        except NoBlocksError:  # nothing was computed
            del noted[-1:]
            raise

    monkeypatch.setattr(Prefill, "_run", noting)
    return noted


def prompts_for(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [(prompt_of(length, seed=length) % vocab).tolist() for length in lengths]


def packing(model: Any, most: int = 64, **options: Any) -> Any:
    """Make a generator whose packs have up to 16 tokens of each prompt and ``most`` in all."""
    sizes = {"prefill_step_size": 16, "completion_batch_size": 16, "prefill_batch_size": 16}
    return packing_generator(model, most, **{**sizes, **options})


def expected_of(model: Any, prompts: Sequence[list[int]], num_tokens: int = 8) -> list[tuple[list[int], np.ndarray]]:
    """Return stock mlx-lm's tokens and log-probabilities of each prompt alone."""
    return [greedy(model, mx.array(prompt, mx.uint32), num_tokens) for prompt in prompts]


def insert(gen: Any, prompts: Sequence[list[int]], num_tokens: int) -> dict[int, Outcome]:
    uids = gen.insert(list(prompts), [num_tokens] * len(prompts))
    return {uid: Outcome() for uid in uids}


def assert_alike(
    outcomes: dict[int, Outcome] | Sequence[Outcome], expected: Sequence[tuple[list[int], np.ndarray]]
) -> None:
    """Assert the tokens of stock mlx-lm's runs, and their log-probabilities within TOLERANCE."""
    found = list(outcomes.values()) if isinstance(outcomes, dict) else outcomes
    for outcome, (tokens, logprobs) in zip(found, expected, strict=True):
        assert outcome.tokens == tokens
        got = np.stack(outcome.logprobs)
        same = got == logprobs  # also minus infinity, where a model rules a token out
        assert np.abs(np.where(same, 0, got) - np.where(same, 0, logprobs)).max() < TOLERANCE
