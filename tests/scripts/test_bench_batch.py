"""scripts/bench_batch.py, run as a user runs it, on a tiny model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_batch.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(SCRIPT, *arguments, timeout=240)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("bench_batch_under_test", SCRIPT)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def test_cases(script: ModuleType) -> None:
    assert script.parse_case("3x17") == script.Case("3x17", 3, (17, 17, 17))
    ragged = script.parse_case("8xragged160")
    assert (min(ragged.lengths), max(ragged.lengths), len(ragged.lengths)) == (10, 160, 8)
    assert script.parse_case("8xragged160") == ragged
    for text in ("8", "x8", "8x", "0x4", "4x0", "8xraggedx"):
        with pytest.raises(argparse.ArgumentTypeError):
            script.parse_case(text)


def test_percentiles(script: ModuleType) -> None:
    assert script.percentiles(range(1, 101)) == {"p50": 51, "p95": 96, "p99": 100}
    assert script.percentiles([4.0]) == {"p50": 4.0, "p95": 4.0, "p99": 4.0}
    assert script.percentiles([]) == {}


class FakeGenerator:
    """Every request's first token comes one call after its insertion."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}

    def insert(self, prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        self.left[len(self.left)] = max_tokens[0]
        return [len(self.left) - 1]

    def next(self) -> tuple[list[Any], list[Any]]:
        generated = []
        for uid, left in self.left.items():
            if left:
                self.left[uid] -= 1
                reason = "length" if left == 1 else None
                generated.append(argparse.Namespace(uid=uid, token=uid, finish_reason=reason))
        return [], generated


def test_a_run_takes_every_token_of_every_request(script: ModuleType) -> None:
    requests = [script.Request(0.005 * i, [1], 3 + i) for i in range(4)]
    run = script.Run(FakeGenerator(), requests)
    seconds = run.go()
    assert {uid: len(tokens) for uid, tokens in run.tokens.items()} == {0: 3, 1: 4, 2: 5, 3: 6}
    assert len(run.first) == 4 and len(run.gaps) == 18 - 4
    assert seconds >= 0.015 and all(value >= 0 for value in (*run.first, *run.gaps))


def test_both_sides_give_the_same_tokens(tmp_path: Path) -> None:
    options = ("--random", "tiny", "--cases", "3xragged64", "--decode-tokens", "12", "--out", str(tmp_path))
    done = bench(*options, "--arrivals", "50", "--requests", "4", "--trace-lengths", "16,40")
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "batch.json").read_text())
    assert [(r["case"], r["side"]) for r in facts["results"]] == [
        ("3xragged64", "stock"),
        ("3xragged64", "paged"),
        ("4 at 50/s", "stock"),
        ("4 at 50/s", "paged"),
    ]
    for result in facts["results"]:
        assert result["tokens_per_s"] > 0 and result["peak_bytes"] > 0
        assert set(result["ttft_s"]) == {"p50", "p95", "p99"} == set(result["inter_token_s"])
        if result["side"] == "paged":
            assert result["rows_with_same_tokens"] == result["requests"]
            assert result["ratios"]["total"] > 0
            assert any(path.startswith("gather") or path.startswith("kernel") for path in result["dispatch"])
    assert (tmp_path / "batch.png").stat().st_size > 0
    assert "paged against stock" in done.stdout


def test_one_side_alone_and_errors(tmp_path: Path) -> None:
    done = bench("--random", "tiny", "--cases", "2x8", "--decode-tokens", "6", "--only", "paged")
    assert done.returncode == 0 and "stock" not in done.stdout, done.stderr
    broken = bench("--model", str(tmp_path / "none"), "--cases", "1x4", "--only", "stock")
    assert broken.returncode == 1
