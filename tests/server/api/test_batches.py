"""Files and batches through the official clients, and their state in a folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mlx_paged.server import batches as module
from mlx_paged.server.batches import NUM_AT_ONCE, Batches
from mlx_paged.server.clients import ApiKeys
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.requests.fields import MAX_PRIORITY
from tests.server.api.samples import HI
from tests.support.processes.server_process import ServerProcess

if TYPE_CHECKING:
    import openai

CHAT = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "default_model", **body}}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, then give the event loop 20 more turns for what should not happen."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0)


def text(*lines: Any) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


@pytest.mark.demo_model
def test_batch_of_a_file_is_answered(client: openai.OpenAI, server: ServerProcess) -> None:
    lines = [line(f"r{number}", messages=HI, max_tokens=2, seed=number) for number in range(20)]
    file = client.files.create(file=("in.jsonl", text(*lines, line("bad", messages=[]))), purpose="batch")
    assert client.files.retrieve(file.id).filename == "in.jsonl" and file in client.files.list().data
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    server.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    assert batch.metadata == {"a": "b"} and client.batches.list().data == [batch]
    assert batch.request_counts and batch.request_counts.to_dict() == {"total": 21, "completed": 20, "failed": 1}
    assert batch.output_file_id and batch.error_file_id
    answers = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in answers] == [each["custom_id"] for each in lines]
    alone = server.chat(HI, max_tokens=2, seed=3)
    assert answers[3]["response"]["body"]["choices"] == alone["choices"]
    (failed,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(failed)["response"]["status_code"] == 400
    for each in (file.id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(each).deleted
    assert server.get(f"/v1/files/{file.id}").status == server.get("/v1/batches/nothing").status == 404
    assert server.post("/v1/files", b"x").status == 400


@pytest.mark.demo_model
def test_batch_of_messages_is_answered(server: ServerProcess) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    params = {"model": "default_model", "max_tokens": 2, "messages": HI}
    requests: Any = [{"custom_id": f"r{number}", "params": params} for number in range(3)]
    requests.append({"custom_id": "bad", "params": {**params, "messages": []}})
    batch = client.messages.batches.create(requests=requests)
    assert batch.processing_status == "in_progress" and batch.request_counts.processing == 4
    server.wait_until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    ended = client.messages.batches.retrieve(batch.id)
    assert (ended.request_counts.succeeded, ended.request_counts.errored) == (3, 1) and ended.ended_at is not None
    assert [each.id for each in client.messages.batches.list().data] == [batch.id]
    results = {each.custom_id: each.result for each in client.messages.batches.results(batch.id)}
    assert list(results) == ["r0", "r1", "r2", "bad"]
    alone = client.messages.create(**params)
    for name in ("r0", "r1", "r2"):
        result = results[name]
        assert result.type == "succeeded" and result.message.content == alone.content
    assert results["bad"].type == "errored" and results["bad"].error.error.type == "invalid_request_error"
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    for ask in (client.messages.batches.retrieve, client.messages.batches.cancel, client.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            ask(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="unique custom_ids"):
        client.messages.batches.create(requests=[requests[0], requests[0]])


def test_batch_of_messages_is_cancelled() -> None:
    async def run() -> None:
        batches = Batches(service(), None)
        batches.app = asked = Asked()
        asked.refusals = 0
        given = [{"custom_id": str(number), "params": {}} for number in range(40)]
        for wrong in ({}, {"requests": [1]}, {"requests": []}, {"requests": [{"custom_id": 1, "params": {}}]}):
            with pytest.raises(RequestRefused):
                batches.add_messages(None, wrong)
        batch = batches.add_messages(None, {"requests": given})
        await until(lambda: len(asked.bodies) == NUM_AT_ONCE)
        with pytest.raises(RequestRefused, match="is still in progress"):
            next(batches.message_results(None, batch["id"]))
        with pytest.raises(RequestRefused, match="is still in progress"):
            batches.delete_messages(None, batch["id"])
        batches.cancel(None, batch["id"])
        await until(lambda: batches._batches[batch["id"]]["status"] != "cancelling")
        results = list(batches.message_results(None, batch["id"]))
        assert [each["result"]["type"] for each in results] == ["canceled"] * 40
        batches.delete_messages(None, batch["id"])
        assert not batches._files and not batches._batches

    asyncio.run(run())


WRONG: dict[str, Any] = {
    "no JSON": b"{",
    "nothing": b"\n",
    "no id": text({"body": {}}),
    "ids twice": text(line("a"), line("a")),
    "another endpoint": text(line("a", "/v1/completions")),
}


def service(*keys: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(api_keys=ApiKeys(keys)), check_open=lambda: None)


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_file_that_is_not_a_valid_batch_is_refused(content: bytes) -> None:
    batches = Batches(service(), None)
    file = batches.add_file(None, "x", "batch", content)
    with pytest.raises(RequestRefused) as caught:
        batches.add_batch(None, {"input_file_id": file["id"], "endpoint": CHAT})
    assert caught.value.status == 400
    with pytest.raises(RequestRefused, match="endpoint must be"):
        batches.add_batch(None, {"input_file_id": file["id"], "endpoint": "/v1/embeddings"})


class Asked:
    """Fake application that records its requests and answers once ``may_answer`` is set."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.keys: set[str] = set()
        self.refusals = 1
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append(json.loads((await receive())["body"]))
        self.keys.add(dict(scope["headers"])[b"authorization"].decode())
        headers = [(b"retry-after", b"0")] if self.refusals else []
        status, self.refusals = (429, self.refusals - 1) if self.refusals else (200, 0)
        if status == 200:
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


def test_batches_are_bounded_cancelled_and_resumed(tmp_path: Path) -> None:
    owner = ApiKeys(["one", "two"]).salt("two", None)
    request = {"endpoint": CHAT}

    def started() -> tuple[Batches, Asked]:
        batches = Batches(service("one", "two"), tmp_path / "batches")
        batches.app = Asked()
        batches.resume()
        return batches, batches.app

    async def first() -> None:
        batches, asked = started()
        file = batches.add_file(owner, "x", "batch", text(*(line(str(number)) for number in range(40))))
        request["input_file_id"] = file["id"]
        kept, other = (batches.add_batch(owner, request) for _ in range(2))
        await until(lambda: len(asked.bodies) > 2 * NUM_AT_ONCE)
        assert len(asked.bodies) == 2 * NUM_AT_ONCE + 1 and asked.keys == {"Bearer two"}
        assert all(body["priority"] == MAX_PRIORITY for body in asked.bodies)
        with pytest.raises(RequestRefused):
            batches.cancel("somebody", kept["id"])
        assert batches.cancel(owner, other["id"])["status"] == "cancelling"
        saved = tmp_path / "batches" / f"{other['id']}.json"
        assert json.loads(saved.read_text())["status"] == "cancelling"
        (tmp_path / "at the crash").write_text(saved.read_text())
        await until(lambda: other["status"] != "cancelling")
        assert other["status"] == "cancelled" and kept["status"] == "in_progress"

    async def second() -> None:
        batches, asked = started()
        asked.may_answer.set()
        (kept,) = [each for each in batches._batches.values() if each["status"] == "in_progress"]
        await until(lambda: kept["status"] != "in_progress")
        assert kept["status"] == "completed" and kept["request_counts"]["completed"] == 40
        assert batches.content(owner, kept["output_file_id"]).count(b"\n") == 40

    async def after_a_crash() -> None:
        batches, asked = started()
        assert sorted(each["status"] for each in batches._batches.values()) == ["cancelled", "in_progress"]
        await until(lambda: asked.bodies != [])

    async def without_its_key() -> None:
        batches = Batches(service("one", "three"), tmp_path / "batches")
        batches.resume()
        (kept,) = [each for each in batches._batches.values() if each["status"] == "in_progress"]
        await until(lambda: kept["status"] != "in_progress")
        assert kept["status"] == "failed" and "API key" in kept["errors"]["data"][0]["message"]

    asyncio.run(first())
    crashed = json.loads((tmp_path / "at the crash").read_text())
    (tmp_path / "batches" / f"{crashed['id']}.json").write_text(json.dumps(crashed))
    files = {path: path.read_bytes() for path in (tmp_path / "batches").iterdir()}
    asyncio.run(after_a_crash())
    asyncio.run(without_its_key())
    for path, content in files.items():
        path.write_bytes(content)
    asyncio.run(second())
    assert oct((tmp_path / "batches").stat().st_mode & 0o777) == "0o700"


def test_total_size_of_files_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    batches = Batches(service(), None)
    file = batches.add_file(None, "x", "batch", b"x" * 90)
    with pytest.raises(RequestRefused) as caught:
        batches.add_file(None, "x", "batch", b"x" * 11)
    assert caught.value.status == 413
    batches.delete_file(None, file["id"])
    assert batches.add_file(None, "x", "batch", b"x" * 100)["bytes"] == 100


def test_server_error_in_a_batch_is_named_in_its_errors() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise OSError("no such device")

    async def run() -> dict[str, Any]:
        batches = Batches(service(), None)
        batches.app = broken
        batch = batches.add_messages(None, {"requests": [{"custom_id": "a", "params": {}}]})
        await until(lambda: batches._batches[batch["id"]]["status"] != "in_progress")
        return batches._batches[batch["id"]]

    batch = asyncio.run(run())
    assert (batch["status"], batch["errors"]["data"][0]["message"]) == ("failed", "OSError: no such device")
