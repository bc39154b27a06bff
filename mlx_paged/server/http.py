"""HTTP beyond uvicorn and starlette: limits, the body of a request, its log entry, and the responses.

Answers are sent as JSON, or as server-sent events with keep-alive comments in between.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .answers import Answers, Event, Form
from .errors import RequestRefused, invalid, refusal_of
from .request import ClientGone, Generated, Work
from .requests.fields import NO_EFFECT, REFUSED, Body

SOCKET_SECONDS = 60  # without a byte from or to a client, after which it counts as gone
MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
SPARE_FILES = 256  # open files for everything but connections
MAX_BODY_BYTES = 32 << 20  # Anthropic's own limit
MAX_VALUES = 1 << 19  # commas and brackets in a body: each may become a Python object, which takes up to 1 µs
MAX_PARAMETERS = 1024
MOST_NOTED = 1000  # names of unknown parameters in the log
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


# From bytes to a model --------------------------------------------------------------------------------------------


def parsed(raw: bytes | bytearray, model: type[Body], *, strict: bool = False) -> tuple[Any, list[str]]:
    """Return the parsed body, and the names in it that are unknown or have no effect.

    Args:
        raw: JSON text.
        model: the endpoint's model of the body.
        strict: refuse such names.

    Raises:
        RequestRefused: 400, naming the parameter, or 413.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise RequestRefused(413, f"the request body has more than {MAX_VALUES:,} commas and opening brackets")
    return validated(json_object(raw, "the request body"), model, strict=strict)


def json_object(raw: bytes | bytearray, what: str) -> dict[str, Any]:
    """Return a JSON object. Raises RequestRefused (400): ``what`` is something else."""
    try:
        given = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:  # pydantic's parser allows 200 levels of nesting
        raise invalid(f"{what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(given, dict):
        raise invalid(f"{what} must be a JSON object")
    return given


def validated(given: Mapping[str, Any], model: type[Body], *, strict: bool = False) -> tuple[Any, list[str]]:
    """Return the body of these JSON values, and the names in it that are unknown or have no effect; see
    :func:`parsed`."""
    if len(given) > MAX_PARAMETERS:
        raise invalid(f"the request body must have at most {MAX_PARAMETERS:,} parameters, got {len(given):,}")
    try:
        body = model.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise validation_refusal(error) from None
    for name, value in (body.model_extra or {}).items():
        if name in REFUSED and value not in REFUSED[name][1:]:
            raise invalid(f"{name} is not supported: {REFUSED[name][0]}", name)
    unknown = sorted(islice(ignored_in(body), MOST_NOTED))
    if unknown and strict:
        raise invalid(f"{unknown[0]} is unknown or has no effect (--strict-parameters)", unknown[0])
    _note_ignored(unknown)
    return body, unknown


def ignored_in(value: Any, where: str = "") -> Iterator[str]:
    """Yield the names in a parsed body that are unknown or have no effect, as paths: ``outer.inner``."""
    if isinstance(value, Body):
        for name, given in (value.model_extra or {}).items():
            if given is not None and (where or name not in NO_EFFECT.keys() | REFUSED.keys()):
                yield f"{where}{name}"
        yield from (f"{where}{name}" for name in value.unused())
        for name in value.model_fields_set & set(type(value).model_fields):
            yield from ignored_in(getattr(value, name), f"{where}{name}.")
    elif isinstance(value, list):
        yield from {name for each in value if isinstance(each, Body) for name in ignored_in(each, where)}


def _note_ignored(names: Sequence[str]) -> None:
    """Log, in one line, names that were not logged before."""
    new = [name for name in names if name not in _noted][: MOST_NOTED - len(_noted)]
    if new:
        _noted.update(new)
        logging.warning("ignoring parameters that are unknown or have no effect: %.1000s", ", ".join(map(repr, new)))


_noted: set[str] = set()


# Parts of pydantic's places that are no names.
_KINDS = ("function-", "constrained-", "list[", "dict[", "literal[", "tagged-union[")


def validation_refusal(error: ValidationError) -> RequestRefused:
    """Return a 400 for the first invalid parameter of a body: its name, what is allowed and what was given."""
    faults = error.errors(include_url=False)
    first = [each for each in faults if each["loc"][:1] == faults[0]["loc"][:1]]
    fault = max(first, key=lambda each: len(each["loc"]))  # of a union's members, the one that fits best
    place = [str(part) for part in fault["loc"]]
    param = place[0] if place else None
    named = [part for part in place if part != "str" and not part.startswith(_KINDS)]
    where = ".".join(part for part, _ in groupby(named))  # members of a union come as TAG.FIELD, often the same word
    if fault["type"] == "missing":
        return invalid(f"{where} is required", param)
    allowed = list(dict.fromkeys(_words(each) for each in first if len(each["loc"]) == len(place)))
    return invalid(f"{where[:200]}: {' or '.join(allowed)[:300]}, got {_abbreviated(fault.get('input'))}", param)


def _words(fault: Mapping[str, Any]) -> str:
    return str(fault["msg"]).removeprefix("Value error, ")


def _abbreviated(value: Any) -> str:
    if isinstance(value, list | dict) and len(value) > 8:
        return f"a list of {len(value)} values" if isinstance(value, list) else f"an object with {len(value)} fields"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 100 else text[:100] + "…"


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


# Answers ------------------------------------------------------------------------------------------------------------


BEAT_SECONDS = 1.0  # without a write, after which a keep-alive comment is sent
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class AnswerResponse(Response):
    """The HTTP response with a request's answers. An event stream starts with the first event, or after a second:
    errors found before that still get their HTTP status.

    Args:
        work: carries the answers to the client.
        answers: the answers, fed from the work.
        form: the API's response format.
        log: log entry of the request.
        headers: additional headers.
    """

    def __init__(
        self,
        work: Work,
        answers: Answers,
        form: Form,
        log: RequestLog,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers)
        self._work, self._answers, self._form, self._log = work, answers, form, log
        self._given = headers
        self._has_begun = False
        self._last = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response. Raises ClientGone, and other errors only while the response can still get a status."""
        self._send_message = send
        try:
            if self._answers.request.streams:
                await self._stream_events()
                return
            while not self._answers.are_over:
                await self._run(self._answers.add, await self._work.receive())
            whole = await run_in_threadpool(lambda: json_response(self._answers.whole(), headers=self._given))
            await whole(scope, receive, send)
        except Exception as error:
            if not self._has_begun or isinstance(error, ClientGone):
                raise
            refusal = refusal_of(error)
            self._log.refuse(refusal)
            await self._write(events_text(self._form.failed(refusal)))
            await self._write(b"", more=False)
        finally:
            self._work.close()
            self._note_tokens()

    def _note_tokens(self) -> None:
        usage, log, answers = self._answers.usage(), self._log, self._answers
        log.prompt, log.cached, log.generated = usage.prompt, usage.cached, usage.completion
        if answers.first_at is not None:
            log.first_token = answers.first_at - answers.request.asked_at

    async def _stream_events(self) -> None:
        while not self._answers.are_over:
            try:
                items = await self._work.receive(BEAT_SECONDS)
                is_end = not self._has_begun or any(isinstance(each, Generated) and each.finish for each in items)
                text = await self._run(self._text, items, is_long=is_end and self._form.repeats_body)
                if text:
                    await self._write(text)
            except TimeoutError:
                pass
            if time.monotonic() - self._last >= BEAT_SECONDS:
                await self._write(f": {self._answers.progress}\n\n".encode())
        await self._write(b"", more=False)

    async def _run(self, call: Callable[[Sequence[Any]], T], items: Sequence[Any], *, is_long: bool = False) -> T:
        """Call a function; in a worker thread if it takes long, as texts of prompts and log-probabilities do."""
        request = self._answers.request
        if is_long or request.wants_logprobs or request.echo:
            return await run_in_threadpool(call, items)
        return call(items)

    def _text(self, items: Sequence[Any]) -> bytes:
        self._answers.add(items)
        return events_text(self._answers.events())

    async def _write(self, raw: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in self._given.items())]
            await self._send_message({"type": "http.response.start", "status": 200, "headers": headers})
        self._last = time.monotonic()
        try:
            async with asyncio.timeout(SOCKET_SECONDS):
                await self._send_message({"type": "http.response.body", "body": raw, "more_body": more})
        except TimeoutError:
            raise ClientGone from None


def events_text(events: Iterable[Event]) -> bytes:
    """Return events as they are sent to the client."""
    text = ""
    for event in events:
        data = event.data if isinstance(event.data, str) else json.dumps(event.data, allow_nan=False)
        text += f"data: {data}\n\n" if event.name is None else f"event: {event.name}\ndata: {data}\n\n"
    return text.encode()
