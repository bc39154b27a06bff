"""The doctor's jobs: kernels for shapes of attention and for products of a few rows, checked in several processes."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol, TextIO

import mlx.core as mx

from ...attention import gather
from ...attention.dispatch import Dispatch, attend, last_dispatch
from ...config import PagedConfig
from ...errors import PagedCacheError
from ...kernels.availability import device_unsupported_reason
from ...kernels.build import backend
from ...kernels.check import MAX_RMS, self_check
from ...kernels.launch_shape import BLOCK_SIZES, DTYPES, HEAD_DIMS, MAX_GQA, Variant
from ...kernels.ops import variants_of
from ...kernels.prefill import prefill_variants_of, unsupported_prefill
from ...kv.attention_params import AttentionParams, QueryHeads
from ...kv.choice import blocks_choice
from ...kv.group import LayerGroup
from ...kv.pool import BlockPool
from ..terminal import SHOW_EVERY_SECONDS, Bar
from .report import Row
from .timing import dense_seconds, launch_seconds, prefill_seconds


class Shape(NamedTuple):
    """A shape of attention that kernel variants are made for."""

    dtype: mx.Dtype
    head_dim: int
    gqa: int
    block_size: int
    softcap: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        extras = " softcap" * self.softcap + " sinks" * self.sinks
        name = str(self.dtype).removeprefix("mlx.core.")
        return f"{name:>8} D{self.head_dim:<3} gqa {self.gqa:<2} block {self.block_size:<3}{extras}"


class Attention(NamedTuple):
    """Attention of a model: ``head_dim``, query heads per KV head (``gqa``), and whether it has a softcap or sinks."""

    head_dim: int
    gqa: int
    softcap: bool = False
    sinks: bool = False


POPULAR = {
    Attention(64, 4): "Llama 3.2 1B",
    Attention(64, 7): "Qwen2.5 0.5B",
    Attention(64, 8, sinks=True): "gpt-oss",
    Attention(80, 1): "Phi-2",
    Attention(96, 1): "Phi-3 mini",
    Attention(128, 2): "Qwen3 0.6B, 1.7B; Gemma 3 27B",
    Attention(128, 2, softcap=True): "Gemma 2 27B",
    Attention(128, 3): "Llama 3.2 3B; Phi-4 mini",
    Attention(128, 4): "Llama 3.1 8B; Mistral 7B; Qwen3 4B, 8B; Phi-4",
    Attention(128, 5): "Qwen3 14B; Qwen2.5 14B, 32B",
    Attention(128, 6): "Qwen2.5 1.5B",
    Attention(128, 7): "Qwen2.5 7B",
    Attention(128, 8): "Llama 3.1 70B; Qwen3 32B; Qwen2.5 3B",
    Attention(256, 2): "Gemma 3 4B, 12B",
    Attention(256, 2, softcap=True): "Gemma 2 2B, 9B",
    Attention(256, 4): "Gemma 3 1B",
}
# Models come in bfloat16; other dtypes are checked with the most common shape only.
POPULAR_DTYPE = mx.bfloat16
COMMON = Attention(128, 4)


def popular_shapes(block_size: int) -> Iterator[Shape]:
    """Yield the shapes of popular models."""
    for attention in POPULAR:
        yield Shape(POPULAR_DTYPE, attention.head_dim, attention.gqa, block_size, attention.softcap, attention.sinks)
    for dtype in DTYPES:
        if dtype != POPULAR_DTYPE:
            yield Shape(dtype, COMMON.head_dim, COMMON.gqa, block_size)


def all_shapes(block_size: int) -> Iterator[Shape]:
    """Yield every dtype, head dimension, GQA ratio and block size; softcap and sinks only with the commonest shape."""
    for dtype in DTYPES:
        for extras in ((True, False), (False, True), (True, True)):
            yield Shape(dtype, COMMON.head_dim, COMMON.gqa, block_size, *extras)
        for head_dim in HEAD_DIMS:
            for gqa in range(1, MAX_GQA + 1):
                for size in BLOCK_SIZES:
                    yield Shape(dtype, head_dim, gqa, size)


def models_of(shape: Shape) -> str:
    """Return the popular models with this shape, or an empty string."""
    return POPULAR.get(Attention(shape.head_dim, shape.gqa, shape.softcap, shape.sinks), "")


_KV_HEADS = 2


class Checked(NamedTuple):
    """A kernel that was compiled and checked in this process.

    Attributes:
        row: its result, without times.
        launch, dense: return the seconds of a launch, and of MLX's own attention; None if there is nothing to time.
    """

    row: Row
    launch: Callable[[], float] | None = None
    dense: Callable[[], float | None] | None = None

    def timed(self) -> Row:
        """Return the row with its times. Nothing else should run on the machine meanwhile."""
        return self.row._replace(seconds=self.launch and self.launch(), dense=self.dense and self.dense())


class ShapeJob(NamedTuple):
    """A job that checks the kernels for one shape, and the path that attention takes.

    Attributes:
        shape: the shape of queries and blocks.
        every_body: also check the kernels that attention takes only if a better one fails.
    """

    shape: Shape
    every_body: bool

    def __str__(self) -> str:
        return str(self.shape)

    @property
    def pool(self) -> tuple[Any, ...]:
        """Key that is equal for jobs whose pools need the same kernels."""
        return str(self.shape.dtype), self.shape.head_dim, self.shape.block_size

    def variants(self) -> tuple[Variant, ...]:
        """Return the decode kernels for the shape, the one that attention prefers first."""
        shape = self.shape
        return variants_of(
            shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size,
            shape.softcap, shape.sinks,
        )  # fmt: skip

    def prefill_variants(self) -> tuple[Variant, ...]:
        """Return the prefill kernels for the shape; none where there is no kernel for it."""
        shape = self.shape
        if unsupported_prefill(shape.dtype, shape.head_dim, shape.head_dim, shape.gqa, shape.block_size):
            return ()
        return prefill_variants_of(
            shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size,
            shape.softcap, shape.sinks,
        )  # fmt: skip

    def run(self, config: PagedConfig) -> Iterator[Checked]:
        """Check the path and the kernels; yield one result per kernel, or a single one where no kernel can run."""
        shape = self.shape
        passed, error, use = True, float("nan"), ""
        try:
            choice, error = dispatch_of(shape, config)
            use = f"{choice.path}: {choice.reason}"
            passed = error < MAX_RMS
            if not passed:
                use += " FAILED: attention over the pool differs from dense attention"
        except (PagedCacheError, RuntimeError, ValueError) as failure:
            passed, use = False, f"FAILED: {type(failure).__name__}: {str(failure)[:500]}"
        if models_of(shape):
            use += f" [{models_of(shape)}]"
        if device_unsupported_reason() is not None:
            yield Checked(Row(passed, str(shape), "-", "-", error, None, None, use))
            return
        for variant in self.prefill_variants():
            result, seconds = self_check(variant), partial(prefill_seconds, variant)
            yield checked(True, str(shape), variant.body, result, "packed prefill", seconds)
        for variant in self.variants():
            result = self_check(variant)
            times = partial(launch_seconds, variant), partial(dense_seconds, variant)
            yield checked(passed, str(shape), variant.body, result, use, *times)
            if result.ok and not self.every_body:
                return


class Checking(Protocol):
    """What a kernel's self-check reports."""

    @property
    def ok(self) -> bool:
        """Whether it passed."""

    @property
    def rms(self) -> float:
        """The difference from the reference."""

    @property
    def reason(self) -> str:
        """Why it failed."""


class Job(Protocol):
    """A job of the doctor: a :class:`ShapeJob`, or a product of a few rows on CUDA (product_jobs.py)."""

    @property
    def pool(self) -> tuple[Any, ...] | None:
        """Key of the pools whose kernels the job compiles besides its own; None: it uses none."""

    def run(self, config: PagedConfig) -> Iterator[Checked]:
        """Check the kernels and yield their results."""


def jobs(block_size: int, *, everything: bool) -> list[Job]:
    """Return the jobs: shapes of popular models, or all shapes if ``everything`` is set, and on CUDA products."""
    # Shapes of popular models always come first; a shape in both lists runs once.
    shapes = dict.fromkeys([*popular_shapes(block_size), *(all_shapes(block_size) if everything else ())])
    listed: list[Job] = [ShapeJob(shape, everything) for shape in shapes]
    if backend() == "cuda":
        products = importlib.import_module(".product_jobs", __package__)
        listed += products.product_jobs(DTYPES if everything else (POPULAR_DTYPE,))
    return listed


def dispatch_of(shape: Shape, config: PagedConfig) -> tuple[Dispatch, float]:
    """Run a decode step over a small pool; return its path and its RMS difference from dense attention in float32."""
    lengths = (shape.block_size + 3, 1)
    choose = blocks_choice(config.kernel)
    pool = BlockPool([LayerGroup((0,))], block_size=shape.block_size, choose_blocks=choose)
    heads = QueryHeads(_KV_HEADS * shape.gqa, shape.softcap, shape.sinks)
    mx.random.seed(0)
    sinks = mx.random.normal((heads.num_q_heads,)).astype(shape.dtype) if shape.sinks else None
    params = AttentionParams(shape.head_dim**-0.5, softcap=10.0 if shape.softcap else None, sinks=sinks)
    q = mx.random.normal((len(lengths), heads.num_q_heads, 1, shape.head_dim)).astype(shape.dtype)
    tables, expected = [], []
    for row, length in enumerate(lengths):
        k, v = (mx.random.normal((1, _KV_HEADS, length, shape.head_dim)).astype(shape.dtype) for _ in range(2))
        pool.set_geometry(0, k, v, batch=1, heads=heads)
        tables.append(pool.new_table())
        pool.append_tokens(tables[-1], length)
        pool.write_prefill(tables[-1], 0, k, v)
        one, k, v = (x.astype(mx.float32) for x in (q[row : row + 1], k, v))
        expected.append(gather.attention(one, k, v, params))
    got = attend(q, None, pool.groups[0], 0, pool.tokens_of(0, tables, 1), params, is_written=True)
    choice = last_dispatch()
    assert choice is not None
    error: Any = mx.sqrt(mx.square(got.astype(mx.float32) - mx.concatenate(expected)).mean()).item()
    return choice, error


def checked(
    passed: bool,
    shape: str,
    body: str,
    result: Checking,
    use: str,
    launch: Callable[[], float],
    dense: Callable[[], float | None] | None = None,
) -> Checked:
    """Return the result of a self-check; a kernel that failed it has nothing to time."""
    compiled = "no" if math.isnan(result.rms) and not result.ok else "yes"
    if not result.ok:
        return Checked(Row(False, shape, body, compiled, result.rms, None, None, f"{use} FAILED: {result.reason}"))
    return Checked(Row(passed, shape, body, compiled, result.rms, None, None, use), launch, dense)


MOST_WORKERS = 16
WORKER_BYTES = 1 << 30  # GPU memory of a worker, most of it for the CUDA context
# Variable for the folder where MLX keeps the kernels that it compiles. It writes these files in place, so that another
# process can read a half-written one: every worker has a folder of its own.
FOLDER = "MLX_PTX_CACHE_DIR"
POOL_KERNELS = 3  # that a worker's first job with a kind of pool compiles besides its own


def num_workers(free_bytes: int) -> int:
    """Return how many worker processes to use: at most 16, one per core, and one per GiB of free GPU memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MOST_WORKERS, free_bytes // WORKER_BYTES))


def shares_of(listed: Mapping[int, Job], num: int) -> list[list[int]]:
    """Divide jobs among up to ``num`` processes: first fit, with the least limit of kernels per share that is enough.

    Returns:
        The numbers of each share's jobs.
    """
    order = sorted(listed, key=lambda index: str(listed[index].pool))  # jobs with the same pool are adjacent
    shares: list[list[int]] = []
    most = 0  # kernels per share
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
    """A process that checks a share of the jobs at once, and times them when asked.

    Args:
        share: the numbers of its jobs.
        folder: the worker's own folder for compiled kernels.
        options: block size and ``everything`` for :func:`jobs`, and the configuration for :meth:`ShapeJob.run`.
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
        """Whether jobs are left to check."""
        return not self._ended and self.num_checked < len(self.share)

    def receive(self) -> Any:
        """Return the process's next message; None if it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._ended = True
            return None

    def receive_checked(self) -> None:
        """Wait until another job is checked, or the process has ended."""
        self.num_checked += self.receive() is not None

    def rows(self) -> dict[int, list[Row]]:
        """Time the kernels and return the rows by job; jobs that the process did not finish are missing."""
        try:
            self.connection.send("time")
        except OSError:
            self._ended = True
        rows: dict[int, list[Row]] = {}
        while not self._ended and len(rows) < len(self.share):
            if (timed := self.receive()) is not None:
                rows[timed[0]] = timed[1]
        return rows

    def how_it_ended(self) -> str:
        """Return how the process ended, in words."""
        self._process.join(timeout=5)
        return f"its process exited with status {self._process.exitcode}"

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self._process.terminate()
        self._process.join()


def rows_of_workers(
    part: Sequence[int], block_size: int, config: PagedConfig, everything: bool, num: int, stream: TextIO
) -> Iterator[Row]:
    """Run some of the jobs in up to ``num`` processes and yield their rows in order, with a progress bar on ``stream``.
    Jobs whose process died count as failed."""
    listed = jobs(block_size, everything=everything)
    with ExitStack() as stack:
        workers: list[Worker] = []
        for share in shares_of({index: listed[index] for index in part}, num):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx_paged_kernels_"))
            workers.append(Worker(share, folder, (block_size, everything, config)))
            stack.callback(workers[-1].close)
        with Bar(stream, "compiling ") as bar:
            while running := {worker.connection: worker for worker in workers if worker.is_checking}:
                for connection in wait(list(running), timeout=SHOW_EVERY_SECONDS):
                    running[connection].receive_checked()  # type: ignore[index]
                num_checked = sum(worker.num_checked for worker in workers)
                bar.draw(num_checked / len(part), f"{num_checked}/{len(part)}, {bar.seconds:.0f} s")
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
    """Run a worker process: check each job and send its number; when asked, time all jobs and send their rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
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
