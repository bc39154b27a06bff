"""A server process on a free port of the loopback interface, for tests."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from mlx_paged.config import PagedConfig
from tests.support.processes.commands import ROOT, start

START_SECONDS, WAIT_SECONDS = 120, 60
BLOCK_SIZE = PagedConfig().tokens_per_block  # of a server on this machine


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServerProcess:
    """A process of ``python -m mlx_paged server``. ``log`` is its output. With ``cold``, it starts in a new
    interpreter."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, command: str | Path = "mlx_paged", cold: bool = False, **env: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log_file = folder / f"server-{self.port}.log"
        arguments = ("server", "--model", model, "--port", self.port, *flags)
        with self.log_file.open("w") as log:
            self.process = start(command, *arguments, stdout=log, stderr=log, cold=cold, **env)
        self.wait_until(lambda: self.is_up, START_SECONDS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return self.get("/health").status == 200
        except OSError:
            return False

    def wait_until(self, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        """Wait until the condition holds. The limit is generous: no test depends on how long it takes."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain\n{self.log[-3000:]}"
            time.sleep(0.05)

    def request(self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()})
        finally:
            connection.close()

    def get(self, path: str, timeout: float = 30, **headers: str) -> Answer:
        return self.request("GET", path, None, headers, timeout)

    def post(self, path: str, body: Any, timeout: float = 60, **headers: str) -> Answer:
        """POST an object as JSON, or bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, raw, headers, timeout)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        answer = self.post("/v1/chat/completions", {"messages": messages, **options})
        assert answer.status == 200, answer.body
        return answer.json

    def complete(self, prompt: Any, **options: Any) -> Any:
        """Return the answer to a completion, and fail if it is refused."""
        answer = self.post("/v1/completions", {"prompt": prompt, **options})
        assert answer.status == 200, answer.body
        return answer.json

    def send_and_leave_open(self, path: str, body: Any) -> socket.socket:
        """Send a request and return the connection, to be closed by the caller."""
        raw = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        return client

    def stats(self) -> Any:
        return self.get("/v1/cache/stats?blocks=1").json

    @property
    def is_idle(self) -> bool:
        """Return whether nothing runs or waits and every live block is the prefix cache's."""
        stats = self.stats()
        pool = stats["pool"]
        return not any(stats["running"].values()) and pool["live_blocks"] == pool["cached_blocks"]

    def wait_for(self, *, running: int) -> None:
        """Wait until ``running`` requests run."""
        self.wait_until(lambda: self.stats()["running"]["running"] == running)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Shut it down in order; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def check_end(self) -> None:
        """Stop it, and fail unless it ends in order and has logged no traceback."""
        assert self.stop() == 0, self.log[-3000:]
        assert "Traceback" not in self.log, self.log[-5000:]


def cached(answer: Any) -> int:
    """Return the cached prompt tokens of a chat or completion."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def together(call: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
    """Call a function with each item, all at once; return its results in order."""
    given = list(items)
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(call, given))


class FaultyServer(ServerProcess):
    """A server with faults or held steps while it computes; faulty_server.py describes them."""

    SCRIPT = ROOT / "tests" / "support" / "processes" / "faulty_server.py"

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self._fault = folder / "fault"
        super().__init__(model, folder, *flags, command=self.SCRIPT, FAULT=str(self._fault))

    def set_fault(self, fault: str) -> None:
        """Replace the fault atomically, so that no step reads a part of it."""
        written = self._fault.with_suffix(".new")
        written.write_text(fault)
        written.replace(self._fault)

    @contextmanager
    def holding(self, rows: int) -> Iterator[None]:
        """Hold all decode steps of ``rows`` rows or more; release them at the end, even if the test fails."""
        self.set_fault(f"holds {rows}")
        try:
            yield
        finally:
            self.set_fault("")
