"""scripts/grammar, run as a user runs it: random schemas, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "grammar"
pytestmark = pytest.mark.demo_model


@pytest.fixture(scope="module")
def folder(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder)


def evaluated(out: Path, *arguments: str) -> dict[str, int]:
    done = commands.run(SCRIPTS / "eval_grammar.py", *arguments, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, int] = json.loads((out / "eval_grammar.json").read_text())
    assert result["wrong"] == [] and result["finished"] == result["valid"]
    assert result["finished"] + result["cut_off"] == result["answers"]
    return result


def test_answers_of_random_logits_keep_to_random_schemas(folder: Path, tmp_path: Path) -> None:
    small = ("--schemas", "6", "--prompts", "2", "--max-tokens", "150", "--temperature", "1.0")
    assert evaluated(tmp_path, "--model", str(folder), *small)["finished"] >= 6


@pytest.mark.slow
def test_answers_of_a_model_keep_to_random_schemas(demo_model_folder: Path, tmp_path: Path) -> None:
    # All 300 take half an hour on a CPU; on an NVIDIA H200, 90 s.
    small = ("--dequantize", "--schemas", "6", "--max-tokens", "80")
    result = evaluated(tmp_path, "--model", str(demo_model_folder), *small)
    assert result["answers"] == 18 and result["finished"] >= 3
