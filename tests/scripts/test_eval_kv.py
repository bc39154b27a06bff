"""scripts/eval_kv.py, run as a user runs it, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "eval_kv.py"
SMALL = ["--random", "tiny", "--tokens", "90", "--chunk", "40"]


def test_every_format_beside_mlx_lms(tmp_path: Path) -> None:
    arguments = [*SMALL, "--kv-bits", "8", "8,4", "4", "--kv-rotate", "8", "--kv-group-size", "32", "64"]
    done = commands.run(SCRIPT, *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "eval_kv.json").read_text())["results"]
    assert (tmp_path / "eval_kv.png").exists()
    found = {(r["side"], r["format"]): r for r in results}
    assert len(found) == len(results) == 2 + 2 * 4 + 2 * 2
    assert all(r["positions"] == 89 and r["perplexity"] > 1 for r in results)
    reference, stock = found["pages", "as they are"], found["mlx-lm", "as they are"]
    assert reference["kl_mean"] == 0 and reference["same_token"] == 1 and reference["layers"]["quantised"] == 0
    assert abs(stock["kl_mean"]) < 1e-6
    for size in (32, 64):
        kl = {side: {bits: found[side, f"{bits} bits in groups of {size}"]["kl_mean"] for bits in "84"}
              for side in ("pages", "mlx-lm")}  # fmt: skip
        assert 0 < kl["pages"]["8"] < kl["pages"]["4"] / 20
        assert kl["mlx-lm"]["4"] == pytest.approx(kl["pages"]["4"], rel=0.01)  # the same bytes
        rotated = found["rotated pages", f"8 bits in groups of {size}"]
        assert 0 < rotated["kl_mean"] < kl["pages"]["4"] / 20 and rotated["layers"]["quantised"] == 2
    assert "8/4 bits in groups of 32" in done.stdout


@pytest.mark.demo_model
def test_a_text_and_a_model_of_ones_own(demo_model_folder: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", demo_model_folder, "gemma3")  # with sliding windows, heads of 16
    (tmp_path / "text").write_text("The sea was calm, and the wind came from the north. " * 20)
    only = ["--kv-bits", "8", "--kv-rotate", "--kv-group-size", "32"]
    arguments = ["--model", str(model), "--text", str(tmp_path / "text"), "--tokens", "50", "--chunk", "30"]
    done = commands.run(SCRIPT, *arguments, *only)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no quantised cache for all" in done.stdout and "no layer is quantised" in done.stdout
    model = make_tiny_model(tmp_path / "wide", demo_model_folder, "llama of wide heads")
    done = commands.run(SCRIPT, *arguments, *only, "--model", str(model), "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "2 quantised, 0 dense" in done.stdout and "rotated" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "at least two tokens"),
        (["--kv-bits", "5"], "argument --kv-bits"),
        (["--kv-bits", "none"], "8, 4 or 8,4"),
        (["--text", "no such file"], "the text cannot be read"),
        (["--random", "tiny", "--model", "x"], "not allowed"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    done = commands.run(SCRIPT, *SMALL, *arguments)
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
