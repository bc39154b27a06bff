"""scripts/bench_first_token.py, run as a user runs it, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_first_token.py"


def test_both_sides_of_a_burst(tmp_path: Path) -> None:
    cases = "3x9,4xmixed5-40"
    done = commands.run(
        SCRIPT, "--random", "tiny", "--cases", cases, "--decode-tokens", "4", "--repeats", "1", "--out", tmp_path,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = {(r["case"], r["side"]): r for r in json.loads((tmp_path / "first.json").read_text())["results"]}
    assert set(results) == {(case, side) for case in cases.split(",") for side in ("stock", "paged")}
    assert results["3x9", "paged"]["prompt_tokens"] == 27
    for (case, _), result in results.items():
        assert 0 < result["first_s"]["p50"] <= result["last_first_s"]
        # Random lengths are seen once: a second run would not be of new ones.
        assert len(result["last_first_s_of_repeats"]) == 1, case
    mixed = results["4xmixed5-40", "stock"]["prompt_tokens"]
    assert 20 <= mixed <= 160 and results["4xmixed5-40", "paged"]["prompt_tokens"] == mixed
    assert any("prefill" in path for path in results["3x9", "paged"]["dispatch"])
    assert "last/stock" in done.stdout


def test_cases_that_cannot_be() -> None:
    done = commands.run(SCRIPT, "--cases", "4xmixed9", timeout=60)
    assert done.returncode == 2 and "4xmixed9" in done.stderr
