"""Operation of a server: models, keys, refusals, log, figures and shutdown."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.cli.server import parse
from mlx_paged.server import texts as server_texts
from mlx_paged.server.http import in_worker
from mlx_paged.server.request import Prompt, ServerRequest
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import FaultyServer, ServerProcess

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
ONE, TWO = {"Authorization": "Bearer one"}, {"x-api-key": "two"}
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - .+")


@pytest.fixture(scope="module")
def server(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    models = tmp_path_factory.mktemp("models")
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder)
    make_tiny_model(models / "other", demo_model_folder, "gemma3")
    (models / "empty").mkdir()
    flags = ("--model-dir", str(models), "--strict-parameters", "--served-model-name", "house")
    flags += ("--api-key", "one", "--api-key", "two", "--kv-cache-memory", "8MB")
    process = FaultyServer(folder, tmp_path_factory.mktemp("server"), *flags)
    yield process
    process.kill()


@pytest.mark.demo_model
def test_only_listed_models_are_served(server: ServerProcess) -> None:
    listed = [model["id"] for model in server.get("/v1/models", **ONE).json["data"]]
    assert listed[0] == "house" and "other" in listed and "empty" not in listed
    folder = next(name for name in listed if name.startswith("/"))
    for name in ("other", folder, "house"):
        assert server.post(COMPLETIONS, {"model": name, "prompt": "a", "max_tokens": 1}, **ONE).status == 200
    for name in ("nobody", "empty", "../other", f"{folder}/", str(Path(folder).parent)):
        asked = server.post(COMPLETIONS, {"model": name, "prompt": "a"}, **ONE)
        looked = server.get(f"/v1/models/{name}", **ONE)
        for answer in (asked, looked):
            words = answer.json["error"]["message"]
            assert answer.status == 404 and "'house'" in words and "'other'" in words and "--served-model-name" in words


@pytest.mark.demo_model
def test_refusals_have_the_form_of_the_api(server: ServerProcess) -> None:
    long = {"role": "user", "content": "word " * 30_000}
    for body, status, kind, code in (
        ({"messages": [long], "max_tokens": 1}, 400, "invalid_request_error", "context_length_exceeded"),
        ({"messages": [long], "max_tokens": 1, "temprature": 1}, 400, "invalid_request_error", None),
        ({"messages": [long], "max_tokens": 1, "model": "nobody"}, 404, "not_found_error", "model_not_found"),
    ):
        ours, theirs = (server.post(path, body, **TWO) for path in ("/v1/chat/completions", MESSAGES))
        assert ours.status == theirs.status == status
        assert ours.json["error"].keys() == {"message", "type", "param", "code"}
        assert ours.json["error"]["type"] == kind and ours.json["error"]["code"] == code
        assert theirs.json["type"] == "error" and theirs.json["error"]["type"] == kind
        if code == "context_length_exceeded":  # clients recognise it by these words
            assert all(each.json["error"]["message"].startswith("prompt is too long: ") for each in (ours, theirs))
    for path, allowed in ((MESSAGES, {"POST"}), ("/health", {"GET", "HEAD"})):
        answer = server.request("DELETE", path, None, ONE, 30)
        assert answer.status == 405 and set(answer.headers["allow"].split(", ")) == allowed
    assert server.post(MESSAGES, {}).json["error"]["type"] == "authentication_error"
    assert server.post(COMPLETIONS, {}).json["error"]["code"] == "invalid_api_key"


@pytest.mark.demo_model
def test_figures_reveal_no_texts(server: ServerProcess) -> None:
    secret = {"prompt": "xylophone mandragora " * 20, "max_tokens": 2, "cache_salt": "mandragora"}
    assert server.post(COMPLETIONS, secret, **ONE).status == 200
    for path in ("/metrics", "/v1/cache/stats?blocks=1", "/cache", "/health"):
        answer = server.get(path, **ONE)
        assert answer.status == 200 and b"mandragora" not in answer.body
    for name in ("first_token_seconds", "between_tokens_seconds", "queue_seconds", "request_prompt_tokens"):
        assert f"mlx_paged_{name}_bucket{{le=".encode() in server.get("/metrics", **ONE).body


def line_of(server: ServerProcess, request_id: str) -> str:
    """Return the line of a request in the log, which is written after the client has its answer."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = [line for line in server.log.splitlines(keepends=True) if f" id={request_id} " in line]
        return bool(found) and found[0].endswith("\n")

    server.wait_until(is_there)
    (line,) = found
    return line


@pytest.mark.demo_model
def test_log_describes_requests_and_sighup_drains_the_server(server: FaultyServer) -> None:
    """Runs last, as SIGHUP ends the server."""
    told = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3}, **ONE, **{"x-request-id": "mine-1"})
    refused = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 0}, **ONE)
    assert server.request("GET", "/", None, {"Host": "["}, 30).status == 400
    assert server.get("/%0Aforged%1B[2K", **ONE).status == 404
    assert told.headers["x-request-id"] == "mine-1"
    one, other = (line_of(server, answer.headers["x-request-id"]) for answer in (told, refused))
    assert re.search(
        r"POST /v1/completions 200 id=mine-1 client='key 1' model='house' prompt=1 cached=\d+ generated=3 "
        r"first=\S+s tokens/s=\S+ ",
        one,
    )
    assert "400" in other and "reason='max_tokens must be at least 1 without echo, got 0'" in other
    body = {"prompt": [1, 2, 3], "max_tokens": 500, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        with server.holding(1):  # so that the answer does not finish before the signal is seen
            answer = pool.submit(server.post, COMPLETIONS, body, **ONE)
            server.wait_until(lambda: server.get("/v1/cache/stats", **ONE).json["running"]["running"] == 1)
            server.process.send_signal(signal.SIGHUP)
            server.wait_until(lambda: "SIGHUP" in server.log)
        assert b"[DONE]" in answer.result().body
    assert server.process.wait(60) == 0
    assert "SIGHUP: waiting up to 30 s for 1 open answer; the next signal ends the server" in server.log
    assert "GET /%0Aforged%1B[2K 404" in server.log and "\x1b" not in server.log
    lines = server.log.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), [line for line in lines if not LINE.fullmatch(line)]
    assert "word word" not in server.log and "mandragora" not in server.log


@pytest.mark.parametrize(
    ("context", "capacity", "asked", "option", "most"),
    [
        (8192, 20_000, None, None, 8092),  # what the model's context leaves
        (8192, 1000, None, None, 900),  # what the budget leaves
        (None, None, None, None, server_texts.MAX_DEFAULT_TOKENS),
        (8192, 20_000, None, 512, 512),
        (8192, 20_000, 9000, 512, 9000),
        (8192, 1000, 9000, None, 900),
    ],
)
def test_max_tokens_is_limited_by_context_and_budget(
    context: int | None, capacity: int | None, asked: int | None, option: int | None, most: int
) -> None:
    assert parse([]).max_tokens is None
    texts: Any = SimpleNamespace(context_length=context, capacity=capacity, completed=lambda request: None)
    request = ServerRequest([[1]], prompts=[Prompt.of_tokens([1] * 100)], max_tokens=asked)
    server_texts.LoadedTexts.complete(texts, request, option)
    assert request.max_tokens == most


def test_small_prompts_do_not_wait_for_a_huge_one() -> None:
    released = threading.Event()

    async def run() -> None:
        huge = asyncio.ensure_future(in_worker(lambda: released.wait(60)))
        for _ in range(3):
            await in_worker(int)
        assert not huge.done()
        released.set()
        await huge

    asyncio.run(run())
