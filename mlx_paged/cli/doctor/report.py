"""What the doctor finds: its lines, and the file of ``--report``, which can be posted also where it came to no end.

Programs run in a process of their own: one that crashes or hangs is a line of the report.
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
    """What came of one kernel for one shape.

    Attributes:
        passed: neither the kernel nor attention through it failed.
        shape: for people.
        body: of the kernel, or ``-`` where none runs.
        compiled: ``yes``, ``no``, or ``-`` where none runs.
        rms: of the difference from attention in float32, or NaN.
        seconds: of a launch that is compiled, or None.
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
        """Return it with numbers that JSON has: NaN is None, times are in microseconds."""
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
    """Collects what the doctor finds, and writes it whenever something is added: a process that a GPU's driver ends
    leaves what it had, and what it was at.

    Args:
        path: the file; its folder is made. None writes nothing.
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
        """Say what runs now: if the file ends there, that is what ended it."""
        self._data["running"] = what
        self._save()

    def add_row(self, row: Row) -> None:
        """Add a kernel."""
        self._data["kernels"].append(row.as_json())
        self._save()

    def add(self, section: str, value: Any) -> None:
        """Add what a check found, as JSON can hold it."""
        self._data[section] = value
        self._save()

    def finish(self, failed: int) -> None:
        """All has run; so many lines failed."""
        self._data.update(finished=True, running=None, failed=failed)
        self._save()

    def summary(self) -> list[str]:
        """Return what the file says, in a few lines."""
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
            lines.append(f"NOT FINISHED: it was at {data['running'] or 'its beginning'}")
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
    return [f"launch against MLX's dense attention: median {middle:.2f}, most {slowest:.2f} ({shape})"]


def _flat(value: Any) -> list[str]:
    """Return a line for each entry of a section."""
    if isinstance(value, dict):
        return [f"{name}: {', '.join(_flat(entry))}" for name, entry in value.items()]
    if isinstance(value, list):
        return [", ".join(_flat(entry)) for entry in value]
    return [str(value)]


def _without_home(value: Any) -> Any:
    """Write ``~`` for the user's folder, wherever a message names it."""
    if isinstance(value, dict):
        return {name: _without_home(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_home(entry) for entry in value]
    home = os.path.expanduser("~")
    return value.replace(home, "~") if isinstance(value, str) and len(home) > 1 else value
