"""Tests that need the emulator are skipped, and compile nothing, unless the platform is Linux."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A pytest plugin: once the tests are imported, the platform is macOS, and starting a program other than Python fails.
DARWIN = """
import platform, subprocess, sys
import pytest

def pytest_collection_finish():
    start = subprocess.Popen.__init__

    def refuse(self, arguments, *given, **options):
        if arguments[0] != sys.executable:
            pytest.exit(f"started {arguments}", 3)
        start(self, arguments, *given, **options)

    platform.system, subprocess.Popen.__init__ = lambda: "Darwin", refuse
"""
FILES = (
    *("tests/msl/test_pool_kernels.py", "tests/msl/test_registers.py", "tests/msl/test_text.py", "tests/msl/sampling"),
    *("tests/kernels/test_prefill_kernel.py", "tests/engine/sampling/test_kernel_rows.py"),
)


def test_tests_on_the_emulator_are_skipped_on_macos(tmp_path: Path) -> None:
    (tmp_path / "darwin.py").write_text(DARWIN)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "darwin", "-p", "no:cacheprovider", "-rs", "-m", "not slow", *FILES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "MSLEMU_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    skipped = sum(int(n) for n in re.findall(r"SKIPPED \[(\d+)\].*the emulator needs Linux", run.stdout))
    assert skipped >= 10, run.stdout
    assert not (tmp_path / "cache").exists()
