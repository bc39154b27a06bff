"""Loads a server with about twice what its budget holds, for some minutes, and checks that nothing is lost.

    python scripts/soak/soak_server.py --model path/to/model --minutes 60 --tokens 4096

It starts ``python -m mlx_paged server`` with room for ``--tokens`` tokens. Clients that together want twice as many
come and go: short and long prompts, with beginnings that others share and without, streams, answers that nobody waits
for, samples with seeds, stop strings. At the end it exits with 1 unless

- the process is the one that was started, it is healthy, has restarted nothing, and no request has failed;
- every block that is held is held by the prefix cache;
- resident memory has grown by no more than 2 %, from the first quarter of the time to the last (medians, without the
  first fifth of it). In between it goes up and down with the buffers that MLX keeps, a few megabytes.

The figures are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLAT = 0.02
WARM_PART = 0.2  # of the time, before memory is compared
SAMPLE_SECONDS = 2.0
WORDS = ["the", "river", "bank", "was", "cold", "and", "nobody", "who", "had", "seen", "it", "before", "a", "lamp"]


class Server:
    """A server process on a free port of the loopback interface."""

    def __init__(self, model: str, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = tempfile.NamedTemporaryFile("w+", prefix="soak", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "mlx_paged", "server", "--model", model, "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 300
        while not self.is_up:
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not start:\n{Path(self.log.name).read_text()[-3000:]}")
            time.sleep(0.2)

    @property
    def is_up(self) -> bool:
        try:
            return bool(self.get("/health")["status"] == "ok")
        except (OSError, HTTPException, ValueError):
            return False

    def get(self, path: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    @property
    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) << 10


class Clients:
    """Requests of all kinds, until the time is up.

    Args:
        server: that they ask.
        tokens: most tokens of a prompt and its answer, each.
        seed: of what they say.
    """

    def __init__(self, server: Server, tokens: int, seed: int) -> None:
        self.server, self.tokens = server, tokens
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._rng = random.Random(seed)
        self._lock = threading.Lock()

    def run(self, deadline: float) -> None:
        """One client's time."""
        with self._lock:
            rng = random.Random(self._rng.random())
        while time.monotonic() < deadline:
            kind = rng.choice(["whole", "whole", "stream", "cancel", "seed", "stop"])
            try:
                status = self._ask(kind, rng)
            except (OSError, HTTPException) as error:
                status = 0
                self._fault(f"{kind}: {type(error).__name__}: {error}")
            with self._lock:
                self.counts[f"{kind} {status}"] += 1
            if status == 429:
                time.sleep(0.5)

    def _ask(self, kind: str, rng: random.Random) -> int:
        body: dict[str, Any] = {"prompt": self._prompt(rng), "max_tokens": rng.randint(1, self.tokens)}
        body["temperature"] = rng.choice([0.0, 0.8])
        if kind in ("stream", "cancel"):
            body["stream"] = True
        if kind == "seed":
            body["seed"] = rng.randint(0, 9)
        if kind == "stop":
            body["stop"] = [" the", "e"]
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=600)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if kind == "cancel" and answer.status == 200:
                for _ in range(rng.randint(0, 40)):
                    answer.readline()
                return 200
            text = answer.read()
            if answer.status not in (200, 429):
                self._fault(f"{kind}: {answer.status}: {text[:300]!r}")
            elif kind == "stream" and answer.status == 200 and b"[DONE]" not in text:
                self._fault(f"a stream without an end: {text[-200:]!r}")
            return answer.status
        finally:
            connection.close()

    def _prompt(self, rng: random.Random) -> str:
        shared = random.Random(rng.randint(0, 3))  # one of four beginnings
        beginning = [shared.choice(WORDS) for _ in range(self.tokens // 3)] if rng.random() < 0.7 else []
        return " ".join(beginning + [rng.choice(WORDS) for _ in range(rng.randint(1, self.tokens // 2))])

    def _fault(self, what: str) -> None:
        with self._lock:
            self.faults.append(what)


def medians(samples: list[tuple[float, int]], parts: int) -> list[int]:
    """Of the parts of the time, each as long."""
    begin, end = samples[0][0], samples[-1][0] + 1e-9
    of_parts: list[list[int]] = [[] for _ in range(parts)]
    for at, value in samples:
        of_parts[int((at - begin) / (end - begin) * parts)].append(value)
    return [int(statistics.median(values)) for values in of_parts if values]


def soak(server: Server, minutes: float, num_clients: int, tokens: int, seed: int) -> dict[str, Any]:
    """The figures, and under ``faults`` what is not as it should be."""
    begin = time.monotonic()
    deadline = begin + 60 * minutes
    clients = Clients(server, tokens, seed)
    samples: list[tuple[float, int]] = []
    with ThreadPoolExecutor(num_clients) as pool:
        running = [pool.submit(clients.run, deadline) for _ in range(num_clients)]
        while not all(each.done() for each in running) and server.process.poll() is None:
            samples.append((time.monotonic() - begin, server.resident_bytes))
            time.sleep(min(SAMPLE_SECONDS, 6 * minutes))
        for each in running:
            each.result()
    faults = clients.faults
    if server.process.poll() is not None:
        return {"faults": [*faults, f"the server has ended with {server.process.poll()}"]}
    report: dict[str, Any] = {}
    for _ in range(600):  # what was cancelled last is noticed a little later
        report = server.get("/v1/cache/stats?blocks=1")
        if not any(report["running"].values()):
            break
        time.sleep(0.1)
    pool_figures, health = report["pool"], server.get("/health")
    states: Counter[str] = Counter()
    for group in report["blocks"]:
        for state, number in group["runs"]:
            states[state] += number
    warm = [sample for sample in samples if sample[0] >= WARM_PART * 60 * minutes] or samples
    resident = medians(warm, 4)
    growth = resident[-1] / resident[0] - 1
    for is_wrong, what in (
        (any(report["running"].values()), "requests are left"),
        (states["l"] or states["s"], f"{states['l'] + states['s']} blocks are held by nobody who is known"),
        (pool_figures["live_blocks"] != pool_figures["cached_blocks"], "blocks are not the prefix cache's"),
        (
            pool_figures["live_blocks"] + pool_figures["free_blocks"] != pool_figures["total_blocks"],
            "blocks are lost",
        ),
        (report["server"]["requests"]["failed"], "requests have failed"),
        (health["restarts"], "the generation thread was started again"),
        (growth > FLAT, f"resident memory has grown by {growth:.1%}"),
    ):
        if is_wrong:
            faults.append(what)
    return {
        "faults": faults[:20],
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "clients": num_clients,
        "requests": report["server"]["requests"],
        "kinds": dict(sorted(clients.counts.items())),
        "prompt_tokens": report["server"]["prompt_tokens"],
        "cached_tokens": report["server"]["cached_tokens"],
        "generated_tokens": report["server"]["generated_tokens"],
        "preemptions": pool_figures["preemptions"],
        "evictions": pool_figures["evictions"],
        "blocks": {name: pool_figures[f"{name}_blocks"] for name in ("total", "live", "cached", "free")},
        "resident_mb": [round(value / 1e6, 1) for value in resident],
        "resident_growth": round(growth, 4),
        "resident_spread": round(max(resident) / min(resident) - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--tokens", type=int, default=4096, help="that the budget holds, about (default: 4096)")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    first = Server(args.model, "--kv-cache-memory", "100MB", "--log-level", "ERROR")
    per_token = first.get("/v1/cache/stats")["pool"]["bytes_per_token"]
    first.process.terminate()
    first.process.wait(60)
    budget = per_token * args.tokens
    server = Server(args.model, "--kv-cache-memory", str(budget), "--log-level", "WARNING", "--max-tokens", "64")
    # A prompt has two thirds of this on average, and an answer half; together they want twice the budget.
    each = int(2 * args.tokens / args.clients / 1.1)
    try:
        figures = soak(server, args.minutes, args.clients, each, args.seed)
    finally:
        server.process.terminate()
    if (code := server.process.wait(120)) != 0:
        figures["faults"].append(f"the server ended with {code}")
    if figures["faults"]:
        figures["log"] = Path(server.log.name).read_text()[-3000:]
    print(json.dumps(figures, indent=1))
    sys.exit(1 if figures["faults"] else 0)


if __name__ == "__main__":
    main()
