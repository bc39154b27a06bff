"""Shared by benchmarks: sides in processes of their own, statistics, tables and files."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cli.doctor import facts
from mlx_paged.config import parse_block_size, parse_kernel, parse_kv_bits, parse_kv_group_size, parse_memory

SCRIPT = Path(__file__).parents[1] / "bench.py"
# A panel of a figure: its title, and the height of a result's bar in it.
Panel = tuple[str, Callable[[dict[str, Any]], float]]
# A column of a table: its title, and a result's cell in it.
Column = tuple[str, Callable[[dict[str, Any]], str]]


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pool's options, ``--out``, and the hidden ``--child`` of child processes."""
    parser.add_argument("--kv-block-size", type=parse_block_size, default=32)
    parser.add_argument("--kv-cache-memory", type=parse_memory, default=None)
    parser.add_argument("--kernel", type=parse_kernel, default="auto", help="auto, on or off")
    parser.add_argument("--kv-bits", type=parse_kv_bits, default=None, help="of pages: 8, 4 or 8,4 (default: neither)")
    parser.add_argument("--kv-group-size", type=parse_kv_group_size, default=64, help="32, 64 (default) or 128")
    add_out_argument(parser)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)


def add_out_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``."""
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the results as JSON and, with matplotlib, PNG"
    )


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of several values with commas between them."""

    def convert(text: str) -> list[Any]:
        try:
            return [parse(item) for item in text.split(",")]
        except (ValueError, mlx_paged.ConfigError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def patch_anew(args: argparse.Namespace) -> None:
    """Patch mlx-lm with a new pool, configured by the arguments."""
    mlx_paged.remove_patches()
    gc.collect()  # frees the former pool
    options = {"kv_bits": args.kv_bits, "kv_group_size": args.kv_group_size}
    mlx_paged.apply_patches(PagedConfig(args.kv_block_size, args.kv_cache_memory, args.kernel, **options))


def run_apart(
    command: str, args: argparse.Namespace, argv: Sequence[str], measure: Callable[..., dict[str, Any]],
    cases: Sequence[dict[str, Any]],
) -> list[dict[str, Any]] | None:  # fmt: skip
    """Return what ``measure(args, **case)`` returns for each case in a process of its own, or the case and an error.
    As such a process (``--child``), print it and return None."""
    if args.child is not None:
        print(json.dumps(measure(args, **json.loads(args.child))))
        return None
    results: list[dict[str, Any]] = []
    for case in cases:
        process = [sys.executable, str(SCRIPT), command, *argv, "--child", json.dumps(case)]
        done = subprocess.run(process, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            results.append(json.loads(done.stdout.strip().splitlines()[-1]))
        else:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            results.append({**case, "error": f"exit status {done.returncode}: {last}"})
        print(", ".join(map(str, case.values())), "done", file=sys.stderr, flush=True)
    return results


def dispatch_counts() -> dict[str, int]:
    """Return how often attention took each path, and why."""
    return {f"{d.path}: {d.reason}": count for d, count in mlx_paged.dispatch_counts().items()}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return right-aligned columns, each as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def print_columns(results: Sequence[dict[str, Any]], labels: Sequence[str], columns: Sequence[Column]) -> None:
    """Print a line for each result: the fields that are labels, then its columns, or its error."""
    rows = []
    for result in results:
        if "error" in result:
            cells = [result["error"][:60], *[""] * (len(columns) - 1)]
        else:
            cells = [show(result) for _, show in columns]
        rows.append([*(str(result.get(label, "")) for label in labels), *cells])
    print(table([*labels, *(title for title, _ in columns)], rows))


def medians(results: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the medians of all numbers of results that have the same labels, without those that failed; None where a
    number is missing in all of them."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        if "error" not in result:
            groups.setdefault(tuple(result[label] for label in labels), []).append(result)
    found = []
    for key, mine in groups.items():
        fields = {name for each in mine for name, value in each.items() if isinstance(value, int | float)}
        values = {name: [each[name] for each in mine if each.get(name) is not None] for name in fields}
        found.append(
            {**{name: statistics.median(each) for name, each in values.items()}, **dict(zip(labels, key, strict=True))}
        )
    return found


def machine() -> dict[str, Any]:
    """Return the hardware, system and versions that figures depend on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = mx.device_info(mx.Device(mx.cpu)).get("device_name")
    return {**facts(), "cpu": cpu, "usable cores": usable, "load average": list(os.getloadavg())}


def write_results(
    out: Path | None, name: str, argv: Sequence[str], results: Sequence[dict[str, Any]],
    panels: Sequence[Panel], by: str, title: str, *, side: str = "side", **more: Any,
) -> None:  # fmt: skip
    """Write ``NAME.json``, without the tokens, and, if matplotlib is installed, ``NAME.png``.

    Args:
        panels: of the figure.
        by: the field of results that its x axis shows.
        title: of the figure.
        side: the field whose values have bars side by side.
        more: facts for the JSON.
    """
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for result in results:
        result.pop("tokens", None)
    written = {"machine": machine(), "arguments": list(argv), "results": results, **more}
    (out / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n")
    title = f"{title}, {written['machine']['device']}"
    _plot_bars([r for r in results if by in r and "error" not in r], out / f"{name}.png", title, panels, by, side)


def _plot_bars(
    results: Sequence[dict[str, Any]], path: Path, title: str, panels: Sequence[Panel], by: str, side: str
) -> None:
    """Draw the median of each side at each value of the field ``by`` as a bar, in one panel after the other."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places, sides = (list(dict.fromkeys(r[field] for r in results)) for field in (by, side))
    spacing = 0.8 / max(1, len(sides))
    size = (max(4.2, 0.35 * len(places)) * len(panels), 4)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, (label, value) in zip(axes[0], panels, strict=True):
        for number, name in enumerate(sides):
            samples: dict[int, list[float]] = {}
            for result in results:
                if result[side] == name:
                    samples.setdefault(places.index(result[by]), []).append(value(result))
            left = [place + (number - (len(sides) - 1) / 2) * spacing for place in samples]
            axis.bar(left, [statistics.median(each) for each in samples.values()], 0.95 * spacing, label=name)
        axis.set_xticks(range(len(places)), places, rotation=30, ha="right", fontsize=8)
        axis.set_title(label, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    if sides:
        axes[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
