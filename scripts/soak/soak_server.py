"""Loads a server with about twice what its budget holds, for some minutes, and checks that nothing is lost.

    python scripts/soak/soak_server.py --model path/to/model --minutes 60 --rounds 12 --tokens 4096

It starts ``python -m mlx_paged server`` with room for ``--tokens`` tokens. Clients that together want twice as many
come and go: short and long prompts, with beginnings that others share and without, streams, answers that nobody waits
for, samples with seeds, stop strings. They do so in rounds, between which the server rests until it has given back
what it keeps for work to come. At the end the script exits with 1 unless

- the process is the one that was started, it is healthy, has restarted nothing, and no request has failed;
- every block that is held is held by the prefix cache;
- resident memory at rest has grown by no more than 2 % since the first round, which is there to warm up: in it every
  kind of request has been answered, requests have been preempted, and blocks evicted. Where a round has few requests,
  as on a busy machine, those before it warm up as well, and do not count.

The figures are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.processes.server_process import ServerProcess

FLAT = 0.02
WARM_REQUESTS = 50  # per client, by the end of the first round
REST_SECONDS = 10.0  # without work: the server trims its heap after 5
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


class Round(NamedTuple):
    """Figures of one round.

    Attributes:
        at_rest: resident bytes after the rest.
        warms: whether by its end every kind of request was answered, requests were preempted and blocks evicted.
    """

    at_rest: int
    warms: bool


def growth(values: list[int]) -> float:
    """Return the growth from the first value to the last, as a fraction of the first."""
    return values[-1] / values[0] - 1


def run_round(server: ServerProcess, clients: Clients, num_clients: int, seconds: float) -> Round | None:
    """Run clients for ``seconds``, then let the server rest. Return None if the server has ended."""
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(num_clients) as pool:
        for each in [pool.submit(clients.run, deadline) for _ in range(num_clients)]:
            each.result()
    idle_since = time.monotonic()
    while time.monotonic() < idle_since + REST_SECONDS:
        if server.process.poll() is not None:
            return None
        # The server notices the last cancellations a little later. Requests that never end are reported at the end.
        report = server.get("/v1/cache/stats").json
        if any(report["running"].values()) and time.monotonic() < deadline + 300:
            idle_since = time.monotonic()
        time.sleep(0.5)
    has_all = all(clients.counts[f"{kind} 200"] for kind in KINDS)
    counts = report["pool"]
    warms = has_all and counts["preemptions"] > 0 and counts["evictions"] > 0
    return Round(resident_bytes(server), warms)


def soak(server: ServerProcess, minutes: float, rounds: int, num_clients: int, tokens: int) -> dict[str, Any]:
    """Run the rounds. Return the figures, with failures under ``faults``."""
    begin = time.monotonic()
    clients = Clients(server, tokens)
    done: list[Round] = []
    faults = clients.faults
    while len(done) < rounds:
        each = run_round(server, clients, num_clients, 60 * minutes / rounds)
        if each is None:
            return {"faults": [*faults, f"the server has ended with {server.process.poll()}"]}
        num_requests = sum(clients.counts.values())
        if done or num_requests >= WARM_REQUESTS * num_clients:
            done.append(each)
        print(f"round {len(done)}: {each}, {num_requests} requests", file=sys.stderr, flush=True)
    report = server.stats()
    pool_figures = report["pool"]
    states: Counter[str] = Counter()
    for group in report["blocks"]:
        for state, number in group["runs"]:
            states[state] += number
    at_rest = [each.at_rest for each in done]
    for is_wrong, what in (
        (any(report["running"].values()), "requests are left"),
        (states["l"] or states["s"], f"{states['l'] + states['s']} blocks are held by nobody who is known"),
        (pool_figures["live_blocks"] != pool_figures["cached_blocks"], "blocks are not the prefix cache's"),
        (
            pool_figures["live_blocks"] + pool_figures["free_blocks"] != pool_figures["total_blocks"],
            "blocks are lost",
        ),
        (report["server"]["requests"]["failed"], "requests have failed"),
        (not done[0].warms, "the first round was too short to warm up"),
        (growth(at_rest) > FLAT, f"resident memory at rest has grown by {growth(at_rest):.1%}"),
    ):
        if is_wrong:
            faults.append(what)
    return {
        "faults": faults[:20],
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "clients": num_clients,
        "kinds": dict(sorted(clients.counts.items())),
        "server": report["server"],
        "pool": pool_figures,
        "at_rest_mb": [round(value / 1e6, 1) for value in at_rest],
        "at_rest_growth": round(growth(at_rest), 4),
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
    start = partial(ServerProcess, args.model, Path(folder.name), cold=True)
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
