"""scripts/lookup/bench_lookup.py on a tiny model: both kinds of work, with and without look-up."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "lookup"


@pytest.fixture
def script() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("bench_lookup_under_test", FOLDER / "bench_lookup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = before


def test_copies_are_accepted(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batches", "1", "--lookup", "6", "--prompt", "48", "--num-tokens", "24", "--repeats", "1"]
    assert script.main(["--random", "tiny", *sizes, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "lookup.json").read_text())["results"]
    assert [(r["case"], r["side"]) for r in results] == [
        ("copy, 1", "without"), ("copy, 1", "up to 6"), ("prose, 1", "without"), ("prose, 1", "up to 6"),
    ]  # fmt: skip
    assert all(r["generated_tokens"] == 24 and r["tokens_per_s"] > 0 for r in results)
    plain, copied = results[:2]
    assert plain["drafted"] == 0 and copied["accepted"] > 12
    assert copied["accepted"] >= 0.9 * copied["drafted"]
    assert "up to 6" in capsys.readouterr().out


def test_what_cannot_be_foretold_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--random", "qwen3-small"]) == 1
    assert "of Llama shapes only" in capsys.readouterr().err
