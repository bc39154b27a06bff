"""scripts/validate_model.py: passes for what we ship, fails for a paged path that differs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import commands

SCRIPT = Path(__file__).parents[2] / "scripts" / "validate_model.py"
SMALL = ["--random", "tiny", "--contexts", "40,100", "--tokens", "6", "--chunk", "32"]


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    if code is None:
        return commands.run(SCRIPT, *arguments)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_the_gather_path_is_stock_to_the_bit() -> None:
    result = run(*SMALL)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith(("40", "100"))]
    assert len(rows) == 2
    assert all(row[1] in ("gather", "kernel") and row[3] == "6/6" and row[-1] == "ok" for row in rows)


def test_a_wrong_paged_path_is_seen() -> None:
    code = f"""
import runpy, sys
sys.argv = ["validate_model.py"] + sys.argv[1:]
sys.path.insert(0, {str(SCRIPT.parent)!r})
from mlx_paged.attention import gather
original = gather.attention
gather.attention = lambda q, k, v, scoring: original(q, k, v[:, :, ::-1] * 1.0, scoring)
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    result = run(*SMALL, code=code)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAIL" in result.stdout


@pytest.mark.parametrize("arguments", [["--contexts", "1"], ["--contexts", "x"], ["--tokens", "0"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2 and "Traceback" not in result.stderr


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    result = run("--model", str(tmp_path / "none"))
    assert result.returncode == 2 and "Traceback" not in result.stderr
