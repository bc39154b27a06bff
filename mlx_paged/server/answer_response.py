"""AnswerResponse: an answer as JSON, or as server-sent events with signs of life in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response

from .answer_stream import AnswerStream, ClientGone
from .answers import Answers
from .errors import refusal_of
from .http import SOCKET_SECONDS, RequestLog, json_response
from .requests.pieces import Event, Form

BEAT_SECONDS = 1.0  # without anything written, after which a comment is
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Client:
    """A client that waits for its answer, in the event loop.

    Args:
        receive: of ASGI; the request's body has been read.

    Attributes:
        stream: of what it waits for; ended when the client goes.
    """

    def __init__(self, receive: Any) -> None:
        self.stream = AnswerStream()
        self._receive = receive
        self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stream.fail(ClientGone())

    def close(self) -> None:
        """Say that nothing more is wanted."""
        self._watch.cancel()
        self.stream.close()


class AnswerResponse(Response):
    """An answer. A stream of events begins with the first thing that there is to tell, or after a second: what can be
    wrong with a request has been found by then, and has had its status.

    Args:
        client: of the answer.
        answers: made of its stream.
        form: of the answer.
        log: of the request.
        headers: of the answer, beyond its own.
        work: what the engine's thread knows of the request, as long as this lives.
        streams: whether it is a stream.
    """

    def __init__(
        self,
        client: Client,
        answers: Answers,
        form: Form,
        log: RequestLog,
        headers: dict[str, str],
        work: Any,
        *,
        streams: bool,
    ) -> None:
        super().__init__(headers=headers)
        self._client, self._stream, self._work = client, client.stream, work
        self._answers, self._form, self._log, self._given, self._streams = answers, form, log, headers, streams
        self._has_begun = False
        self._last = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises Exception: before anything was sent, so that it can still have a status."""
        self._send_message = send
        try:
            if self._streams:
                await self._tell()
                return
            while not self._answers.are_over:
                self._answers.add(await self._stream.receive())
            await json_response(self._answers.whole(), headers=self._given)(scope, receive, send)
        except Exception as error:
            if not self._has_begun or isinstance(error, ClientGone):
                raise
            refusal = refusal_of(error)
            self._log.refuse(refusal)
            await self._send(self._form.failed(refusal))
            await self._write(b"", more=False)
        finally:
            self._client.close()
            self._answers.note_in(self._log)

    async def _tell(self) -> None:
        while not self._answers.are_over:
            try:
                self._answers.add(await self._stream.receive(BEAT_SECONDS))
                await self._send(self._answers.events())
            except TimeoutError:
                pass
            if time.monotonic() - self._last >= BEAT_SECONDS:
                await self._write(f": {self._answers.progress}\n\n".encode())
        await self._write(b"", more=False)

    async def _send(self, events: Iterable[Event]) -> None:
        text = "".join(map(event_text, events))
        if text:
            await self._write(text.encode())

    async def _write(self, raw: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in self._given.items())]
            await self._send_message({"type": "http.response.start", "status": 200, "headers": headers})
        self._last = self._stream.writing_since = time.monotonic()
        try:
            async with asyncio.timeout(SOCKET_SECONDS):
                await self._send_message({"type": "http.response.body", "body": raw, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        finally:
            self._stream.writing_since = None


def event_text(event: Event) -> str:
    data = event.data if isinstance(event.data, str) else json.dumps(event.data, allow_nan=False)
    return f"data: {data}\n\n" if event.name is None else f"event: {event.name}\ndata: {data}\n\n"
