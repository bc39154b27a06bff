"""ComputingLoop: takes a server's requests, and computes them until it is told to end, or fails."""

from __future__ import annotations

import gc
import logging
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx_lm import server as upstream

from ....kv.pool import BlockPool
from ....serve.refusal import RequestRefused
from ...cache.lru_prompt_cache import PagedPromptCache
from ...cache.pools import forget_pool, known_pool
from ..answer_queue import AnswerQueue
from ..answers.scoring import PromptScoring
from ..prepared_request import PreparedRequest, has_images
from ..served_batch import ServedBatch
from .memory_guard import MemoryGuard
from .tidying import Tidying

if TYPE_CHECKING:
    from ..response_generator import PagedResponseGenerator

IDLE_SECONDS = 0.1


class Stuck(BaseException):
    """Raised in a thread that hangs, so that it ends where it next runs code of Python."""


class Scored(NamedTuple):
    """A request whose prompt is being scored."""

    queue: AnswerQueue
    request: PreparedRequest
    args: upstream.GenerationArguments
    scoring: PromptScoring
    tokens: list[int]


class ComputingLoop:
    """One life of what computes: a batch, and the requests that wait for it or are served alone.

    Only :meth:`run` and what it calls change anything here, in its thread; the rest may be called by any.

    Args:
        owner: the server's response generator: its models, its prompts, the queue that requests come from.
        clock: seconds.

    Attributes:
        pending: requests that were taken from the owner's queue and have not begun.
        scored: requests whose prompts are being scored, one slice a turn, before they begin; with their tokens.
        batch: of the present model.
        is_abandoned: another loop has taken its place; what it still does counts for nobody.
        is_loading: a model is being loaded.
        thread: that it runs in, once it does.
    """

    def __init__(self, owner: PagedResponseGenerator, clock: Callable[[], float] = time.monotonic) -> None:
        self.owner = owner
        self.pending: deque[tuple[AnswerQueue, PreparedRequest | None, upstream.GenerationArguments]] = deque()
        self.scored: deque[Scored] = deque()
        self.batch: ServedBatch | None = None
        self.is_abandoned = self.is_loading = False
        self.thread: Thread | None = None
        self.stream: Any = None
        self._alone: AnswerQueue | None = None
        self._num_turns = 0
        self._tidying = Tidying(clock)
        self._memory = MemoryGuard(owner.memory_watch)

    # What a watchdog looks at ---------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        return self.thread is None or self.thread.is_alive()

    @property
    def may_take_long(self) -> bool:
        return self.is_loading

    def progress(self) -> object:
        """Changes with each turn, step, and token of a request that is served alone."""
        batch, alone = self.batch, self._alone
        return self._num_turns, None if batch is None else batch.num_steps, None if alone is None else alone.num_put

    @property
    def where(self) -> str:
        """What the thread is at, for the log."""
        frame = None if self.thread is None else sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    # The loop -------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Before :meth:`run`: load the model; after another loop has failed, see what is left to go on with."""
        owner = self.owner
        if not owner.has_started:
            owner.load_default()
        elif owner.supervisor.restarts.number and (model := owner.model_provider.model) is not None:
            pool = known_pool(model)
            try:
                if pool is not None:
                    check_pool(pool, owner.prompt_cache)
            except Exception:
                logging.exception("the pool is not in order: it is made anew, without its prefixes")
                drop_pool(owner)
            owner.learn_layout()

    def run(self) -> None:
        """Until the owner stops. Raises whatever ends it otherwise."""
        self.stream = mx.default_stream(mx.default_device())
        while not self.owner.is_stopping and not self.is_abandoned:
            try:
                self._turn()
            except Exception as error:
                logging.exception("a step failed; its requests are given up")
                self.close_batch(error)

    def _turn(self) -> None:
        self._num_turns += 1
        self._take_requests()
        while self.pending and self._start(*self.pending[0]):
            self.pending.popleft()
        if self.batch is not None:
            self._memory.keep(self.batch.generator, self.pool, self.owner.prompt_cache)
            self.batch.step()
        self._score()
        self._tidying.while_busy(self.owner.prompt_cache)

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for an answer, as far as is known here."""
        return bool(self.pending) or bool(self.scored) or (self.batch is not None and bool(self.batch.served))

    @property
    def pool(self) -> BlockPool | None:
        model = self.owner.model_provider.model
        return None if model is None else known_pool(model)

    def _take_requests(self) -> None:
        """Everything that has come; if there is nothing to do, wait for it a little, and tidy up."""
        owner, requests = self.owner, self.owner.requests
        if not self.is_busy:
            try:
                self.pending.append(requests.get(timeout=IDLE_SECONDS))
            except Empty:
                models = (owner.model_provider.model, owner.model_provider.draft_model)

                def is_wanted() -> bool:
                    self._num_turns += 1  # asked between prefixes that are written to disk, which may take long
                    return not requests.empty() or owner.is_stopping

                self._tidying.while_idle(owner.prompt_cache, models, is_wanted)
                self._memory.keep(None, self.pool, owner.prompt_cache)
        while True:
            try:
                self.pending.append(requests.get_nowait())
            except Empty:
                break
        if self.is_busy:
            self._tidying.note_work()
        self._drop_gone()

    def _drop_gone(self) -> None:
        """Requests that have not begun, and whose clients have gone."""
        gone = [item for item in self.pending if not item[0].is_wanted]
        for item in gone:
            self.pending.remove(item)
        for scored in [scored for scored in self.scored if not scored.queue.is_wanted]:
            self.scored.remove(scored)
            scored.scoring.drop()

    def _start(self, queue: AnswerQueue, request: PreparedRequest | None, args: Any) -> bool:
        """Begin a request, or answer it at once. False if it has to wait until the batch is done."""
        owner, provider = self.owner, self.owner.model_provider
        busy = bool(self.scored) or (self.batch is not None and bool(self.batch.served))
        try:
            if owner.key_of(args.model) != provider.model_key:
                if busy:
                    return False
                self.is_loading = True
                owner.load_model(args.model, lambda: self.close_batch(None))
            if request is None:  # only the model was wanted, to make the prompt with
                queue.put(owner.present_setup())
                return True
            if request.scoring is not None and request.scoring.logprobs is None:
                tokens = owner._tokenize(provider.tokenizer, request, args)[0]
                self.scored.append(Scored(queue, request, args, request.scoring, tokens))
                return True
            if not owner._is_batchable(args) or has_images(request.messages):
                if not busy:
                    queue.is_alone, self._alone = True, queue
                    owner._serve_single((queue, request, args), self.stream)
                return not busy
            if self.batch is None:
                self.batch = ServedBatch(
                    owner,
                    provider.model,
                    provider.tokenizer,
                    provider.model_key,
                    owner.prompt_cache,
                    owner.stats,
                    self.stream,
                )
            self.batch.insert(queue, request, args)
        except Exception as error:
            queue.put(error)
        finally:
            self.is_loading, self._alone = False, None
        return True

    def _score(self) -> None:
        """Compute a slice of the prompt that has waited longest for its scores; behind the last one its request
        begins."""
        if not self.scored:
            return
        queue, request, args, scoring, tokens = self.scored[0]
        try:
            if not scoring.step(self.owner.model_provider.model, tokens):
                return
            self.pending.appendleft((queue, request, args))
        except Exception as error:
            scoring.drop()
            queue.put(error)
        self.scored.popleft()

    def _take_scored(self) -> list[AnswerQueue]:
        """The clients of requests whose prompts are being scored; what these hold is let go of."""
        queues = [scored.queue for scored in self.scored]
        while self.scored:
            self.scored.popleft().scoring.drop()
        return queues

    def close_batch(self, error: Exception | None) -> None:
        """The batch's requests fail with ``error``."""
        batch, self.batch = self.batch, None
        if batch is not None and error is not None:
            batch.fail_all(error)
        if batch is not None:
            batch.close()

    def refuse_all(self) -> None:
        """The server ends in order."""
        self.close_batch(RequestRefused(503, "the server is shutting down", retry_after=5))
        for queue in [*self._take_scored(), *(queue for queue, *_ in self.pending)]:
            queue.put(RequestRefused(503, "the server is shutting down", retry_after=5))

    def wreck(self) -> None:
        """After :meth:`run` has failed: let go of everything. Nothing is kept of what was being computed, since nobody
        knows how far that has come."""
        batch, self.batch = self.batch, None
        self.pending.clear()
        self._take_scored()
        if batch is not None:
            with suppress(Exception):
                batch.generator.abandon()
        del batch
        with suppress(Exception):  # no more is being computed in this thread
            mx.synchronize(self.stream)
        gc.collect()


def drop_pool(owner: PagedResponseGenerator) -> None:
    """Forget the present model's pool and its prefixes, without waiting for anybody who may hold its lock."""
    model = owner.model_provider.model
    pool = None if model is None else known_pool(model)
    if pool is not None:
        forget_pool(model)
        if isinstance(owner.prompt_cache, PagedPromptCache):
            owner.prompt_cache.forget_pool(pool)


def check_pool(pool: BlockPool, prompt_cache: Any) -> None:
    """Raise unless a pool's accounts and prefixes agree, and what is in it can be computed in this thread."""
    pool.check_integrity()
    if isinstance(prompt_cache, PagedPromptCache):
        prompt_cache.tree_of(pool).check_integrity()
    with pool.lock:
        mx.eval([array for group in pool.groups for array in group.latest()])
