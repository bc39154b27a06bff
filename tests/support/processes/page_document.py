"""The functions of the page /cache, run by Node.js on a minimal document."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")


def page_of(page: bytes, reports: Sequence[dict[str, Any]], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the page's texts for each report, and its state when its key is refused."""
    (folder / "page.html").write_bytes(page)
    command = ["node", str(Path(__file__).with_suffix(".mjs")), str(folder / "page.html")]
    done = subprocess.run(command, input=json.dumps(reports), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *said, state = json.loads(done.stdout)
    return said, state
