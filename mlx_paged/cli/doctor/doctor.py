"""``python -m mlx_paged doctor``: does the fused kernel work on this machine? Runs its variants for the shapes of
popular models and says which path attention takes; "launch" is the time of a launch that is compiled, "dense" that of
MLX's own attention for the same shape."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from ... import __version__
from ...config import PagedConfig
from ...kernels.availability import device_unsupported_reason
from ...kernels.build import backend, compiled_by, gpu_cores
from ...kernels.fused_attention import NAX_RELEASE, wheel_release
from ...kv.geometry import Geometry, PageFormat
from ...machine import usable_memory
from ..terminal import add_version, orderly_end
from .jobs import jobs, num_workers, rows_of_workers
from .report import HEADER, Report, Row

JOBS_PER_ROUND = 64  # jobs handed to the workers at once; their kernels are kept until they are timed


def facts() -> dict[str, str]:
    """Return the versions, the system and the device, by label."""
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    info = mx.device_info() if on_gpu else {}
    versions = {}
    for package in ("mlx", "mlx-lm"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "mlx_paged": __version__,
        **versions,
        "python": platform.python_version(),
        "system": _system(),
        "device": f"{mx.default_device()} {info.get('device_name', '')}".strip(),
        "architecture": str(info.get("architecture", "") or "unknown"),
        "GPU cores": str(gpu_cores() or "unknown"),
        "memory": _memory(info),
        **_wheel(),
        "kernel dialect": backend() or "none",
        "compiled by": compiled_by(),
        "kernel": device_unsupported_reason() or "can run here",
    }


def _system() -> str:
    release = f"macOS {mac}" if (mac := platform.mac_ver()[0]) else f"{platform.system()} {platform.release()}"
    return f"{release} {platform.machine()}"


def _pages(page_format: PageFormat) -> str:
    """Describe pages of this format: bytes of a token's keys and values against 16 bits, for heads of popular sizes."""
    parts = []
    for dim in (64, 96, 128, 256):
        dense = Geometry(1, dim, dim, mx.bfloat16)
        pages, why = dense.in_format(page_format, None)
        size = f"{pages.bytes_per_token()} of {dense.bytes_per_token()} bytes" if why is None else "not quantised"
        parts.append(f"{dim}: {size}")
    return f"{page_format}; a head's keys and values of a token: {', '.join(parts)}"


def _memory(info: Mapping[str, Any]) -> str:
    """Describe the machine's memory, Metal's recommended limit for a process, and its largest array, in GiB."""
    total = info.get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / 2**30:.0f} GiB"
    if "max_recommended_working_set_size" in info:
        text += f", {info['max_recommended_working_set_size'] / 2**30:.0f} GiB for the GPU"
    if "max_buffer_length" in info:
        text += f", {info['max_buffer_length'] / 2**30:.0f} GiB in one array"
    return text


def _wheel() -> dict[str, str]:
    """Return the macOS release that MLX's wheel was built for, where it is known. Only wheels for macOS 26 have kernels
    for an M5's matrix units."""
    release, mac = wheel_release(), platform.mac_ver()[0]
    if release is None:
        return {}
    text = f"for macOS {release}"
    if release < NAX_RELEASE <= int(mac.partition(".")[0]):
        text += f", which does not use an M5's matrix units; a current pip installs the one for macOS {NAX_RELEASE}"
    return {"MLX wheel": text}


def run(block_size: int, config: PagedConfig, *, everything: bool, report_file: Path | None = None) -> int:
    """Print the facts and one line per variant, and return the number of failures.

    Args:
        report_file: file of the report, with which the checks of ``checks.CHECKS`` run, too; None: neither.

    Raises:
        ConfigError: the report cannot be written.
    """
    begin = time.perf_counter()
    found = facts()
    report = Report(report_file, found)
    if config.page_format is not None:
        found["pages"] = _pages(config.page_format)
    for name, value in found.items():
        print(f"{name:<16}{value}")
    # MLX compiles one CUDA kernel at a time per process, which takes some seconds.
    workers = num_workers(usable_memory()) if device_unsupported_reason() is None and backend() == "cuda" else 1
    if workers > 1:
        print(f"{'compiling':<16}in {workers} processes")
    print("", HEADER, "-" * len(HEADER), sep="\n", flush=True)
    failed = 0
    for row in _rows(block_size, config, everything, workers, report):
        failed += not row.passed
        print(row, flush=True)
        report.add_row(row)
    if report.wanted:
        from .checks import run_checks  # needs mlx-lm

        print()
        failed += run_checks(report, config)
    report.finish(failed)
    print(f"\n{time.perf_counter() - begin:.1f} s in all")
    if report.wanted:
        print(f"the report is in {report_file}")
    print(_verdict(failed, config))
    return failed


def _verdict(failed: int, config: PagedConfig) -> str:
    if failed:
        return f"{failed} failed"
    why = device_unsupported_reason() or ("--kernel is off" if config.kernel is False else None)
    return "all passed" if why is None else f"no kernel ran ({why}); attention without kernels passed for every shape"


def _rows(block_size: int, config: PagedConfig, everything: bool, workers: int, report: Report) -> Iterator[Row]:
    listed = jobs(block_size, everything=everything)
    for first in range(0, len(listed), JOBS_PER_ROUND):
        part = range(first, min(first + JOBS_PER_ROUND, len(listed)))
        if workers > 1:
            yield from rows_of_workers(part, block_size, config, everything, workers, sys.stderr)
            continue
        for index in part:
            report.begin(str(listed[index]))
            for checked in listed[index].run(config):
                yield checked.timed()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the doctor. Exits with status 1 if a line failed."""
    parser = argparse.ArgumentParser(prog="mlx_paged doctor", description=__doc__)
    PagedConfig.add_arguments(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="Check every dtype, head dimension, GQA ratio and block size, not only those of popular models (slow)",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="Also check the order of command buffers and registers (Metal), measure tokens/s of a small model, and "
        "write everything as JSON that is safe to post (the home folder is replaced by ~)",
    )
    add_version(parser)
    with orderly_end("mlx_paged doctor"):
        args = parser.parse_args(argv)
        config = PagedConfig.from_env().with_arguments(args)
        config.check_rotation()
        config.check_kernel()
        sys.exit(1 if run(config.block_size, config, everything=args.all, report_file=args.report) else 0)


if __name__ == "__main__":
    main()
