"""Choices: the sequences that answer one request, computed at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_lm import server as upstream

from ....serve.extras import RequestExtras
from ..answer_queue import ClientSide

if TYPE_CHECKING:
    from ..response_generator import PagedResponseGenerator

POLL_SECONDS = 0.25  # between looks at whether the client is still there
MOST_MERGED = 256  # items; more wait in the sequences' own queues


class Choice(NamedTuple):
    """One sequence that is asked for."""

    request: upstream.CompletionRequest
    args: upstream.GenerationArguments
    extras: RequestExtras


class Choices:
    """All that is told of some sequences, as it comes.

    A single one is waited for by the caller's thread, several by a thread for each: the batch computes them together.
    Threads are ended when the iteration is.

    Args:
        generator: of the server's answers.
        choices: what is asked for.
        client_is_gone: asked again and again, by the caller's thread.
        on_progress: told how many tokens of a prompt are computed, of how many; from any thread.
        side: of the client, for each sequence.
    """

    def __init__(
        self,
        generator: PagedResponseGenerator,
        choices: Sequence[Choice],
        client_is_gone: Callable[[], bool],
        on_progress: Callable[[int, int], None],
        side: ClientSide,
    ) -> None:
        self._generator = generator
        self._choices = choices
        self._client_is_gone = client_is_gone
        self._on_progress, self._side = on_progress, side

    def __iter__(self) -> Generator[tuple[int, Any], None, None]:
        """Of each sequence, with its index: its GenerationContext, Responses, and None at its end.

        Raises:
            RequestRefused: one of them is not, or no longer, served; the others are given up.
            ConnectionAbortedError: the client has gone.
        """
        if len(self._choices) > 1:
            yield from self._several()
        else:
            for item in self._items(self._choices[0], self._client_is_gone):
                yield 0, item

    def _items(self, choice: Choice, client_is_gone: Callable[[], bool]) -> Iterator[Any]:
        ctx, answers = self._generator.generate(
            choice.request,
            choice.args,
            self._on_progress,
            client_is_gone,
            extras=choice.extras,
            client=self._side,
        )
        try:
            yield ctx
            yield from answers
        finally:
            ctx.stop()
        yield None

    def _several(self) -> Iterator[tuple[int, Any]]:
        items: Queue[tuple[int, Any]] = Queue(MOST_MERGED)
        is_over = threading.Event()

        def put(index: int, item: Any) -> None:
            while not is_over.is_set():
                with suppress(Full):
                    return items.put((index, item), timeout=POLL_SECONDS)

        def wait_for(index: int, choice: Choice) -> None:
            try:
                for item in self._items(choice, is_over.is_set):
                    put(index, item)
            except BaseException as error:
                put(index, error)

        threads = [
            threading.Thread(target=wait_for, args=pair, name="choice", daemon=True)
            for pair in enumerate(self._choices)
        ]
        try:
            for thread in threads:
                thread.start()
            yield from self._merged(items)
        finally:
            is_over.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _merged(self, items: Queue[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        num_open, next_look = len(self._choices), 0.0
        while num_open:
            if time.monotonic() >= next_look:
                if self._client_is_gone():
                    raise ConnectionAbortedError("the client has gone")
                next_look = time.monotonic() + POLL_SECONDS
            try:
                index, item = items.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            num_open -= item is None
            yield index, item
