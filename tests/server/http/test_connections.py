"""HTTP/1.1: persistent connections, chunked bodies, pipelining, slow readers and idle connections."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.support.processes.server_process import ServerProcess

COMPLETIONS = "/v1/completions"


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
    for method, path in (("POST", "/nothing"), ("GET", "/health")):  # the server does not read these bodies
        assert ask(method, path, body)[0] in (200, 404)
    assert ask("GET", "/health")[0] == 200 and connection.sock is opened
    connection.close()


@pytest.mark.demo_model
def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
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
def test_idle_connections_and_slow_readers_do_not_block_others(server: ServerProcess) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(200)]
    slow = [
        server.send_and_leave_open(COMPLETIONS, {"prompt": "Hello", "max_tokens": 400, "stream": True})
        for _ in range(4)
    ]
    for client in idle[::2]:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    for _ in range(5):
        assert server.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 3}).status == 200
    for client in slow:
        assert client.recv(20).startswith(b"HTTP/1.1 200")
    for client in [*idle, *slow]:
        client.close()
    server.wait_until(lambda: server.is_idle)
