"""Both servers side by side: stock ``mlx_lm.server`` and ``mlx_paged.server``, the same model and chats.

    python scripts/bench.py servers --tokenizer "$(python scripts/demo_model.py)" --out out/servers

Each round starts both anew: the same products take up to an eighth more CPU time in one process than in another, for
as long as both run. Chats go to one and then to the other, each case in turn: one chat alone, and several at once.
Tokens per second are of a round's answers over its wall time, with prompts; milliseconds are of the server process's
CPU time for a token. Prompts of a round are new to both, and answers are greedy and streamed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from .models import PRESETS, SEED, BenchError, random_model
from .report import add_out_argument, list_of, positive, table, write_results

SIDES = {"stock": ("mlx_lm", "server"), "paged": ("mlx_paged.server",)}
SECONDS = 120  # until a server has to be ready
WORDS = ("river", "stone", "window", "green", "paper", "yellow", "sudden", "morning", "winter", "bottle")


def write_model(folder: Path, preset: str, tokenizer: Path) -> None:
    """Write a model of random weights, with a tokenizer and its chat template.

    Raises:
        BenchError: the tokenizer knows more tokens than the model.
    """
    known = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    if known > PRESETS[preset].args["vocab_size"]:
        raise BenchError(f"{preset} knows {PRESETS[preset].args['vocab_size']:,} tokens, the tokenizer {known:,}")
    model = random_model(preset, None)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(PRESETS[preset].args))
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)


class Server:
    """A server in a process of its own, on a port of this machine."""

    def __init__(self, side: str, folder: Path, options: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.side, self.folder = side, folder
        self._log = (folder / f"{side}.log").open("wb")
        command = [sys.executable, "-m", *SIDES[side], "--model", str(folder), "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def wait(self) -> None:
        """Wait until it answers. Raises BenchError if it does not."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError, BenchError):
                self.chat("hello", 2)
                return
            time.sleep(0.2)
        said = (self.folder / f"{self.side}.log").read_text()[-500:]
        raise BenchError(f"the {self.side} server is not ready: {said}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()

    def cpu_seconds(self) -> float:
        """Return what its process has used; nothing where /proc lacks."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.exists():
            return float("nan")
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def chat(self, prompt: str, num_tokens: int) -> tuple[int, float, float]:
        """Return the number of an answer's tokens, and the seconds to its first text and to its end."""
        begin, first, count = time.perf_counter(), 0.0, 0
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BenchError(f"the {self.side} server answers {response.status}: {response.read()[:200]!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - begin
                    if (usage := json.loads(line[6:]).get("usage")) is not None:
                        count = usage["completion_tokens"]
        finally:
            connection.close()
        return count, first, time.perf_counter() - begin


def prompts_of(rng: random.Random, count: int, words: int) -> list[str]:
    return [" ".join(rng.choice(WORDS) for _ in range(words)) for _ in range(count)]


def measured(server: Server, prompts: Sequence[str], num_tokens: int) -> dict[str, float]:
    """Send chats together, and return a round's figures."""
    found: list[tuple[int, float, float]] = []
    threads = [
        threading.Thread(target=lambda prompt=prompt: found.append(server.chat(prompt, num_tokens)))
        for prompt in prompts
    ]
    used, begin = server.cpu_seconds(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, used = time.perf_counter() - begin, server.cpu_seconds() - used
    if len(found) < len(prompts):
        raise BenchError(f"the {server.side} server has failed {len(prompts) - len(found)} chat(s)")
    total = sum(count for count, _, _ in found)
    return {
        "tokens_per_s": total / seconds,
        "cpu_ms_per_token": 1e3 * used / total,
        "last_first_s": max(first for _, first, _ in found),
        "num_tokens": total,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--random", choices=sorted(PRESETS), default="llama-22m", help="a model of random weights")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--chats", type=list_of(positive), default=[1, 8], help="at once")
    parser.add_argument("--rounds", type=positive, default=4)
    parser.add_argument("--words", type=positive, default=40, help="of a prompt")
    parser.add_argument("--answer", type=positive, default=128, help="tokens")
    parser.add_argument("--sides", type=list_of(str), default=list(SIDES), help="stock,paged")
    add_out_argument(parser)


@contextlib.contextmanager
def running(args: argparse.Namespace) -> Iterator[list[Server]]:
    """Within, the servers run."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_model(folder, args.random, args.tokenizer)
        servers = [Server(side, folder) for side in args.sides]
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.wait()
        yield servers


def run(args: argparse.Namespace, given: Sequence[str]) -> None:
    rng, results = random.Random(SEED), []
    for number in range(args.rounds):
        with running(args) as servers:
            for count in args.chats:  # not measured
                for server in servers:
                    measured(server, prompts_of(rng, count, args.words), 8)
            for count in args.chats:
                prompts = prompts_of(rng, count, args.words)
                for server in servers if number % 2 == 0 else reversed(servers):
                    figures = measured(server, prompts, args.answer)
                    results.append({"side": server.side, "chats": count, "round": number, **figures})
    lines = []
    for count in args.chats:
        mine = {side: [r for r in results if r["side"] == side and r["chats"] == count] for side in args.sides}
        for side, rounds in mine.items():
            each = [f"{r['tokens_per_s']:.1f}" for r in rounds]
            rate = statistics.median(r["tokens_per_s"] for r in rounds)
            cpu = statistics.median(r["cpu_ms_per_token"] for r in rounds)
            first = statistics.median(r["last_first_s"] for r in rounds)
            lines.append([str(count), side, f"{rate:.1f}", " ".join(each), f"{cpu:.2f}", f"{first:.3f}"])
    print(table(("chats", "server", "tokens/s", "rounds", "CPU ms/token", "last first, s"), lines))
    write_results(args.out, "servers", given, results)
