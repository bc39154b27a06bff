"""scripts/bench.py: each command once on a tiny model, as a user runs it; and what it refuses."""

import json
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scripts.bench import COMMANDS
from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"
CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")
TINY = ("--random", "tiny")
RUNS = [
    ("generate", *TINY, "--contexts", "40,150", "--block-sizes", "16", "--decode-tokens", 4, "--repeats", 2),
    ("generate", *TINY, "--synthetic-context", "--contexts", 100, "--block-sizes", 32, "--repeats", 1),
    ("batch", *TINY, "--cases", "3xragged64,4xmixed5-40", "--decode-tokens", 12, "--arrivals", 50, "--requests", 4),
    ("prefix", *TINY, "--prefix", 192, "--suffix", 16, "--sharers", 4, "--decode-tokens", 4, "--pattern", "burst"),
    ("lookup", *TINY, "--batches", 1, "--lookup", 6, "--prompt", 48, "--num-tokens", 24, "--repeats", 1),
    ("engine", "--rows", "1,2", "--nodes", 20, "--waiting", 300),
    pytest.param(("ranks", *TINY, "--rows", 2, "--prompt", 20, "--answer", 16, "--rounds", 1), marks=CPU_ONLY),
    *(pytest.param(("kernel", "--what", what), marks=pytest.mark.gpu) for what in ("decode", "latents", "prefill")),
]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return commands.run(SCRIPT, *arguments, timeout=240)


def results_of(out: Path, command: str, *arguments: object) -> list[dict[str, Any]]:
    """The results that a command writes."""
    done = bench(command, *arguments, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((out / f"{command}.json").read_text())
    assert set(written["machine"]["versions"]) == {"mlx", "mlx-lm", "mlx_paged"} and written["arguments"]
    return written["results"]


@pytest.mark.parametrize("arguments", RUNS, ids=lambda given: " ".join(map(str, given[:4])))
def test_each_command_measures_both_sides(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    results = results_of(tmp_path, *arguments)
    assert results and not any("error" in r for r in results)
    for r in results:
        if r.get("side", "").startswith("paged-"):
            assert r["same_tokens"]
        if arguments[0] == "batch" and r["side"] == "paged":
            assert r["rows_with_same_tokens"] == r["requests"] and r["ratios"]["total"] > 0
        if r.get("side") == "shared":
            assert r["computed_prompt_tokens"] == 192 + 4 * 16 and r["kv_bytes"] < 1.3 * r["unique_kv_bytes"]
        if (r.get("case"), r.get("side")) == ("copy, 1", "up to 6"):
            assert r["accepted"] > 12 and r["accepted"] >= 0.9 * r["drafted"]


@pytest.mark.slow
def test_a_steps_cost_grows_with_what_changes(tmp_path: Path) -> None:
    """Ratios, not times: of 256 rows to 32, of a full prefix tree to a small one, of 10,000 that wait to 256."""
    results = results_of(tmp_path, "engine", "--rows", "32,256", "--nodes", 10_000)
    few = results_of(tmp_path, "engine", "--rows", "32,256", "--nodes", 100)

    def ms(given: list[dict[str, Any]], case: str, **sizes: int) -> float:
        return next(r["ms"] for r in given if r["case"] == case and sizes.items() <= r.items())

    assert ms(results, "decode", rows=256) < 6 * ms(results, "decode", rows=32)
    full = "pool full of prefixes"
    assert ms(results, full, rows=32) < 2 * ms(few, full, rows=32)
    for case in ("256 start", "256 start, prefix cache", "20 join in each step"):
        assert ms(results, case, waiting=10_000) < 2 * ms(results, case, waiting=256), case


def test_help_lists_commands_and_bad_values_are_refused(tmp_path: Path) -> None:
    shown = bench("--help").stdout
    assert all(f"  {name} " in shown for name in COMMANDS)
    for arguments in (("nothing",), ("batch", "--cases", "4xmixed9"), ("generate", "--contexts", "0")):
        assert bench(*arguments).returncode == 2
    broken = bench("batch", "--model", tmp_path / "none", "--cases", "1x4", "--only", "stock")
    assert broken.returncode == 1 and "exit status" in broken.stdout
