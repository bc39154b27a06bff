"""Hostile clients and web pages: ambiguous framing, bodies, other origins, disconnects."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from mlx_paged.server.app import Gate
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.request import ChatInput
from mlx_paged.server.texts import check_images
from tests.support.models.tiny_model import VOCAB
from tests.support.processes.server_process import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: smuggled\r\nConnection: close\r\n\r\n"
BODY = b'{"prompt":"hi","max_tokens":1}'


def gate_of(host: str, origins: list[str] | None = None, *, has_keys: bool = False) -> Gate:
    parts: Any = SimpleNamespace(
        cli_args=SimpleNamespace(host=host, allowed_origins=origins), config=SimpleNamespace(api_keys=has_keys)
    )
    return Gate(lambda *_: None, parts)


def raw(server: ServerProcess, data: bytes) -> bytes:
    """Return what the server sends until it closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        try:
            client.sendall(data)
            while part := client.recv(65536):
                answer += part
        except ConnectionResetError:  # closed before all was sent
            pass
    return answer


def post(head: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head


FRAMING = {
    "two lengths": b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n" + SMUGGLED,
    "short and long": post(b"Content-Length: %d\r\nContent-Length: 99\r\n\r\n" % len(BODY)) + BODY + SMUGGLED,
    "space before the colon": b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n" + SMUGGLED,
    "a line without a colon": b"GET /health HTTP/1.1\r\nHost: x\r\nfoo\r\nContent-Length: 9\r\n\r\n" + SMUGGLED,
    "a bare CR": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\rContent-Length: 0\r\n\r\n" + SMUGGLED,
    "two codings": post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n") + SMUGGLED,
    "control character": post(b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n") + SMUGGLED,
    "very many headers": b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"\ra:" * 100_000 + b"\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\r\n\r\n",
}


@pytest.mark.demo_model
@pytest.mark.parametrize("name", FRAMING)
def test_ambiguous_framing_is_refused(server: ServerProcess, name: str) -> None:
    """It is refused by h11, beneath uvicorn."""
    answer = raw(server, FRAMING[name])
    assert answer.count(b"HTTP/1.1") <= 1 and b"mlx-lm" not in answer
    assert name == "very many headers" or answer.startswith(b"HTTP/1.1 400")
    assert server.get("/health").status == 200


@pytest.mark.demo_model
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed in /proc")
def test_prompts_are_made_in_the_servers_own_process(server: ServerProcess) -> None:
    """A process started in the current folder would run code from there."""
    assert server.post(CHAT, {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}).status == 200
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    assert not "".join(each.read_text() for each in children)


@pytest.mark.demo_model
def test_body_full_of_quotes_does_not_block_the_server(server: ServerProcess) -> None:
    assert server.post(COMPLETIONS, b'\\"' * (1 << 19)).status == 400
    assert server.post(COMPLETIONS, b'{"prompt":"' + b'\\"' * (1 << 20) + b'"}', timeout=30).status == 400  # too long
    assert server.get("/health").status == 200


@pytest.mark.demo_model
def test_many_answers_share_large_lists_of_stops_and_biases(server: ServerProcess) -> None:
    words = [chr(0x4E00 + n // 90) + chr(0x4E00 + n % 90) for n in range(1024)]
    answer = server.post(COMPLETIONS, {"prompt": [[1, 2], [4, 5]], "n": 64, "max_tokens": 1, "stop": words})
    assert answer.status == 200 and len(answer.json["choices"]) == 128
    bias = {str(token): 0.5 for token in range(VOCAB)}
    answer = server.post(COMPLETIONS, {"prompt": "a", "n": 16, "max_tokens": 1, "logit_bias": bias})
    assert answer.status == 200 and len(answer.json["choices"]) == 16


@pytest.mark.demo_model
def test_requests_of_other_origins_and_hosts_are_refused(server: ServerProcess) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for headers in (
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Host": "evil.example:8080"},
    ):
        answer = server.post(COMPLETIONS, body, **headers)
        assert answer.status == 403 and "access-control-allow-origin" not in answer.headers, headers
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.request("OPTIONS", COMPLETIONS, None, asked, 10).headers
    local = server.post(COMPLETIONS, body, Origin="http://localhost:3000")
    assert local.status == 200 and local.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert server.post(COMPLETIONS, body, Origin="vscode-webview://abc").status == 200


@pytest.mark.demo_model
def test_long_names_are_cut_and_extreme_numbers_give_no_nan(server: ServerProcess) -> None:
    before = len(server.log)
    answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "model": "a/" + "b" * (1 << 20)})
    assert answer.status == 404 and len(answer.body) < 2000 and len(server.log) - before < 4000
    body = {"prompt": [1, 500, 600, 700, 500], "max_tokens": 2, "logprobs": 1, "temperature": 1e-300}
    for penalty, status in ((1e-300, 400), (1e-3, 200), (0, 200)):
        answer = server.post(COMPLETIONS, {**body, "repetition_penalty": penalty})
        assert answer.status == status and b"NaN" not in answer.body, answer.body
    before = len(server.log)
    named = server.post(
        COMPLETIONS, {"prompt": "a", "max_tokens": 1, "a\r\n\0\u00fc": 1, **{f"x{n}": 1 for n in range(900)}}
    )
    assert named.status == 200 and named.headers["x-ignored-parameters"].startswith("a\\r\\n\\x00\\xfc, x0, ")
    assert len(server.log) - before < 4000
    for wrong in ({"logit_bias": {"1" * 5000: 1}}, {"adapters": "/no/such"}, {"draft_model": "/no/such"}):
        assert server.post(COMPLETIONS, {"prompt": "a", **wrong}).json["error"]["param"] == next(iter(wrong))


def test_only_images_in_data_urls_are_accepted() -> None:
    for url in ("http://127.0.0.1/small", "http://[", "file://127.0.0.1/etc/hostname", 3):
        chat = ChatInput([{"role": "user", "content": [{"type": "image", "image_url": {"url": url}}]}])
        with pytest.raises(RequestRefused, match="must be a data URL"):
            check_images(chat, takes_images=True)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eHh4"}}
    check_images(ChatInput([{"role": "user", "content": [part]}]), takes_images=True)


@pytest.mark.parametrize(
    ("host", "has_keys", "headers", "passes"),
    [
        ("127.0.0.1", False, {"host": "127.0.0.1:8080"}, True),
        ("127.0.0.1", False, {"host": "[::1]:8080"}, True),
        ("127.0.0.1", False, {"host": "me.localhost"}, True),
        ("127.0.0.1", False, {"host": "rebound.example"}, False),
        ("127.0.0.1", True, {"host": "behind.proxy.example"}, True),
        ("0.0.0.0", False, {"host": "server.lan.example"}, True),
        ("0.0.0.0", False, {"origin": "https://evil.example"}, False),
    ],
)
def test_gate_refuses_other_hosts_and_origins(host: str, has_keys: bool, headers: dict[str, str], passes: bool) -> None:
    gate = gate_of(host, has_keys=has_keys)
    if passes:
        gate.check(Headers(headers))
    else:
        with pytest.raises(RequestRefused) as caught:
            gate.check(Headers(headers))
        assert caught.value.status == 403
    gate_of(host, ["*"], has_keys=has_keys).check(Headers({"origin": "https://any.example"}))
