"""OpenRequests: whose clients are waiting for an answer."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

from ..answer_queue import AnswerQueue


def open_figures(queue: AnswerQueue) -> dict[str, Any]:
    """What is known of a request wherever it is."""
    tokens = 0 if queue.ctx is None else len(queue.ctx.prompt)
    cached = 0 if queue.ctx is None else max(0, queue.ctx.prompt_cache_count)
    return {
        "number": queue.number,
        "uid": None,
        "state": "alone" if queue.is_alone else "queued",
        "waiting": not queue.is_alone,
        "age_seconds": round(time.monotonic() - queue.asked_at, 1),
        "prompt_tokens": tokens,
        "cached_tokens": cached,
        "tokens": cached,
        "computing_tokens": 0,
        "generated_tokens": queue.num_tokens,
        "blocks": [],
    }


class OpenRequests:
    """Every method may be called by any thread. A request whose client's thread has let go of it is none of them."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[AnswerQueue] = weakref.WeakSet()
        self._lock = threading.Lock()

    def put(self, requests: Queue[Any], item: tuple[AnswerQueue, Any, Any]) -> None:
        """Queue a request; it is open from now on."""
        with self._lock:
            self._open.add(item[0])
            requests.put(item)

    def end(self, queue: AnswerQueue) -> None:
        """It has been answered."""
        with self._lock:
            self._open.discard(queue)

    @contextmanager
    def ending(self, queue: AnswerQueue) -> Iterator[None]:
        """A request that fails within the block is not open any more."""
        try:
            yield
        except BaseException:
            self.end(queue)
            raise

    def progress(self) -> list[dict[str, Any]]:
        """The open ones, oldest first: whether their context has come, and how long ago they did."""
        with self._lock:
            queues = sorted(self._open, key=lambda queue: queue.number)
        return [open_figures(queue) for queue in queues if queue.is_wanted]

    def fail_all(self, refusal: Callable[[], Exception]) -> None:
        """Nothing more will come, to anybody."""
        with self._lock:
            for queue in list(self._open):
                queue.fail(refusal())
            self._open.clear()

    def fail_taken(self, requests: Queue[Any], refusal: Callable[[], Exception]) -> None:
        """All fail but those that nobody has taken from ``requests`` yet."""
        with self._lock:
            with requests.mutex:
                waiting = {id(item[0]) for item in requests.queue}
            for queue in list(self._open):
                if id(queue) not in waiting:
                    queue.fail(refusal())
                    self._open.discard(queue)
