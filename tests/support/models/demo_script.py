"""scripts/demo_model.py as tests use it: loaded as a module of its own, run as a command, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "demo_model.py"


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo_model = _load_script()


def no_pip(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a process was started")


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.name not in (demo_model.MODEL_FOLDER, demo_model.LOCK_FILE))


def run_script(*args: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does, or with ``code`` executed between its import as ``m`` and ``m.main()``."""
    command = [sys.executable, str(SCRIPT), *args]
    if code:
        program = (
            f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import demo_model as m; "
            f"{code}; sys.exit(m.main({list(args)!r}))"
        )
        command = [sys.executable, "-c", program]
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def assert_one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *progress, last = done.stderr.splitlines()
    assert last.startswith("demo_model: error: ")
    assert all(line.startswith("demo_model: ") and "error" not in line for line in progress)
    for word in words:
        assert word in last
