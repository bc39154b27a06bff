"""Work: a request in the engine, and the way of its answers from the engine thread to one client's coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from ..errors import without_frames
from .request import ModelKey, ServerRequest


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
        num_cached: with the first token, how many tokens of the prompt came from the prefix cache.
    """

    answer: int
    token: int
    text: str
    finish: str | None = None
    stop: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_shown: int | None = None
    num_cached: int | None = None


class Scores(NamedTuple):
    """Log-probabilities of a prompt's tokens from the second on, and the most likely tokens at these positions."""

    prompt: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class ClientGone(Exception):
    """The client has closed its connection."""


class Work:
    """A request in the engine thread, and the items for its client in order, until an error or the reader ends them.

    Args:
        request: the request; None: only the model's texts are wanted, to make prompts with.
        key: the model that it needs; None: the present one.
        loop: the event loop of its client; None: this rank has no clients.
        is_shared: several ranks compute it, so they notice only between turns, together, that its client has gone.

    Attributes:
        is_open: whether the client is connected and wants more.
        is_gone: it has failed, or, on several ranks, all of them know that its client has gone.
        num_tokens: tokens generated so far.
        state: ``queued``, ``scoring``, ``scored``, ``batched`` or ``alone``.
    """

    def __init__(
        self,
        request: ServerRequest | None,
        key: ModelKey | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.request, self.key, self.loop, self.is_shared = request, key, loop, is_shared
        self.is_open, self.is_gone = True, False
        self.num_tokens = 0
        self.state = "queued"
        self._watch: asyncio.Task[None] | None = None
        self._items: list[Any] = []
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Return whether the engine is to go on with it."""
        return not self.is_gone and (self.is_shared or self.is_open)

    # In the event loop ----------------------------------------------------------------------------------------

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Fail with ClientGone when the client disconnects.

        Args:
            receive: ASGI's; the request's body has been read.
        """

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.fail(ClientGone())

        self._watch = asyncio.create_task(until_gone())

    def feed(self, items: list[Any]) -> None:
        """Add items from the engine thread; an exception among them ends the work."""
        for item in items:
            if isinstance(item, BaseException):
                self.fail(item)
            elif self._error is None:
                self._items.append(item)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """End the work and drop later items; earlier ones are still read, unless the client has gone."""
        if self._error is None:
            self._error, self.is_open = without_frames(error), False
            if isinstance(error, ClientGone):
                self._items.clear()
            self._arrived.set()

    async def receive(self, seconds: float | None = None) -> list[Any]:
        """Return all unread items, waiting up to ``seconds`` for the first.

        Raises:
            TimeoutError: there was none in that time.
            Exception: the error that ended the work.
        """
        if not self._items and self._error is None:
            self._arrived.clear()
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Tell the engine thread that nothing more is wanted, and drop unread items."""
        self.is_open = False
        if self._watch is not None:
            self._watch.cancel()
        self._items.clear()


class Outbox:
    """Items of one step, delivered together so that the event loop wakes once. For the engine thread."""

    def __init__(self) -> None:
        self._waiting: dict[Work, list[Any]] = {}

    def put(self, work: Work, item: Any) -> None:
        """Add an item for a client; dropped on ranks without clients."""
        if work.loop is not None:
            self._waiting.setdefault(work, []).append(item)

    def fail(self, work: Work, error: BaseException) -> None:
        work.is_open = False
        self.put(work, without_frames(error))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        loop = next(iter(waiting)).loop if waiting else None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, waiting)


def _deliver(waiting: dict[Work, list[Any]]) -> None:
    for work, items in waiting.items():
        work.feed(items)
