"""Compile the texts that scripts/dump_kernels.py wrote with Apple's compiler; needs macOS with Xcode, and no GPU.

    python scripts/support/compile_metal.py FOLDER

Compiles with each standard that MLX compiles with on some macOS, if the installed compiler knows it. Exits with 1 if
a text has an error, a warning, or an array in private memory: an ``alloca`` that is left in its AIR is memory that
every thread reads and writes in place of registers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STANDARDS = ("metal3.1", "metal3.2", "metal4.0", "metal4.1")  # MLX's on macOS 14, 15, 26 and 27
COMPILER = ("xcrun", "-sdk", "macosx", "metal")
# -fno-fast-math and -O2 are what MLX compiles with. Launches pass types as typedefs, which a text need not use.
FLAGS = ("-Wall", "-Werror", "-Wno-unused-local-typedef", "-O2", "-fno-fast-math", "-S", "-emit-llvm")
INCLUDE = "mlx_include.txt"


def allocas(air: str) -> list[str]:
    """Return the lines of AIR that reserve private memory."""
    return [line.strip() for line in air.splitlines() if re.match(r"\s*%\S+ = alloca\b", line)]


def is_known(standard: str) -> bool:
    """Return whether the installed compiler knows a standard.

    Raises:
        FileNotFoundError: xcrun is not installed.
    """
    command = [*COMPILER, f"-std={standard}", "-fsyntax-only", "-x", "metal", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compile_text(file: Path, standard: str, include: str) -> str | None:
    """Compile one file. Return its errors, or None."""
    with tempfile.TemporaryDirectory() as folder:
        air = Path(folder) / "text.ll"
        command = [*COMPILER, *FLAGS, f"-std={standard}", "-isystem", include, "-o", str(air), str(file)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            return (run.stdout + run.stderr).strip() or f"the compiler ended with {run.returncode}"
        if "warning:" in run.stderr:
            return run.stderr.strip()
        left = allocas(air.read_text())
    return "\n".join(["private memory:", *left]) if left else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    files = sorted(folder.glob("*.metal"))
    if not files:
        print(f"compile_metal: no .metal files in {folder}", file=sys.stderr)
        return 2
    include = (folder / INCLUDE).read_text().strip()
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            standards = [standard for standard in STANDARDS if is_known(standard)]
            if not standards:
                print(f"compile_metal: the compiler knows none of {', '.join(STANDARDS)}", file=sys.stderr)
                return 2
            jobs = [(file, standard) for standard in standards for file in files]
            outcomes = list(pool.map(lambda job: compile_text(*job, include), jobs))
        except FileNotFoundError:
            print("compile_metal: no xcrun; it comes with Xcode on macOS", file=sys.stderr)
            return 2
    for (file, standard), wrong in zip(jobs, outcomes, strict=True):
        if wrong is not None:
            failed += 1
            print(f"FAILED {file.name} with {standard}\n{wrong}\n", flush=True)
    print(f"{len(jobs) - failed} of {len(jobs)} compiled: {len(files)} texts, {', '.join(standards)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
