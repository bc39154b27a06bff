"""Servers with injected faults in the engine thread (faulty_server.py), with little memory, and at signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.server_process import Answer, FaultyServer, cached, together

pytestmark = pytest.mark.demo_model

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Once upon a time, in a forest far away from here, " * 5, "max_tokens": 8}
LONG = {**SHORT, "prompt": "In the beginning " * 20, "max_tokens": 100_000}


class WatchedServer(FaultyServer):
    """A server with a watchdog timeout of 3 s."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        super().__init__(model, folder, "--watchdog-timeout", "3", "--log-level", "WARNING", *flags)

    def fail_while_it_answers(self, fault: str, num_requests: int) -> list[Answer]:
        self.set_fault(fault)
        with ThreadPoolExecutor(num_requests) as pool:
            asked = [pool.submit(self.ask, {**LONG, "prompt": f"{n} {LONG['prompt']}"}) for n in range(num_requests)]
            self.wait_for(running=num_requests)
            os.kill(self.process.pid, signal.SIGUSR1)  # type: ignore[attr-defined]
            return [each.result() for each in asked]

    @property
    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/health").json
        return answer

    def ask(self, body: dict[str, Any]) -> Answer:
        return self.post(COMPLETIONS, body)


LOST = "the device failed: [METAL] Command buffer execution"


@pytest.mark.parametrize(
    ("fault", "reason", "logged"),
    [
        ("raises", "the engine failed: Fault: as asked", "the engine failed: Fault: as asked; exiting with status 70"),
        *((f"device {place}", LOST, "SubmissionsIgnored") for place in ("eval", "async_eval", "item")),
        ("loops", "no progress for 3 s", "no progress for 3 s; its stack:"),
        pytest.param("blocks", "no progress for 3 s", "no progress for 3 s; its stack:", marks=pytest.mark.slow),
    ],
)
def test_fault_in_a_step_is_answered_and_ends_the_process(
    fault: str, reason: str, logged: str, folder: Path, tmp_path: Path
) -> None:
    flags = ("--prefix-cache-dir", str(tmp_path / "prefixes"), "--kv-block-size", "16")
    faulty = WatchedServer(folder, tmp_path, *flags)
    for answer in faulty.fail_while_it_answers(fault, 2):
        assert answer.status == 503 and answer.headers["retry-after"] == "5", answer.body
        assert reason in answer.json["error"]["message"]
    assert faulty.process.wait(60) == 70
    assert logged in faulty.log and ("stack" not in logged or "faulty_server.py" in faulty.log)
    assert not list((tmp_path / "prefixes").glob("*.kv*"))


def test_error_of_the_device_at_a_write_to_disk_ends_the_process(folder: Path, tmp_path: Path) -> None:
    flags = ("--prefix-cache-dir", str(tmp_path / "prefixes"), "--kv-block-size", "16")
    faulty = WatchedServer(folder, tmp_path, *flags)
    faulty.set_fault("device write")
    os.kill(faulty.process.pid, signal.SIGUSR1)
    faulty.ask(SHORT)  # prefixes are written when the server is idle again
    assert faulty.process.wait(60) == 70
    assert "SubmissionsIgnored" in faulty.log and "exiting with status 70" in faulty.log
    assert not list((tmp_path / "prefixes").glob("*.kv*"))


def test_server_short_of_memory_answers_one_request_at_a_time(serve: Any) -> None:
    server = serve("--memory-watermark", "0.001")
    body = {**LONG, "max_tokens": 60}
    expected = server.complete(**body)["choices"][0]["text"]
    for answer in together(lambda _: server.complete(**body), range(3)):
        assert answer["choices"][0]["text"] == expected
    server.wait_until(lambda: server.get("/health").json["memory"]["pressure"] == "preempting")
    health = server.get("/health")
    assert health.status == 200 and health.json["status"] == "degraded"
    assert 0 < health.json["memory"]["used_bytes"] <= health.json["memory"]["limit_bytes"]
    server.wait_until(lambda: server.stats()["pool"]["live_blocks"] == 0)  # nothing stays cached
    assert "preempting" in server.log and server.stats()["server"]["requests"]["failed"] == 0


def streamed(client: socket.socket) -> bytes:
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_sigterm_finishes_accepted_requests_and_refuses_new_ones(serve: Any, tmp_path: Path) -> None:
    flags = ("--prefix-cache-dir", tmp_path / "prefixes", "--kv-block-size", "16")
    server = serve(*flags, kind=FaultyServer)
    body = {**LONG, "max_tokens": 200}
    with ThreadPoolExecutor(4) as pool:
        with server.holding(1):
            asked = pool.submit(server.post, COMPLETIONS, body)
            server.wait_for(running=1)
            clients = [server.send_and_leave_open(COMPLETIONS, {**body, "stream": True}) for _ in range(3)]
            server.wait_until(lambda: sum(server.stats()["running"].values()) == 4)
            server.set_fault("holds 4")
            server.wait_for(running=4)
            server.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: server.get("/health").json["status"] == "draining")
            assert server.get("/health").status == 503
            refused = server.post(COMPLETIONS, SHORT)
            assert refused.status == 503 and refused.headers["retry-after"] == "5"
            assert "shutting down" in refused.json["error"]["message"]
        answer = asked.result()
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 200
        for client in clients:
            assert b"[DONE]" in streamed(client)
    assert server.process.wait(60) == 0, server.log
    assert cached(serve(*flags).complete(**{**body, "max_tokens": 1})) > 0


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), pytest.param(signal.SIGTERM, signal.SIGINT, marks=pytest.mark.slow)],
)
def test_second_signal_ends_the_server_at_once(serve: Any, first: signal.Signals, second: signal.Signals) -> None:
    server = serve("--drain-timeout", "600")
    client = server.send_and_leave_open(COMPLETIONS, {**LONG, "stream": True})
    server.wait_for(running=1)
    server.process.send_signal(first)
    server.wait_until(lambda: server.get("/health").json["status"] == "draining")
    assert "waiting up to 600 s for 1 open answer" in server.log
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(0.3)
    server.process.send_signal(second)
    assert server.process.wait(60) == 0, server.log
    client.close()


def test_drain_timeout_ends_unfinished_requests(serve: Any) -> None:
    server = serve("--drain-timeout", "0.5")
    client = server.send_and_leave_open(COMPLETIONS, {**LONG, "stream": True})
    server.wait_for(running=1)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log
    assert b"shutting down" in streamed(client)
