"""PagedResponseGenerator: mlx-lm's ResponseGenerator, whose batches share prefixes and survive what fails."""

from __future__ import annotations

import _thread
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any

from mlx_lm import server as upstream
from mlx_lm.models import cache as stock_cache

from ...engine.ranks.ranks import Ranks
from ...serve.capacity import announce, answer_tokens, capacity, check_capacity
from ...serve.extras import RequestExtras
from ...serve.health.drain import Drain
from ...serve.health.memory_watch import Pressure
from ...serve.health.watchdog import default_timeout
from ...serve.model_names import ModelNames
from ...serve.prompt_maker import PromptMaker, PromptSetup
from ...serve.prompt_messages import MadePrompt
from ...serve.refusal import RequestRefused, invalid, refusal_of
from ...serve.report.server_report import server_report
from ...serve.report.server_stats import ServerStats
from ...serve.server_config import ServerConfig
from ..cache.geometry import probe_geometry
from ..cache.lru_prompt_cache import PagedPromptCache, PromptStore, salted_store
from ..cache.pools import known_pool, pool_of
from ..grammar.tokenizer_grammars import TokenizerGrammars
from .answer_queue import NOBODY, AnswerQueue, ClientSide
from .computing.computing_loop import ComputingLoop
from .computing.open_requests import OpenRequests
from .computing.ranked_loop import check_for_ranks, memory_watch
from .computing.shared_request import queue_of
from .computing.supervisor import Supervisor
from .model_switch import Candidate, ModelKey, key_of
from .prepared_request import PreparedRequest, RenderedTokenizer, has_images
from .prompt_job import PROCESS, make_prompt
from .served_batch import batched_args

LAST_SECONDS = 1.5  # for answers to clients when the process has to end
POLL_SECONDS = 0.25  # between looks at whether a client is still there
MAX_WAITING = 1024  # requests; each takes a thread
Tokenized = tuple[list[int], list[list[int]], list[str], str, Any]  # as in mlx-lm; the last one is of images


class PagedResponseGenerator(upstream.ResponseGenerator):  # type: ignore[misc]
    """One thread computes all requests: those that can be batched together, others alone, in the order they came. If
    it fails or hangs, its requests are told so, and it is started again (:class:`.computing.supervisor.Supervisor`).

    Of several ranks, the first has the clients, and all compute (:class:`.computing.ranked_loop.RankedLoop`).

    Args:
        model_provider: mlx-lm's.
        prompt_cache: of all models.
        prompts: makes the prompts.
        config: of the server.
        on_start_error: told of ``start_error``; that may be before this is made.
        ranks: that compute the model together; None: it is all here.

    Attributes:
        start_error: why the server's own model cannot be served, if so; the server ends then.
        drain: who is being answered, and whether anybody new is.
    """

    def __init__(
        self,
        model_provider: Any,
        prompt_cache: PromptStore,
        prompts: PromptMaker | None = None,
        config: ServerConfig | None = None,
        on_start_error: Callable[[Exception], None] = lambda error: None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks
        self._on_start_error = on_start_error
        self.stats = ServerStats()
        self.prompts, self.config = prompts or PromptMaker(make_prompt, PROCESS), config or ServerConfig()
        self.start_error: Exception | None = None
        self.drain = Drain(self.config.drain_timeout)
        self.memory_watch = memory_watch(self.config.memory_watermark, ranks)
        self._setup: PromptSetup | None = None  # of the present model
        self.has_started = False
        self._open = OpenRequests()
        timeout = self.config.watchdog_timeout
        self.supervisor = Supervisor(self, default_timeout() if timeout is None else timeout)
        super().__init__(model_provider, prompt_cache)  # starts the thread
        if ranks is None:
            self.supervisor.watchdog.start()
        else:
            ranks.on_fault(self.give_up)

    # Clients' threads -----------------------------------------------------------------------------------------

    def generate(
        self,
        request: upstream.CompletionRequest,
        generation_args: upstream.GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
        client_is_gone: Callable[[], bool] = lambda: False,
        extras: RequestExtras | None = None,
        client: ClientSide = NOBODY,
    ) -> tuple[upstream.GenerationContext, Iterator[upstream.Response]]:
        """The request's context, and its answers as they come. Between its prompt, which is made first, and its turn,
        ``client.accept`` is called.

        Raises (both the call and the iterator):
            RequestRefused: the request is not, or no longer, served.
            ConnectionAbortedError: the client has gone; what the request holds is freed.
        """
        self.drain.check()
        self._check_thread()
        if self.num_waiting >= MAX_WAITING:
            raise RequestRefused(429, f"{MAX_WAITING} requests are waiting", kind="overloaded", retry_after=5)
        queue = queue_of(generation_args.stop_words, client.is_stalled, is_shared=self.ranks is not None)
        request = PreparedRequest(**vars(request), **(extras or RequestExtras())._asdict())
        with self._open.ending(queue):
            request.made = self.make_prompt(queue, request, generation_args, client_is_gone)
            client.accept()
            self._open.put(self.requests, (queue, request, generation_args))
            return self._receive(queue, client_is_gone), self._answers(queue, progress_callback, client_is_gone)

    def make_prompt(
        self, queue: AnswerQueue, request: PreparedRequest, args: Any, client_is_gone: Callable[[], bool]
    ) -> MadePrompt:
        setup, key = self._setup, self.key_of(args.model)
        if setup is None or (self.ranks is None and setup.key != key):
            self._open.put(self.requests, (queue, None, args))  # the model first; later it may have to be loaded again
            setup = self._receive(queue, client_is_gone)
        if self.ranks is not None:
            request.check_for_ranks(is_batched=setup.key == key and self._is_batchable(args))
        request.constrain(setup, queue, client_is_gone)
        return self.prompts.make(
            setup,
            request,
            args.chat_template_kwargs,
            None if setup.capacity is None else setup.capacity - 1,
            has_images=has_images(request.messages),
            client_is_gone=client_is_gone,
        )

    def _receive(self, queue: AnswerQueue, client_is_gone: Callable[[], bool]) -> Any:
        while True:
            if client_is_gone():
                queue.cancelled = True
                raise ConnectionAbortedError("the client has gone")
            try:
                item = queue.get(timeout=POLL_SECONDS)
            except Empty:
                self._check_thread()
                continue
            if isinstance(item, Exception):
                raise refusal_of(item)
            return item

    def _check_thread(self) -> None:
        if not self.generation_available():
            message = "the generation thread has died: see the server's log"
            raise RequestRefused(503, message, retry_after=None if self.start_error else 5)

    def _answers(
        self,
        queue: AnswerQueue,
        progress_callback: Callable[[int, int], None] | None,
        client_is_gone: Callable[[], bool],
    ) -> Iterator[upstream.Response]:
        is_first = True
        try:
            while (item := self._receive(queue, client_is_gone)) is not None:
                if isinstance(item, tuple):
                    if progress_callback is not None:
                        progress_callback(*item)
                    continue
                if is_first:
                    num_tokens, num_cached = len(queue.ctx.prompt), max(0, queue.ctx.prompt_cache_count)
                    self.stats.count_prompt(num_tokens, num_cached)
                    if queue.counts_prompt:
                        self.stats.count_computed(num_tokens - num_cached)
                    self.stats.count_first_token(time.monotonic() - queue.asked_at)
                    is_first = False
                self.stats.count_generated(1)
                yield item
        finally:
            queue.cancelled = True
            self._open.end(queue)

    @property
    def num_waiting(self) -> int:
        """Requests that have not been looked at, and those that wait in the batch."""
        loop = self.supervisor.loop
        batch = loop.batch
        waiting = 0 if batch is None else batch.generator.num_waiting
        return int(self.requests.qsize()) + len(loop.pending) + len(loop.scored) + waiting + self.prompts.num_waiting

    @property
    def state(self) -> str:
        """``loading``, ``ok``, ``degraded``, ``draining`` or ``failed``."""
        if not self.generation_available() or self.start_error is not None:
            return "failed"
        if self.drain.is_draining:
            return "draining"
        if not self.has_started:
            return "loading"
        is_short = self.memory_watch.pressure >= Pressure.HOLDING
        return "degraded" if is_short or self.supervisor.restarts.is_recent else "ok"

    def health(self) -> dict[str, Any]:
        """What ``/health`` says. Waits for nobody."""
        return {"status": self.state, **self.supervisor.restarts.as_dict(), "memory": self.memory_watch.as_dict()}

    def begin_drain(self) -> bool:
        """Let those who are being answered finish, and have the process interrupted then. False: nobody is, or the
        server is ending already."""
        if self.drain.is_draining or self.drain.seconds <= 0 or self.state not in ("ok", "degraded"):
            return False
        self.drain.begin(lambda: _thread.interrupt_main(signal.SIGTERM))
        return True

    def report(self, *, with_blocks: bool = False) -> dict[str, Any]:
        """What ``/v1/cache/stats`` says."""
        model, key, batch = self.model_provider.model, self.model_provider.model_key, self.supervisor.loop.batch
        cache = getattr(self, "prompt_cache", None)  # gone when the server shuts down
        return server_report(
            self.stats,
            None if model is None else known_pool(model),
            [] if batch is None else batch.progress(),
            self._open.progress(),
            self.num_waiting,
            cache.figures() if isinstance(cache, PagedPromptCache) else None,
            model=None if key is None or key[0] is None else ModelNames(str(key[0])).names[0],
            health=self.health(),
            with_blocks=with_blocks,
        )

    # The computing thread -------------------------------------------------------------------------------------

    def _run_generate(self) -> None:
        self.supervisor.run()

    def give_up(self, why: str) -> None:
        """The process ends because of another rank: all who wait are told so, and those who come. For any thread."""
        self._generation_failed = True
        self._open.fail_all(lambda: RequestRefused(503, f"the server ends: {why}", retry_after=5))
        self.drain.wait(LAST_SECONDS)

    @property
    def is_stopping(self) -> bool:
        return bool(self._stop)

    def end(self, loop: ComputingLoop) -> None:
        """The server ends in order; in the loop's thread."""
        self.supervisor.watchdog.stop()
        loop.refuse_all()
        if isinstance(self.prompt_cache, PagedPromptCache):
            self.prompt_cache.close()  # to disk, if there is a folder for it
        # In this thread, as mlx-lm does: arrays go where they were made.
        self._setup = None
        self.model_provider.reset()
        del self.prompt_cache
        gc.collect()

    def fail_taken(self, why: str) -> None:
        """Requests that have been looked at fail with 503; those that still wait in the queue have lost nothing."""
        self._open.fail_taken(self.requests, lambda: RequestRefused(503, why, retry_after=5))

    def restart(self) -> None:
        """A thread in the place of one that hangs."""
        self._generation_thread = threading.Thread(target=self._run_generate, daemon=True)
        self._generation_thread.start()

    def load_default(self) -> None:
        """Load the model that the command line names. If it cannot be served, the process is to end."""
        provider = self.model_provider
        try:
            provider.load_default()
            if provider.model is not None:
                self.learn_layout()
                check_capacity(pool_of(provider.model), self.cli_args.prefill_step_size)
                check_for_ranks(provider, self.ranks)
                if self._setup is not None and (self.ranks is None or self.ranks.rank == 0):
                    self.prompts.learn(self._setup)
        except Exception as error:
            if self.ranks is not None:
                self.ranks.fail(error)
            if self._stop:
                return
            logging.error("the model %s cannot be served: %s", self.cli_args.model, error)
            self.start_error = error
            self._on_start_error(error)
            _thread.interrupt_main(signal.SIGTERM)
            return
        self.has_started = True
        if provider.model is not None:
            self._announce()

    def present_setup(self) -> PromptSetup:
        """What prompts of the present model are made with."""
        if self._setup is None:
            self.learn_layout()
        assert self._setup is not None
        return self._setup

    def _is_batchable(self, args: Any) -> bool:
        return bool(super()._is_batchable(batched_args(args, self.model_provider.model)))

    def _serve_single(self, request: Any, stream: Any) -> None:
        with salted_store(self.prompt_cache, request[1].salt), request[1].alone(self.model_provider.tokenizer):
            super()._serve_single(request, stream)

    def key_of(self, wanted: upstream.ModelDescription) -> ModelKey:
        """What mlx-lm's model provider is going to call this model."""
        return key_of(self.model_provider, wanted)

    def load_model(self, wanted: upstream.ModelDescription, make_way: Callable[[], None]) -> None:
        """Load another model, in the present one's place. One that cannot be loaded leaves everything as it is.

        Args:
            make_way: lets go of what holds the present one.

        Raises:
            RequestRefused: 404, it cannot be loaded. Why, the log says: a client is not told what there is on disk.
        """
        try:
            candidate = Candidate(self.model_provider, self.key_of(wanted))
            if isinstance(self.prompt_cache, PagedPromptCache):
                self.prompt_cache.tidy()  # the model's prefixes go with it
            make_way()
            self._setup = None  # until the new one's is known
            candidate.take_over()
        except Exception as error:
            logging.warning("the model %r cannot be loaded: %s: %s", wanted.model, type(error).__name__, error)
            message = f"the model {wanted.model} cannot be loaded, or is not what the request needs"
            raise RequestRefused(404, message, kind="not_found", param="model") from None
        self.learn_layout()
        self._announce()

    def learn_layout(self) -> None:
        """Make the model's pool known, so that prefixes on disk are found, and its tokenizer, to make prompts with."""
        provider = self.model_provider
        caches = stock_cache.make_prompt_cache(provider.model)
        probe_geometry(provider.model, caches)
        if provider.draft_model is not None:
            caches += stock_cache.make_prompt_cache(provider.draft_model)
        if isinstance(self.prompt_cache, PagedPromptCache):
            self.prompt_cache.forget_unloaded()
            self.prompt_cache.learn_layout(provider.model_key, caches)
            if (pool := known_pool(provider.model)) is not None:
                self.prompt_cache.tree_of(pool)  # with it a request takes more of the budget, whose size is told now
        self._setup = PromptSetup(
            provider.model_key,
            provider.tokenizer,
            self.cli_args.chat_template_args,
            grammars=TokenizerGrammars(provider.tokenizer),
            has_processor=provider.processor is not None,
            capacity=capacity(pool_of(provider.model), self.cli_args.prefill_step_size),
        )

    def _announce(self) -> None:
        announce(self.model_provider.model_key[0], pool_of(self.model_provider.model), self.cli_args.prefill_step_size)

    def _tokenize(self, tokenizer: Any, request: PreparedRequest, args: Any) -> Tokenized:
        """mlx-lm's, from a prompt made before, and with what mlx-lm takes for granted checked; ``args.max_tokens`` is
        cut to what the budget can hold.

        Raises:
            RequestRefused: 400, the request cannot be served; RequestTooLargeError: it could never be held.
        """
        made = request.made
        assert made is not None
        if made.text is None:
            result = (made.tokens, made.segments, made.segment_types, made.initial_state, None)
        else:
            try:
                result = super()._tokenize(RenderedTokenizer(tokenizer, made.text), request, args)
            except Exception as error:
                raise invalid(f"the prompt cannot be made: {type(error).__name__}: {error}", "messages") from error
        model, chunk = self.model_provider.model, self.cli_args.prefill_step_size
        request.check(args, tokenizer, model, result[0])
        args.max_tokens = answer_tokens(pool_of(model), chunk, len(result[0]), args.max_tokens)
        return result

    def _make_state_machine(self, model_key: ModelKey, tokenizer: Any, stop_words: list[str]) -> Any:
        """mlx-lm's, without stop strings: the AnswerQueue looks for them in the text."""
        return super()._make_state_machine(model_key, tokenizer, [])

    def stop_and_join(self) -> None:
        begin = time.monotonic()
        self.prompts.close()
        self._stop = True
        self._generation_thread.join(self.supervisor.watchdog.timeout or None)
        if self._generation_thread.is_alive():
            logging.critical("the generation thread hangs: what it computed is not kept")
        self.drain.wait(LAST_SECONDS)
        logging.info("stopped after %.1f s", time.monotonic() - begin)
