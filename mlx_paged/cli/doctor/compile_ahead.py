"""Compiles CUDA kernels in several processes at a time, into the folder where MLX keeps them compiled.

MLX compiles a kernel when it is evaluated first, and no two at a time in one process. Its folder serves all processes,
but it writes the files in place, so that another process can read half of one. Here every process has a folder of its
own, and hands a kernel over by renaming once it is whole: what is in MLX's folder can be read at any time, also when a
process was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

VARIABLE = "MLX_PTX_CACHE_DIR"
MOST_PROCESSES = 12  # each takes some 0.5 GB of the GPU's memory for its context
# In this order: MLX takes a kernel for compiled once it finds the last.
SUFFIXES = (".txt", ".cu", ".ptx")


def num_processes(num_tasks: int) -> int:
    """How many processes compile so many kernels best."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_tasks, cores, MOST_PROCESSES)


def use_folder() -> Path:
    """MLX's folder for compiled kernels; must be called before this process has used a kernel."""
    given = os.environ.get(VARIABLE)
    folder = Path(given) if given else Path(tempfile.gettempdir()) / "mlx" / mx.__version__ / "ptx"  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(folder)
    return folder


class CompilePool:
    """Processes that are called for the kernels they compile. To be used in a ``with`` block, which ends them.

    Args:
        processes: how many.
    """

    def __init__(self, processes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mlx_paged_kernels_")
        self._pool = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(str(use_folder()), self._folder.name),
        )

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[None]:
        """Call a function of a module in one of the processes; what it returns or raises is lost.

        Returns:
            Done when the kernels it needs are in MLX's folder, or cannot be had: a process that dies ends the pool,
            and whoever needs a kernel then compiles it himself.
        """
        try:
            return self._pool.submit(_run, function, args)
        except BrokenExecutor as error:
            gone: Future[None] = Future()
            gone.set_exception(error)
            return gone

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._folder.cleanup()


_shared = Path()
_own = Path()


def _begin(shared: str, parent: str) -> None:
    global _shared, _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began this ends it
    warnings.simplefilter("ignore")  # they are given where the kernels are used
    _shared, _own = Path(shared), Path(tempfile.mkdtemp(dir=parent))
    os.environ[VARIABLE] = str(_own)


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    copy_whole(_shared, _own)
    with suppress(Exception):  # the caller does it again, and sees it
        function(*args)
    copy_whole(_own, _shared)


def copy_whole(source: Path, target: Path) -> None:
    """Copy the compiled kernels of one folder that another does not have; each is there whole or not at all."""
    for compiled in source.glob(f"*{SUFFIXES[-1]}"):
        if (target / compiled.name).exists():
            continue
        for suffix in SUFFIXES:
            file = compiled.with_name(compiled.name.removesuffix(SUFFIXES[-1]) + suffix)
            if file.exists():
                new = target / f"{file.name}.{os.getpid()}.new"
                shutil.copyfile(file, new)
                new.replace(target / file.name)
