"""HTTP beyond uvicorn and starlette: checks of origin, host and the body's size, and the access log."""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import resource
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .errors import RequestRefused, invalid, refusal_of
from .parts import Parts
from .work import ClientGone

SOCKET_SECONDS = 60  # without a byte from or to a client, after which it counts as gone
MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
SPARE_FILES = 256  # open files for everything but connections
MAX_BODY_BYTES = 32 << 20  # Anthropic's own limit
QUIET = ("/v1/cache/stats", "/health", "/metrics")  # polled by the page and by monitors: logged at DEBUG only
LOOPBACK = re.compile(r"localhost|.+\.localhost|127(\.\d+){3}|\[?::1\]?")
# Pages of this machine, browser extensions and applications; no web sites.
LOCAL_ORIGINS = r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?|(?!https?:|null)[a-z][a-z0-9+.-]*:.*"


def raise_file_limit() -> None:
    """Raise the limit of open files to what MAX_CONNECTIONS needs, if that is allowed: macOS starts with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES if hard < 0 else min(MAX_CONNECTIONS + SPARE_FILES, hard)
    if 0 <= soft < wanted:  # -1: no limit
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


class Gate(CORSMiddleware):
    """The outermost ASGI application: checks origin and host, turns exceptions into responses, counts and logs.

    A web page that attacks a server on the loopback interface sends its own origin, or, with DNS rebinding, its own
    name as the host. If the server has API keys, which pages do not know, any host is allowed.

    Args:
        app: the application that answers.
        parts: the parts of the server.
    """

    def __init__(self, app: Callable[..., Any], parts: Parts) -> None:
        self._app, self._parts = app, parts
        host, origins = parts.cli_args.host, parts.cli_args.allowed_origins
        self._host, self._checks_host = host, LOOPBACK.fullmatch(host) is not None and not parts.config.api_keys
        super().__init__(
            self._answer,
            allow_origins=origins or (),
            allow_origin_regex=LOCAL_ORIGINS if origins is None else None,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-ignored-parameters"],
        )

    def check(self, headers: Headers) -> None:
        """Raise RequestRefused: 403 for a forbidden origin or host, 400 for an invalid host."""
        origin = headers.get("origin")
        if origin is not None and not self.is_allowed_origin(origin):
            raise RequestRefused(403, f"the origin {origin[:200]!r} is not allowed (--allowed-origins)")
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        except ValueError:
            raise invalid("invalid Host header") from None
        if self._checks_host and "." in name and not (name == self._host or LOOPBACK.fullmatch(name)):
            try:
                ipaddress.ip_address(name)
            except ValueError:
                raise RequestRefused(403, f"the Host header {name[:200]!r} is not this server's name") from None

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        headers, begin = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        log = RequestLog(given if _ID.fullmatch(given) else uuid.uuid4().hex)
        scope["app"] = self  # makes starlette raise HTTPException instead of answering
        scope.setdefault("state", {})["log"] = log
        is_post = scope["method"] == "POST"

        async def noted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = log.id
            await send(message)

        self._parts.num_answering += is_post
        try:
            self.check(headers)
            app = Response(status_code=204) if scope["method"] == "OPTIONS" else self._app
            await app(scope, receive, noted_send)
        except (ClientGone, ClientDisconnect, ConnectionAbortedError):
            log.outcome = "cancelled"
        except Exception as error:
            if log.status:
                raise
            await error_response(error, scope, log)(scope, receive, noted_send)
        finally:
            self._parts.num_answering -= is_post
            log.num_seconds = time.monotonic() - begin
            if is_post:
                self._parts.stats.requests[log.outcome] += 1
            if log.client:
                self._parts.clients.count(log.client, log.prompt, log.cached, log.generated)
            path = scope["raw_path"].decode("ascii", "backslashreplace")  # percent-encoded: no line breaks
            quiet = path in QUIET and log.status in (200, 503)
            logging.log(logging.DEBUG if quiet else logging.INFO, "%s", log.line(scope["method"], path))


_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


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
