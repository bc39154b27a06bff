"""A rank that dies, stops, hangs or decides otherwise: all processes end within the timeout, and say why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_paged.engine.ranks.peers import EXIT_STATUS
from tests.support.ranks import launch

TIMEOUT = "3"
# A test fails after so many seconds, which a busy machine may need; what it waits for takes the timeout or less.
MOST_SECONDS = 90.0


def _started(folder: Path, name: str, size: int = 2) -> launch.Launch:
    """Ranks that compute, :mod:`tests.support.ranks.faults`."""
    return launch.worker(size, folder, f"fault:{name}", MLX_PAGED_RANK_TIMEOUT=TIMEOUT)


def _running(started: launch.Launch) -> None:
    until = time.monotonic() + MOST_SECONDS
    while not all((started.folder / f"{rank}.running").exists() for rank in range(len(started.processes))):
        assert time.monotonic() < until
        time.sleep(0.05)


def _signalled(sig: int) -> Callable[[launch.Launch], None]:
    def send(started: launch.Launch) -> None:
        _running(started)
        started.processes[1].send_signal(sig)

    return send


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    started = _started(tmp_path, "none")
    _signalled(signal.SIGKILL)(started)
    first, second = started.ended(MOST_SECONDS)
    assert second.status == -signal.SIGKILL
    assert first.status == EXIT_STATUS
    assert "rank 1 has died" in first.stderr


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    started = _started(tmp_path, "none")
    try:
        _signalled(signal.SIGSTOP)(started)
        assert started.processes[0].wait(MOST_SECONDS) == EXIT_STATUS
        assert "rank 1 has said nothing for" in (tmp_path / "0.err").read_text()
        started.processes[1].send_signal(signal.SIGCONT)  # it finds that it is alone
        assert started.processes[1].wait(MOST_SECONDS) == EXIT_STATUS
    finally:
        started.kill()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hang", "has been in step"),
        ("raise", "ValueError: injected: the script"),
        ("raise_late", "injected: out of memory"),
    ],
)
def test_what_goes_wrong_on_one_rank(name: str, reason: str, tmp_path: Path) -> None:
    for ended in _started(tmp_path, name).ended(MOST_SECONDS):
        assert ended.status == EXIT_STATUS
        assert reason in ended.stderr


def test_a_rank_that_leaves_as_if_all_were_done(tmp_path: Path) -> None:
    first, second = _started(tmp_path, "leave").ended(MOST_SECONDS)
    assert second.status == 0
    assert first.status != 0
    assert "rank 1 has ended" in first.stderr


def test_a_report_of_both(tmp_path: Path) -> None:
    found = _started(tmp_path, "diverge").ended(MOST_SECONDS)
    for ended in found:
        assert ended.status == EXIT_STATUS
        assert "Rank 1 at message" in ended.stderr
        assert "Rank 0 at message" in ended.stderr
        assert "remove: requests [0]" in ended.stderr  # what only rank 1 has done
