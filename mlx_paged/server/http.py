"""HTTP beyond uvicorn and starlette: limits, the body of a request, its log entry, and error responses."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .errors import RequestRefused, refusal_of

SOCKET_SECONDS = 60  # without a byte from or to a client, after which it counts as gone
MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
SPARE_FILES = 256  # open files for everything but connections
MAX_BODY_BYTES = 32 << 20  # Anthropic's own limit
# More threads would take the interpreter from the one that computes.
_workers = ThreadPoolExecutor(4, thread_name_prefix="prompts")
T = TypeVar("T")


def raise_file_limit() -> None:
    """Raise the limit of open files to what MAX_CONNECTIONS needs, if that is allowed: macOS starts with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES if hard < 0 else min(MAX_CONNECTIONS + SPARE_FILES, hard)
    if 0 <= soft < wanted:  # -1: no limit
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def in_worker(work: Callable[[], T]) -> Awaitable[T]:
    """Run what grows with a request's body in one of a few threads, so that it delays no smaller request."""
    return asyncio.get_running_loop().run_in_executor(_workers, work)


async def body_of(request: Request) -> bytearray:
    """Return a request's body.

    Raises:
        RequestRefused: 413, the body is too large.
        ClientDisconnect: the client has gone.
    """
    too_large = RequestRefused(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:  # h11 has checked that it is a number
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return body


# Every request ----------------------------------------------------------------------------------------------------


@dataclass
class RequestLog:
    """The log entry of a request, filled in as it is answered.

    Attributes:
        id: the request's id, which the client gets as well.
        reason: the error message, if there is one.
        outcome: ``ok``, ``refused`` (4xx), ``failed`` (5xx) or ``cancelled``.
        client: the client's name; empty before it is admitted.
    """

    id: str
    status: int = 0
    model: str = ""
    reason: str = ""
    outcome: str = "ok"
    client: str = ""
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    first_token: float | None = None
    num_seconds: float = 0.0

    def refuse(self, refusal: RequestRefused) -> None:
        self.outcome, self.reason = "failed" if refusal.status >= 500 else "refused", str(refusal)

    def line(self, method: str, path: str) -> str:
        parts = [f"{method} {path[:200]} {self.status or '-'}", f"id={self.id}"]
        if self.client:
            parts.append(f"client={self.client!r}")
        if self.model:
            parts.append(f"model={self.model[:100]!r}")
        if self.prompt:
            parts.append(f"prompt={self.prompt} cached={self.cached} generated={self.generated}")
        if self.first_token is not None:
            rest = self.num_seconds - self.first_token
            parts.append(f"first={self.first_token:.3f}s")
            if self.generated > 1 and rest > 0:
                parts.append(f"tokens/s={(self.generated - 1) / rest:.1f}")
        parts.append(f"seconds={self.num_seconds:.3f}")
        if self.outcome == "cancelled":
            parts.append("client gone")
        if self.reason:
            parts.append(f"reason={self.reason[:300]!r}")
        return " ".join(parts)


def error_response(error: Exception, scope: Any, log: RequestLog) -> Response:
    """Return the response to an error, in the format of the API that was called."""
    headers = {}
    if isinstance(error, HTTPException):  # starlette's, for a method that is not allowed
        headers["allow"] = (error.headers or {}).get("Allow", "")
        error = RequestRefused(error.status_code, f"method not allowed; use {headers['allow']}")
    refusal = refusal_of(error)
    log.refuse(refusal)
    if refusal.retry_after is not None:
        headers["retry-after"] = str(refusal.retry_after)
    of_messages = scope["path"].startswith("/v1/messages")
    return json_response(refusal.anthropic_body() if of_messages else refusal.body(), int(refusal.status), headers)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response. Raises ValueError for NaN and infinity, which JSON cannot express."""
    return Response(json.dumps(value, allow_nan=False), status, headers, "application/json")
