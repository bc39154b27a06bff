"""EventStream: server-sent events, in chunks where the client takes them, with signs of life in between."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

from ..api.form import Event, Form
from ..refusal import RequestRefused

STALL_SECONDS = 0.25  # in one write
BEAT_SECONDS = 1.0  # without anything written, after which a comment is


class EventStream:
    """The body of an answer. For one thread, but for ``is_stalled``.

    Args:
        write: to the client.
        is_chunked: the client takes chunks (HTTP/1.1); otherwise the end of the connection is the end of the body.

    Attributes:
        form: of the answers, once it is known; it words failures.
    """

    def __init__(self, write: Callable[[bytes], object], *, is_chunked: bool) -> None:
        self.form: Form | None = None
        self._write = write
        self._is_chunked = is_chunked
        self._last = time.monotonic()
        self._writes_since: float | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether the client has been taking nothing for a while of what is being written to it: what the systems in
        between keep for it is full."""
        since = self._writes_since
        return since is not None and time.monotonic() - since >= STALL_SECONDS

    def send(self, events: Iterable[Event]) -> None:
        text = "".join(map(_text, events))
        if text:
            self._send(text.encode())

    def comment(self, text: str) -> None:
        self._send(f": {text}\n\n".encode())

    def beat(self, text: str) -> None:
        """Tell that the server lives, if nothing else has for a second."""
        if time.monotonic() - self._last >= BEAT_SECONDS:
            self.comment(text)

    def fail(self, refusal: RequestRefused) -> None:
        """Tell why there is no more, and close."""
        self.send([Event(refusal.body())] if self.form is None else self.form.failed(refusal))
        self.close()

    def close(self) -> None:
        """The body is complete."""
        if self._is_chunked:
            self._write(b"0\r\n\r\n")

    def _send(self, raw: bytes) -> None:
        self._last = self._writes_since = time.monotonic()
        self._write(b"%x\r\n%b\r\n" % (len(raw), raw) if self._is_chunked else raw)
        self._writes_since = None


def _text(event: Event) -> str:
    data = event.data if isinstance(event.data, str) else json.dumps(event.data)
    return f"data: {data}\n\n" if event.name is None else f"event: {event.name}\ndata: {data}\n\n"
