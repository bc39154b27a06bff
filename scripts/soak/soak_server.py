"""Load a server with about twice what its budget holds, for some minutes, and check that nothing is lost.

    python scripts/soak/soak_server.py --model path/to/model --minutes 60 --rounds 12 --tokens 4096

It starts ``python -m mlx_paged server`` with room for ``--tokens`` tokens. Clients that together want twice as many
come and go: short and long prompts, with beginnings that others share and without, streams, answers that nobody waits
for, samples with seeds, stop strings. They do so in rounds, between which the server rests until it has given back
what it keeps for work to come. When the time is over no request is sent any more, and those that run have a minute to
end. Then the script exits with 1 unless

- the process is the one that was started, it is healthy, and no request has failed or is left;
- every block that is held is held by the prefix cache;
- resident memory at rest has grown by no more than 5 % since the first round that ended warm: every kind of request
  had been answered, requests preempted, and blocks evicted. It is not compared if fewer than two rounds did.

The figures are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.processes.server_process import ServerProcess

FLAT = 0.05  # rounds of a few minutes vary by 3 %
WARM_REQUESTS = 50  # per client, by the end of a round whose memory counts
REST_SECONDS = 10  # without work: the server trims its heap after 5
DRAIN_SECONDS = 60  # for the answers to requests sent before a deadline
KINDS = ["whole", "stream", "cancel", "seed", "stop"]
WORDS = ["the", "river", "bank", "was", "cold", "and", "nobody", "who", "had", "seen", "it", "before", "a", "lamp"]


def resident_bytes(server: ServerProcess) -> int:
    pid, status = server.process.pid, Path(f"/proc/{server.process.pid}/status")
    if status.exists():
        match = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
        assert match is not None
        return int(match[1]) << 10
    listed = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(listed.stdout) << 10


class Clients:
    """Clients that send requests of all kinds until a deadline.

    Args:
        server: the server they send to.
        tokens: most tokens of a prompt, and of its answer.
    """

    def __init__(self, server: ServerProcess, tokens: int) -> None:
        self.server, self.tokens = server, tokens
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._rng = random.Random(0)
        self._lock = threading.Lock()

    def run(self, deadline: float) -> None:
        """Run one client until the deadline."""
        with self._lock:
            rng = random.Random(self._rng.random())
        while time.monotonic() < deadline:
            kind = rng.choice([*KINDS, "whole"])
            try:
                status = self._ask(kind, rng)
            except (OSError, HTTPException) as error:
                status = 0
                self.fault(f"{kind}: {type(error).__name__}: {error}")
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
                self.fault(f"{kind}: {answer.status}: {text[:300]!r}")
            elif kind == "stream" and answer.status == 200 and b"[DONE]" not in text:
                self.fault(f"a stream without an end: {text[-200:]!r}")
            return answer.status
        finally:
            connection.close()

    def _prompt(self, rng: random.Random) -> str:
        shared = random.Random(rng.randint(0, 3))  # one of four beginnings
        beginning = [shared.choice(WORDS) for _ in range(self.tokens // 3)] if rng.random() < 0.7 else []
        return " ".join(beginning + [rng.choice(WORDS) for _ in range(rng.randint(1, self.tokens // 2))])

    def fault(self, what: str) -> None:
        with self._lock:
            self.faults.append(what)


def growth(values: list[int]) -> float:
    """Return the growth from the first value to the last, as a fraction of the first."""
    return values[-1] / values[0] - 1


def run_round(server: ServerProcess, clients: Clients, num_clients: int, deadline: float) -> bool:
    """Run clients until the deadline, then let the server rest. Return whether all requests were answered."""
    threads = [threading.Thread(target=clients.run, args=(deadline,), daemon=True) for _ in range(num_clients)]
    for each in threads:
        each.start()
    limit = deadline + DRAIN_SECONDS
    for each in threads:
        each.join(max(0.0, limit - time.monotonic()))
    if waiting := sum(each.is_alive() for each in threads):
        clients.fault(f"{waiting} requests had no answer {DRAIN_SECONDS} s after the deadline")
        return False
    idle_since = time.monotonic()
    while time.monotonic() < idle_since + REST_SECONDS and server.process.poll() is None:
        # The server notices the last cancellations a little later. Requests that never end are reported at the end.
        if any(server.stats()["running"].values()) and time.monotonic() < limit:
            idle_since = time.monotonic()
        time.sleep(0.5)
    return True


def soak(server: ServerProcess, minutes: float, rounds: int, num_clients: int, tokens: int) -> dict[str, Any]:
    """Run the rounds. Return the figures, with failures under ``faults``."""
    begin = time.monotonic()
    clients = Clients(server, tokens)
    at_rest: list[int] = []  # resident bytes after rounds that ended warm
    for left in range(rounds, 0, -1):
        now = time.monotonic()
        seconds = (begin + 60 * minutes - now) / left - REST_SECONDS
        if not run_round(server, clients, num_clients, now + max(1.0, seconds)):
            break
        if server.process.poll() is not None:
            return {"faults": [*clients.faults, f"the server has ended with {server.process.poll()}"]}
        pool, num_requests = server.stats()["pool"], sum(clients.counts.values())
        if (
            num_requests >= WARM_REQUESTS * num_clients
            and all(clients.counts[f"{kind} 200"] for kind in KINDS)
            and pool["preemptions"] > 0
            and pool["evictions"] > 0
        ):
            at_rest.append(resident_bytes(server))
        print(f"{left - 1} rounds are left after {num_requests} requests: {at_rest}", file=sys.stderr, flush=True)
    report = server.stats()
    pool = report["pool"]
    states: Counter[str] = Counter()
    for group in report["blocks"]:
        for state, number in group["runs"]:
            states[state] += number
    grown = growth(at_rest) if len(at_rest) > 1 else None
    for is_wrong, what in (
        (any(report["running"].values()), "requests are left"),
        (states["l"] or states["s"], f"{states['l'] + states['s']} blocks are held by nobody who is known"),
        (pool["live_blocks"] != pool["cached_blocks"], "blocks are not the prefix cache's"),
        (pool["live_blocks"] + pool["free_blocks"] != pool["total_blocks"], "blocks are lost"),
        (report["server"]["requests"]["failed"], "requests have failed"),
        (grown is not None and grown > FLAT, f"resident memory at rest has grown by {grown or 0:.1%}"),
    ):
        if is_wrong:
            clients.fault(what)
    return {
        "faults": clients.faults[:20],
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "clients": num_clients,
        "kinds": dict(sorted(clients.counts.items())),
        "server": report["server"],
        "pool": pool,
        "at_rest_mb": [round(value / 1e6, 1) for value in at_rest],
        "at_rest_growth": grown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="that the time has (default: 5)")
    parser.add_argument("--tokens", type=int, default=4096, help="that the budget holds, about (default: 4096)")
    parser.add_argument("--clients", type=int, default=16)
    args = parser.parse_args()
    folder = tempfile.TemporaryDirectory(prefix="soak")
    path = os.pathsep.join(filter(None, sys.path))  # this checkout's modules
    start = partial(ServerProcess, args.model, Path(folder.name), cold=True, PYTHONPATH=path)
    first = start("--kv-cache-memory", "100MB", "--log-level", "ERROR")
    per_token = first.stats()["pool"]["bytes_per_token"]
    first.stop()
    server = start("--kv-cache-memory", str(per_token * args.tokens), "--log-level", "WARNING", "--max-tokens", "64")
    # On average a prompt takes two thirds of this and an answer half, so all clients need twice the budget.
    each = int(2 * args.tokens / args.clients / 1.1)
    try:
        figures = soak(server, args.minutes, args.rounds, args.clients, each)
    finally:
        code = server.stop()
    if code != 0:
        figures["faults"].append(f"the server ended with {code}")
    if figures["faults"]:
        figures["log"] = server.log[-3000:]
    print(json.dumps(figures, indent=1))
    sys.exit(1 if figures["faults"] else 0)


if __name__ == "__main__":
    main()
