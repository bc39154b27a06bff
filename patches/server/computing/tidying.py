"""Tidying: what a server does for its prefixes and its memory when it has nothing else to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import mlx.nn as nn

from ....serve.health.heap import trim_heap
from ...cache.lru_prompt_cache import PagedPromptCache, PromptStore
from ...cache.pools import known_pool

TIDY_EVERY_SECONDS, TIDY_SECONDS = 30, 0.1
RETURN_MEMORY_SECONDS = 5  # without work, until pools give memory back


class Tidying:
    """For the thread that computes. Keeps neither the prompt cache nor the models.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tidied = clock()
        self._worked_at: float | None = None  # None: memory has been given back since

    def note_work(self) -> None:
        """There is something to do."""
        self._worked_at = self._clock()

    def while_idle(
        self, prompt_cache: PromptStore, models: Iterable[nn.Module | None], is_wanted: Callable[[], bool]
    ) -> None:
        """Until a request comes."""
        self._tidied = self._clock()
        if isinstance(prompt_cache, PagedPromptCache):
            prompt_cache.tidy(is_wanted)
        if self._worked_at is not None and self._tidied - self._worked_at >= RETURN_MEMORY_SECONDS:
            self._worked_at = None
            for model in models:
                pool = None if model is None else known_pool(model)
                if pool is not None:
                    pool.return_memory()
            trim_heap()

    def while_busy(self, prompt_cache: PromptStore) -> None:
        """A little now and then, for a server that is never idle."""
        now = self._clock()
        if now - self._tidied > TIDY_EVERY_SECONDS and isinstance(prompt_cache, PagedPromptCache):
            prompt_cache.tidy(for_seconds(TIDY_SECONDS))
            self._tidied = self._clock()


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Whether so many have passed."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin > seconds
