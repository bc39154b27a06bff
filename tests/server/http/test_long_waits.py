"""Streams send keepalives during long prompts, and clients that do not read cost others little."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import make_tools_model
from tests.support.processes.server_process import ServerProcess
from tests.support.server.answers import PATHS, body_of

NO_THINKING = '{"enable_thinking": false}'
NO_END = {"2": -1e4}
CHUNK = 512  # tokens of a prefill chunk, which takes a fraction of a second


@pytest.fixture(scope="module")
def server(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tools_model(tmp_path_factory.mktemp("tools"), demo_model_folder)
    flags = ("--max-tokens", "3", "--chat-template-args", NO_THINKING, "--log-level", "WARNING")
    process = ServerProcess(folder, tmp_path_factory.mktemp("server"), *flags, "--prefill-step-size", str(CHUNK))
    yield process
    process.wait_until(lambda: process.is_idle)
    process.check_end()


def words(name: str, number: int) -> str:
    """Return a prompt of somewhat more than ``number`` tokens that begins with the name."""
    return f"{name} the long land was cold. " * (number // 7)


def read_stream(server: ServerProcess, path: str, body: Any) -> list[str]:
    """Return the lines of a streamed answer."""
    lines = []
    with server.send_and_leave_open(path, {**body, "stream": True}) as client:
        client.settimeout(120)
        with client.makefile() as file:
            for line in file:
                lines.append(line.strip())
                if line == "0\n":  # the last chunk
                    return lines
    raise AssertionError(lines)


@pytest.mark.demo_model
def test_streams_send_keepalives_during_long_prompts(server: ServerProcess) -> None:
    """Four requests at once: three wait while another one's prompt is computed."""
    with ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda path: read_stream(server, path, body_of(path, words(path, 5 * CHUNK))), PATHS))
    num_beats = 0
    for lines in streams:
        assert lines[0] == "HTTP/1.1 200 OK"
        num_beats += sum(line.startswith(": keepalive") for line in lines)
    assert num_beats >= 2, streams


def unread(server: ServerProcess, number: int, body: dict[str, Any]) -> list[socket.socket]:
    """Open streams that are never read, with small receive buffers."""
    clients = []
    for _ in range(number):
        client = server.send_and_leave_open("/v1/completions", {**body, "stream": True})
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        clients.append(client)
    return clients


@pytest.mark.slow
@pytest.mark.demo_model
def test_unread_answer_is_ended_and_its_blocks_are_freed(server: ServerProcess) -> None:
    body = {"prompt": "Hello", "max_tokens": 200_000, "logprobs": True, "top_logprobs": 20, "logit_bias": NO_END}
    with contextlib.ExitStack() as files:
        for client in unread(server, 3, body):
            files.enter_context(client)
        server.wait_until(lambda: sum(server.stats()["running"].values()) == 3, 30)
        assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 3}).status == 200
        server.wait_until(lambda: server.is_idle, 300)  # although the connections stay open
    assert server.stats()["server"]["generated_tokens"] < 100_000
