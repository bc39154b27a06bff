"""A line of the doctor: one kernel for one shape."""

from __future__ import annotations

from typing import Any, NamedTuple


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
        """With numbers that JSON has: NaN is None, times are in microseconds."""
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
