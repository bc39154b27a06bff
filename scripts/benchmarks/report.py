"""Shared by benchmarks: parsers of arguments, and results as a table, as JSON and as a plot."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_paged import ConfigError
from mlx_paged.cli.doctor import facts


class BenchError(Exception):
    """The benchmark cannot be run, or did not measure what it says it measures."""


class Metric(NamedTuple):
    """A figure of results: a column of the table and, if it is plotted, a panel of the plot.

    Attributes:
        title: what it is, with the unit.
        field: its name in a result.
        better: ``more`` or ``less``; None: it has no ratio.
        scale: factor from the field's unit to the title's.
    """

    title: str
    field: str
    better: str | None = None
    scale: float = 1.0
    is_plotted: bool = True


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
        except (ValueError, ConfigError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def report(
    out: Path | None, name: str, argv: Sequence[str], results: list[dict[str, Any]], metrics: Sequence[Metric]
) -> int:
    """Print the table, and write NAME.json and, if matplotlib is installed, NAME.png. Return the exit status."""
    rows = medians(results, metrics)
    metrics = [metric for metric in metrics if any(metric.field in row for row in rows)]
    print(table(["case", "side", *(metric.title for metric in metrics)], [cells_of(row, metrics) for row in rows]))
    errors = [each for each in results if "error" in each]
    for each in errors:
        print(f"{each['case']}, {each['side']}: {each['error']}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        kept = [{key: value for key, value in each.items() if key != "tokens"} for each in results]
        written = {"machine": machine(), "arguments": list(argv), "results": kept, "medians": rows}
        (out / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n")
        title = f"bench.py {name} {' '.join(argv)}, {written['machine']['device']}"
        plot(rows, [metric for metric in metrics if metric.is_plotted], out / f"{name}.png", title)
    return int(bool(errors))


def medians(results: Sequence[dict[str, Any]], metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return the medians of each side of each case. ``ratios`` are to the first side's, above 1 if this one is
    better."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        if "error" not in result:
            groups.setdefault((result["case"], result["side"]), []).append(result)
    rows = {}
    for (case, side), mine in groups.items():
        row: dict[str, Any] = {"case": case, "side": side, "ratios": {}}
        for metric in metrics:
            if values := [each[metric.field] for each in mine if each.get(metric.field) is not None]:
                row[metric.field] = statistics.median(values)
        rows[case, side] = row
    for (case, side), row in rows.items():
        base = rows.get((case, results[0]["side"]), {})
        for metric in metrics:
            value, other = row.get(metric.field), base.get(metric.field)
            if metric.better and side != results[0]["side"] and value and other:
                row["ratios"][metric.field] = value / other if metric.better == "more" else other / value
    return list(rows.values())


def cells_of(row: dict[str, Any], metrics: Sequence[Metric]) -> list[str]:
    """Return a line of the table: each figure with at least three digits, and its ratio in brackets."""
    cells = [row["case"], row["side"]]
    for metric in metrics:
        value, ratio = row.get(metric.field), row["ratios"].get(metric.field)
        if value is None:
            cells.append("-")
            continue
        value *= metric.scale
        decimals = 0 if value % 1 == 0 else max(0, 3 - len(f"{value:.0f}"))
        cells.append(f"{value:,.{decimals}f}{'' if ratio is None else f' ({ratio:.2f}x)'}")
    return cells


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return right-aligned columns, each as wide as its widest cell."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return the hardware, system and versions that figures depend on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = mx.device_info(mx.Device(mx.cpu)).get("device_name")
    return {**facts(), "cpu": cpu, "usable cores": usable, "load average": list(os.getloadavg())}


def plot(rows: Sequence[dict[str, Any]], metrics: Sequence[Metric], path: Path, title: str) -> None:
    """Draw a bar for each side of each case, in one panel per metric."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases, sides = (list(dict.fromkeys(row[field] for row in rows)) for field in ("case", "side"))
    spacing = 0.8 / max(1, len(sides))
    size = (max(4.2, 0.35 * len(cases)) * max(1, len(metrics)), 4)
    figure, axes = plt.subplots(1, max(1, len(metrics)), figsize=size, layout="constrained", squeeze=False)
    for axis, metric in zip(axes[0], metrics, strict=False):
        for number, side in enumerate(sides):
            mine = [row for row in rows if row["side"] == side and metric.field in row]
            left = [cases.index(row["case"]) + (number - (len(sides) - 1) / 2) * spacing for row in mine]
            axis.bar(left, [row[metric.field] * metric.scale for row in mine], 0.95 * spacing, label=side)
        axis.set_xticks(range(len(cases)), cases, rotation=30, ha="right", fontsize=8)
        axis.set_title(metric.title, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
