"""Random batches against stock mlx-lm's single runs."""

from __future__ import annotations

import pytest

from tests.fuzz import batches
from tests.fuzz.cases import FAMILIES, draw

SAMPLE = 12
FOUND = (336, 1853)  # cached prefixes: two made room for each other for ever; one, behind windows, was counted twice
SWEEP, SHARE = 2_000, 50  # cases, and how many of them are one test


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("seed", (*range(SAMPLE), *FOUND))
def test_a_batch_delivers_what_single_runs_do(seed: int) -> None:
    _run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + SWEEP, SHARE))
def test_batches_deliver_what_single_runs_do(first: int) -> None:
    for seed in range(first, first + SHARE):
        _run(seed)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("seed", range(4))
def test_chunks_in_a_batch(seed: int) -> None:
    _run(seed, ("llama4",))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4, 204, SHARE))
def test_chunks_in_batches(first: int) -> None:
    for seed in range(first, first + SHARE):
        _run(seed, ("llama4",))


def _run(seed: int, families: tuple[str, ...] = FAMILIES) -> None:
    case = draw(seed, families)
    try:
        batches.run(case)
    except Exception as error:
        error.add_note(str(case))
        raise
