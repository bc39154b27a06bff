"""AnswerStream: what goes from the thread that computes to one client's coroutine."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from ..errors import without_frames
from .errors import RequestRefused

MOST_UNREAD = 4096  # items, and the likeliest tokens told with them, that wait for a client that reads nothing
STALL_SECONDS = 0.25  # in one write to a client, after which it is taken to read nothing


class Begun(NamedTuple):
    """An answer begins: so many tokens of its prompt were found cached."""

    answer: int
    num_cached: int


class Progress(NamedTuple):
    """So many tokens of an answer's prompt are computed."""

    answer: int
    done: int
    total: int


class Generated(NamedTuple):
    """The next token of an answer.

    Attributes:
        answer: which of the request's.
        token: of the vocabulary.
        text: that can be shown now.
        finish: why the answer ends here: ``stop`` or ``length``; None: it goes on.
        stop: the stop string that ends it.
        logprob, top: of the token and of the likeliest, ``(id, log-probability)``, if they are wanted.
        num_shown: at the end, how many tokens are part of the answer: an end token is not, nor one behind a stop
            string; None: all are.
    """

    answer: int
    token: int
    text: str
    finish: str | None = None
    stop: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_shown: int | None = None


class Scores(NamedTuple):
    """Log-probabilities of a prompt's own tokens but the first, and the likeliest at the same places."""

    prompt: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class ClientGone(Exception):
    """The client has closed its connection."""


class AnswerStream:
    """Items in order, ended by an exception or by the reader. Made in the event loop, and used there.

    Attributes:
        is_wanted: whether the client is there and wants more; read by the thread that computes.
        writing_since: when the write to the client began that is going on, in seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_wanted = True
        self.writing_since: float | None = None
        self._items: list[Any] = []
        self._num_unread = 0
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    def feed(self, items: list[Any]) -> None:
        """Add items from the thread that computes; an exception among them ends the stream."""
        for item in items:
            if isinstance(item, BaseException):
                self.fail(item)
            elif self._error is None:
                self._items.append(item)
                self._num_unread += 1 + len(item.top) if isinstance(item, Generated) else 0
        self._arrived.set()
        since = self.writing_since
        if self._num_unread > MOST_UNREAD and since is not None and time.monotonic() - since >= STALL_SECONDS:
            self.fail(RequestRefused(408, "the answer was not read: too much of it waited"))

    def fail(self, error: BaseException) -> None:
        """End the stream, whatever still comes; what has come is read first."""
        if self._error is None:
            self._error, self.is_wanted = without_frames(error), False
            if isinstance(error, ClientGone):
                self._items.clear()
            self._arrived.set()

    async def receive(self, seconds: float | None = None) -> list[Any]:
        """Return what has come, at least one item.

        Raises:
            TimeoutError: nothing has come in that time.
            Exception: that the stream ended with.
        """
        if not self._items and self._error is None:
            self._arrived.clear()
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        if not self._items and self._error is not None:
            raise self._error
        items, self._items, self._num_unread = self._items, [], 0
        return items

    def close(self) -> None:
        """Say that nothing more is wanted."""
        self.is_wanted = False
        self._items.clear()


class Outbox:
    """Collects what a step has to tell, so that the event loop is woken once. For the thread that computes."""

    def __init__(self) -> None:
        self._waiting: dict[AnswerStream, list[Any]] = {}

    def put(self, stream: AnswerStream | None, item: Any) -> None:
        """Args: stream: None on ranks without clients."""
        if stream is not None:
            self._waiting.setdefault(stream, []).append(item)

    def fail(self, stream: AnswerStream | None, error: BaseException) -> None:
        if stream is not None:
            stream.is_wanted = False
            self.put(stream, without_frames(error))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        loop = next(iter(waiting)).loop if waiting else None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, waiting)


def _deliver(waiting: dict[AnswerStream, list[Any]]) -> None:
    for stream, items in waiting.items():
        stream.feed(items)
