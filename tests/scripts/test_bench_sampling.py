"""scripts/bench_sampling.py, run as a user runs it, on few words and a tiny model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_sampling.py"
SIZES = ("--batch", "3", "--vocab", "300", "--steps", "2")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(SCRIPT, *SIZES, *arguments, timeout=240)


def test_sampling_alone_and_whole_steps_are_measured(tmp_path: Path) -> None:
    done = bench("--random", "tiny", "--setting", "min-p", "top-p, penalties", "all", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "sampling.json").read_text())["results"]
    assert [(result["part"], result["setting"]) for result in results] == [
        *(("sampling", name) for name in ("min-p", "top-p, penalties", "all")),
        *(("model", name) for name in ("greedy", "min-p", "top-p, penalties", "all")),
    ]
    for result in results:
        assert result["ratio"] == result["ours"] / result["stock"] > 0
        if result["part"] == "model":
            assert result["to_greedy"] > 0
    assert results[3]["to_greedy"] == 1
    assert (tmp_path / "sampling.png").stat().st_size > 0
    assert "ours / greedy" in done.stdout


def test_whole_steps_alone(tmp_path: Path) -> None:
    done = bench("--random", "tiny", "--model-only", "--setting", "temperature", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "sampling.json").read_text())["results"]
    assert [(result["part"], result["setting"]) for result in results] == [
        ("model", "greedy"),
        ("model", "temperature"),
    ]
    done = bench("--model-only")
    assert done.returncode == 2 and "needs --random" in done.stderr


def test_a_setting_that_there_is_not_is_refused() -> None:
    done = bench("--setting", "all of it")
    assert done.returncode == 2 and "invalid choice" in done.stderr
