"""What idle connections and slow readers cost: the server's memory, and how long an ordinary client waits.

    python scripts/clients/bench_connections.py [--idle 1000] [--slow 200] [--rounds 4]

Each is measured in turns with and without the others, since a machine is never quiet:

- idle: connections that have asked once and say nothing more;
- slow: streams whose readers take five bytes a second, or nothing, beside as many whose readers take all. Both are
  computed in the same batch, so what they differ in is what slowness costs. Afterwards the slow ones have been computed
  and lie unread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from mlx_paged.serve.http.listener import raised_file_limit
from scripts.demo_model import ensure_demo_model
from tests.support.models.tiny_model import make_tools_model
from tests.support.processes.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
ASKED = 40  # requests of the ordinary client in one round
NO_END = {"2": -1e4}
ECHOED = "information international " * 2000  # an answer that begins with so much fills what the systems keep for it


class Waits(NamedTuple):
    """Of an ordinary client, in milliseconds; with what the server's CPUs take for one of its requests."""

    first: list[float]
    between: list[float]
    cpu: list[float]

    def __str__(self) -> str:
        waits = "; ".join(
            f"{name} {statistics.median(times):6.1f}, 9 of 10 below {sorted(times)[len(times) * 9 // 10]:6.1f}"
            for name, times in (("first token", self.first), ("per token", self.between))
        )
        return f"{waits}; CPU {statistics.median(self.cpu):.1f}"


def memory(server: ServerProcess) -> float:
    """Resident, in MB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def cpu_seconds(server: ServerProcess) -> float:
    """That the server has had, in steps of a clock tick."""
    figures = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(figures[11]) + int(figures[12])) / os.sysconf("SC_CLK_TCK")


def blocked(server: ServerProcess) -> int:
    """Connections whose client has not read what the server has written."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        int(line[1].rpartition(":")[2], 16) == server.port and int(line[4].partition(":")[0], 16) > 0 for line in lines
    )


def waits(server: ServerProcess, asked: int) -> Waits:
    """An ordinary client reads streams of eight tokens, one after the other."""
    measured, cpu = Waits([], [], []), cpu_seconds(server)
    for _ in range(asked):
        begin = time.perf_counter()
        with server.send_and_leave_open(COMPLETIONS, {"prompt": "Hello", "max_tokens": 8, "stream": True}) as client:
            lines = iter(client.makefile().readline, "0\n")  # the last chunk
            times = [time.perf_counter() for line in lines if _is_token(line)]
        measured.first.append((times[0] - begin) * 1000)
        measured.between.append((times[-1] - times[0]) / max(1, len(times) - 1) * 1000)
    measured.cpu.append((cpu_seconds(server) - cpu) * 1000 / asked)
    return measured


def _is_token(line: str) -> bool:
    return line.startswith("data: {") and bool(json.loads(line[6:])["choices"])


@contextlib.contextmanager
def idle_connections(server: ServerProcess, number: int) -> Iterator[None]:
    with contextlib.ExitStack() as files:
        for _ in range(number):
            client = files.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        yield


@contextlib.contextmanager
def readers(server: ServerProcess, number: int, tokens: int, bytes_a_second: float) -> Iterator[None]:
    """Streams that are read at some speed until the end: ``inf``: as they come; 0: not at all."""
    is_over = threading.Event()
    body = {"prompt": ECHOED, "echo": True, "max_tokens": tokens, "stream": True, "logit_bias": NO_END}
    raw = json.dumps(body).encode()
    with contextlib.ExitStack() as files:
        clients = []
        for _ in range(number):
            client = files.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
            )
            clients.append(client)

        def read() -> None:
            for client in clients:
                client.setblocking(False)
            while not is_over.wait(0.05 if bytes_a_second > 5 else 1.0):
                for client in clients:
                    with contextlib.suppress(BlockingIOError):
                        while client.recv(65536 if bytes_a_second > 5 else 5) and bytes_a_second > 5:
                            pass

        thread = threading.Thread(target=read)
        if bytes_a_second:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            if bytes_a_second:
                thread.join()


def tell(name: str, server: ServerProcess, measured: Waits) -> None:
    print(f"{name:32} {memory(server):6.1f} MB; {measured}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6, help="of each slow reader's answer")
    args = parser.parse_args()
    raised_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tools_model(Path(folder) / "model", ensure_demo_model())
        flags = ("--log-level", "WARNING", "--decode-concurrency", str(args.slow + 1))
        server = ServerProcess(model, Path(folder), *flags, cold=True)
        waits(server, ASKED)
        every: dict[str, Waits] = {}

        def note(name: str, asked: int = ASKED) -> None:
            measured = waits(server, asked)
            tell(name, server, measured)
            known = every.setdefault(name, Waits([], [], []))
            known.first.extend(measured.first)
            known.between.extend(measured.between)
            known.cpu.extend(measured.cpu)

        for _ in range(args.rounds):
            note("alone")
            with idle_connections(server, args.idle):
                note(f"{args.idle} idle connections")
        server.post(COMPLETIONS, {"prompt": ECHOED, "max_tokens": 1}, timeout=600)  # computed once, for all
        for _ in range(args.rounds):
            for name, speed in (("all they get", float("inf")), ("5 bytes a second", 5.0), ("nothing", 0.0)):
                with readers(server, args.slow, args.tokens, speed):
                    server.wait_until(lambda: any(server.stats()["running"].values()))
                    note(f"{args.slow} read {name}", 3)
                    server.wait_until(lambda: server.is_idle, 600)
                    if speed != float("inf"):
                        print(f"{blocked(server)} connections have what is not read", flush=True)
                        note(f"{args.slow} unread, {name}")
                server.wait_until(lambda: server.is_idle, 600)
        print("all rounds:")
        for name, measured in every.items():
            tell(name, server, measured)
        assert server.stop() == 0


if __name__ == "__main__":
    main()
