"""What benchmarks share that run each side in a process of its own: arguments, the child, results and bars."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from support.bench_common import DTYPES, PRESETS, add_quantization, load_model, machine, random_model

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.config import parse_block_size, parse_kernel, parse_kv_bits, parse_kv_group_size, parse_memory

# A panel of a figure: its title, and a result's height in it.
Panel = tuple[str, Callable[[dict[str, Any]], float]]
CPU_CACHE_LIMIT = 1 << 30


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model; see :func:`chosen_model`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--random", choices=sorted(PRESETS), default=None, help="a model of random weights")
    source.add_argument("--model", default=None, help="a model folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=None)
    add_quantization(parser)


def add_pool_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The pool's options, where results go (``NAME.json``, ``NAME.png``), and the child's own flag."""
    parser.add_argument("--kv-block-size", type=parse_block_size, default=32)
    parser.add_argument("--kv-cache-memory", type=parse_memory, default=None)
    parser.add_argument("--kernel", type=parse_kernel, default="auto", help="auto, on or off")
    parser.add_argument(
        "--kv-bits", type=parse_kv_bits, default=None, help="of pages: 8, 4 or 8,4 (default: as they are)"
    )
    parser.add_argument("--kv-group-size", type=parse_kv_group_size, default=64, help="32, 64 (default) or 128")
    parser.add_argument("--out", type=Path, default=None, help=f"folder for {name}.json and {name}.png")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)


def chosen_model(args: argparse.Namespace) -> Any:
    """The model that the arguments name, in a process of its own: on a CPU, MLX may keep more of what is freed."""
    if not on_gpu():
        mx.set_cache_limit(CPU_CACHE_LIMIT)
    how = (args.dtype, args.bits, args.group_size)
    return random_model(args.random, *how) if args.random else load_model(args.model, *how)


def model_name(args: argparse.Namespace) -> str:
    """What a figure calls that model."""
    return f"{args.random or args.model}{'' if args.bits is None else f', {args.bits} bits'}"


def on_gpu() -> bool:
    """Whether MLX computes on one."""
    return mx.default_device() != mx.Device(mx.cpu)


def patch_anew(args: argparse.Namespace) -> None:
    """Have mlx-lm use a pool as the arguments say; one that was in use before is let go."""
    mlx_paged.remove_patches()
    gc.collect()  # the pool
    mlx_paged.apply_patches(
        PagedConfig(
            args.kv_block_size,
            args.kv_cache_memory,
            args.kernel,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
        )
    )


def measure_apart(script: str, argv: Sequence[str], child: Sequence[Any], **labels: Any) -> dict[str, Any]:
    """What ``script --child`` prints in a process of its own; ``labels`` and the error if it fails."""
    command = [sys.executable, script, *argv, "--child", json.dumps(child)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**labels, "error": f"exit status {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def write_results(
    out: Path, name: str, argv: Sequence[str], results: Sequence[dict[str, Any]], panels: Sequence[Panel],
    by: str, sides: Sequence[str], title: str, *, rotation: int = 0,
) -> str | None:  # fmt: skip
    """Write ``NAME.json`` (without the tokens) and ``NAME.png``. Returns why there is no figure, or None."""
    out.mkdir(parents=True, exist_ok=True)
    for result in results:
        result.pop("tokens", None)
    facts = {"machine": machine(), "arguments": list(argv), "results": results}
    (out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    title = f"{title}, {facts['machine']['device']}"
    return plot_bars(results, out / f"{name}.png", title, panels, by, sides, rotation)


def plot_bars(
    results: Sequence[dict[str, Any]], path: Path, title: str, panels: Sequence[Panel], by: str, sides: Sequence[str],
    rotation: int,
) -> str | None:  # fmt: skip
    """A bar for each side at each value of the field ``by``, in one panel after the other."""
    try:
        import matplotlib
    except ImportError:
        return f"no {path.name}: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [r for r in results if "error" not in r]
    places = list(dict.fromkeys(r[by] for r in good))
    sides = [side for side in sides if any(r["side"] == side for r in good)]
    spacing = 0.8 / max(1, len(sides))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), layout="constrained")
    for axis, (label, value) in zip(axes, panels, strict=True):
        for number, side in enumerate(sides):
            mine = {r[by]: value(r) for r in good if r["side"] == side}
            left = [i + (number - (len(sides) - 1) / 2) * spacing for i, place in enumerate(places) if place in mine]
            axis.bar(left, [mine[place] for place in places if place in mine], 0.95 * spacing, label=side)
        axis.set_xticks(range(len(places)), places, rotation=rotation, ha="right" if rotation else "center", fontsize=8)
        axis.set_title(label, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return None
