"""``python -m mlx_paged doctor``: does the fused kernel work on this machine? Runs its variants and says which path
attention takes."""

from __future__ import annotations

import argparse
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import mlx.core as mx

from . import __version__
from .attention import gather, narrow_matmul
from .attention.dispatch import Dispatch, last_dispatch, paged_attention
from .attention.kernel_build import backend
from .attention.kernel_check import MAX_RMS, SelfCheck, self_check
from .attention.kernel_plan import BLOCK_SIZES, DTYPES, HEAD_DIMS, MAX_GQA
from .attention.kernels import variants_of
from .attention.select import device_decline, storage_choice
from .config import PagedConfig
from .errors import PagedCacheError
from .kv.group import LayerGroup
from .kv.pool import BlockPool
from .kv.storage import QueryHeads

_KV_HEADS = 2


class Shape(NamedTuple):
    """What a kernel variant is made for."""

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


def shapes(block_size: int, *, everything: bool) -> Iterator[Shape]:
    """The shapes to run: every dtype and head dimension; with ``everything``, also every GQA ratio and block size."""
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            yield Shape(dtype, head_dim, 4, block_size)
        yield Shape(dtype, 128, 1, block_size)
        yield Shape(dtype, 128, 4, block_size, softcap=True)
        yield Shape(dtype, 128, 4, block_size, sinks=True)
        yield Shape(dtype, 128, 4, block_size, softcap=True, sinks=True)
        if everything:
            for head_dim in HEAD_DIMS:
                for gqa in range(1, MAX_GQA + 1):
                    for size in BLOCK_SIZES:
                        if (gqa, size) != (4, block_size):
                            yield Shape(dtype, head_dim, gqa, size)


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
    info = mx.device_info() if mx.default_device() == mx.Device(mx.gpu) else {}
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
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{mx.default_device()} {info.get('device_name', '')}".strip(),
        "kernel dialect": backend() or "none",
        "kernel": device_decline() or "can run here",
    }


def run(block_size: int, config: PagedConfig, *, everything: bool) -> int:
    """Print the facts and one line per variant; returns the number of lines that failed."""
    for name, value in facts().items():
        print(f"{name:<16}{value}")
    print()
    header = _line("shape", "body", "compiled", "RMS", "seconds", "dispatch")
    print(header, "-" * len(header), sep="\n")
    failed = 0
    for shape in shapes(block_size, everything=everything):
        choice, error = dispatch_of(shape, config)
        path = f"{choice.path}: {choice.reason}"
        pool_ok = error < MAX_RMS
        if not pool_ok:
            path += " FAILED: attention through the pool differs"
        if device_decline() is not None:
            print(_line(str(shape), "-", "-", f"{error:.1e}", "-", path), flush=True)
            failed += not pool_ok
            continue
        for variant in variants_of(
            shape.dtype, shape.head_dim, shape.head_dim, shape.gqa * _KV_HEADS, _KV_HEADS, shape.block_size,
            shape.softcap, shape.sinks,
        ):  # fmt: skip
            result = self_check(variant)
            failed += not (result.ok and pool_ok)
            print(_check_line(str(shape), variant.body, result, path), flush=True)
    failed += _run_products()
    print(f"\n{failed} failed" if failed else "\nall passed")
    return failed


def _run_products() -> int:
    """A line for each kernel that multiplies a few rows, on CUDA; returns the number of lines that failed."""
    failed = 0
    for dtype in narrow_matmul.DTYPES if backend() == "cuda" else ():
        for tile in narrow_matmul.TILES:
            for body in narrow_matmul.BODIES:
                result = narrow_matmul.self_check(body, dtype, tile)
                failed += not result.ok
                name = str(dtype).removeprefix("mlx.core.")
                label = f"{name:>8} products of up to {tile.rows} rows"
                print(_check_line(label, body, result, "compiled decode steps"), flush=True)
    return failed


def _check_line(shape: str, body: str, result: SelfCheck | narrow_matmul.TileCheck, use: str) -> str:
    compiled = "no" if math.isnan(result.rms) and not result.ok else "yes"
    why = "" if result.ok else f" FAILED: {result.reason}"
    return _line(shape, body, compiled, f"{result.rms:.1e}", f"{result.seconds:.2f}", use + why)


def _line(shape: str, body: str, compiled: str, rms: str, seconds: str, dispatch: str) -> str:
    return f"{shape:<46}{body:<22}{compiled:<10}{rms:<10}{seconds:<9}{dispatch}"


def main(argv: Sequence[str] | None = None) -> None:
    """Exit with 1 if a variant failed."""
    parser = argparse.ArgumentParser(prog="mlx_paged doctor", description=__doc__)
    PagedConfig.add_arguments(parser)
    parser.add_argument("--all", action="store_true", help="Every GQA ratio and block size too (takes long)")
    args = parser.parse_args(argv)
    try:
        config = PagedConfig.from_env().with_arguments(args)
        config.check_kernel()
    except PagedCacheError as error:
        sys.exit(f"mlx_paged doctor: {error}")
    sys.exit(1 if run(config.block_size, config, everything=args.all) else 0)


if __name__ == "__main__":
    main()
