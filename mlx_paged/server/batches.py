"""Batches: files of requests at the lowest priority, with OpenAI's API and Anthropic's Message Batches."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email import message_from_bytes, policy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import ConfigError
from .errors import RequestRefused, invalid, not_found
from .http import body_of, json_response
from .requests import endpoints
from .requests.fields import MAX_PRIORITY

if TYPE_CHECKING:
    from .service import Service

MAX_BYTES = 256 << 20  # of all files together
MAX_LINES = 50_000  # requests in a batch; OpenAI's limit
MAX_KEPT = 1000  # batches
MAX_UNFINISHED = 16  # unfinished batches
NUM_AT_ONCE = 16  # concurrent requests of one batch
MESSAGES = endpoints.MESSAGES.path
URLS = tuple(path for path, each in endpoints.ENDPOINTS.items() if each.request is not None)
UNFINISHED = ("in_progress", "cancelling")
FILES = ("input_file_id", "output_file_id", "error_file_id")
TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")


class Batches:
    """Files and batches of one server. With a folder they are kept on disk, and unfinished batches run again after a
    restart. For the event loop.

    Args:
        service: the server that answers the requests.
        folder: where files and batches are kept; None: in memory only.
    """

    def __init__(self, service: Service, folder: Path | None) -> None:
        self._service, self._folder = service, folder
        self._files: dict[str, dict[str, Any]] = {}  # each with its "owner"
        self._contents: dict[str, bytes] = {}  # only without a folder
        self._batches: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.app: Any = None  # the server's ASGI application
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.glob("*.json"):
                kept = json.loads(path.read_text())
                (self._batches if kept["object"] == "batch" else self._files)[kept["id"]] = kept

    def resume(self) -> None:
        """Run the batches again that were unfinished when the server ended."""
        for batch in self._batches.values():
            if batch["status"] == "cancelling":
                batch |= {"status": "cancelled", "cancelled_at": int(time.time())}
                self._save(batch)
            elif batch["status"] in UNFINISHED:
                self._start(batch)

    # Files ----------------------------------------------------------------------------------------------------

    def add_file(self, owner: str | None, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        """Store a file. Raises RequestRefused: 413, all files together are too large."""
        if sum(file["bytes"] for file in self._files.values()) + len(content) > MAX_BYTES:
            raise RequestRefused(413, f"all files together may have at most {MAX_BYTES >> 20} MiB; delete some")
        new = _new_id("file-")
        file: dict[str, Any] = {"id": new, "object": "file", "bytes": len(content), "created_at": int(time.time())}
        file |= {"filename": name[:200], "purpose": purpose, "status": "processed", "owner": owner}
        if self._folder is None:
            self._contents[new] = content
        else:
            (self._folder / new).write_bytes(content)
        self._files[new] = file
        self._save(file)
        return file

    def content(self, owner: str | None, name: str) -> bytes:
        """Return a file's content. Raises RequestRefused: 404."""
        file = _found(self._files, owner, name)
        return self._contents[name] if self._folder is None else (self._folder / file["id"]).read_bytes()

    def delete_file(self, owner: str | None, name: str) -> dict[str, Any]:
        _found(self._files, owner, name)
        self._forget(self._files, name)
        self._contents.pop(name, None)
        if self._folder is not None:
            (self._folder / name).unlink(missing_ok=True)
        return {"id": name, "object": "file", "deleted": True}

    # Batches --------------------------------------------------------------------------------------------------

    def add_batch(self, owner: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start a batch. Raises RequestRefused: 400, it is invalid; 404, no such file; 429, too many are unfinished."""
        endpoint, file = body.get("endpoint"), body.get("input_file_id")
        if endpoint not in URLS:
            raise invalid(f"endpoint must be one of {', '.join(URLS)}", "endpoint")
        requests = _requests(self.content(owner, str(file)), endpoint)
        if sum(batch["status"] in UNFINISHED for batch in self._batches.values()) >= MAX_UNFINISHED:
            raise RequestRefused(
                429, f"too many unfinished batches (limit {MAX_UNFINISHED})", kind="overloaded", retry_after=60
            )
        over = [name for name, batch in self._batches.items() if batch["status"] not in UNFINISHED]
        if len(self._batches) >= MAX_KEPT and over:
            self._forget(self._batches, over[0])
        now = int(time.time())
        batch = {
            "id": _new_id("msgbatch_" if endpoint == MESSAGES else "batch_"),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": file,
        }
        batch |= {"completion_window": body.get("completion_window", "24h"), "status": "in_progress", "created_at": now}
        batch |= {"metadata": body.get("metadata"), "errors": None, "output_file_id": None, "error_file_id": None}
        batch |= dict.fromkeys(TIMES) | {"expires_at": None, "in_progress_at": now, "owner": owner}
        batch["request_counts"] = {"total": len(requests), "completed": 0, "failed": 0}
        self._batches[batch["id"]] = batch
        self._start(batch)
        return batch

    def cancel(self, owner: str | None, name: str) -> dict[str, Any]:
        """Cancel a batch; the answers so far are kept."""
        batch = _found(self._batches, owner, name)
        if batch["status"] == "in_progress":
            batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
            self._save(batch)
            self._tasks[name].cancel()
        return batch

    # Anthropic's: requests come in the body, and not in a file -------------------------------------------------

    def add_messages(self, owner: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
        """Start a batch of messages. Raises RequestRefused, as :meth:`add_batch`."""
        given = body.get("requests")
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise invalid("requests must be a list of objects", "requests")
        lines = [{"custom_id": each.get("custom_id"), "body": each.get("params")} for each in given]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        _requests(content, MESSAGES, "requests")
        file = self.add_file(owner, "requests.jsonl", "batch", content)["id"]
        try:
            return self.add_batch(owner, {"endpoint": MESSAGES, "input_file_id": file})
        except RequestRefused:
            self.delete_file(owner, file)
            raise

    def delete_messages(self, owner: str | None, name: str) -> dict[str, Any]:
        """Delete a finished batch and its files."""
        batch = _found(self._batches, owner, name)
        if batch["status"] in UNFINISHED:
            raise invalid("the batch is still in progress; cancel it first")
        for file in {batch[field] for field in FILES} & self._files.keys():
            self.delete_file(owner, file)
        self._forget(self._batches, name)
        return {"id": name, "type": "message_batch_deleted"}

    def message_results(self, owner: str | None, name: str) -> Iterator[dict[str, Any]]:
        """Yield the result of each request of a finished batch. Raises RequestRefused: 400, it is unfinished."""
        batch = _found(self._batches, owner, name)
        if batch["status"] in UNFINISHED:
            raise invalid("the batch is still in progress")
        answers: dict[str, dict[str, Any]] = {}
        for field in FILES[1:]:
            content = self.content(owner, batch[field]) if batch[field] in self._files else b""
            answers |= {line["custom_id"]: line for line in map(json.loads, content.splitlines())}
        for request in _requests(self.content(owner, batch["input_file_id"]), MESSAGES):
            line = answers.get(request["custom_id"])
            result = {"type": "canceled"}
            if line is not None:
                good, answer = _is_good(line), line["response"]["body"]
                result = {"type": "succeeded", "message": answer} if good else {"type": "errored", "error": answer}
            yield {"custom_id": request["custom_id"], "result": result}

    def _start(self, batch: dict[str, Any]) -> None:
        self._save(batch)
        self._tasks[batch["id"]] = task = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch["id"], None))

    async def _run(self, batch: dict[str, Any]) -> None:
        lines: dict[int, dict[str, Any]] = {}  # answers by request number
        try:
            keys = self._service.config.api_keys
            key = keys.key_of(batch["owner"])
            if keys and key is None:
                raise ConfigError("the server no longer accepts the API key of this batch")
            requests = _requests(self.content(batch["owner"], batch["input_file_id"]), batch["endpoint"])
            batch["request_counts"] = counts = {"total": len(requests), "completed": 0, "failed": 0}
            left = iter(enumerate(requests))

            async def work() -> None:
                for number, request in left:
                    lines[number] = line = await self._answered(batch, request, key)
                    counts["completed" if _is_good(line) else "failed"] += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_AT_ONCE):
                    group.create_task(work())
            batch |= {"status": "completed", "completed_at": int(time.time())}
        except asyncio.CancelledError:
            if batch["status"] != "cancelling":
                raise  # the server shuts down
            batch |= {"status": "cancelled", "cancelled_at": int(time.time())}
        except Exception as error:
            while isinstance(error, ExceptionGroup):  # the group of tasks'
                error = error.exceptions[0]
            logging.exception("a batch failed")
            faults = [{"code": "failed", "message": f"{type(error).__name__}: {error}"[:1000]}]
            batch |= {"status": "failed", "failed_at": int(time.time()), "errors": {"object": "list", "data": faults}}
        for field, good in (("output_file_id", True), ("error_file_id", False)):
            answers = [line for _, line in sorted(lines.items()) if _is_good(line) == good]
            if answers:
                content = "".join(json.dumps(line) + "\n" for line in answers).encode()
                try:
                    file = self.add_file(batch["owner"], f"{batch['id']}_{field[:6]}.jsonl", "batch_output", content)
                    batch[field] = file["id"]
                except RequestRefused as refused:
                    batch["errors"] = {"object": "list", "data": [{"code": "too_large", "message": str(refused)}]}
        self._save(batch)

    async def _answered(self, batch: Mapping[str, Any], request: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        """Send a request through the server's application; retry on 429 and 503. Return the answer's line."""
        body = json.dumps({**request["body"], "stream": False, "priority": MAX_PRIORITY}).encode()
        headers = {"authorization": f"Bearer {key}", "user-agent": "batch", "host": "localhost"}
        while True:
            status, answered, raw = await post(self.app, batch["endpoint"], body, headers)
            if status not in (429, 503) or "retry-after" not in answered:
                break
            await asyncio.sleep(float(answered["retry-after"]))
        response = {"status_code": status, "request_id": answered.get("x-request-id", ""), "body": json.loads(raw)}
        return {"id": _new_id("batch_req_"), "custom_id": request["custom_id"], "response": response, "error": None}

    # What is kept ---------------------------------------------------------------------------------------------

    def _save(self, kept: Mapping[str, Any]) -> None:
        if self._folder is not None:
            path = self._folder / f"{kept['id']}.new"
            path.write_text(json.dumps(kept))
            path.rename(path.with_suffix(".json"))

    def _forget(self, among: dict[str, dict[str, Any]], name: str) -> None:
        del among[name]
        if self._folder is not None:
            (self._folder / f"{name}.json").unlink(missing_ok=True)

    # HTTP -----------------------------------------------------------------------------------------------------

    async def _body(self, http: Request) -> dict[str, Any]:
        """Return the request body, a JSON object. Raises RequestRefused: 503, the server takes no more requests."""
        async with body_of(http, self._service.bodies) as raw:
            body = _object(raw, "the request body")
        self._service.check_open()
        return body

    def routes(self, owner_of: Callable[[Request], str | None]) -> list[Route]:
        """Return the routes. ``owner_of`` checks a request's API key, and returns an id of the key's holder."""

        async def files(http: Request) -> Response:
            owner = owner_of(http)
            if http.method == "GET":
                return json_response(_list(self._files, owner))
            async with body_of(http, self._service.bodies) as raw:
                parts = _form(http.headers.get("content-type", ""), raw)
            if "file" not in parts or "purpose" not in parts:
                raise invalid("upload the file as multipart/form-data with fields file and purpose", "file")
            name, content = parts["file"]
            return json_response(_shown(self.add_file(owner, name, parts["purpose"][1].decode()[:100], content)))

        async def file(http: Request) -> Response:
            owner, name = owner_of(http), http.path_params["name"]
            if http.method == "DELETE":
                return json_response(self.delete_file(owner, name))
            if http.url.path.endswith("/content"):
                return Response(self.content(owner, name), 200, None, "application/octet-stream")
            return json_response(_shown(_found(self._files, owner, name)))

        async def batches(http: Request) -> Response:
            owner = owner_of(http)
            if http.method == "GET":
                return json_response(_list(self._batches, owner))
            return json_response(_shown(self.add_batch(owner, await self._body(http))))

        async def batch(http: Request) -> Response:
            owner, name = owner_of(http), http.path_params["name"]
            cancels = http.url.path.endswith("/cancel")
            return json_response(_shown(self.cancel(owner, name) if cancels else _found(self._batches, owner, name)))

        async def messages(http: Request) -> Response:
            owner = owner_of(http)
            if http.method == "GET":
                among = {name: each for name, each in self._batches.items() if each["endpoint"] == MESSAGES}
                listed = _list(among, owner)
                return json_response({**listed, "data": [_as_messages(each) for each in listed["data"]]})
            return json_response(_as_messages(self.add_messages(owner, await self._body(http))))

        async def message(http: Request) -> Response:
            owner, name = owner_of(http), http.path_params["name"]
            if http.method == "DELETE":
                return json_response(self.delete_messages(owner, name))
            if http.url.path.endswith("/results"):
                lines = "".join(json.dumps(each) + "\n" for each in self.message_results(owner, name))
                return Response(lines, 200, None, "application/x-jsonl")
            cancels = http.url.path.endswith("/cancel")
            return json_response(
                _as_messages(self.cancel(owner, name) if cancels else _found(self._batches, owner, name))
            )

        return [
            Route(f"{MESSAGES}/batches", messages, methods=["GET", "POST"]),
            Route(f"{MESSAGES}/batches/{{name}}", message, methods=["GET", "DELETE"]),
            Route(f"{MESSAGES}/batches/{{name}}/results", message, methods=["GET"]),
            Route(f"{MESSAGES}/batches/{{name}}/cancel", message, methods=["POST"]),
            Route("/v1/files", files, methods=["GET", "POST"]),
            Route("/v1/files/{name}", file, methods=["GET", "DELETE"]),
            Route("/v1/files/{name}/content", file, methods=["GET"]),
            Route("/v1/batches", batches, methods=["GET", "POST"]),
            Route("/v1/batches/{name}", batch, methods=["GET"]),
            Route("/v1/batches/{name}/cancel", batch, methods=["POST"]),
        ]


async def post(app: Any, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Send a POST to an ASGI application. Return the response's status, headers and body."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": raw, "http_version": "1.1", "scheme": "http"}, receive, send)
    answered = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(message["body"] for message in sent[1:])


def _requests(content: bytes, endpoint: str, param: str = "input_file_id") -> list[dict[str, Any]]:
    """Return the requests in a file. Raises RequestRefused: 400, a line is invalid."""
    requests = []
    for number, line in enumerate(filter(bytes.strip, content.split(b"\n")), 1):
        request = _object(line, f"request {number}")
        if not isinstance(request.get("custom_id"), str) or not isinstance(request.get("body"), dict):
            raise invalid(f"request {number} requires a string custom_id and an object body", param)
        if request.get("url", endpoint) != endpoint or request.get("method", "POST") != "POST":
            raise invalid(f"request {number}: method and url must be POST {endpoint}", param)
        requests.append(request)
    if not 0 < len(requests) <= MAX_LINES or len({request["custom_id"] for request in requests}) < len(requests):
        raise invalid(f"a batch must have 1 to {MAX_LINES:,} requests with unique custom_ids", param)
    return requests


def _object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid(f"{what} must be a JSON object")
    return value


def _form(content_type: str, raw: bytes) -> dict[str, tuple[str, bytes]]:
    """Return the parts of multipart/form-data by name: file name and content."""
    message = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode("latin-1") + raw, policy=policy.HTTP)
    parts = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")
        parts[str(name)] = part.get_filename() or "", bytes(part.get_payload(decode=True) or b"")
    return parts


def _found(among: Mapping[str, dict[str, Any]], owner: str | None, name: str) -> dict[str, Any]:
    found = among.get(name)
    if found is None or found["owner"] != owner:
        raise not_found(f"no such file or batch: {name[:200]!r}")
    return found


def _shown(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kept.items() if name != "owner"}


def _as_messages(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch in Anthropic's format."""
    counts, is_over = batch["request_counts"], batch["status"] not in UNFINISHED
    left = counts["total"] - counts["completed"] - counts["failed"]
    ended = next((batch[time] for time in ("completed_at", "cancelled_at", "failed_at") if batch[time]), None)
    times = {"created_at": batch["created_at"], "expires_at": batch["created_at"] + 86400, "ended_at": ended}
    times |= {"cancel_initiated_at": batch["cancelling_at"], "archived_at": None}
    return {
        "id": batch["id"],
        "type": "message_batch",
        "processing_status": "ended" if is_over else "canceling" if batch["status"] == "cancelling" else "in_progress",
        "request_counts": {
            **{"processing": 0 if is_over else left, "succeeded": counts["completed"], "errored": counts["failed"]},
            **{"canceled": left if is_over else 0, "expired": 0},
        },
        **{name: at and datetime.fromtimestamp(at, UTC).isoformat() for name, at in times.items()},
        "results_url": f"{MESSAGES}/batches/{batch['id']}/results" if is_over else None,
    }


def _list(among: Mapping[str, dict[str, Any]], owner: str | None) -> dict[str, Any]:
    data = [_shown(each) for each in reversed(list(among.values())) if each["owner"] == owner]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": False}


def _is_good(line: Mapping[str, Any]) -> bool:
    return bool(line["response"]["status_code"] == 200)


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex
