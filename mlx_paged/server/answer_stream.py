"""AnswerStream: carries answers from the engine thread to one client's coroutine."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from ..errors import without_frames
from .errors import RequestRefused

MOST_UNREAD = 4096  # unread tokens, their top log-probabilities included, after which a stalled client is dropped
STALL_SECONDS = 0.25  # in one write, after which the client counts as stalled


class Begun(NamedTuple):
    """Start of an answer; ``num_cached`` tokens of its prompt came from the prefix cache."""

    answer: int
    num_cached: int


class Progress(NamedTuple):
    """Prefill progress: ``done`` of ``total`` prompt tokens of an answer are computed."""

    answer: int
    done: int
    total: int


class Generated(NamedTuple):
    """The next token of an answer.

    Attributes:
        answer: index among the request's answers.
        token: token id.
        text: text that can be shown now.
        finish: why the answer ends here, ``stop`` or ``length``; None: it continues.
        stop: the stop string that ends it.
        logprob, top: log-probability of the token, and ``(id, log-probability)`` of the most likely ones, if requested.
        num_shown: with the last token, how many tokens are part of the answer, without an end token or those from a
            stop string on; None: all.
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
    """Log-probabilities of a prompt's tokens from the second on, and the most likely tokens at these positions."""

    prompt: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class ClientGone(Exception):
    """The client has closed its connection."""


class AnswerStream:
    """Items for one client in order, until an exception or the reader ends it. Made and used in the event loop.

    Attributes:
        is_wanted: whether the client is connected and wants more; read by the engine thread.
        writing_since: start of the current write to the client, in seconds of the monotonic clock; None: there is none.
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
        """Add items from the engine thread; an exception among them ends the stream."""
        for item in items:
            if isinstance(item, BaseException):
                self.fail(item)
            elif self._error is None:
                self._items.append(item)
                self._num_unread += 1 + len(item.top) if isinstance(item, Generated) else 0
        self._arrived.set()
        since = self.writing_since
        if self._num_unread > MOST_UNREAD and since is not None and time.monotonic() - since >= STALL_SECONDS:
            self.fail(RequestRefused(408, f"the client reads too slowly: more than {MOST_UNREAD} unread tokens"))

    def fail(self, error: BaseException) -> None:
        """End the stream and drop later items; earlier ones are still read, unless the client has gone."""
        if self._error is None:
            self._error, self.is_wanted = without_frames(error), False
            if isinstance(error, ClientGone):
                self._items.clear()
            self._arrived.set()

    async def receive(self, seconds: float | None = None) -> list[Any]:
        """Return all unread items, waiting up to ``seconds`` for the first.

        Raises:
            TimeoutError: there was none in that time.
            Exception: the error that ended the stream.
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
        """Tell the engine thread that nothing more is wanted, and drop unread items."""
        self.is_wanted = False
        self._items.clear()


class Outbox:
    """Items of one step, delivered together so that the event loop wakes once. For the engine thread."""

    def __init__(self) -> None:
        self._waiting: dict[AnswerStream, list[Any]] = {}

    def put(self, stream: AnswerStream | None, item: Any) -> None:
        """Add an item for a stream; dropped if ``stream`` is None, as on ranks without clients."""
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
