"""EngineLoop: takes requests from the queue and computes them, until the server stops or the loop fails."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import PoolExhaustedError, RequestFailedError, check_device
from .errors import RequestRefused, unavailable
from .logprobs import fetch_logprobs
from .memory import trim_heap
from .request import ServerRequest
from .stops import StopScanner
from .work import Begun, Generated, Outbox, Progress, Scores, Work

if TYPE_CHECKING:
    from .loaded_models import LoadedModels
    from .memory import MemoryWatch
    from .report import ServerStats

IDLE_SECONDS = 0.1
TIDY_EVERY_SECONDS, TIDY_SECONDS = 30, 0.1
TRIM_SECONDS = 5  # without work, after which the heap is trimmed
CLOSING = "the server is shutting down"


class Row:
    """One answer that is being computed: decodes its tokens and looks for stop strings."""

    def __init__(self, work: Work, index: int, detokenizer: Any) -> None:
        assert work.request is not None
        self.work, self.index = work, index
        self.request: ServerRequest = work.request
        self.num_tokens = 0
        self.has_started = False
        self.last_at: float | None = None  # time of its last token
        self._detokenizer = detokenizer
        self._scanner = None if work.request.stops is None else StopScanner(work.request.stops)
        self._starts: list[int] = []  # of the tokens' texts, in characters; only with log-probabilities
        self._length = self._num_characters = 0  # of the text, and of its part that was shown

    @property
    def name(self) -> str:
        """The request's number, followed by the answer's if there are several."""
        request = self.request
        return f"{request.number}.{self.index + 1}" if request.num_answers > 1 else str(request.number)

    @property
    def age(self) -> float:
        return round(time.monotonic() - self.request.asked_at, 1)

    def next(self, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Generated:
        """Add the next token. Return the item for the client.

        Args:
            response: token and finish reason, and its text if mlx-lm has decoded it.
        """
        finish, text = response.finish_reason, getattr(response, "text", None)
        self.num_tokens += 1
        if text is None:
            if finish != "stop":  # an end token has no text
                self._detokenizer.add_token(response.token)
            if finish is not None:
                self._detokenizer.finalize()
            text = self._detokenizer.last_segment
        stop, num_shown = None, self.num_tokens - 1 if finish == "stop" else None
        if self._scanner is not None:
            if self.request.wants_logprobs:
                self._starts.append(self._length)
            self._length += len(text)
            text = self._scanner.feed(text, is_last=finish is not None)
            self._num_characters += len(text)
            stop = self._scanner.found
            if stop is not None:
                finish, num_shown = "stop", bisect_left(self._starts, self._num_characters)
        return Generated(self.index, response.token, text, finish, stop, logprob, top, num_shown)


class EngineLoop:
    """The loop of the engine thread: a batch, and the requests that wait for it or run alone.

    Only :meth:`run` and what it calls change anything here, in the engine thread; any thread may call the rest.

    Args:
        models: the model and its caches.
        requests: queue of new requests.
        stats: the server's figures.
        memory_watch: watches the memory in use.
        is_stopping: returns whether the server is shutting down.
        clock: returns seconds.
    """

    def __init__(
        self,
        models: LoadedModels,
        requests: SimpleQueue[Work],
        stats: ServerStats,
        memory_watch: MemoryWatch,
        is_stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models, self.requests, self.stats, self.is_stopping = models, requests, stats, is_stopping
        self.pending: deque[Work] = deque()
        self.batch: Any = None
        self.rows: dict[int, Row] = {}  # by uid
        self.scoring: deque[Work] = deque()
        self.alone: Iterator[None] | None = None
        self.is_loading = False
        self.stream: Any = None
        self.outbox = Outbox()
        self._num_turns = self._num_computed = 0
        self._memory = memory_watch
        self._clock = clock
        self._tidied, self._worked_at = clock(), 0.0
        self._used_at: float | None = clock()  # None: the models have been unloaded since

    # By any thread --------------------------------------------------------------------------------------------

    def progress(self) -> object:
        """Return a value that changes with all progress: each turn, each step of the batch, each prompt chunk alone."""
        batch = self.batch
        return self._num_turns, None if batch is None else batch.num_steps

    @property
    def num_waiting(self) -> int:
        batch = self.batch
        return self.requests.qsize() + len(self.pending) + (0 if batch is None else batch.num_waiting)

    def sequences(self) -> list[dict[str, Any]]:
        """Return the progress of each answer in the batch."""
        rows, batch = dict(self.rows), self.batch
        return [
            {**each, "number": row.name, "order": (row.request.number, row.index), "age_seconds": row.age}
            for each in ([] if batch is None else batch.progress())
            if (row := rows.get(each["uid"])) is not None
        ]

    # The loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the server stops. Raises the error that ends the loop otherwise."""
        self.stream = mx.default_stream(mx.default_device())
        while not self.is_stopping():
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
        self._score()
        if self.batch is not None:
            self._memory.relieve(self.batch, self.models.pool, self.models.prompt_cache)
            self._step()
        cache, now = self.models.prompt_cache, self._clock()
        if now - self._tidied > TIDY_EVERY_SECONDS and hasattr(cache, "tidy"):  # for a server that is never idle
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
                return not self.requests.empty() or self.is_stopping()

            self.tidy_while_idle(is_wanted)
        self.drop_gone()

    def drop_gone(self) -> None:
        """Drop requests that wait or are being scored, and whose clients have gone."""
        for queue in (self.pending, self.scoring):
            for work in [work for work in queue if not work.is_wanted]:
                queue.remove(work)
                work.scoring = None  # frees its blocks, even if something still holds the request
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
            elif request.scores_prompt and work.scoring is None:
                work.state, work.scoring = "scoring", self._scores_of(request)
                self.scoring.append(work)
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
            self.batch = models.batch(self.stream)
            self._num_computed = 0
        work.state = "batched"
        for index, uid in enumerate(self.batch.insert_request(request)):
            self.rows[uid] = Row(work, index, texts.detokenizer())
        models.trim(self.batch)

    # Prompts' own scores --------------------------------------------------------------------------------------

    def _scores_of(self, request: ServerRequest) -> Iterator[Scores | None]:
        for number, prompt in enumerate(request.prompts):
            for found in self.models.scores(prompt.tokens, request.top_logprobs or 0, lambda: not self.rows):
                yield None if found is None else Scores(number, *found)

    def _score(self) -> None:
        """Compute one slice of the scores."""
        if not self.scoring:
            return
        work = self.scoring[0]
        assert work.scoring is not None
        try:
            found = next(work.scoring, False)
        except Exception as error:
            self.scoring.popleft()
            self.fail(work, error)
            return
        if found is False:
            self.scoring.popleft()
            self.pending.appendleft(work)
        elif isinstance(found, Scores):
            self.outbox.put(work, found)
            self.scoring.rotate(-1)

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
                self.outbox.put(row.work, Progress(row.index, *response.progress))
        asking = [r for r in generated if r.uid in self.rows and self.rows[r.uid].request.wants_logprobs]
        logprobs = fetch_logprobs([(r, self.rows[r.uid].request.top_logprobs or 0) for r in asking])
        for response in generated:
            if (row := self.rows.get(response.uid)) is None:
                continue
            try:
                if self._emit_token(row, response, *logprobs.get(response.uid, (None, ()))):
                    del self.rows[response.uid]
                    batch.end(response)
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
        now = time.monotonic()
        if row.last_at is None:
            self._note_start(row)
            num_tokens, num_cached = len(request.prompt_of(row.index).tokens), max(0, response.num_cached)
            waited = now - request.asked_at
            self.stats.count(prompt_tokens=num_tokens, cached_tokens=num_cached, request_prompt_tokens=num_tokens)
            self.stats.count(first_tokens=1, first_token_seconds=waited, generated_tokens=1)
            self.outbox.put(work, Begun(row.index, num_cached))
        else:
            self.stats.count(generated_tokens=1, between_tokens_seconds=now - row.last_at)
        generated = row.next(response, logprob, top)
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
        if isinstance(error.__cause__, PoolExhaustedError) and hasattr(self.models.prompt_cache, "unpaged"):
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
            self.outbox.put(work, Progress(index, done, total))
            self.outbox.flush()

        try:
            for index in range(request.num_answers):
                row = Row(work, index, texts.detokenizer())
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
        for work in [*self.pending, *self.scoring]:
            self.fail(work, refusal)

    def tidy_while_idle(self, is_wanted: Callable[[], bool]) -> None:
        """Write prefixes to disk, trim the heap, unload idle models, and check the memory in use."""
        cache = self.models.prompt_cache
        self._tidied = self._clock()
        if hasattr(cache, "tidy"):
            cache.tidy(is_wanted)
        if self._worked_at and self._tidied - self._worked_at >= TRIM_SECONDS:
            self._worked_at = 0.0
            trim_heap()
        seconds = self.models.idle_unload
        if seconds is not None and self._used_at is not None and self._tidied - self._used_at >= seconds:
            self._used_at = None
            self.close_batch(None)
            self.models.unload()
            trim_heap()
            logging.info("no request for %g s: models are unloaded until the next request", seconds)
        self._memory.relieve(None, self.models.pool, cache)


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Return a function that returns whether ``seconds`` have passed since now."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin > seconds
