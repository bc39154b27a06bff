"""Runs the doctor's jobs in several processes, each of which compiles kernels of its own.

MLX compiles a CUDA kernel when it is launched first, one at a time, and keeps it for the process alone. So a process
keeps what it compiled until all others have compiled theirs too, and then the processes time their kernels one after
the other, with the machine to themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any, TextIO

from ...config import PagedConfig
from ..progress import Bar
from .jobs import Job, jobs
from .report import Row

MOST_WORKERS = 16
WORKER_BYTES = 1 << 30  # of the GPU's memory, most of them for its context
# Where MLX keeps the kernels that it does compile for all processes. It writes these files in place, so that another
# process can read half of one: every worker has a folder of its own.
FOLDER = "MLX_PTX_CACHE_DIR"
POOL_KERNELS = 3  # that the first job with some kind of pool compiles besides its own


def num_workers(free_bytes: int) -> int:
    """How many processes compile best here, where a GPU has so much free memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MOST_WORKERS, free_bytes // WORKER_BYTES))


def shares_of(listed: Mapping[int, Job], num: int) -> list[list[int]]:
    """Jobs, by their numbers, for up to ``num`` processes, the largest share being as small as it can be: every job
    goes to the first share with room for the kernels it has to compile there."""
    order = sorted(listed, key=lambda index: str(listed[index].pool))  # those with the same pool one after the other
    shares: list[list[int]] = []
    most = 0  # kernels of a share
    while not shares or len(shares) > num:
        most += 1
        shares = []
        for index in order:
            fitting = (share for share in shares if _num_kernels([*share, index], listed) <= most)
            if (share := next(fitting, None)) is None:
                shares.append(share := [])
            share.append(index)
    return [sorted(share) for share in shares]


def _num_kernels(share: Sequence[int], listed: Mapping[int, Job]) -> int:
    return len(share) + POOL_KERNELS * len({listed[index].pool for index in share} - {None})


class Worker:
    """A process with a share of the jobs.

    Args:
        share: their numbers.
        folder: of its own.
        options: of :func:`jobs`, and of :meth:`ShapeJob.run`.
    """

    def __init__(self, share: Sequence[int], folder: str, options: tuple[int, bool, PagedConfig]) -> None:
        self.share = share
        self.num_checked = 0
        self._ended = False
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, list(share), folder, *options), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_checking(self) -> bool:
        return not self._ended and self.num_checked < len(self.share)

    def receive(self) -> Any:
        """What it says next; None if it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._ended = True
            return None

    def receive_checked(self) -> None:
        """Take note of a job that was checked."""
        self.num_checked += self.receive() is not None

    def rows(self) -> dict[int, list[Row]]:
        """Have it time its kernels; the rows of those jobs that it came to."""
        try:
            self.connection.send("time")
        except OSError:
            self._ended = True
        rows: dict[int, list[Row]] = {}
        while not self._ended and len(rows) < len(self.share):
            if (told := self.receive()) is not None:
                rows[told[0]] = told[1]
        return rows

    def how_it_ended(self) -> str:
        self._process.join(timeout=5)
        return f"the process that ran it ended with {self._process.exitcode}"

    def close(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()


def rows_of_workers(
    part: Sequence[int], block_size: int, config: PagedConfig, everything: bool, num: int, stream: TextIO
) -> Iterator[Row]:
    """The rows of some of the jobs in their order, with a bar on ``stream`` until they come. Jobs whose process died
    have failed."""
    listed = jobs(block_size, everything=everything)
    with ExitStack() as stack:
        workers: list[Worker] = []
        for share in shares_of({index: listed[index] for index in part}, num):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx_paged_kernels_"))
            workers.append(Worker(share, folder, (block_size, everything, config)))
            stack.callback(workers[-1].close)
        with Bar(stream, "compiling", len(part)) as bar:
            while running := {worker.connection: worker for worker in workers if worker.is_checking}:
                for connection in wait(list(running), timeout=bar.SECONDS):
                    running[connection].receive_checked()  # type: ignore[index]
                bar.show(sum(worker.num_checked for worker in workers))
        rows: dict[int, list[Row]] = {}
        for worker in workers:
            rows |= worker.rows()
            for index in set(worker.share) - set(rows):
                failed = f"FAILED: {worker.how_it_ended()}"
                rows[index] = [Row(False, str(listed[index]), "-", "-", float("nan"), None, None, failed)]
    for index in part:
        yield from rows[index]


def _work(
    connection: Connection, share: Sequence[int], folder: str, block_size: int, everything: bool, config: PagedConfig
) -> None:
    """A worker: says the number of each job that it has checked; told to, it times all and says their rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began this ends it
    warnings.simplefilter("ignore")  # a row says what failed
    os.environ[FOLDER] = folder
    listed = jobs(block_size, everything=everything)
    checked = {}
    for index in share:
        checked[index] = list(listed[index].run(config))
        connection.send(index)
    connection.recv()
    for index in share:
        connection.send((index, [kernel.timed() for kernel in checked[index]]))
