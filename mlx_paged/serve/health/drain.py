"""Drain: a server that ends lets those finish whom it is answering."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..refusal import RequestRefused

SECONDS = 30.0
RETRY_SECONDS = 5


class Drain:
    """Counts those that are being answered. Every method may be called by any thread.

    Args:
        seconds: how long they have to finish; 0: they have not.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.num_answering = 0
        self.began_at: float | None = None
        self._changed = threading.Condition()

    @property
    def is_draining(self) -> bool:
        return self.began_at is not None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """For the time that a client is being answered, to its last byte."""
        with self._changed:
            self.num_answering += 1
        try:
            yield
        finally:
            with self._changed:
                self.num_answering -= 1
                self._changed.notify_all()

    def check(self) -> None:
        """Raises RequestRefused: 503, nobody new is served any more."""
        if self.is_draining:
            raise RequestRefused(503, "the server is shutting down", retry_after=RETRY_SECONDS)

    def wait(self, seconds: float) -> None:
        """Until nobody is being answered, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self.num_answering, seconds)

    def begin(self, then: Callable[[], None]) -> None:
        """Serve nobody new, and call ``then`` in a thread of its own once all are answered or the time is up."""
        self.began_at = time.monotonic()
        threading.Thread(target=self._wait, args=(then,), daemon=True, name="drain").start()

    def _wait(self, then: Callable[[], None]) -> None:
        self.wait(self.seconds)
        then()
