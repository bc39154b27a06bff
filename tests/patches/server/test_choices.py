"""Several sequences of one request, whose client is slow."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_paged.patches.server.answer_queue import NOBODY
from mlx_paged.patches.server.answers.choices import MOST_MERGED, Choice, Choices


class Context:
    def stop(self) -> None:
        pass


class Endless:
    """Stands in for the response generator: answers without an end."""

    def __init__(self) -> None:
        self.num_taken: list[int] = []

    def generate(
        self, request: Any, args: Any, on_progress: Any, client_is_gone: Callable[[], bool], **options: Any
    ) -> tuple[Any, Iterator[Any]]:
        return Context(), self._answers(request, client_is_gone)

    def _answers(self, index: int, client_is_gone: Callable[[], bool]) -> Iterator[Any]:
        for number in itertools.count():
            if client_is_gone():
                raise ConnectionAbortedError
            self.num_taken[index] = number
            yield number


def test_nobody_takes_answers_that_the_client_does_not() -> None:
    generator: Any = Endless()
    generator.num_taken = [0, 0, 0]
    asked: list[Any] = [Choice(index, None, None) for index in range(3)]  # type: ignore[arg-type]
    items = iter(Choices(generator, asked, lambda: False, lambda done, total: None, NOBODY))
    next(items)
    before = [0, 0, 0]
    while generator.num_taken != before or not any(before):
        before = list(generator.num_taken)
        time.sleep(0.1)
    assert MOST_MERGED - 5 <= sum(before) <= MOST_MERGED + 5
    items.close()
    assert not any(thread.name == "choice" for thread in threading.enumerate())
