"""EngineThread: the one thread that computes, and its batch; watched for hangs. If it fails, the process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
from mlx_lm.generate import make_stop_sequences

from ..engine.request import RequestOptions
from ..errors import PoolExhaustedError, RequestFailedError, check_device
from ..patches.cache.pools import known_pool, prefix_pool_of
from ..patches.generate.batch_generator import PagedBatchGenerator
from ..prefix.prefix_cache import SharedPrefixes
from .errors import RequestRefused, unavailable
from .loaded_models import LoadedModels, fetch_logprobs, grammar_of
from .memory import MemoryWatch, Pressure, trim_heap
from .request import ModelKey, Outbox, Progress, Row, Scores, ServerRequest, Work

if TYPE_CHECKING:
    from .report import ServerStats
    from .texts import LoadedTexts

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h: a service manager starts the server again
LAST_SECONDS = 1.5  # for errors to reach clients before the process exits
MAX_WAITING = 1024  # requests
# Seconds without progress that count as a hang. A step may compile kernels, and on a CPU its two thousand prompt tokens
# take minutes.
GPU_TIMEOUT, CPU_TIMEOUT = 300.0, 3600.0
IDLE_SECONDS = 0.1
TIDY_EVERY_SECONDS, TIDY_SECONDS = 30, 0.1
TRIM_SECONDS = 5  # without work, after which the heap is trimmed
CLOSING = "the server is shutting down"


class ServedBatch(PagedBatchGenerator):
    """A batch generator for requests of the server.

    Args:
        models: of which one is present.
        stream: stream to compute on.
    """

    def __init__(self, models: LoadedModels, stream: mx.Stream) -> None:
        weights, args = models.weights, models.cli_args
        assert weights is not None
        cache = models.prompt_cache if models.config.prefix_cache else None
        prefixes: SharedPrefixes | None = None
        if cache is not None:
            prefixes = cache.shared_prefixes(weights.key, prefix_pool_of(weights.model))
        drafts: dict[str, Any] = {}
        if weights.draft_model is not None:
            drafts = {"draft_model": weights.draft_model, "num_draft_tokens": args.num_draft_tokens}
            draft_pool = known_pool(weights.draft_model)
            if cache is not None and draft_pool is not None:
                drafts["draft_prefixes"] = cache.shared_prefixes(weights.key, draft_pool, 1)
        super().__init__(
            weights.model,
            prefixes=prefixes,
            **drafts,
            completion_batch_size=args.decode_concurrency,
            prefill_batch_size=args.prompt_concurrency,
            prefill_step_size=args.prefill_step_size,
            stream=stream,
        )
        self._tokenizer = weights.tokenizer
        self._end_tokens = make_stop_sequences(weights.tokenizer)

    def insert_request(self, request: ServerRequest) -> list[int]:
        """Queue a request's answers. If it raises, nothing has been queued."""
        prompts = [request.prompt_of(index) for index in range(request.num_answers)]
        # Chunks end with segments only where prefixes do.
        segments = [prompt.segments if self.reuses_only_at_boundaries else [prompt.tokens] for prompt in prompts]
        options = [
            RequestOptions(
                request.salt,
                sampling.seed,
                grammar_of(request, prompt, self._tokenizer),
                request.prompt_lookup,
                sampling,
                priority=request.priority,
                client=request.client,
                num_draft_tokens=request.num_draft_tokens,
                keep=request.num_kept(prompt),
            )
            for prompt, sampling in zip(prompts, map(request.sampling_of, range(len(prompts))), strict=True)
        ]
        most, ends = [request.max_tokens or 1] * len(prompts), [self._end_tokens] * len(prompts)
        return list(self.insert_segments(segments, most, stop_sequences=ends, options=options))


class EngineThread:
    """The one thread that computes: a batch, and the requests that wait for it or run alone.

    If a turn fails through no request's fault, as after an error of the device, or hangs, the process ends with
    :data:`EXIT_STATUS`, and a service manager starts it again.

    Args:
        models: the model and its caches.
        stats: the server's figures.
        memory_watch: watches the memory in use.
        timeout: seconds without progress that count as a hang; 0: no watchdog; None: the device's default.
        clock: returns seconds.

    Attributes:
        on_start_error: called with the error if the server's own model cannot be served.
    """

    def __init__(
        self,
        models: LoadedModels,
        stats: ServerStats,
        memory_watch: MemoryWatch,
        timeout: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models, self.stats, self.memory_watch = models, stats, memory_watch
        self.requests: SimpleQueue[Work] = SimpleQueue()
        self.start_error: Exception | None = None
        self.has_started = self.is_stopping = self.is_dead = self.is_loading = False
        self._open: weakref.WeakSet[Work] = weakref.WeakSet()
        self._open_lock = threading.Lock()  # a WeakSet cannot be read while another thread adds to it
        self.on_start_error: Callable[[Exception], None] = lambda error: None
        if timeout is None:
            timeout = GPU_TIMEOUT if mx.default_device() == mx.Device(mx.gpu) else CPU_TIMEOUT
        self._timeout = timeout
        self.thread = threading.Thread(target=self._run, daemon=True, name="engine")
        # Changed by the thread only.
        self.pending: deque[Work] = deque()
        self.batch: Any = None
        self.rows: dict[int, Row] = {}  # by uid
        self.scoring: deque[tuple[Work, Iterator[None]]] = deque()
        self.alone: Iterator[None] | None = None
        self.stream: Any = None
        self.outbox = Outbox()
        self._num_turns = self._num_computed = 0
        self._clock = clock
        self._tidied, self._worked_at = clock(), 0.0
        self._used_at: float | None = clock()  # None: the models have been unloaded since

    def start(self, *, is_watched: bool = True) -> None:
        self.thread.start()
        if is_watched and self._timeout:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    # The event loop's side ------------------------------------------------------------------------------------

    def submit(self, work: Work) -> Work:
        """Queue a request whose prompts are made, or that only wants the model's texts.

        Raises:
            RequestRefused: 503, the engine has stopped or failed; 429, too many requests wait.
        """
        with self._open_lock:  # first: whatever happens from here on fails it
            self._open.add(work)
        self.check()
        if self.num_waiting >= MAX_WAITING:
            raise RequestRefused(
                429, f"too many waiting requests (limit {MAX_WAITING})", kind="overloaded", retry_after=5
            )
        self.requests.put(work)
        return work

    def check(self) -> None:
        """Raise RequestRefused (503) if the engine has stopped or failed."""
        if self.start_error is not None:
            raise RequestRefused(503, "the model could not be loaded: see the server's log")
        if self.is_dead or self.is_stopping:
            raise unavailable(CLOSING if self.is_stopping else "the engine has stopped: see the server's log")

    async def texts_for(self, key: ModelKey | None) -> LoadedTexts:
        """Return a model's tokenizer and parsers; the model is loaded if they are not known yet.

        Raises:
            RequestRefused: the model cannot be loaded.
        """
        if (texts := self.models.texts_of(key)) is not None:
            return texts
        work = self.submit(Work(None, key, asyncio.get_running_loop()))
        try:
            (found,) = await work.receive()
        finally:
            work.close()
        return found  # type: ignore[no-any-return]

    @property
    def state(self) -> str:
        """``loading``, ``ok``, ``degraded`` or ``failed``."""
        if self.is_dead or self.start_error is not None:
            return "failed"
        if not self.has_started:
            return "loading"
        return "degraded" if self.memory_watch.pressure == Pressure.PREEMPTING else "ok"

    def sequences(self) -> list[dict[str, Any]]:
        """Return the progress of each answer in the batch and of each request outside it, in order of arrival."""
        rows, batch = dict(self.rows), self.batch
        batched = [
            {**each, "number": row.name, "order": (row.request.number, row.index), "age_seconds": _age(row.request)}
            for each in ([] if batch is None else batch.progress())
            if (row := rows.get(each["uid"])) is not None
        ]
        outside = [work for work in self._open_work() if work.request is not None and work.state != "batched"]
        found = [*batched, *(_figures(work) for work in outside if work.is_wanted)]
        return sorted(found, key=lambda each: each["order"])

    def _open_work(self) -> list[Work]:
        with self._open_lock:
            return list(self._open)

    def fail_all(self, message: str) -> None:
        """Fail all open requests with a 503. For any thread."""
        for work in self._open_work():
            if work.loop is not None and work.is_open and not work.loop.is_closed():
                work.loop.call_soon_threadsafe(work.fail, unavailable(message))

    def stop(self, seconds: float | None) -> bool:
        """Stop the thread in order, waiting up to ``seconds``. Return whether it has ended."""
        self.is_stopping = True
        if self.thread.ident is not None:
            self.thread.join(seconds)
        return not self.thread.is_alive()

    @property
    def num_waiting(self) -> int:
        batch = self.batch
        return self.requests.qsize() + len(self.pending) + (0 if batch is None else batch.num_waiting)

    # The thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        mx.default_stream(mx.default_device())
        try:
            self._load_default()
            if self.start_error is None:
                self.run()
                self.refuse_all()
                self.outbox.flush()
                self.models.close()  # in this thread: arrays must be freed where they were made
        except BaseException as error:
            logging.critical("the engine failed", exc_info=error)
            self._die(f"the engine failed: {type(error).__name__}: {error}")
        finally:
            self.is_dead = not self.is_stopping
            mx.clear_streams()  # a thread that ends with a CPU stream may abort the process

    def _load_default(self) -> None:
        """Load the model of the command line. If it cannot be served, report it, so that the process ends."""
        try:
            self.models.load_default()
            self.has_started = True
        except Exception as error:
            if self.is_stopping:
                return
            check_device(error)
            self.start_error = error
            self.fail_all("the model could not be loaded: see the server's log")
            self.on_start_error(error)

    def run(self) -> None:
        """Run until the server stops. Raises the error that ends the loop otherwise."""
        self.stream = mx.default_stream(mx.default_device())
        while not self.is_stopping:
            self.guarded_turn()

    def guarded_turn(self) -> None:
        """Run one turn; an error in it fails the batch's requests, one of the device ends the loop."""
        try:
            self.turn()
        except Exception as error:
            check_device(error)
            self.note_failure(error)
            self.close_batch(error)
        self.outbox.flush()

    def note_failure(self, error: Exception) -> None:
        logging.error("a step failed; its requests fail", exc_info=error)

    def turn(self) -> None:
        self._num_turns += 1
        self.receive()
        if self.alone is not None:
            if next(self.alone, False) is False:
                self.alone = None
            return
        while self.pending and self._start(self.pending[0]):
            self.pending.popleft()
        if self.scoring and next(self.scoring[0][1], False) is False:
            self.scoring.popleft()
        if self.batch is not None:
            self.memory_watch.relieve(self.batch, self.models.pool, self.models.prompt_cache)
            self._step()
        cache, now = self.models.prompt_cache, self._clock()
        if now - self._tidied > TIDY_EVERY_SECONDS:  # for a server that is never idle
            cache.tidy(for_seconds(TIDY_SECONDS))
            self._tidied = self._clock()

    @property
    def is_busy(self) -> bool:
        """Return whether any request is pending or running; those still in the queue do not count."""
        return bool(self.pending or self.rows or self.scoring or self.alone is not None)

    def arrived(self, seconds: float) -> list[Work]:
        """Return all new requests, waiting up to ``seconds`` for the first."""
        found = []
        with suppress(Empty):
            found.append(self.requests.get(timeout=seconds))
            while True:
                found.append(self.requests.get_nowait())
        return found

    def receive(self) -> None:
        """Take new requests; when idle, wait up to IDLE_SECONDS for one, and then tidy up."""
        is_busy = self.is_busy
        self.pending += self.arrived(0 if is_busy else IDLE_SECONDS)
        if not is_busy and not self.pending:

            def is_wanted() -> bool:
                self._num_turns += 1  # called between prefixes written to disk: slow, but progress
                return not self.requests.empty() or self.is_stopping

            self.tidy_while_idle(is_wanted)
        self.drop_gone()

    def drop_gone(self) -> None:
        """Drop requests that wait or whose prompts are scored, and whose clients have gone."""
        self.pending = deque(work for work in self.pending if work.is_wanted)
        self.scoring = deque(each for each in self.scoring if each[0].is_wanted)
        if self.is_busy:
            self._worked_at = self._used_at = self._clock()

    # Requests begin -------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> bool:
        """Start a request, or answer it at once. Return False if it must wait until the running requests are done."""
        models, request = self.models, work.request
        is_busy = bool(self.rows or self.scoring)
        if self.alone is not None:
            return False
        try:
            if work.key is not None and not models.is_present(work.key):
                if is_busy:
                    return False
                self.is_loading = True
                models.load(work.key, lambda: self.close_batch(None))
            if request is None:  # only the model's texts are wanted
                if models.texts is None:
                    raise RequestRefused(
                        404, "model is required: the server was started without --model", param="model"
                    )
                self.outbox.put(work, models.texts)
            elif not models.can_batch(request):
                if is_busy:
                    return False
                work.state, self.alone = "alone", self._compute_alone(work, request)
            elif request.scores_prompt and work.state != "scored":
                work.state = "scoring"
                self.scoring.append((work, self._score(work, request)))
            else:
                self._insert(work, request)
        except Exception as error:
            self.fail(work, error)
        finally:
            self.is_loading = False
            self.outbox.flush()
        return True

    def _insert(self, work: Work, request: ServerRequest) -> None:
        """Add the answers to a request to the batch: all of them, or none if it raises."""
        models, texts = self.models, self.models.texts
        assert texts is not None
        if self.batch is None:
            self.batch = ServedBatch(models, self.stream)
            self._num_computed = 0
        work.state = "batched"
        for index, uid in enumerate(self.batch.insert_request(request)):
            self.rows[uid] = Row(work, index, texts.tokenizer.detokenizer)
        models.trim(self.batch)

    def _score(self, work: Work, request: ServerRequest) -> Iterator[None]:
        """Compute the scores of a request's prompts, a slice at a time; then it waits for its turn again."""
        try:
            for number, prompt in enumerate(request.prompts):
                for found in self.models.scores(prompt.tokens, request.top_logprobs or 0):
                    if found is not None:
                        self.outbox.put(work, Scores(number, *found))
                    yield None
            work.state = "scored"
            self.pending.appendleft(work)
        except Exception as error:
            self.fail(work, error)

    # The batch ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Run the batch until it has responses, and send them. If a request fails, the others go on."""
        unwanted = [uid for uid, row in self.rows.items() if not row.work.is_wanted]
        if unwanted:
            self.batch.remove(unwanted)
            for uid in unwanted:
                del self.rows[uid]
        batch = self.batch
        if not self.rows:
            return
        try:
            prompts, generated = batch.next()
        except RequestFailedError as error:
            self._fail_row(error.uid, error)
            return
        finally:
            computed = batch.computed_prompt_tokens
            self.stats.count(computed_prompt_tokens=computed - self._num_computed)
            self._num_computed = computed
        if not prompts and not generated:  # nothing is left to compute, but rows still wait
            self.close_batch(RuntimeError("internal error: the batch ended without answering its requests"))
            return
        for response in prompts:
            if (row := self.rows.get(response.uid)) is not None:
                self._note_start(row)
                self.outbox.put(row.work, Progress(*response.progress))
        asking = [r for r in generated if r.uid in self.rows and self.rows[r.uid].request.wants_logprobs]
        logprobs = fetch_logprobs([(r, self.rows[r.uid].request.top_logprobs or 0) for r in asking])
        for response in generated:
            if (row := self.rows.get(response.uid)) is None:
                continue
            try:
                if self._emit_token(row, response, *logprobs.get(response.uid, (None, ()))):
                    del self.rows[response.uid]
                    if response.finish_reason is None:  # a stop string ends it, which the batch does not know
                        batch.finish([response.uid])
                    self.models.trim(batch)
            except Exception as error:
                check_device(error)
                batch.remove([response.uid])
                self._fail_row(response.uid, error)

    def _emit_token(self, row: Row, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> bool:
        """Send a client the next token of its answer. Return whether it is the last.

        Raises:
            ValueError: a log-probability is NaN, which JSON cannot express.
        """
        work, request = row.work, row.request
        if any(value != value for value in (logprob, *(value for _, value in top))):
            raise ValueError("the model's logits contain NaN")
        now, generated = time.monotonic(), row.next(response, logprob, top)
        if row.last_at is None:
            self._note_start(row)
            num_tokens, num_cached = len(request.prompt_of(row.index).tokens), max(0, response.num_cached)
            waited = now - request.asked_at
            self.stats.count(prompt_tokens=num_tokens, cached_tokens=num_cached, request_prompt_tokens=num_tokens)
            self.stats.count(first_tokens=1, first_token_seconds=waited, generated_tokens=1)
            generated = generated._replace(num_cached=num_cached)
        else:
            self.stats.count(generated_tokens=1, between_tokens_seconds=now - row.last_at)
        work.num_tokens += 1
        row.last_at = now
        self.outbox.put(work, generated)
        if generated.finish is None:
            return False
        self.stats.count(request_generated_tokens=row.num_tokens)
        return True

    def _note_start(self, row: Row) -> None:
        """Count a row's time in the queue, once the first part of it has been computed."""
        if not row.has_started:
            row.has_started = True
            self.stats.count(queue_seconds=time.monotonic() - row.request.asked_at)

    def _fail_row(self, uid: int, error: Exception) -> None:
        """Fail a row's request, with its other rows."""
        if isinstance(error.__cause__, PoolExhaustedError):
            self.models.prompt_cache.unpaged.trim_to(n_sequences=0)  # cached copies whose blocks the pool cannot evict
        row = self.rows.pop(uid, None)
        if row is not None:
            self.fail(row.work, error)
            row.work.is_gone = True

    def fail(self, work: Work, error: BaseException) -> None:
        """Fail a request. Raises an error of the device instead, which concerns all of them."""
        check_device(error)
        self.outbox.fail(work, error)
        self.outbox.flush()

    # Alone ----------------------------------------------------------------------------------------------------

    def _compute_alone(self, work: Work, request: ServerRequest) -> Iterator[None]:
        """Compute the answers to a request that cannot run in the batch, one after the other."""
        texts = self.models.texts
        assert texts is not None

        def note(done: int, total: int) -> None:
            self._num_turns += 1
            if not work.is_wanted:
                raise InterruptedError("the client has gone")
            self.outbox.put(work, Progress(done, total))
            self.outbox.flush()

        try:
            for index in range(request.num_answers):
                row = Row(work, index, texts.tokenizer.detokenizer)
                tokens = self.models.generate_alone(request, index, self.stream, note)
                for response in tokens:
                    wanted = [(response, request.top_logprobs or 0)] if request.wants_logprobs else []
                    logprobs = fetch_logprobs(wanted).get(response.uid, (None, ()))
                    if row.last_at is None:
                        num_prompt = len(request.prompt_of(index).tokens)
                        self.stats.count(computed_prompt_tokens=num_prompt - max(0, response.num_cached))
                    if self._emit_token(row, response, *logprobs) or not work.is_wanted:
                        tokens.close()  # type: ignore[attr-defined]
                        break
                    yield None
        except Exception as error:
            self.fail(work, error)
        self.models.trim(None)

    # Ends -----------------------------------------------------------------------------------------------------

    def close_batch(self, error: Exception | None) -> None:
        """Close the batch; its requests, if it has any, fail with ``error``."""
        batch, self.batch = self.batch, None
        rows, self.rows = self.rows, {}
        if error is not None:
            for work in dict.fromkeys(row.work for row in rows.values()):
                self.fail(work, error)
        if batch is not None:
            batch.remove(list(rows))
            batch.close()

    def refuse_all(self) -> None:
        """Refuse all requests at an orderly shutdown."""
        refusal = unavailable(CLOSING)
        self.alone = None
        self.close_batch(refusal)
        for work in [*self.pending, *(work for work, _ in self.scoring)]:
            self.fail(work, refusal)

    def tidy_while_idle(self, is_wanted: Callable[[], bool]) -> None:
        """Write prefixes to disk, trim the heap, unload idle models, and check the memory in use."""
        cache = self.models.prompt_cache
        self._tidied = self._clock()
        cache.tidy(is_wanted)
        if self._worked_at and self._tidied - self._worked_at >= TRIM_SECONDS:
            self._worked_at = 0.0
            trim_heap()
        seconds = self.models.config.idle_unload
        if seconds is not None and self._used_at is not None and self._tidied - self._used_at >= seconds:
            self._used_at = None
            self.close_batch(None)
            self.models.unload()
            trim_heap()
            logging.info("no request for %g s: models are unloaded until the next request", seconds)
        self.memory_watch.relieve(None, self.models.pool, cache)

    # The end of the process -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Check the thread several times per timeout, and end the process if it makes no progress."""
        seen, since = None, time.monotonic()
        while self.thread.is_alive():
            time.sleep(min(1.0, self._timeout / 8))
            if (progress := self.progress()) is None or progress != seen:
                seen, since = progress, time.monotonic()
            elif time.monotonic() - since >= self._timeout:
                frame = sys._current_frames().get(self.thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                why = f"no progress for {self._timeout:g} s"
                logging.critical("the engine made %s; its stack:\n%s", why, stack)
                self._die(why)

    def progress(self) -> object:
        """Return a value that changes with all progress: each turn, each step of the batch, each prompt chunk alone.
        None: the thread does something without a time limit, such as loading a model."""
        if self.is_stopping or not self.has_started or self.is_loading:
            return None
        batch = self.batch
        return self._num_turns, None if batch is None else batch.num_steps

    def _die(self, why: str) -> NoReturn:
        """End the process, so that a service manager restarts it."""
        self.is_dead = True
        self.fail_all(f"the server is exiting: {why}")
        time.sleep(LAST_SECONDS)  # for errors to reach clients
        print(f"mlx_paged: {why}; exiting with status {EXIT_STATUS}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(EXIT_STATUS)


def _age(request: ServerRequest) -> float:
    return round(time.monotonic() - request.asked_at, 1)


def _figures(work: Work) -> dict[str, Any]:
    """Return the progress of a request outside the batch."""
    request = work.request
    assert request is not None
    return {
        "number": str(request.number),
        "order": (request.number, 0),
        "uid": None,
        "state": work.state,
        "waiting": work.state == "queued",
        "age_seconds": _age(request),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in request.prompts),
        "cached_tokens": 0,
        "tokens": 0,
        "computing_tokens": 0,
        "generated_tokens": work.num_tokens,
        "blocks": [],
    }


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Return a function that returns whether ``seconds`` have passed since now."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin > seconds
