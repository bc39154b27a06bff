"""Two ranks of one machine and one: stock mlx-lm against mlx_paged.

    python scripts/bench.py ranks --out out/ranks                    # GPUs: NCCL, an 8B shape in bf16
    python scripts/bench.py ranks --random deep --out out/ranks      # without GPUs: ring, to try the script

Parts, each in processes of their own and with a time limit, after which they are killed:

- ``tokens``: greedy tokens of a small f32 model on two ranks and on one.
- ``two``: on two ranks, stock and paged by themselves (peak memory), with one row and with ``--rows``; then rounds of
  stock, paged, stock, paged, ... Between rounds the patches and the output layer are changed.
- ``one``: the paged side on one rank.

Decode counts the steps in which all rows decode: from the last first token to the first finish. A shorter run of the
same shape goes before each that is measured. ranks.json has all, also of parts that were cut short.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_paged
from mlx_paged.patches.sharded import shard_head

from .batch import Request, Run, percentiles
from .models import PRESETS, BenchError, on_gpu, random_model, vocabulary_of
from .report import SCRIPT, positive, table, write_results

SECONDS = {"tokens": 25, "two": 150, "one": 65}
RANKS = {"tokens-of-one": 1, "tokens-of-two": 2, "two": 2, "one": 1}
WARM = 16  # tokens of the run before one that is measured
LENGTHS, ANSWER = (300, 40, 7, 129), 48  # of the part ``tokens``


class Rank:
    """This process: its part of the model, and the file of its figures.

    Args:
        preset: of the model.
        dtype: of its weights; None: the preset's.
        path: of the file.
    """

    def __init__(self, preset: str, dtype: str | None, path: Path) -> None:
        backend = "nccl" if "NCCL_HOST_IP" in os.environ else "ring"
        several = int(os.environ["BENCH_SIZE"]) > 1
        self.group = mx.distributed.init(strict=True, backend=backend) if several else None
        self.model, self._path = random_model(preset, dtype), path
        self._heads: dict[str, nn.Module] = {}  # the output layer, by side
        if self.group is not None:
            self.model.shard(self.group)
            mx.eval(self.model.parameters())
        self.figures: dict[str, Any] = {}
        self._generate = importlib.import_module("mlx_lm.generate")

    def tell(self, **figures: Any) -> None:
        """Keep figures, whatever happens next."""
        self.figures.update(figures)
        self._path.write_text(json.dumps(self.figures))

    def be(self, side: str, budget: int | None = None) -> None:
        """Run as ``stock`` or ``paged`` from now on, with a new pool. A head that is sharded as our loader does it
        takes the whole one's place, unless both are kept."""
        mlx_paged.remove_patches()
        if self._heads:
            self.model.lm_head = self._heads[side]
        elif side == "paged" and self.group is not None and shard_head(self.model, self.group):
            mx.eval(self.model.parameters())
        gc.collect()
        if side == "paged":
            mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory=budget))

    def keep_both_heads(self) -> None:
        """Make the whole output layer again, of all ranks' parts, for :meth:`be` to change between the two."""
        if self.group is None or "lm_head" not in self.model:
            return
        sharded = self.model.lm_head
        whole = nn.Linear(1, 1, bias=False)
        whole.weight = mx.distributed.all_gather(sharded.part.weight, group=self.group)
        mx.eval(whole.parameters())
        self._heads = {"stock": whole.eval(), "paged": sharded}

    def run(self, lengths: Sequence[int], answer: int) -> tuple[Run, float]:
        """Run prompts of these lengths; return the run and its seconds."""
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        rng, vocabulary = random.Random(len(lengths)), vocabulary_of(self.model)
        requests = [Request(0.0, [rng.randrange(vocabulary) for _ in range(length)], answer) for length in lengths]
        generator = self._generate.BatchGenerator(self.model, completion_batch_size=len(lengths))
        run = Run(generator, requests)
        seconds = run.go()
        generator.close()
        run.generator = None
        return run, seconds

    def measured(self, rows: int, length: int, answer: int) -> dict[str, Any]:
        """Return figures of the second of two runs of a case."""
        self.run([length] * rows, min(answer, WARM))
        run, seconds = self.run([length] * rows, answer)
        figures = {"decode_tokens_per_s": run.decode_rate(), "last_first_s": run.last_first, "seconds": seconds}
        return {**figures, "inter_token_s": percentiles(run.gaps), "peak_bytes": mx.get_peak_memory()}


def compute(args: argparse.Namespace, path: Path) -> None:
    """Compute this rank's share of a part."""
    if args.part == "tokens":
        rank = Rank("tiny", "float32", path)
        rank.be("paged")
        run, _ = rank.run(LENGTHS, ANSWER)
        rank.tell(tokens=[run.tokens[uid] for uid in sorted(run.tokens)])
        return
    rank = Rank(args.random, None, path)
    cases = {rows: (rows, args.prompt, args.answer) for rows in (1, args.rows)}
    for side in ("stock", "paged") if args.part == "two" else ("paged",):
        rank.be(side, args.budget)
        for rows, case in cases.items():
            rank.tell(**{f"{side} {rows}": rank.measured(*case)})
    if args.part == "one":
        return
    rank.keep_both_heads()
    for rows, case in cases.items():
        found: dict[str, list[Any]] = {"stock": [], "paged": []}
        for _ in range(args.rounds if rows == 1 else (args.rounds + 1) // 2):
            for side, figures in found.items():
                rank.be(side, args.budget)
                figures.append(rank.measured(*case))
                rank.tell(**{f"rounds {rows}": found})


def start(name: str, argv: Sequence[str], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a part, with the variables that mlx.launch gives them."""
    size, part = RANKS[name], name.split("-")[0]
    env = {**os.environ, "BENCH_SIZE": str(size), "MLX_PAGED_RANK_TIMEOUT": "60", "HF_HUB_OFFLINE": "1"}
    ports = free_ports(2)
    if size > 1 and on_gpu():
        env |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(size)}
        env.setdefault("NCCL_NVLS_ENABLE", "0")
        env.setdefault("MLX_USE_CUDA_GRAPHS", "0")  # as our commands have it; for stock, too
    elif size > 1:
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        env["MLX_HOSTFILE"] = str(hosts)
    started = []
    for rank in range(size):
        mine = {**env, "CUDA_VISIBLE_DEVICES": str(rank)} | ({"MLX_RANK": str(rank)} if size > 1 else {})
        child = ["--part", part, "--child", str(folder / f"{rank}.json")]
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(SCRIPT), "ranks", *argv, *child]
            started.append(subprocess.Popen(command, env=mine, stdout=log, stderr=log, start_new_session=True))
    return started


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_part(name: str, argv: Sequence[str], out: Path) -> dict[str, Any]:
    """Return what the ranks of a part told, and how they ended."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + SECONDS[name.split("-")[0]]
    started = start(name, argv, folder)
    try:
        while any(each.poll() is None for each in started) and time.monotonic() < deadline:
            if any(each.poll() not in (None, 0) for each in started):
                time.sleep(3)  # for the last words of the others
                break
            time.sleep(0.1)
    finally:
        for each in started:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
        codes = [each.wait() for each in started]
    files = [folder / f"{rank}.json" for rank in range(RANKS[name])]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    log = "" if failed is None else (folder / f"{failed}.log").read_text()[-1500:]
    return {"part": name, "ranks": found, "codes": codes, "log": log}


def print_results(parts: dict[str, dict[str, Any]]) -> None:
    """Print peaks of each side by itself, medians of the rounds, and whether the tokens are the same."""
    for name, part in parts.items():
        if any(part["codes"]):
            print(f"{name} ended with {part['codes']}:\n{part['log']}", file=sys.stderr)
    rows = []
    for name in ("two", "one"):
        for case, figures in parts.get(name, {"ranks": [{}]})["ranks"][0].items():
            if not case.startswith("rounds"):
                peak = max(each[case]["peak_bytes"] for each in parts[name]["ranks"] if case in each)
                rows.append([f"{name} rank(s)", case, *_told([figures]), f"{peak / 1e9:.2f}"])
                continue
            for side, rounds in figures.items():
                rows.append([f"{name}, {len(rounds)} rounds", f"{side} {case.split()[1]}", *_told(rounds), ""])
    print(table(("part", "side, rows", "decode tok/s", "last first s", "peak GB"), rows))
    told = [rank.get("tokens") for name in ("tokens-of-one", "tokens-of-two") for rank in parts[name]["ranks"]]
    print(f"greedy f32 tokens of two ranks are one's: {'yes' if all(each == told[0] for each in told) else 'NO'}")


def _told(rounds: Sequence[dict[str, Any]]) -> tuple[str, str]:
    rates = [rate for figures in rounds if (rate := figures["decode_tokens_per_s"]) is not None]
    late = statistics.median(figures["last_first_s"] for figures in rounds) if rounds else float("nan")
    return f"{statistics.median(rates):.1f}" if rates else "-", f"{late:.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--random", choices=sorted(PRESETS), default="llama-8b", help="a model of random weights (default llama-8b)")
    add("--rows", type=positive, default=16)
    add("--prompt", type=positive, default=1024, help="tokens")
    add("--answer", type=positive, default=128, help="tokens")
    add("--rounds", type=positive, default=5, help="with one row; half as many with all")
    add("--budget", type=positive, default=None, help="bytes of each rank's pool")
    add("--out", type=Path, required=True, help="folder for ranks.json and the logs")
    add("--part", choices=tuple(SECONDS), help=argparse.SUPPRESS)
    add("--child", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the parts one after the other, print the table and write the files; or compute, as a child."""
    if args.child is not None:
        if args.part is None:
            raise BenchError("--child needs --part")
        compute(args, args.child)
        return 0
    parts = {name: run_part(name, argv, args.out) for name in ("two", "one", "tokens-of-two", "tokens-of-one")}
    print_results(parts)
    write_results(args.out, "ranks", argv, list(parts.values()))
    return int(any(any(part["codes"]) for part in parts.values()))
