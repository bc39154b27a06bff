"""Requests for twice the budget, for minutes; see scripts/soak/soak_server.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.soak.soak_server import growth
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands

SCRIPT = Path(__file__).parents[3] / "scripts" / "soak" / "soak_server.py"


def test_growth_compares_the_last_round_with_the_first() -> None:
    assert growth([200, 900, 210]) == pytest.approx(0.05) and growth([100, 90]) == pytest.approx(-0.1)


@pytest.mark.slow
@pytest.mark.demo_model
@pytest.mark.parametrize("minutes, num_tokens, num_clients", [(5, 2048, 12)])
def test_soak_passes_under_load(
    demo_model_folder: Path, tmp_path: Path, minutes: int, num_tokens: int, num_clients: int
) -> None:
    model = make_tiny_model(tmp_path, demo_model_folder)
    flags = ("--minutes", minutes, "--tokens", num_tokens, "--clients", num_clients)
    done = commands.run(SCRIPT, "--model", model, *flags, timeout=60 * minutes + 300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["pool"]["preemptions"] > 0 and figures["pool"]["evictions"] > 0
    assert figures["server"]["requests"]["ok"] > num_clients
