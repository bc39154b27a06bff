"""Programs of the doctor, each in a process of its own: one that crashes or hangs is a line of the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

TIMEOUT = 300.0


class Outcome(NamedTuple):
    """What a program said.

    Attributes:
        values: the JSON of each line that it wrote.
        error: why it did not end well, or None.
    """

    values: list[Any]
    error: str | None


def run_program(
    module: str, *arguments: str, variables: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> Outcome:
    """Run ``python -m module``, which writes JSON, a value a line.

    Args:
        variables: added to the environment.
        timeout: in seconds; then it is ended.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        run = subprocess.run(
            command, capture_output=True, timeout=timeout, check=False, env={**os.environ, **(variables or {})}
        )
    except subprocess.TimeoutExpired as late:
        return Outcome(_values(late.stdout or b""), f"did not end within {timeout:.0f} s")
    error = None
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip()
        error = f"ended with {run.returncode}: {said[-1000:] or 'it said nothing'}"
    return Outcome(_values(run.stdout), error)


def _values(output: bytes) -> list[Any]:
    values = []
    for line in output.decode(errors="replace").splitlines():
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:  # the rest of what was cut short, or what others print
            continue
    return values
