"""schemathesis over the server's OpenAPI description: no 5xx, and every request is answered."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.tiny_model import make_tools_model
from tests.support.processes.server_process import ServerProcess

# The default length of answers and the budget bound the work. 256 answers that fill a large budget would take minutes
# on a CPU and could not be told from a hang.
FLAGS = ("--max-tokens", "2", "--kv-cache-memory", "128KiB", "--log-level", "WARNING")
SECONDS = 60  # for one request

pytestmark = [
    pytest.mark.demo_model,
    pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"),
]


def fuzz(server: ServerProcess, folder: Path, *flags: str, seconds: float) -> int:
    """Run schemathesis in the folder; fail if a request does not pass, and return how many did."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *flags]
    command += ["--checks", "not_a_server_error", "--request-timeout", str(SECONDS), "--continue-on-failure"]
    command += ["--generation-deterministic", "--no-shrink", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None and found[1] == found[2], done.stdout[-5000:]
    return int(found[2])


@pytest.mark.slow
def test_every_request_by_the_openapi_description_is_answered(demo_model_folder: Path, tmp_path: Path) -> None:
    server = ServerProcess(make_tools_model(tmp_path / "tools", demo_model_folder), tmp_path, *FLAGS)
    assert fuzz(server, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "100", seconds=540) > 2000
    server.wait_until(lambda: server.is_idle)
    requests = server.stats()["server"]["requests"]
    assert requests["ok"] > 100 and requests["failed"] == 0, requests
    assert server.get("/health").json["status"] == "ok"
    assert server.stop() == 0 and "Traceback" not in server.log, server.log[-5000:]
