"""Bodies of very many small things: they are refused or answered, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import MagicMock

import pytest
from pydantic import AfterValidator

from mlx_paged.server import app
from mlx_paged.server.answers import Head
from mlx_paged.server.call_formats import TextMarks
from mlx_paged.server.engine_thread import EngineThread
from mlx_paged.server.request import Generated, Prompt, ServerRequest, Work
from mlx_paged.server.requests.fields import Endpoint, ModelParameters, SamplingParameters
from tests.support.models.tiny_model import make_tools_model
from tests.support.processes.server_process import ServerProcess

CHAT, MESSAGES, RESPONSES = (f"/v1/{name}" for name in ("chat/completions", "messages", "responses"))
COMPLETIONS = "/v1/completions"
FLAGS = ("--max-tokens", "2", "--kv-cache-memory", "64MB")


def named(number: int) -> list[dict[str, Any]]:
    return [{"type": "custom", "name": f"t{n}"} for n in range(number)]


def calls(number: int) -> list[dict[str, Any]]:
    return [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(number)]


def results(number: int) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": f"c{n}", "content": "x"} for n in range(number)]


def of_user(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


USER: list[Any] = [{"role": "user", "content": "a"}]
TEXT = {"type": "text", "text": "a"}
# Bodies by what they are full of: path, body, status, and words of the error.
BODIES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "tools": (RESPONSES, {"input": "a", "tools": [*named(20_000), *named(1)]}, 400, "at most 1024"),
    "two tools of one name": (RESPONSES, {"input": "a", "tools": [*named(1000), *named(1)]}, 400, "have the name 't0'"),
    "tools in a namespace": (
        RESPONSES,
        {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": named(5000)}]},
        400,
        "at most 1024",
    ),
    "messages": (CHAT, {"messages": USER * 90_000}, 400, "tokens > 8192 maximum"),
    "more messages": (CHAT, {"messages": USER * 100_001}, 400, "tokens > 8192 maximum"),
    "items": (RESPONSES, {"input": USER * 90_000}, 400, "tokens > 8192 maximum"),
    "parts": (CHAT, {"messages": of_user(*[TEXT] * 90_000)}, 400, "tokens"),
    "more parts": (CHAT, {"messages": of_user(*[TEXT] * 110_000)}, 400, "tokens"),
    "content blocks": (MESSAGES, {"max_tokens": 1, "messages": of_user(*[TEXT] * 90_000)}, 400, "tokens"),
    "tool results": (MESSAGES, {"max_tokens": 1, "messages": of_user(*results(90_000))}, 400, "tokens"),
    "calls": (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": calls(30_000)}, *USER]}, 400, "tokens"),
    "stops": (COMPLETIONS, {"prompt": "a", "stop": ["s"] * 120_000}, 400, "at most 1024 items"),
    "references": (
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_0"}] * 60_000},
        400,
        "input must have at most 1,024 references",
    ),
    "unknown references": (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}] * 1000}, 404, "no such item"),
    "faulty messages": (MESSAGES, {"max_tokens": 1, "messages": [{}] * 80_000}, 400, "role is required"),
    "faulty tokens": ("/detokenize", {"tokens": ["a"] * 500_000}, 400, "tokens.0"),
    "faulty biases": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {str(n): None for n in range(400_000)}},
        400,
        "logit_bias: values must be numbers",
    ),
    "unknown names": (
        COMPLETIONS,
        {"prompt": "a", **{f"x{n}": 1 for n in range(400_000)}},
        400,
        "at most 1,024 parameters",
    ),
    "unknown names in a message": (
        MESSAGES,
        {"max_tokens": 1, "messages": [{**USER[0], **{f"x{n}": 1 for n in range(400_000)}}]},
        200,
        "",
    ),
    "lists": (CHAT, {"messages": [{"role": "user", "content": "a", "x": [[] for _ in range(400_000)]}]}, 413, "commas"),
    "objects": (CHAT, {"messages": [{"role": "user", "content": "a", "x": [{}] * 250_000}]}, 200, ""),
    "prompts": (COMPLETIONS, {"prompt": ["a"] * 200_000}, 400, "at most 256 answers"),
    "token ids": (COMPLETIONS, {"prompt": [1] * 500_000}, 400, "maximum"),
    "echoed tokens": (COMPLETIONS, {"prompt": [5] * 300, "max_tokens": 1, "echo": True, "logprobs": 20}, 200, ""),
    "a long repeated text": (RESPONSES, {"input": "a", "metadata": {"x": "\n" * 8_000_000}}, 200, ""),
    "levels": (CHAT, {"messages": json.loads("[" * 300 + "]" * 300)}, 400, "recursion limit exceeded"),
}


def model_of(folder: Path, tokenizer: Path) -> Path:
    config = make_tools_model(folder, tokenizer) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def server(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    process = ServerProcess(model_of(folder / "tools", demo_model_folder), folder, *FLAGS)
    yield process
    process.check_end()


@pytest.mark.demo_model
@pytest.mark.parametrize("name", BODIES)
def test_others_are_answered_beside_a_body_of_many_small_things(server: ServerProcess, name: str) -> None:
    path, body, status, words = BODIES[name]
    raw = json.dumps(body, separators=(",", ":")).encode()
    answers: list[Any] = []
    sender = threading.Thread(target=lambda: answers.append(server.post(path, raw, 120)))
    sender.start()
    while not answers and sender.is_alive():
        assert server.get("/health").status == 200
    sender.join()
    (answer,) = answers
    assert answer.status == status, answer.body[:500]
    assert words in answer.body.decode()


@pytest.mark.demo_model
def test_server_ends_at_sigterm_beside_such_bodies(demo_model_folder: Path, tmp_path: Path) -> None:
    server = ServerProcess(model_of(tmp_path / "tools", demo_model_folder), tmp_path, *FLAGS)
    for name in ("tools", "parts", "faulty messages", "unknown names", "echoed tokens", "calls"):
        path, body, *_ = BODIES[name]
        server.send_and_leave_open(path, body)
    assert server.stop() == 0, server.log[-3000:]


# Threads ----------------------------------------------------------------------------------------------------------

seen: dict[str, threading.Thread] = {}


def note(what: str) -> None:
    seen[what] = threading.current_thread()


def noted(value: Any) -> Any:
    note("check")
    return value


class NotedBody(SamplingParameters, ModelParameters):
    prompt: Annotated[str, AfterValidator(noted)]
    stream: bool = False


def noted_request(body: NotedBody, defaults: Any) -> ServerRequest:
    note("request")
    return ServerRequest([body.prompt])


class NotedForm:
    """Notes the threads in which its methods are called."""

    repeats_body = True

    def __init__(self, head: Head, body: NotedBody) -> None:
        note("form")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: note(name) or ({} if name == "whole" else [])


@pytest.mark.parametrize(("streams", "makes"), [(False, {"whole"}), (True, {"begin", "piece", "end"})])
@pytest.mark.parametrize("texts_are_known", [False, True])
def test_nothing_of_a_body_is_done_in_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, streams: bool, makes: set[str], texts_are_known: bool
) -> None:
    seen.clear()
    texts = MagicMock(capacity=None, context_length=None)
    texts.marks = TextMarks({"normal": {}})
    texts.complete = lambda request, _: note("prompt") or request.prompts.append(Prompt.of_tokens([1]))

    def submit(work: Any) -> Any:
        work.feed([Generated(0, 2, "a", "length", num_cached=0)])
        return work

    async def texts_for(key: Any) -> Any:
        return texts

    service = MagicMock()
    service.config.strict_parameters, service.names.resolve().draft = False, None
    service.clients.name_of = lambda *_: "somebody"
    service.engine.submit, service.engine.texts_for = submit, texts_for
    service.engine.models.texts_of = lambda key: texts if texts_are_known else None
    endpoint = Endpoint("/noted", "", NotedBody, noted_request, NotedForm)
    monkeypatch.setattr(app, "ENDPOINTS", {"/noted": endpoint})
    monkeypatch.setattr(app, "Gate", lambda router, service: router)
    router, sent = app.make_app(service), []
    body = json.dumps({"prompt": "a", "stream": streams}).encode()

    async def run() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/noted", "raw_path": b"/noted", "query_string": b""}
        scope |= {"headers": [], "state": {"log": MagicMock(), "key": None}, "http_version": "1.1", "scheme": "http"}
        await router(scope, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 200
    assert set(seen) == {"check", "request", "form", "prompt", *makes}
    assert threading.current_thread() not in seen.values()


def test_open_requests_are_listed_while_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A WeakSet raises an error if it grows while it is read."""
    monkeypatch.setattr("mlx_paged.server.engine_thread.MAX_WAITING", 10_000)
    engine = EngineThread(MagicMock(), MagicMock(), MagicMock(), 0.0)
    held = [engine.submit(Work(None)) for _ in range(5000)]
    interval, is_over = sys.getswitchinterval(), threading.Event()

    def add() -> None:
        while not is_over.is_set():
            works = [engine.submit(Work(None)) for _ in range(500)]
            while not engine.requests.empty():
                engine.requests.get()
            works.clear()

    adding = threading.Thread(target=add)
    sys.setswitchinterval(1e-6)
    try:
        adding.start()
        for _ in range(30):
            engine.fail_all("the server is exiting")
            assert engine.sequences() == []
    finally:
        is_over.set()
        adding.join()
        sys.setswitchinterval(interval)
    assert len(held) == 5000
