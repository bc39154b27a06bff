"""That kernels are being compiled is said once, and only on a terminal."""

import io
import sys
import threading

import pytest

from mlx_paged.kernels import build
from mlx_paged.kernels.build import warn_when_compiling


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self.told = threading.Event()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if text.endswith("\n"):
            self.told.set()
        return written


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_has_said_so", threading.Event())


def test_slow_compilation_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(build, "SLOW_SECONDS", 0.001)
    with warn_when_compiling():
        assert terminal.told.wait(60)
    before = threading.active_count()
    with warn_when_compiling():
        assert threading.active_count() <= before, "no second timer is started"
    assert terminal.getvalue() == "mlx_paged: compiling kernels\n"


@pytest.mark.parametrize(
    ("stderr", "seconds", "timers"), [(Terminal(), 3600.0, 1), (Terminal(is_terminal=False), 0.0, 0), (None, 0.0, 0)]
)
def test_fast_operations_and_those_without_a_terminal_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, stderr: Terminal | None, seconds: float, timers: int
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(build, "SLOW_SECONDS", seconds)
    before = threading.active_count()
    with warn_when_compiling():
        assert threading.active_count() <= before + timers
    assert stderr is None or not stderr.getvalue()
    assert not any(isinstance(each, threading.Timer) and not each.finished.is_set() for each in threading.enumerate())
