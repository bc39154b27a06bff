"""The doctor's findings: the lines it prints, and the file of ``--report``, usable even if the doctor crashes.

Programs run in processes of their own: one that crashes or hangs is only a line of the report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError

TIMEOUT = 300.0


class Outcome(NamedTuple):
    """Output of a program.

    Attributes:
        values: the JSON values of the lines it printed; other lines are left out.
        error: why it failed, or None.
    """

    values: list[Any]
    error: str | None


def run_program(
    module: str, *arguments: str, variables: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> Outcome:
    """Run ``python -m module``, which prints one JSON value per line.

    Args:
        variables: added to the environment.
        timeout: in seconds; then the program is killed.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        run = subprocess.run(
            command, capture_output=True, timeout=timeout, check=False, env={**os.environ, **(variables or {})}
        )
    except subprocess.TimeoutExpired as late:
        return Outcome(_values(late.stdout or b""), f"timed out after {timeout:.0f} s")
    error = None
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip()
        error = f"exited with status {run.returncode}: {said[-1000:] or 'no output on stderr'}"
    return Outcome(_values(run.stdout), error)


def _values(output: bytes) -> list[Any]:
    values = []
    for line in output.decode(errors="replace").splitlines():
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError:  # a truncated line, or output that is not the program's own
            continue
    return values


# Variables that are reported. Not all of the environment: it holds keys and names.
VARIABLES = (
    "MLX_MAX_MB_PER_BUFFER",
    "MLX_MAX_OPS_PER_BUFFER",
    "MLX_METAL_FAST_SYNCH",
    "MLX_PAGED_BLOCK_SIZE",
    "MLX_PAGED_KERNEL",
    "MLX_PAGED_KV_BITS",
    "MLX_PAGED_KV_CACHE_MEMORY",
    "MLX_PAGED_KV_GROUP_SIZE",
    "MLX_PAGED_SHARED_MEMORY",
    "MTL_SHADER_VALIDATION",
)


class Row(NamedTuple):
    """Result of one kernel for one shape: a line of the doctor's output.

    Attributes:
        passed: neither the kernel nor attention through it failed.
        shape: the shape, as text.
        body: name of the kernel's body, or ``-`` where none runs.
        compiled: ``yes``, ``no``, or ``-`` where none runs.
        rms: RMS difference from attention in float32, or NaN.
        seconds: time of a launch, without compiling, or None.
        dense: seconds of MLX's own attention for the same shape, or None.
        use: the path that attention takes and why, models with the shape, and what failed.
    """

    passed: bool
    shape: str
    body: str
    compiled: str
    rms: float
    seconds: float | None
    dense: float | None
    use: str

    def __str__(self) -> str:
        return _line(
            self.shape,
            self.body,
            self.compiled,
            f"{self.rms:.1e}",
            _microseconds(self.seconds),
            _microseconds(self.dense),
            self.use,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the row as a JSON object: NaN becomes None, times are in microseconds."""
        return {
            "passed": self.passed,
            "shape": " ".join(self.shape.split()),
            "body": self.body,
            "compiled": self.compiled,
            "rms": self.rms if self.rms < float("inf") else None,
            "launch_us": None if self.seconds is None else round(1e6 * self.seconds, 1),
            "dense_us": None if self.dense is None else round(1e6 * self.dense, 1),
            "use": self.use,
        }


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.0f} us"


def _line(shape: str, body: str, compiled: str, rms: str, launch: str, dense: str, dispatch: str) -> str:
    return f"{shape:<46}{body:<22}{compiled:<10}{rms:<10}{launch:<9}{dense:<9}{dispatch}"


HEADER = _line("shape", "body", "compiled", "RMS", "launch", "dense", "dispatch")


class Report:
    """The findings, written to the file whenever one is added: if a GPU's driver ends the process, the file still has
    all findings so far, and what was running.

    Args:
        path: the file, whose folder is created; None: nothing is written.
        facts: versions and the device.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None, facts: dict[str, str]) -> None:
        self._path = path
        self._data: dict[str, Any] = {
            "summary": [],
            "finished": False,
            "running": None,
            "facts": facts,
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "kernels": [],
        }
        self._save()

    @property
    def wanted(self) -> bool:
        """Return whether there is a file to write."""
        return self._path is not None

    def begin(self, what: str) -> None:
        """Note what runs now: if the process is killed, the file says what was running."""
        self._data["running"] = what
        self._save()

    def add_row(self, row: Row) -> None:
        """Add the result of a kernel."""
        self._data["kernels"].append(row.as_json())
        self._save()

    def add(self, section: str, value: Any) -> None:
        """Add a section with what a check found, made of JSON values."""
        self._data[section] = value
        self._save()

    def finish(self, failed: int) -> None:
        """Mark the report as finished, with the number of failures."""
        self._data.update(finished=True, running=None, failed=failed)
        self._save()

    def summary(self) -> list[str]:
        """Return a summary of the report, in a few lines."""
        data = self._data
        lines = [f"{name}: {value}" for name, value in data["facts"].items()]
        rows = data["kernels"]
        bad = [row for row in rows if not row["passed"]]
        lines.append(f"kernels and paths: {len(rows) - len(bad)} of {len(rows)} passed")
        lines += [f"  failed: {row['shape']}: {row['use']}" for row in bad]
        lines += _times(rows)
        for section in ("threads", "ordering", "speed"):
            if section in data:
                lines += [f"{section}: {line}" for line in _flat(data[section])]
        if not data["finished"]:
            lines.append(f"NOT FINISHED: stopped at {data['running'] or 'the start'}")
        return lines

    def _save(self) -> None:
        if self._path is None:
            return
        self._data["summary"] = self.summary()
        text = json.dumps(_without_home(self._data), indent=1, allow_nan=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text(text)
            new.replace(self._path)
        except OSError as error:
            raise ConfigError(f"cannot write the report {self._path}: {error.strerror or error}") from None


def _times(rows: Sequence[dict[str, Any]]) -> list[str]:
    timed = [row for row in rows if row["launch_us"] and row["dense_us"]]
    if not timed:
        return []
    ratios = sorted((row["launch_us"] / row["dense_us"], row["shape"]) for row in timed)
    middle = ratios[len(ratios) // 2][0]
    slowest, shape = ratios[-1]
    return [f"launch time relative to MLX's dense attention: median {middle:.2f}, maximum {slowest:.2f} ({shape})"]


def _flat(value: Any) -> list[str]:
    """Return a line for each entry of a section."""
    if isinstance(value, dict):
        return [f"{name}: {', '.join(_flat(entry))}" for name, entry in value.items()]
    if isinstance(value, list):
        return [", ".join(_flat(entry)) for entry in value]
    return [str(value)]


def _without_home(value: Any) -> Any:
    """Replace the home folder by ``~`` in all texts of a JSON value."""
    if isinstance(value, dict):
        return {name: _without_home(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_home(entry) for entry in value]
    home = os.path.expanduser("~")
    return value.replace(home, "~") if isinstance(value, str) and len(home) > 1 else value
