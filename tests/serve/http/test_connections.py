"""HTTP/1.1: connections that stay, chunks both ways, readers that are slow, and very many that say nothing."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.serve.api.form import Event
from mlx_paged.serve.http import event_stream, listener
from mlx_paged.serve.http.event_stream import EventStream
from mlx_paged.serve.refusal import invalid
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import ServerProcess

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder)
    process = ServerProcess(folder, tmp_path_factory.mktemp("server"), "--max-tokens", "3", "--log-level", "WARNING")
    yield process
    assert process.stop() == 0, process.log
    assert "Traceback" not in process.log, process.log


@pytest.mark.demo_model
def test_one_connection_takes_many_requests(server: ServerProcess) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"prompt": "Hello", "max_tokens": 2})
    connection.connect()
    opened = connection.sock

    def ask(method: str, path: str, body: Any = None, **options: Any) -> tuple[int, bytes]:
        connection.request(method, path, body, **options)
        answer = connection.getresponse()
        return answer.status, answer.read()

    assert ask("GET", "/health")[0] == 200
    assert ask("POST", COMPLETIONS, body)[0] == 200
    assert ask("POST", COMPLETIONS, iter([body[:9].encode(), body[9:].encode()]), encode_chunked=True)[0] == 200
    status, stream = ask("POST", COMPLETIONS, json.dumps({"prompt": "Hello", "max_tokens": 2, "stream": True}))
    assert status == 200 and stream.endswith(b"data: [DONE]\n\n")
    assert ask("POST", COMPLETIONS, json.dumps({"prompt": 3}))[0] == 400
    assert ask("HEAD", "/v1/models") == (200, b"")
    assert ask("OPTIONS", COMPLETIONS) == (204, b"")
    assert ask("GET", "/")[0] == 307 and ask("GET", "/nothing")[0] == 404
    assert connection.sock is opened
    for method, path, left in (("POST", "/nothing", body), ("GET", "/health", body)):  # whose bodies nobody reads
        connection.request(method, path, left)
        answer = connection.getresponse()
        assert answer.read() and answer.getheader("Connection") == "close" and answer.will_close
    connection.close()


@pytest.mark.demo_model
def test_requests_that_are_sent_at_once_are_answered_in_order(server: ServerProcess) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    one = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (COMPLETIONS.encode(), len(body), body)
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(one + one + last)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200 OK") == 3 and answer.count(b"text_completion") == 2
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["status"] == "ok"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:  # HTTP/1.0 has no chunks
        streamed = body[:-1] + b', "stream": true}'
        client.sendall(
            b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (COMPLETIONS.encode(), len(streamed), streamed)
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"Transfer-Encoding" not in answer and answer.endswith(b"data: [DONE]\n\n")


@pytest.mark.demo_model
def test_idle_connections_and_slow_readers_cost_others_nothing(server: ServerProcess) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(200)]
    slow = [
        server.send_and_leave_open(COMPLETIONS, {"prompt": "Hello", "max_tokens": 400, "stream": True})
        for _ in range(4)
    ]
    for client in idle[::2]:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    for _ in range(5):
        assert server.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 3}, timeout=20).status == 200
    for client in slow:
        assert client.recv(20).startswith(b"HTTP/1.1 200")
    for client in [*idle, *slow]:
        client.close()
    server.wait_until(lambda: server.is_idle)


def test_one_connection_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from http.server import BaseHTTPRequestHandler
    from threading import Thread

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
    with listener.Listener(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def ask() -> tuple[socket.socket, bytes]:
            client = socket.create_connection(server.server_address[:2], timeout=20)  # type: ignore[arg-type]
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return client, client.recv(4096)

        open_ones = [ask() for _ in range(3)]
        assert all(b" 204 " in answer for _, answer in open_ones)
        refused, answer = ask()
        assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After" in answer and b"3 connections are open" in answer
        open_ones[0][0].close()
        wait_for(lambda: ask()[1].startswith(b"HTTP/1.1 204"))
        server.shutdown()
        thread.join()
        for client in [refused, *(client for client, _ in open_ones[1:])]:
            client.close()


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
    raise AssertionError("in vain")


def test_a_stream_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(event_stream.time, "monotonic", lambda: now)
    out = io.BytesIO()
    stream = EventStream(out.write, is_chunked=True)
    stream.beat("keepalive 1/2")
    assert not out.getvalue()
    now += 1.0
    stream.beat("keepalive 1/2")
    stream.beat("keepalive 1/2")
    assert out.getvalue() == b"11\r\n: keepalive 1/2\n\n\r\n"
    stream.send([Event({"a": 1}), Event("[DONE]", "end")])
    stream.send([])
    stream.fail(invalid("no", "x"))
    assert b'data: {"a": 1}\n\nevent: end\ndata: [DONE]\n\n' in out.getvalue()
    assert b'"param": "x"' in out.getvalue() and out.getvalue().endswith(b"\r\n0\r\n\r\n")


@pytest.mark.demo_model
@pytest.mark.parametrize("behind", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_goes_is_noticed_whatever_it_has_sent(server: ServerProcess, behind: bytes) -> None:
    endless = {"prompt": "Hello", "max_tokens": 1 << 20, "n": 2, "logit_bias": {"39": 1000}}
    client = server.send_and_leave_open(COMPLETIONS, endless)
    server.wait_until(lambda: any(server.stats()["running"].values()))
    client.sendall(behind)
    client.close()
    server.wait_until(lambda: server.is_idle)


@pytest.mark.demo_model
def test_long_prompts_are_scored_between_the_steps_of_others(server: ServerProcess) -> None:
    scored = {"prompt": [[number + 5] * 1000 for number in range(200)], "max_tokens": 0, "echo": True, "logprobs": 0}
    with server.send_and_leave_open(COMPLETIONS, scored) as client:
        server.wait_until(lambda: server.stats()["running"]["waiting"] > 20)
        assert server.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 3}).status == 200
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # it is not answered yet
            client.recv(1)
    server.wait_until(lambda: server.is_idle)
    assert server.get("/health").json["restarts"] == 0
