"""EventResponse: an answer as server-sent events, with signs of life in between."""

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
from .http import SOCKET_SECONDS, RequestLog
from .requests.pieces import Event, Form, Piece

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


class EventResponse(Response):
    """The events of a stream. It begins with the first thing that there is to tell, or after a second: what can be
    wrong with a request has been found by then, and has had its status.

    Args:
        client: of the answer.
        answers: made of them.
        form: of the events.
        log: of the request.
        headers: of the answer, beyond its own.
        work: what the engine's thread knows of the request.
    """

    def __init__(
        self,
        client: Client,
        answers: Answers,
        form: Form,
        log: RequestLog,
        headers: dict[str, str],
        work: Any,
    ) -> None:
        super().__init__()
        self._work = work  # as long as this lives, the engine's thread knows of the request
        self._client, self._stream = client, client.stream
        self._answers, self._form, self._log = answers, form, log
        self._headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._has_begun = False
        self._last = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises Exception: before anything was sent, so that it can still have a status."""
        self._send_message = send
        try:
            await self._run()
        except Exception as error:
            if not self._has_begun or isinstance(error, ClientGone):
                raise
            refusal = refusal_of(error)
            self._log.outcome, self._log.reason = "failed" if refusal.status >= 500 else "refused", str(refusal)
            await self._send(self._form.failed(refusal))
            await self._write(b"", more=False)
        finally:
            self._client.close()
            self._answers.tell(self._log)

    async def _run(self) -> None:
        early: list[Piece] = []  # before all answers have begun
        is_open = False
        while not self._answers.are_over:
            try:
                items = await self._stream.take(BEAT_SECONDS)
            except TimeoutError:
                await self._beat()
                continue
            events: list[Event] = []
            for item in items:
                piece = self._answers.take(item)
                if piece is not None:
                    early.append(piece)
                if not is_open and self._answers.have_begun:
                    is_open = True
                    events += self._form.begin(self._answers.usage(), self._answers.echoes(self._answers.best()))
                if is_open:
                    events += [event for piece in early for event in self._form.piece(piece)]
                    early.clear()
            await self._send(events)
            if time.monotonic() - self._last >= BEAT_SECONDS:
                await self._beat()
        await self._send(self._form.end(self._answers.usage()))
        await self._write(b"", more=False)

    async def _beat(self) -> None:
        await self._write(f": {self._answers.progress}\n\n".encode())

    async def _send(self, events: Iterable[Event]) -> None:
        text = "".join(map(event_text, events))
        if text:
            await self._write(text.encode())

    async def _write(self, raw: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send_message({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._last = self._stream.writes_since = time.monotonic()
        try:
            async with asyncio.timeout(SOCKET_SECONDS):
                await self._send_message({"type": "http.response.body", "body": raw, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        finally:
            self._stream.writes_since = None


def event_text(event: Event) -> str:
    data = event.data if isinstance(event.data, str) else json.dumps(event.data, allow_nan=False)
    return f"data: {data}\n\n" if event.name is None else f"event: {event.name}\ndata: {data}\n\n"
