"""AnswerQueue: what goes to one client of the server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from queue import Queue
from typing import Any, NamedTuple

from mlx_lm import server as upstream

from ...errors import without_frames
from ...serve.refusal import RequestRefused
from ...serve.stops.stopped_answer import StoppedAnswer

MOST_UNREAD = 4096  # tokens, and the likeliest told with them, that wait for a client that reads nothing

_numbers = itertools.count(1)


class ClientSide(NamedTuple):
    """What is told to, and asked of, a client's thread; by any thread.

    Attributes:
        accept: called when a request's prompt is made: it waits for nothing but its turn.
        is_stalled: whether the client takes nothing of what is being written to it.
    """

    accept: Callable[[], None] = lambda: None
    is_stalled: Callable[[], bool] = lambda: False


NOBODY = ClientSide()


class AnswerQueue(Queue[Any]):
    """What goes to one client, in order: the context, progress and tokens, and None or an error at the end.

    Args:
        stop_strings: the answer ends before the first of them.
        is_stalled: see :class:`ClientSide`. Beyond :data:`MOST_UNREAD`, the answer to such a client ends.

    Attributes:
        cancelled: the client has gone; set by its thread.
        ctx: the request's GenerationContext once it has one.
        is_alone: the request is served alone: putting its progress raises once the client has gone, which ends it.
        text_sm: parts the answer's text, in the place of mlx-lm's; None: mlx-lm's does.
        num_put: items that were put.
        num_tokens: those of them that were tokens.
        number: of the request, in the order they came.
        asked_at: when it came, in seconds of the monotonic clock.
        counts_prompt: whether somebody else counts the prompt tokens computed for it.
    """

    def __init__(self, stop_strings: Iterable[str] = (), is_stalled: Callable[[], bool] = NOBODY.is_stalled) -> None:
        super().__init__()
        self._is_stalled = is_stalled
        self._num_unread = 0
        self.cancelled = False
        self.is_alone = False
        self.counts_prompt = True
        self.num_put = self.num_tokens = 0
        self.number = next(_numbers)
        self.asked_at = time.monotonic()
        self._is_failed = False
        self.ctx: Any = None
        self.text_sm: Any = None
        stop_strings = tuple(stop_strings)
        self._answer = StoppedAnswer(stop_strings) if stop_strings else None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer: what it gets beyond that is dropped."""
        return self._answer is not None and self._answer.is_stopped

    @property
    def client_waits(self) -> bool:
        """Whether the client is there and wants more."""
        return not (self.cancelled or (self.ctx is not None and self.ctx._should_stop))

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be computed."""
        return self.client_waits

    def fail(self, error: Exception) -> None:
        """The last item, whatever somebody who was taken to be dead still puts. By any thread."""
        self._is_failed = True
        super().put(without_frames(error))

    def _put(self, item: Any) -> None:
        self._num_unread += _weight(item)
        super()._put(item)

    def _get(self) -> Any:
        item = super()._get()
        self._num_unread -= _weight(item)
        return item

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.num_put += 1
        if self._is_failed:
            return
        self.num_tokens += isinstance(item, upstream.Response)
        if isinstance(item, upstream.GenerationContext):
            self.ctx = item
            item.text_sm = self.text_sm or item.text_sm
        elif self.is_alone and self.cancelled and isinstance(item, tuple):
            raise InterruptedError("the client has gone")
        elif self._answer is not None and isinstance(item, upstream.Response):
            if self.is_stopped:
                return
            item = self._answer.take(item)
            if self.is_stopped:
                self.ctx.num_shown, self.ctx.stop_string = self._answer.num_shown, self._answer.stop_string
                self.ctx.stop()  # ends mlx-lm's own loop, where the request is served alone
        if isinstance(item, Exception):  # its frames hold this queue, and often the batch and its model
            item = without_frames(item)
        super().put(item, block, timeout)
        if self._num_unread > MOST_UNREAD and self._is_stalled():
            self.fail(RequestRefused(408, "the answer was not read: too much of it waited"))
            self.cancelled = True
            if self.ctx is not None:
                self.ctx.stop()


def _weight(item: Any) -> int:
    return 1 + len(item.top_tokens or ()) if isinstance(item, upstream.Response) else 1
