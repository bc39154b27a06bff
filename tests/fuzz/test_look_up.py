"""Random batches that look tokens up, against stock mlx-lm's single runs."""

from __future__ import annotations

import random
from contextlib import ExitStack
from unittest import mock

import pytest

from mlx_paged.engine import look_up
from tests.fuzz import batches
from tests.fuzz.cases import Case, draw, vocabulary
from tests.support.models.builders import KINDS
from tests.support.models.oracle import oracles

FAMILIES = (*KINDS, *KINDS, "qwen2", "phi3", "gpt_oss", "gemma2", "olmo3")
SAMPLE = 8
SWEEP, SHARE = 1_000, 50


def draw_repeating(seed: int) -> Case:
    """A case whose prompts say things several times, most of them for answers without penalties."""
    case = draw(seed, FAMILIES)
    rng = random.Random(f"{seed} repeats")
    case.lookup = rng.choice((1, 2, 5, 16))
    for request in case.requests:
        if request.follows is None and request.given is None and request.cut is None:
            part = request.prompt[: rng.randint(1, 30)]
            request.replace_prompt([*part * rng.randint(1, 4), *part[: rng.randint(1, len(part))]])
        if rng.random() < 0.7:
            request.processors = []
    return case


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", range(SAMPLE))
def test_a_batch_delivers_what_single_runs_do(seed: int) -> None:
    _run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + SWEEP, SHARE))
def test_batches_deliver_what_single_runs_do(first: int) -> None:
    for seed in range(first, first + SHARE):
        _run(seed)


def _run(seed: int) -> None:
    case = draw_repeating(seed)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(look_up, "LEAST_GAIN", 0.0))
        if seed % 2:  # drafts that are often right
            oracle = stack.enter_context(oracles(vocabulary(case.family)))
            case.tell = lambda prompt, tokens: oracle.answers.update({tuple(prompt): tokens})
        try:
            batches.run(case)
        except Exception as error:
            error.add_note(f"{case}, {case.lookup} looked up")
            raise
