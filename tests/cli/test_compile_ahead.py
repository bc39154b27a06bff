"""Compiling in other processes: what MLX would write goes from folder to folder whole."""

from __future__ import annotations

import io
import os
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from mlx_paged import PagedConfig
from mlx_paged.cli.doctor.compile_ahead import SUFFIXES, VARIABLE, CompilePool, copy_whole, num_processes, use_folder
from mlx_paged.cli.progress import wait_for


def write_kernel(folder: Path, name: str, text: str) -> None:
    """As MLX does: in place, and what says that it is compiled first."""
    for suffix in reversed(SUFFIXES):
        (folder / f"{name}{suffix}").write_text(text)


def compile_kernels(*names: str) -> None:
    """Stands in for a computation whose kernels MLX compiles: only those that its folder does not have."""
    folder = Path(os.environ[VARIABLE])
    for name in names:
        if not (folder / f"{name}.ptx").exists():
            write_kernel(folder, name, f"{name} by {os.getpid()}")
    if "broken" in names:
        raise RuntimeError("does not compile")
    if "deadly" in names:
        os._exit(1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mlx" / "ptx"))
    return use_folder()


def test_kernels_of_other_processes_are_there_when_their_future_is_done(folder: Path) -> None:
    write_kernel(folder, "old", "as it was")
    with CompilePool(2) as pool:
        futures = [pool.submit(compile_kernels, "old", "common", name) for name in ("a", "b", "broken", "c")]
        for future, name in zip(futures, ("a", "b", "broken", "c"), strict=True):
            future.result(timeout=120)
            assert (folder / f"{name}.ptx").read_text().startswith(f"{name} by ")
    assert (folder / "old.ptx").read_text() == "as it was", "nothing is compiled twice"
    names = {"old", "common", "a", "b", "broken", "c"}
    assert {file.name for file in folder.iterdir()} == {f"{name}{suffix}" for name in names for suffix in SUFFIXES}


def test_a_process_that_dies_leaves_nothing_half_written_and_nobody_waiting(folder: Path) -> None:
    with CompilePool(1) as pool:
        futures = [pool.submit(compile_kernels, name) for name in ("a", "deadly", "b")]
        wait_for(futures, io.StringIO())
        wait_for([pool.submit(compile_kernels, "late")], io.StringIO())
    assert {file.stem for file in folder.iterdir()} <= {"a", "b"}


def test_a_kernel_that_is_being_written_is_not_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    write_kernel(source, "whole", "x")
    (source / "begun.txt").write_text("no kernel yet")
    copy_whole(source, target)
    assert sorted(file.name for file in target.iterdir()) == ["whole.cu", "whole.ptx", "whole.txt"]


def test_mlx_is_told_which_folder_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")
    folder = use_folder()
    assert folder.is_dir() and folder.is_relative_to(tmp_path) and os.environ[VARIABLE] == str(folder)


def test_as_many_processes_as_there_is_use_for() -> None:
    assert num_processes(1) == 1 and 1 <= num_processes(1000) <= 12


def test_options_go_to_other_processes() -> None:
    config = PagedConfig(block_size=16, kernel="on")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_bar_is_drawn_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    done: Future[None] = Future()
    done.set_result(None)
    slow: Future[None] = Future()
    threading.Timer(0.5, lambda: slow.set_exception(RuntimeError("died"))).start()
    terminal = Terminal()
    wait_for([done, slow], terminal)
    assert f"compiling [{15 * '#'}{15 * '.'}] 1/2" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
