"""Random conversations against stock mlx-lm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import conversations

SAMPLE = 12
SWEEP, SHARE = 500, 50  # conversations, and how many of them are one test


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("seed", range(SAMPLE))
def test_a_conversation_goes_as_with_stock(seed: int, tmp_path: Path) -> None:
    _run(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SAMPLE, SAMPLE + SWEEP, SHARE))
def test_conversations_go_as_with_stock(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + SHARE):
        _run(seed, tmp_path)


def _run(seed: int, folder: Path) -> None:
    conversation = conversations.draw(seed)
    try:
        conversations.run(conversation, folder)
    except Exception as error:
        error.add_note(str(conversation))
        raise
