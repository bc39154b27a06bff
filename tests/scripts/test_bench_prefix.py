"""scripts/bench_prefix.py, run as a user runs it, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_prefix.py"


def test_sharing_computes_and_stores_each_token_once(tmp_path: Path) -> None:
    sizes = ["--prefix", "192", "--suffix", "16", "--sharers", "4", "--decode-tokens", "4", "--kv-block-size", "16"]
    arguments = ["--random", "tiny", *sizes, "--pattern", "burst", "--out", str(tmp_path)]
    done = commands.run(SCRIPT, *arguments, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "burst: 4/4 answers the same on all sides" in done.stdout
    results = json.loads((tmp_path / "prefix.json").read_text())["results"]
    assert len(results) == 3 and (tmp_path / "prefix.png").exists()
    for result in results:
        computed = {"stock cache": None, "no sharing": 4 * 208, "shared": 192 + 4 * 16}[result["side"]]
        assert computed in (None, result["computed_prompt_tokens"])
        assert len(result["ttft_s"]) == 4 and result["kv_bytes"] > 0
        if result["side"] == "shared":
            assert result["kv_bytes"] < 1.3 * result["unique_kv_bytes"]
