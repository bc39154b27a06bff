"""What idle connections and slow readers cost: the server's memory, and how long another client waits.

python scripts/clients/bench_connections.py [--idle 1000] [--slow 10]
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mlx_paged.serve.http.listener import raised_file_limit
from scripts.demo_model import ensure_demo_model
from tests.support.models.tiny_model import make_tools_model
from tests.support.processes.server_process import ServerProcess

COMPLETIONS = "/v1/completions"


def memory(server: ServerProcess) -> float:
    """Resident, in MB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def waits(server: ServerProcess, path: str) -> str:
    times = []
    for _ in range(60):
        begin = time.perf_counter()
        answer = server.get(path) if path == "/health" else server.post(path, {"prompt": "Hello", "max_tokens": 4})
        times.append((time.perf_counter() - begin) * 1000)
        assert answer.status == 200
    times.sort()
    return f"{statistics.median(times):6.1f} ms, 9 of 10 below {times[54]:6.1f}"


def tell(server: ServerProcess, what: str) -> None:
    print(
        f"{what:30} {memory(server):7.1f} MB; /health {waits(server, '/health')}; 4 tokens {waits(server, COMPLETIONS)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=10)
    args = parser.parse_args()
    raised_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tools_model(Path(folder) / "model", ensure_demo_model())
        server = ServerProcess(model, Path(folder), "--log-level", "WARNING", cold=True)
        waits(server, COMPLETIONS)
        tell(server, "alone")
        idle = []
        for _ in range(args.idle):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            idle.append(client)
        tell(server, f"{args.idle} idle connections")
        body = {"prompt": "Hello", "max_tokens": 400, "stream": True, "logprobs": True, "top_logprobs": 20}
        slow = [server.send_and_leave_open(COMPLETIONS, body) for _ in range(args.slow)]
        server.wait_until(lambda: server.is_idle, 600)  # all is generated, and nobody has read it
        tell(server, f"and {args.slow} that do not read")
        for client in [*idle, *slow]:
            client.close()
        time.sleep(2)
        tell(server, "after all have gone")
        assert server.stop() == 0


if __name__ == "__main__":
    main()
