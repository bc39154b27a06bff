"""``python -m mlx_paged doctor``: does the fused kernel work on this machine? Runs its variants for the shapes of
popular models and says which path attention takes; "launch" is the time of a launch that is compiled, "dense" that of
MLX's own attention for the same shape."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ... import __version__
from ...attention import gather
from ...attention.dispatch import Dispatch, last_dispatch, paged_attention
from ...config import PagedConfig
from ...errors import PagedCacheError
from ...kernels import narrow_matmul
from ...kernels.availability import device_decline
from ...kernels.build import backend, build_kernel, gpu_cores
from ...kernels.check import MAX_RMS, SelfCheck, self_check
from ...kernels.decode_spec import pool_texts, texts_of
from ...kernels.launch_shape import Variant
from ...kernels.ops import variants_of
from ...kernels.timing import TOKENS, dense_seconds, launch_seconds
from ...kernels.trial import Text, failure_of
from ...kv.group import LayerGroup
from ...kv.pool import BlockPool
from ...kv.storage.base import QueryHeads
from ...kv.storage.choice import storage_choice
from ..progress import wait_for
from ..terminal import orderly_end
from .compile_ahead import CompilePool, num_processes
from .report import Report
from .row import HEADER, Row
from .shapes import POPULAR_DTYPE, Shape, all_shapes, models_of, popular_shapes

_KV_HEADS = 2
AT_A_TIME = 64  # jobs whose kernels are compiled before their lines appear
TABLE_BLOCKS = 16  # of a block table of dispatch_of (kv/step.py)


def dispatch_of(shape: Shape, config: PagedConfig) -> tuple[Dispatch, float]:
    """Path of a real decode step over a small pool, and the RMS of its result against dense attention in float32."""
    lengths = (shape.block_size + 3, 1)
    choose = storage_choice(config.kernel)
    pool = BlockPool([LayerGroup((0,))], block_size=shape.block_size, choose_storage=choose)
    heads = QueryHeads(_KV_HEADS * shape.gqa, shape.softcap, shape.sinks)
    mx.random.seed(0)
    sinks = mx.random.normal((heads.num_q_heads,)).astype(shape.dtype) if shape.sinks else None
    options: dict[str, Any] = {
        "scale": shape.head_dim**-0.5,
        "softcap": 10.0 if shape.softcap else None,
        "sinks": sinks,
    }
    q = mx.random.normal((len(lengths), heads.num_q_heads, 1, shape.head_dim)).astype(shape.dtype)
    tables, expected = [], []
    for row, length in enumerate(lengths):
        k, v = (mx.random.normal((1, _KV_HEADS, length, shape.head_dim)).astype(shape.dtype) for _ in range(2))
        pool.set_geometry(0, k, v, batch=1, heads=heads)
        tables.append(pool.new_table())
        pool.append_tokens(tables[-1], length)
        pool.write_prefill(tables[-1], 0, k, v)
        dense = [x.astype(mx.float32) for x in (q[row : row + 1], k, v)]
        expected.append(gather.attention(*dense, mask=None, **options))
    got = paged_attention(q, pool, 0, tables, **options)
    choice = last_dispatch()
    assert choice is not None
    error: Any = mx.sqrt(mx.square(got.astype(mx.float32) - mx.concatenate(expected)).mean()).item()
    return choice, error


def facts() -> dict[str, str]:
    """Versions and the device."""
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    info = mx.device_info() if on_gpu else {}
    names = {"mlx": "mlx", "mlx-lm": "mlx-lm"}
    versions = {}
    for label, package in names.items():
        try:
            versions[label] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[label] = "not installed"
    return {
        "mlx_paged": __version__,
        **versions,
        "python": platform.python_version(),
        "system": _system(),
        "device": f"{mx.default_device()} {info.get('device_name', '')}".strip(),
        "architecture": str(info.get("architecture", "") or "not told"),
        "GPU cores": str(gpu_cores() or "not known"),
        "memory": _memory(info),
        "kernel dialect": backend() or "none",
        "kernel": device_decline() or "can run here",
    }


def _system() -> str:
    release = f"macOS {mac}" if (mac := platform.mac_ver()[0]) else f"{platform.system()} {platform.release()}"
    return f"{release} {platform.machine()}"


def _memory(info: Mapping[str, Any]) -> str:
    """Of the machine, and what Metal recommends a process to use, in GiB."""
    total = info.get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / 2**30:.0f} GiB"
    if "max_recommended_working_set_size" in info:
        text += f", {info['max_recommended_working_set_size'] / 2**30:.0f} GiB for the GPU"
    return text


class ShapeJob(NamedTuple):
    """The decode kernels for one shape, and the path that attention takes.

    Attributes:
        shape: of the queries and blocks.
        every_body: also run the kernels that attention takes only if a better one fails.
    """

    shape: Shape
    every_body: bool

    def __str__(self) -> str:
        return str(self.shape)

    def variants(self) -> tuple[Variant, ...]:
        """The kernels for the shape, the one that attention takes first."""
        shape = self.shape
        return variants_of(
            shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size,
            shape.softcap, shape.sinks,
        )  # fmt: skip

    def texts(self) -> Iterator[Text]:
        """What :meth:`rows` launches if everything passes."""
        variants = self.variants()
        for variant in variants[:1]:
            yield from texts_of(variant, TABLE_BLOCKS * self.shape.block_size)  # of dispatch_of
        for variant in variants if self.every_body else variants[:1]:
            yield from texts_of(variant, TOKENS)  # of the check and the timing
            yield from pool_texts(variant)

    def rows(self, config: PagedConfig) -> Iterator[Row]:
        """Run it. Yields a row for each kernel."""
        shape = self.shape
        passed, error, use = True, float("nan"), ""
        try:
            choice, error = dispatch_of(shape, config)
            use = f"{choice.path}: {choice.reason}"
            passed = error < MAX_RMS
            if not passed:
                use += " FAILED: attention through the pool differs"
        except (PagedCacheError, RuntimeError, ValueError) as failure:
            passed, use = False, f"FAILED: {type(failure).__name__}: {str(failure)[:500]}"
        if models_of(shape):
            use += f" [{models_of(shape)}]"
        if device_decline() is not None:
            yield Row(passed, str(shape), "-", "-", error, None, None, use)
            return
        for variant in self.variants():
            result = self_check(variant)
            times = partial(launch_seconds, variant), partial(dense_seconds, variant)
            yield _checked_row(passed, str(shape), variant.body, result, use, *times)
            if result.ok and not self.every_body:
                return


class ProductJob(NamedTuple):
    """A kernel that multiplies a few rows, on CUDA."""

    body: str
    dtype: mx.Dtype
    tile: narrow_matmul.Tile

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("mlx.core.")
        return f"{name:>8} products of up to {self.tile.rows} rows"

    def texts(self) -> Iterator[Text]:
        """As :meth:`ShapeJob.texts`."""
        yield narrow_matmul.text_of(self.body, self.dtype, self.tile, narrow_matmul.CHECKED_DIMS)

    def rows(self, config: PagedConfig) -> Iterator[Row]:
        """As :meth:`ShapeJob.rows`."""
        result = narrow_matmul.self_check(self.body, self.dtype, self.tile)
        launch = partial(narrow_matmul.launch_seconds, *self)
        yield _checked_row(True, str(self), self.body, result, "compiled decode steps", launch)


def jobs(block_size: int, *, everything: bool) -> list[ShapeJob | ProductJob]:
    """What to run: the shapes of popular models, or all shapes; and products, where there are kernels for them."""
    # Those of popular models come first in any case; a shape that is in both is run once.
    shapes = dict.fromkeys([*popular_shapes(block_size), *(all_shapes(block_size) if everything else ())])
    dtypes = () if backend() != "cuda" else narrow_matmul.DTYPES if everything else (POPULAR_DTYPE,)
    products = [
        ProductJob(body, dtype, tile)
        for dtype in dtypes
        for tile in narrow_matmul.TILES
        for body in narrow_matmul.BODIES
    ]
    return [*(ShapeJob(shape, everything) for shape in shapes), *products]


def run_job(block_size: int, everything: bool, index: int, config: PagedConfig) -> None:
    """Run one of the jobs, in a process that compiles kernels for another."""
    for _ in jobs(block_size, everything=everything)[index].rows(config):
        pass


# Bodies that take long to compile, the longest first.
_LONG = ("paged_decode_tensor", "paged_decode", *narrow_matmul.BODIES)


@lru_cache(maxsize=4)
def texts_to_compile(block_size: int, everything: bool, first: int) -> tuple[Text, ...]:
    """The texts of the jobs from ``first`` on that are run together, each once and those that take longest first.
    Without those of the first job of all, which a process runs as it is."""
    listed = jobs(block_size, everything=everything)
    known = set(listed[0].texts())
    texts = dict.fromkeys(text for job in listed[first : first + AT_A_TIME] for text in job.texts())
    return tuple(sorted((text for text in texts if text not in known), key=_duration))


def _duration(text: Text) -> tuple[int, int]:
    """To sort by: less for what takes longer to compile."""
    known = dict(text.constants)
    rank = _LONG.index(text.body) if text.body in _LONG else len(_LONG)
    return rank, -known.get("G", 1) * (known.get("D", 0) + known.get("DV", 0))


def compile_text(block_size: int, everything: bool, first: int, index: int) -> None:
    """Compile one of :func:`texts_to_compile`, in a process that does so for another. By its place in them, for MLX's
    dtypes cannot be sent."""
    failure_of(texts_to_compile(block_size, everything, first)[index], build_kernel)


def compile_part(pool: CompilePool, block_size: int, everything: bool, first: int, config: PagedConfig) -> None:
    """Have all that the jobs from ``first`` on need compiled: each text of our kernels by itself, and what MLX compiles
    for the references by one process, which runs the first job."""
    futures = [] if first else [pool.submit(run_job, block_size, everything, 0, config)]
    for index in range(len(texts_to_compile(block_size, everything, first))):
        futures.append(pool.submit(compile_text, block_size, everything, first, index))
    wait_for(futures, sys.stderr)


def run(block_size: int, config: PagedConfig, *, everything: bool, report_file: Path | None = None) -> int:
    """Print the facts and one line per variant; returns the number of lines that failed.

    Args:
        report_file: where all of it is written, and what more is checked then.

    Raises:
        ConfigError: the report cannot be written.
    """
    begin = time.perf_counter()
    told = facts()
    report = Report(report_file, told)
    for name, value in told.items():
        print(f"{name:<16}{value}")
    listed = jobs(block_size, everything=everything)
    processes = num_processes(len(listed)) if device_decline() is None and backend() == "cuda" else 1
    failed, compiled = 0, 0.0
    with CompilePool(processes) if processes > 1 else nullcontext() as pool:
        if pool is not None:
            print(f"{'compiling':<16}in {processes} processes")
        print("", HEADER, "-" * len(HEADER), sep="\n", flush=True)
        for first in range(0, len(listed), AT_A_TIME):
            part = range(first, min(first + AT_A_TIME, len(listed)))
            if pool is not None:  # all of them, for what is timed should be alone
                since = time.perf_counter()
                compile_part(pool, block_size, everything, first, config)
                compiled += time.perf_counter() - since
            for index in part:
                report.begin(str(listed[index]))
                for row in listed[index].rows(config):
                    failed += not row.passed
                    print(row, flush=True)
                    report.add_row(row)
    if report.wanted:
        from .checks import run_checks  # which needs mlx-lm

        print()
        failed += run_checks(report, config)
    report.finish(failed)
    compiling = f", {compiled:.1f} of them compiling" if compiled else ""
    print(f"\n{time.perf_counter() - begin:.1f} s in all{compiling}")
    if report.wanted:
        print(f"the report is in {report_file}")
    print(f"{failed} failed" if failed else "all passed")
    return failed


def _checked_row(
    passed: bool,
    shape: str,
    body: str,
    result: SelfCheck | narrow_matmul.TileCheck,
    use: str,
    launch: Callable[[], float],
    dense: Callable[[], float | None] = lambda: None,
) -> Row:
    """Of a kernel that was checked; one that failed is not timed."""
    compiled = "no" if math.isnan(result.rms) and not result.ok else "yes"
    if not result.ok:
        return Row(False, shape, body, compiled, result.rms, None, None, f"{use} FAILED: {result.reason}")
    return Row(passed, shape, body, compiled, result.rms, launch(), dense(), use)


def main(argv: Sequence[str] | None = None) -> None:
    """Exit with 1 if a variant failed."""
    parser = argparse.ArgumentParser(prog="mlx_paged doctor", description=__doc__)
    PagedConfig.add_arguments(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="Every dtype, head dimension, GQA ratio and block size, not only those of popular models (takes long)",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="Also check the order of command buffers, registers (Metal) and tokens/s of a small model, and write all "
        "of it as JSON that can be posted; it names no files of yours",
    )
    args = parser.parse_args(argv)
    with orderly_end("mlx_paged doctor"):
        config = PagedConfig.from_env().with_arguments(args)
        config.check_kernel()
        sys.exit(1 if run(config.block_size, config, everything=args.all, report_file=args.report) else 0)


if __name__ == "__main__":
    main()
