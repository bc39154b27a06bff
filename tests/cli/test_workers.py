"""The doctor's jobs in several processes: who runs what, and what becomes of the jobs of one that dies."""

import io
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import PagedConfig
from mlx_paged.cli.doctor import jobs as doctor_jobs
from mlx_paged.cli.doctor.jobs import POOL_KERNELS, jobs, num_workers, rows_of_workers, shares_of
from mlx_paged.cli.terminal import Bar

CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Deadly:
    """Options that end the process which asks for one of them first."""

    def __init__(self, config: PagedConfig, flag: Path) -> None:
        self.given = config, flag

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "given":
            raise AttributeError(name)
        config, flag = self.given
        try:
            flag.touch(exist_ok=False)
        except FileExistsError:
            return getattr(config, name)
        os._exit(7)


@CPU_ONLY
def test_rows_come_in_the_order_of_the_jobs() -> None:
    terminal = Terminal()
    rows = list(rows_of_workers(range(1, 6), 32, PagedConfig(), False, 2, terminal))
    assert [row.shape for row in rows] == [str(job) for job in jobs(32, everything=False)[1:6]]
    assert all(row.passed and "gather" in row.use for row in rows)
    assert "compiling [" in terminal.getvalue() and "] 5/5" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


@CPU_ONLY
def test_the_jobs_of_a_process_that_dies_have_failed_and_the_others_go_on(tmp_path: Path) -> None:
    config: Any = Deadly(PagedConfig(), tmp_path / "flag")
    rows = list(rows_of_workers(range(5), 32, config, False, 2, io.StringIO()))
    assert [row.shape for row in rows] == [str(job) for job in jobs(32, everything=False)[:5]]
    failed = [row for row in rows if not row.passed]
    assert 0 < len(failed) < 5
    assert {row.use for row in failed} == {"FAILED: the process that ran it ended with 7"}


def test_processes_compile_about_as_many_kernels_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_jobs, "backend", lambda: "cuda")
    listed = dict(enumerate(jobs(32, everything=False)))
    shares = shares_of(listed, 16)
    assert Counter(index for share in shares for index in share) == Counter(list(listed))
    pools = [{listed[index].pool for index in share} - {None} for share in shares]
    kernels = [len(share) + POOL_KERNELS * len(own) for share, own in zip(shares, pools, strict=True)]
    assert len(kernels) <= 16 and max(kernels) <= 6
    assert shares_of({3: listed[3]}, 16) == [[3]]


def test_no_more_processes_than_cores_or_memory_for_them() -> None:
    assert 1 <= num_workers(80 << 30) <= min(16, os.cpu_count() or 1)
    assert num_workers(100 << 20) == 1


def test_options_go_to_other_processes() -> None:
    config = PagedConfig(block_size=16, kernel="on")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_bar_is_drawn_on_a_terminal_only() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with Bar(stream, "compiling", 2) as bar:
            bar.show(1)
    assert f"compiling [{15 * '#'}{15 * '.'}] 1/2" in terminal.getvalue() and file.getvalue() == ""
