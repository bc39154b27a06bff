"""RankedLoop: an EngineLoop per rank; all ranks act on what rank 0 receives from clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import RankError
from ..machine import MemoryReading
from ..ranks.ranks import Ranks
from .engine_loop import IDLE_SECONDS, TIDY_SECONDS, EngineLoop, Work, for_seconds
from .errors import RequestRefused, invalid
from .memory import MemoryWatch, nearest, read_memory
from .prompting import parts_of
from .request import ServerRequest

if TYPE_CHECKING:
    from .engine_thread import EngineThread

COMPILING_SECONDS = 0.005  # between turns while grammars are compiled and nothing else is to be done
TICK_SECONDS = 1.0  # between turns without work, in which prefixes expire and memory is given back
MAX_MESSAGE_BYTES = 64 << 20  # of prompts and other texts in one message to the ranks; the rest waits for the next one


class RankedLoop(EngineLoop):
    """An EngineLoop whose turns all ranks take together.

    Each turn begins with a message from rank 0: new requests with their tokens, clients that have disconnected, whether
    to end, and the time. Every rank then does the same work, including stop strings, grammars and texts; ranks without
    clients discard the answers. Without work, rank 0 sends a message every :data:`TICK_SECONDS`.
    """

    def __init__(self, ranks: Ranks, thread: EngineThread) -> None:
        is_stopping, clock = lambda: thread.is_stopping, lambda: ranks.now
        super().__init__(thread.models, thread.requests, thread.stats, thread.memory_watch, is_stopping, clock)
        self.ranks = ranks
        self._message: dict[str, Any] = {}
        self._new_works: list[Work] = []
        self._uncompiled = UncompiledWork(ranks)
        self._waiting: list[Work] = []  # for the next message; rank 0 only

    def run(self) -> None:
        """Run until rank 0 ends all ranks. Raises errors that end only this one."""
        self.stream = mx.default_stream(mx.default_device())
        while True:
            message = self._next_message() if self.ranks.rank == 0 else None
            with self.ranks.step():
                self._message = message = self.ranks.broadcast(message) or {}
                self.ranks.now = message["now"]
                if message["ends"]:
                    break
                self.guarded_turn()
        self.refuse_all()
        if (pool := self.models.pool) is not None:
            pool.check_integrity()
            if hasattr(self.models.prompt_cache, "tree_of"):
                self.models.prompt_cache.tree_of(pool).check_integrity()
            stats = pool.stats()
            logging.info("rank %d at its end: %d blocks cached; %s", self.ranks.rank, stats.cached_blocks, stats)

    def note_failure(self, error: Exception) -> None:
        self.ranks.await_fault(error)
        if isinstance(error, RankError):
            raise error
        super().note_failure(error)
        self.ranks.record.note("failed turn", {})  # of one rank only: the next message ends all ranks

    @property
    def is_busy(self) -> bool:
        return super().is_busy or bool(self._uncompiled)

    def refuse_all(self) -> None:
        self.pending += [*self._uncompiled.close(), *self._waiting]
        self._waiting = []
        super().refuse_all()

    # Rank 0 ---------------------------------------------------------------------------------------------------

    def _next_message(self) -> dict[str, Any]:
        """Return the next message; without work, wait up to :data:`TICK_SECONDS` for requests."""
        until = time.monotonic() + TICK_SECONDS
        self._waiting += self.arrived(COMPILING_SECONDS if self._uncompiled and not super().is_busy else 0)
        while not (self._waiting or self.is_stopping() or self.is_busy or time.monotonic() > until):
            self._waiting += self.arrived(IDLE_SECONDS)
        for work in [work for work in self._waiting if work.request is None]:  # only the tokenizer was wanted
            self._waiting.remove(work)
            self.outbox.put(work.stream, self.models.texts)
        self.outbox.flush()
        self._new_works, num_bytes = [], 0
        while self._waiting and (not self._new_works or num_bytes < MAX_MESSAGE_BYTES):
            work = self._waiting.pop(0)
            if work.is_wanted:
                work.is_shared = True
                self._new_works.append(work)
                num_bytes += _size(work)
        gone = [work for work in self._works() if work.stream is not None and not work.stream.is_wanted]
        return {
            "now": time.monotonic(),
            "ends": self.is_stopping(),
            "requests": [work.request.described() for work in self._new_works if work.request is not None],
            "gone": [work.request.number for work in gone if work.request is not None],
        }

    # All ranks ------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        message, texts = self._message, self.models.texts
        if self.ranks.rank > 0:
            assert texts is not None
            requests = [ServerRequest.from_description(each) for each in message["requests"]]  # without their grammars
            self._new_works = [Work(None, request, texts.key, is_shared=True) for request in requests]
        self.pending += self._uncompiled.add(self._new_works, texts)
        self._new_works, gone = [], set(message["gone"])
        for work in self._works():
            work.is_gone = work.is_gone or (work.request is not None and work.request.number in gone)
        self._uncompiled.drop_gone()
        for work, fault in self._uncompiled.ready():
            if fault is None:
                self.pending.append(work)
            else:
                self.fail(work, invalid(fault))
        self.drop_gone()
        if not self.is_busy:
            self.tidy_while_idle(for_seconds(TIDY_SECONDS))

    def _works(self) -> Iterator[Work]:
        """Yield the unfinished requests that all ranks know of."""
        yield from self._uncompiled
        yield from self.pending
        yield from dict.fromkeys(row.work for row in self.rows.values())


class UncompiledWork:
    """Requests that wait until every rank has compiled their grammars.

    Rank 0 has compiled a grammar before it sends the request; the others compile it in a thread, so no step waits. All
    ranks make the same calls in the same steps, so a request begins in the same step on all.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waiting: dict[int, tuple[Work, Future[None] | None]] = {}
        self._compiler: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Work]:
        return (work for work, _ in self._waiting.values())

    def add(self, works: list[Work], texts: Any) -> list[Work]:
        """Return the requests without a grammar; except on rank 0, begin to compile the grammars of the others."""
        free = []
        for work in works:
            request = work.request
            if request is None or request.constraint is None:
                free.append(work)
                continue
            future = None
            if self._ranks.rank > 0:
                if self._compiler is None:
                    self._compiler = ThreadPoolExecutor(1, "grammars")
                future = self._compiler.submit(_compile, request, texts)
            self._waiting[request.number] = work, future
        return free

    def ready(self) -> list[tuple[Work, str | None]]:
        """Return requests whose grammar every rank has, with None, or that a rank failed to compile, with its error."""
        if not self._waiting:
            return []
        done = [(number, future) for number, (_, future) in self._waiting.items() if future is None or future.done()]
        own_faults = {str(number): None if future is None else _fault(future) for number, future in done}
        all_faults = self._ranks.exchange(own_faults)
        ready = []
        for number in [number for number in self._waiting if all(str(number) in each for each in all_faults)]:
            work, _ = self._waiting.pop(number)
            fault = next((each[str(number)] for each in all_faults if each[str(number)] is not None), None)
            ready.append((work, fault))
        return ready

    def drop_gone(self) -> None:
        """Forget requests whose clients have gone."""
        for number, (work, future) in list(self._waiting.items()):
            if not work.is_wanted:
                del self._waiting[number]
                if future is not None:
                    future.cancel()

    def close(self) -> list[Work]:
        """End the thread, and return the requests that still wait."""
        if self._compiler is not None:
            self._compiler.shutdown(wait=False, cancel_futures=True)
        left, self._waiting = list(self), {}
        return left


def _compile(request: ServerRequest, texts: Any) -> None:
    request.grammar = texts.compile(request.constraint, is_checked=True)


def _fault(future: Future[None]) -> str | None:
    error = future.exception()
    return None if error is None else f"{type(error).__name__}: {error}"


def _size(work: Work) -> int:
    request = work.request
    if request is None:
        return 0
    tokens = 20 * sum(len(prompt.tokens) for prompt in request.prompts)
    return tokens + len(str(request.constraint or "")) + 32 * len(request.sampling.logit_bias)


def check_for_ranks(request: ServerRequest) -> None:
    """Raise RequestRefused (501) for what several ranks do not support."""
    if any(part.get("type") != "text" for given in request.inputs for part in parts_of(given)):
        raise RequestRefused(501, "several ranks accept only text", param="messages")
    if request.scores_prompt:
        raise RequestRefused(501, "several ranks do not support log-probabilities of prompts", param="echo")


def ranked_memory_watch(watermark: float, ranks: Ranks) -> MemoryWatch:
    """Return a memory watch that, on every rank, reads the memory of the fullest rank."""

    def read() -> MemoryReading | None:
        readings = ranks.exchange(read_memory())
        return nearest([MemoryReading(*reading) for reading in readings if reading is not None])

    return MemoryWatch(watermark, read, lambda: ranks.now)
