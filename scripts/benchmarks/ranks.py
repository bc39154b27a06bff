"""Two ranks of one machine: stock mlx-lm against mlx_paged.

    python scripts/bench.py ranks --out out/ranks                    # GPUs: NCCL, an 8B shape in bf16
    python scripts/bench.py ranks --random deep --out out/ranks      # without GPUs: ring, to try the script

Rounds of stock and paged in turns, each in processes of its own, with one row and with ``--rows``; then paged
on one rank. Decode counts the steps in which all rows decode. A shorter run of the same shape goes before each that is
measured. Writes ranks.json and ranks.png.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_paged
from mlx_paged.patches.sharded import shard_head

from .models import PRESETS, on_gpu, random_model, vocabulary_of
from .report import SCRIPT, Column, Panel, medians, positive, print_columns, write_results
from .timed_run import Request, Run, percentiles

SECONDS = 150  # limit of a round, after which its processes are killed
PANELS: tuple[Panel, ...] = (
    ("decode, tokens/s", lambda r: r["decode_tokens_per_s"] or 0.0),
    ("last first token, s", lambda r: r["last_first_s"]),
    ("peak memory, GB", lambda r: r["peak_bytes"] / 1e9),
)
COLUMNS: tuple[Column, ...] = (
    ("decode tok/s", lambda r: f"{r.get('decode_tokens_per_s', float('nan')):.1f}"),
    ("last first s", lambda r: f"{r['last_first_s']:.3f}"),
    ("peak GB", lambda r: f"{r['peak_bytes'] / 1e9:.2f}"),
)
WARM = 16  # most tokens of the warm-up before a measured run


def measured(model: Any, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a case, run after a shorter warm-up."""
    rng, vocabulary = random.Random(rows), vocabulary_of(model)
    for answer in (min(args.answer, WARM), args.answer):
        mx.clear_cache()
        mx.reset_peak_memory()
        requests = [Request([rng.randrange(vocabulary) for _ in range(args.prompt)], answer) for _ in range(rows)]
        generator = importlib.import_module("mlx_lm.generate").BatchGenerator(model, completion_batch_size=rows)
        run = Run(generator, requests)
        run.go()
        generator.close()
    figures = {"decode_tokens_per_s": run.decode_rate(), "last_first_s": run.last_first}
    return {**figures, "inter_token_s": percentiles(run.gaps), "peak_bytes": mx.get_peak_memory()}


def compute(side: str, size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return this rank's figures."""
    group = None
    model = random_model(args.random, None)
    if size > 1:
        group = mx.distributed.init(strict=True, backend="nccl" if "NCCL_HOST_IP" in os.environ else "ring")
        model.shard(group)
    if side == "paged":
        if group is not None:
            shard_head(model, group)
        mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory=args.budget))
    mx.eval(model.parameters())
    label = {"side": f"{side} on {size}"}
    return [{**label, "case": f"{rows} row(s)", **measured(model, rows, args)} for rows in (1, args.rows)]


def run_round(side: str, size: int, argv: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Run a round's ranks with the variables that mlx.launch sets. Return rank 0's figures, with the highest peak."""
    env = {**os.environ, "MLX_PAGED_RANK_TIMEOUT": "60", "HF_HUB_OFFLINE": "1"}
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    if size > 1 and on_gpu():
        env |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(size)}
        env.setdefault("NCCL_NVLS_ENABLE", "0")
        env.setdefault("MLX_USE_CUDA_GRAPHS", "0")  # as our commands set it; also for stock
    elif size > 1:
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        env["MLX_HOSTFILE"] = str(hosts)
    started = []
    for rank in range(size):
        mine = {**env, "CUDA_VISIBLE_DEVICES": str(rank)} | ({"MLX_RANK": str(rank)} if size > 1 else {})
        command = [sys.executable, str(SCRIPT), "ranks", *argv, "--child", json.dumps([side, size])]
        started.append(subprocess.Popen(command, env=mine, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        told = [each.communicate(timeout=SECONDS) for each in started]
    except subprocess.TimeoutExpired:
        told = []
    finally:
        for each in started:
            each.kill()
    if not told or any(each.returncode for each in started):
        words = [err.strip().splitlines()[-1:] for _, err in told]
        return [{"side": f"{side} on {size}", "error": f"did not finish: {words}"}]
    ranks = [json.loads(out.strip().splitlines()[-1]) for out, _ in told]
    return [{**mine[0], "peak_bytes": max(each["peak_bytes"] for each in mine)} for mine in zip(*ranks, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--random", choices=sorted(PRESETS), default="llama-8b", help="a model of random weights (default llama-8b)")
    add("--rows", type=positive, default=16)
    add("--prompt", type=positive, default=1024, help="tokens")
    add("--answer", type=positive, default=128, help="tokens")
    add("--rounds", type=positive, default=3)
    add("--budget", type=positive, default=None, help="bytes of each rank's pool")
    add("--out", type=Path, required=True, help="folder for the results as JSON and, with matplotlib, PNG")
    add("--child", default=None, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the rounds, print the table and write the files; as a child process, compute one rank."""
    if args.child is not None:
        print(json.dumps(compute(*json.loads(args.child), args)))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    sides = [("stock", 2), ("paged", 2)] * args.rounds + [("paged", 1)]
    results = [figures for side in sides for figures in run_round(*side, argv, args.out)]
    print_columns(medians(results, ("side", "case")), ("side", "case"), COLUMNS)
    for each in results:
        if "error" in each:
            print(f"{each['side']}: {each['error']}", file=sys.stderr)
    write_results(args.out, "ranks", argv, results, PANELS, "case", args.random)
    return int(any("error" in each for each in results))
