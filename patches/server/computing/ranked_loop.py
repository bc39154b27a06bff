"""RankedLoop: a ComputingLoop on each of several ranks, which all do the same with what rank 0 hears from outside."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm import server as upstream

from ....engine.ranks.ranks import Ranks
from ....errors import ConfigError, RankError
from ....serve.health.memory_reading import MemoryReading, nearest, read_memory
from ....serve.health.memory_watch import MemoryWatch
from ....serve.refusal import RequestRefused
from ...cache.pools import known_pool
from .computing_loop import IDLE_SECONDS, ComputingLoop, check_pool
from .shared_request import ComingRequests, Descriptions, SharedQueue, SharedRequest, requests_of
from .tidying import TIDY_SECONDS, for_seconds

if TYPE_CHECKING:
    from ..response_generator import PagedResponseGenerator

COMPILING_SECONDS = 0.005  # between turns in which nothing but grammars is being compiled
TICK_SECONDS = 1.0  # between turns without work: prefixes may expire, memory be given back


class RankedLoop(ComputingLoop):
    """Each turn begins with a message of rank 0: what has come since the last one (requests with their tokens, clients
    that have gone, the end) and what time it is. From then on every rank does what the others do, with stop strings,
    grammars and texts, and answers go nowhere on ranks that have no clients.

    Where nothing is to be done rank 0 says so once in :data:`TICK_SECONDS`, and the others wait for it.

    Args:
        owner: of this rank; on rank 0, where requests come from.
        ranks: that compute the model together.
    """

    def __init__(self, owner: PagedResponseGenerator, ranks: Ranks) -> None:
        super().__init__(owner, clock=lambda: ranks.now)
        self.ranks = ranks
        self._news: dict[str, Any] = {}
        self._new: list[SharedRequest] = []
        self._later: list[Any] = []  # have come, and were too much for one message
        self._coming = ComingRequests(ranks)

    def run(self) -> None:
        """Until rank 0 says that all end. Raises what ends only this rank."""
        self.stream = mx.default_stream(mx.default_device())
        while True:
            news = self._collected() if self.ranks.rank == 0 else None
            with self.ranks.step():
                self._news = news = self.ranks.broadcast(news) or {}
                self.ranks.now = news["now"]
                if news["ends"]:
                    break
                try:
                    self._turn()
                except RankError:
                    raise
                except Exception as error:
                    logging.exception("a step failed; its requests are given up")
                    self.ranks.record.note("failed turn", {})  # of this rank alone, it ends all with the next message
                    self.close_batch(error)
        self._check_end()

    def _check_end(self) -> None:
        self.refuse_all()
        if (pool := self.pool) is not None:
            check_pool(pool, self.owner.prompt_cache)
            stats = pool.stats()
            logging.info("rank %d at its end: %d blocks cached; %s", self.ranks.rank, stats.cached_blocks, stats)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or bool(self._coming)

    def refuse_all(self) -> None:
        self.pending += [*self._coming.close(), *self._later]
        self._later = []
        super().refuse_all()

    # Rank 0 ---------------------------------------------------------------------------------------------------

    def _collected(self) -> dict[str, Any]:
        """What has come; if there is nothing to do, waits for it a little."""
        owner = self.owner
        items, self._later = self._later, []
        until = time.monotonic() + TICK_SECONDS
        while not (items or owner.is_stopping or self.is_busy or time.monotonic() > until):
            with suppress(Empty):
                items.append(owner.requests.get(timeout=IDLE_SECONDS))
        if self._coming and not super().is_busy:
            with suppress(Empty):
                items.append(owner.requests.get(timeout=COMPILING_SECONDS))
        while True:
            try:
                items.append(owner.requests.get_nowait())
            except Empty:
                break
        for queue, request, _ in items:
            if request is None:  # only what prompts are made with was wanted
                queue.put(owner.present_setup())
        descriptions = self._described([SharedRequest(*item) for item in items if item[1] is not None])
        return {
            "now": time.monotonic(),
            "ends": owner.is_stopping,
            "requests": descriptions.told(),
            "gone": [queue.number for queue in self._queues() if not queue.client_waits],
        }

    def _described(self, requests: list[SharedRequest]) -> Descriptions:
        """Describe requests as far as one message holds them; the others come with the next. One that no message holds
        is refused."""
        self._new = []
        descriptions = Descriptions()
        for number, each in enumerate(requests):
            if descriptions.add(*each):
                self._new.append(each)
            elif self._new:
                self._later = list(requests[number:])
                break
            else:
                what = "the request is too large for several ranks: shorten its prompt, grammar or stop strings"
                each.queue.put(RequestRefused(413, what, kind="request_too_large"))
        return descriptions

    # All ranks ------------------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        news = self._news
        if self.ranks.rank > 0:
            self._new = requests_of(news["requests"])
        if self._new:
            self.pending += self._coming.add(self._new, self.owner.present_setup())
            self._new = []
        gone = set(news["gone"])
        for queue in self._queues():
            queue.is_wanted = queue.is_wanted and queue.number not in gone
        self._coming.drop_gone()
        self.pending += self._coming.ready()
        self._drop_gone()
        if self.is_busy:
            self._tidying.note_work()
        else:
            provider = self.owner.model_provider
            self._tidying.while_idle(self.owner.prompt_cache, [provider.model], for_seconds(TIDY_SECONDS))
            self._memory.keep(None, self.pool, self.owner.prompt_cache)

    def _queues(self) -> Iterator[SharedQueue]:
        """Of all requests that have been told to the ranks and are not over."""
        yield from (queue for queue, *_ in self._coming)
        yield from (queue for queue, *_ in self.pending)  # type: ignore[misc]
        if self.batch is not None:
            yield from (served.queue for served in self.batch.served.values())  # type: ignore[misc]


def memory_watch(watermark: float, ranks: Ranks | None) -> MemoryWatch:
    """Of this process; of several ranks, it sees on each the one of which the largest share of memory is used."""
    if ranks is None:
        return MemoryWatch(watermark)

    def read() -> MemoryReading | None:
        readings = ranks.exchange(read_memory())
        return nearest([MemoryReading(*reading) for reading in readings if reading is not None])

    return MemoryWatch(watermark, read, lambda: ranks.now)


def check_for_ranks(provider: upstream.ModelProvider, ranks: Ranks | None) -> None:
    """Raise ConfigError for a model that ranks cannot serve."""
    if ranks is not None and not (provider.is_batchable and known_pool(provider.model) is not None):
        raise ConfigError("several ranks serve models whose requests are computed in a batch, on pages")
