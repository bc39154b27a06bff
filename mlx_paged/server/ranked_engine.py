"""RankedEngine: an EngineThread per rank; all ranks act on what rank 0 receives from clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ..machine import MemoryReading, memory_readings
from ..ranks.ranks import Ranks
from .engine_thread import IDLE_SECONDS, TIDY_SECONDS, EngineThread, for_seconds
from .errors import RequestRefused
from .loaded_models import LoadedModels
from .memory import MemoryWatch, nearest
from .report import ServerStats
from .request import ServerRequest, Work
from .texts import parts_of

TICK_SECONDS = 1.0  # between turns without work, in which prefixes expire and memory is given back


class RankedEngine(EngineThread):
    """An EngineThread whose turns all ranks take together.

    Each turn begins with a message from rank 0: new requests with their tokens, clients that have disconnected, whether
    to end, and the time. Every rank then does the same work, including stop strings, grammars and texts; ranks without
    clients discard the answers. Without work, rank 0 sends a message every :data:`TICK_SECONDS`.

    Args:
        ranks: the ranks.
        args: arguments of :class:`EngineThread`.
    """

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args, clock=lambda: ranks.now)
        self.ranks = ranks
        self._message: dict[str, Any] = {}

    def run(self) -> None:
        """Run until rank 0 ends all ranks. Raises errors that end only this one."""
        self.stream = mx.default_stream(mx.default_device())
        while True:
            message = self._next_message() if self.ranks.rank == 0 else None
            self._message = message = self.ranks.broadcast(message) or {}
            self.ranks.now = message["now"]
            if message["ends"]:
                break
            self.guarded_turn()
        self.refuse_all()
        if (pool := self.models.pool) is not None:
            pool.check_integrity()
            self.models.prompt_cache.cache_of(pool).check_integrity()
            stats = pool.stats()
            logging.info("rank %d at its end: %d blocks cached; %s", self.ranks.rank, stats.cached_blocks, stats)

    def note_failure(self, error: Exception) -> None:
        self.ranks.fail(error)

    # Rank 0 ---------------------------------------------------------------------------------------------------

    def _next_message(self) -> dict[str, Any]:
        """Return the next message; without work, wait up to :data:`TICK_SECONDS` for requests."""
        until = time.monotonic() + TICK_SECONDS
        arrived = self.arrived(0)
        while not (arrived or self.is_stopping or self.is_busy or time.monotonic() > until):
            arrived = self.arrived(IDLE_SECONDS)
        requests = []
        for work in arrived:
            if work.request is None:  # only the tokenizer is wanted
                self.outbox.put(work, self.models.texts)
            elif work.is_wanted:
                work.is_shared = True
                self.pending.append(work)
                requests.append(work.request.described())
        self.outbox.flush()
        gone = [work for work in self._works() if not work.is_open]
        return {
            "now": time.monotonic(),
            "ends": self.is_stopping,
            "requests": requests,
            "gone": [work.request.number for work in gone if work.request is not None],
        }

    # All ranks ------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        message, texts = self._message, self.models.texts
        if self.ranks.rank > 0:
            assert texts is not None
            for described in message["requests"]:  # without its grammar, which rank 0 has compiled
                request = ServerRequest.from_description(described)
                request.grammar = None if request.constraint is None else texts.compile(request.constraint)
                self.pending.append(Work(request, texts.key, is_shared=True))
        gone = set(message["gone"])
        for work in self._works():
            work.is_gone = work.is_gone or (work.request is not None and work.request.number in gone)
        self.drop_gone()
        if not self.is_busy:
            self.tidy_while_idle(for_seconds(TIDY_SECONDS))

    def _works(self) -> Iterator[Work]:
        """Yield the unfinished requests that all ranks know of."""
        yield from self.pending
        yield from dict.fromkeys(row.work for row in self.rows.values())


def check_for_ranks(request: ServerRequest, *, is_default: bool = True) -> None:
    """Raise RequestRefused (501) for what several ranks do not support, such as another model than the default."""
    if not is_default:
        what = "several ranks serve only the model of --model, without other adapters or draft models"
        raise RequestRefused(501, what, param="model")
    if any(part.get("type") != "text" for given in request.inputs for part in parts_of(given)):
        raise RequestRefused(501, "several ranks accept only text", param="messages")
    if request.scores_prompt:
        raise RequestRefused(501, "several ranks do not support log-probabilities of prompts", param="echo")


def make_engine(models: LoadedModels, stats: ServerStats) -> EngineThread:
    """Return the engine of a server or a prompts file. On several ranks each reads the memory of the fullest one."""
    ranks, config = models.ranks, models.config
    if ranks is None:
        return EngineThread(models, stats, MemoryWatch(config.memory_watermark), config.watchdog_timeout)

    def read() -> MemoryReading | None:
        readings = ranks.exchange(nearest(memory_readings()))
        return nearest([MemoryReading(*reading) for reading in readings if reading is not None])

    watch = MemoryWatch(config.memory_watermark, read, lambda: ranks.now)
    return RankedEngine(ranks, models, stats, watch, config.watchdog_timeout)
