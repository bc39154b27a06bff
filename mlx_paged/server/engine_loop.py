"""EngineLoop: takes requests and computes them, until it is told to end or fails."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import PoolExhaustedError, RequestFailedError
from ..kv.pool import BlockPool
from .answer_stream import AnswerStream, Begun, Generated, Outbox, Progress, Scores
from .errors import RequestRefused, unavailable
from .memory import trim_heap
from .request import ModelKey, ServerRequest
from .stops import StopScanner

if TYPE_CHECKING:
    from .backend import Models
    from .memory import MemoryWatch
    from .report import ServerStats

IDLE_SECONDS = 0.1
TIDY_EVERY_SECONDS, TIDY_SECONDS = 30, 0.1
RETURN_MEMORY_SECONDS = 5  # without work, until pools give memory back
CLOSING = "the server is shutting down"


@dataclass(eq=False)
class Work:
    """A request in the thread that computes.

    Attributes:
        stream: to its client; None on a rank without clients.
        request: None: only the model is wanted, to make the prompts with.
        key: of the model.
        is_gone: it has failed, or, on several ranks, its client has gone, as all of them know.
        is_shared: several ranks compute it: whether it is wanted changes only between their turns.
        scoring: the rest of the prompts' scores.
        rows: answers that have begun.
        state: for people to look at.
    """

    stream: AnswerStream | None
    request: ServerRequest | None
    key: ModelKey | None = None
    is_gone: bool = False
    is_shared: bool = False
    scoring: Iterator[Scores | None] | None = None
    rows: list[Row] = field(default_factory=list)
    state: str = "queued"

    @property
    def is_wanted(self) -> bool:
        return not self.is_gone and (self.is_shared or self.stream is None or self.stream.is_wanted)


class Row:
    """One answer that is computed: its text, and where that ends."""

    def __init__(self, work: Work, index: int, detokenizer: Any) -> None:
        assert work.request is not None
        self.work, self.index = work, index
        self.request: ServerRequest = work.request
        self.num_tokens = 0
        self.has_started = False
        self.last_at: float | None = None  # when its last token came
        self._detokenizer = detokenizer
        self._scanner = None if work.request.stops is None else StopScanner(work.request.stops)
        self._starts: list[int] = []  # of the tokens' texts, in characters; kept where somebody asks for the tokens
        self._length = self._num_characters = 0  # of the text, and of what could be shown

    @property
    def name(self) -> str:
        """The request's number, and where it has several answers, the answer's."""
        request = self.request
        return f"{request.number}.{self.index + 1}" if request.num_answers > 1 else str(request.number)

    @property
    def age(self) -> float:
        return round(time.monotonic() - self.request.asked_at, 1)

    def next(self, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Generated:
        """Return what is told of the next token.

        Args:
            response: token and reason to end; with a text, where the library has decoded it.
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
    """One life of what computes: a batch, and the requests that wait for it or are computed alone.

    Only :meth:`run` and what it calls change anything here, in its thread; the rest may be called by any.

    Args:
        models: the model and its caches.
        requests: that have come.
        stats: of the server.
        memory_watch: says when memory is short.
        is_stopping: whether the server ends.
        clock: seconds.
    """

    def __init__(
        self,
        models: Models,
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
        self._used_at: float | None = clock()  # None: the model has been unloaded since
        self._score_at = 0.0  # when the next slice of a prompt's scores may be computed beside others

    # By any thread --------------------------------------------------------------------------------------------

    def progress(self) -> object:
        """Return a value that changes with each turn, step, slice, and token of a request computed alone."""
        batch = self.batch
        return self._num_turns, None if batch is None else batch.num_steps

    @property
    def num_waiting(self) -> int:
        batch = self.batch
        return self.requests.qsize() + len(self.pending) + (0 if batch is None else batch.num_waiting)

    def sequences(self) -> list[dict[str, Any]]:
        """Return how far each answer of the batch is."""
        rows, batch = dict(self.rows), self.batch
        return [
            {**each, "number": row.name, "order": (row.request.number, row.index), "age_seconds": row.age}
            for each in ([] if batch is None else batch.progress())
            if (row := rows.get(each["uid"])) is not None
        ]

    # The loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the server ends. Raises whatever ends it otherwise."""
        self.stream = mx.default_stream(mx.default_device())
        while not self.is_stopping():
            self.guarded_turn()

    def guarded_turn(self) -> None:
        """One turn; what fails in it fails the batch's requests."""
        try:
            self.turn()
        except Exception as error:
            self.note_failure(error)
            self.close_batch(error)
        self.outbox.flush()

    def note_failure(self, error: Exception) -> None:
        logging.error("a step failed; its requests are given up", exc_info=error)

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
            self._memory.keep(self.batch, self.models.pool, self.models.prompt_cache)
            self._step()
        cache, now = self.models.prompt_cache, self._clock()
        if now - self._tidied > TIDY_EVERY_SECONDS and hasattr(cache, "tidy"):  # for a server that is never idle
            cache.tidy(for_seconds(TIDY_SECONDS))
            self._tidied = self._clock()

    @property
    def is_busy(self) -> bool:
        """Return whether somebody waits for an answer, as far as is known here."""
        return bool(self.pending or self.rows or self.scoring or self.alone is not None)

    def arrived(self, seconds: float) -> list[Work]:
        """Return the requests that have come, after at most this time."""
        found = []
        with suppress(Empty):
            found.append(self.requests.get(timeout=seconds))
            while True:
                found.append(self.requests.get_nowait())
        return found

    def receive(self) -> None:
        """Note the requests that have come; if there is nothing to do, wait for them a little, and tidy up."""
        is_busy = self.is_busy
        self.pending += self.arrived(0 if is_busy else IDLE_SECONDS)
        if not is_busy and not self.pending:

            def is_wanted() -> bool:
                self._num_turns += 1  # asked between prefixes that are written to disk, which may take long
                return not self.requests.empty() or self.is_stopping()

            self.tidy_while_idle(is_wanted)
        self.drop_gone()

    def drop_gone(self) -> None:
        """Let go of requests that have not begun, and whose clients have gone."""
        for queue in (self.pending, self.scoring):
            for work in [work for work in queue if not work.is_wanted]:
                queue.remove(work)
                work.scoring = None  # and its blocks, whoever still holds the request
        if self.is_busy:
            self._worked_at = self._used_at = self._clock()

    # Requests begin -------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> bool:
        """Begin a request, or answer it at once. False if it has to wait until the batch is done."""
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
            if request is None:  # only the model was wanted
                if models.texts is None:
                    raise RequestRefused(404, "the server was started without --model: name one", param="model")
                self.outbox.put(work.stream, models.texts)
            elif not models.batches(request):
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
        """Have the answers to a request computed in the batch: all of them, or none."""
        models, texts = self.models, self.models.texts
        assert texts is not None
        if self.batch is None:
            self.batch = models.batch(self.stream)
            self._num_computed = 0
        work.state = "batched"
        for index, uid in enumerate(self.batch.insert_request(request)):
            self.rows[uid] = row = Row(work, index, texts.detokenizer())
            work.rows.append(row)
        models.trim(self.batch)

    # Prompts' own scores --------------------------------------------------------------------------------------

    def _scores_of(self, request: ServerRequest) -> Iterator[Scores | None]:
        for number, prompt in enumerate(request.prompts):
            for found in self.models.scores(prompt.tokens, request.top_logprobs or 0):
                yield None if found is None else Scores(number, *found)

    def _score(self) -> None:
        """Compute one slice, between the steps of others, who have as much time as the slices."""
        if not self.scoring or (self.rows and self._clock() < self._score_at):
            return
        work, begin = self.scoring[0], self._clock()
        assert work.scoring is not None
        try:
            found = next(work.scoring, False)
        except Exception as error:
            self.scoring.popleft()
            self.fail(work, error)
            return
        finally:
            self._score_at = 2 * self._clock() - begin
        if found is False:
            self.scoring.popleft()
            self.pending.appendleft(work)
        elif isinstance(found, Scores):
            self.outbox.put(work.stream, found)
            self.scoring.rotate(-1)

    # The batch ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Compute until there is something to tell, and tell it. A request that failed is told so; others go on."""
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
        if not prompts and not generated:  # nothing is left to do, and so nobody may be waiting for it
            self.close_batch(RuntimeError("the batch has lost its requests"))
            return
        for response in prompts:
            if (row := self.rows.get(response.uid)) is not None:
                self._note_start(row)
                self.outbox.put(row.work.stream, Progress(row.index, *response.progress))
        asking = [r for r in generated if r.uid in self.rows and self.rows[r.uid].request.wants_logprobs]
        logprobs = fetch_logprobs([(r, self.rows[r.uid].request.top_logprobs or 0) for r in asking])
        for response in generated:
            if (row := self.rows.get(response.uid)) is None:
                continue
            try:
                if self._tell(row, response, *logprobs.get(response.uid, (None, ()))):
                    del self.rows[response.uid]
                    batch.end(response)
                    self.models.trim(batch)
            except Exception as error:
                batch.remove([response.uid])
                self._fail_row(response.uid, error)

    def _tell(self, row: Row, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> bool:
        """Tell a client the next token of its answer. Return whether it is the last.

        Raises:
            ValueError: a log-probability is not a number, which no JSON has a word for.
        """
        stream, request = row.work.stream, row.request
        if any(value != value for value in (logprob, *(value for _, value in top))):
            raise ValueError("the model's logits are not numbers")
        now = time.monotonic()
        if row.last_at is None:
            self._note_start(row)
            num_tokens, num_cached = len(request.prompt_of(row.index).tokens), max(0, response.num_cached)
            waited = now - request.asked_at
            self.stats.count(prompt_tokens=num_tokens, cached_tokens=num_cached, request_prompt_tokens=num_tokens)
            self.stats.count(first_tokens=1, first_token_seconds=waited, generated_tokens=1)
            self.outbox.put(stream, Begun(row.index, num_cached))
        else:
            self.stats.count(generated_tokens=1, between_tokens_seconds=now - row.last_at)
        generated = row.next(response, logprob, top)
        row.last_at = now
        self.outbox.put(stream, generated)
        if generated.finish is None:
            return False
        self.stats.count(request_generated_tokens=row.num_tokens)
        return True

    def _note_start(self, row: Row) -> None:
        """Count a row's start once something of it has been computed."""
        if not row.has_started:
            row.has_started = True
            self.stats.count(queue_seconds=time.monotonic() - row.request.asked_at)

    def _fail_row(self, uid: int, error: Exception) -> None:
        """A row has failed: its request fails, with its other rows."""
        if isinstance(error.__cause__, PoolExhaustedError) and hasattr(self.models.prompt_cache, "others"):
            self.models.prompt_cache.others.trim_to(n_sequences=0)  # copies that the pool cannot ask for their blocks
        row = self.rows.pop(uid, None)
        if row is not None:
            self.fail(row.work, error)
            row.work.is_gone = True

    def fail(self, work: Work, error: BaseException) -> None:
        self.outbox.fail(work.stream, error)
        self.outbox.flush()

    # Alone ----------------------------------------------------------------------------------------------------

    def _compute_alone(self, work: Work, request: ServerRequest) -> Iterator[None]:
        """Compute the answers to a request that the batch cannot, one after the other."""
        texts = self.models.texts
        assert texts is not None

        def note(done: int, total: int) -> None:
            self._num_turns += 1
            if not work.is_wanted:
                raise InterruptedError("the client has gone")
            self.outbox.put(work.stream, Progress(index, done, total))
            self.outbox.flush()

        try:
            for index in range(request.num_answers):
                row = Row(work, index, texts.detokenizer())
                work.rows.append(row)
                tokens = self.models.alone(request, index, self.stream, note)
                for response in tokens:
                    wanted = [(response, request.top_logprobs or 0)] if request.wants_logprobs else []
                    logprobs = fetch_logprobs(wanted).get(response.uid, (None, ()))
                    if row.last_at is None:
                        num_prompt = len(request.prompt_of(index).tokens)
                        self.stats.count(computed_prompt_tokens=num_prompt - max(0, response.num_cached))
                    if self._tell(row, response, *logprobs) or not work.is_wanted:
                        tokens.close()  # type: ignore[attr-defined]
                        break
                    yield None
        except Exception as error:
            self.fail(work, error)
        self.models.trim(None)

    # Ends -----------------------------------------------------------------------------------------------------

    def close_batch(self, error: Exception | None) -> None:
        """Let go of the batch; its requests, if it has any, fail with ``error``."""
        batch, self.batch = self.batch, None
        rows, self.rows = self.rows, {}
        if error is not None:
            for work in dict.fromkeys(row.work for row in rows.values()):
                self.fail(work, error)
        if batch is not None:
            batch.remove(list(rows))
            batch.close()

    def refuse_all(self) -> None:
        """End in order."""
        refusal = unavailable(CLOSING)
        self.alone = None
        self.close_batch(refusal)
        for work in [*self.pending, *self.scoring]:
            self.fail(work, refusal)

    def abandon(self) -> None:
        """Let go of everything after :meth:`run` has failed. Nothing is kept of what was being computed, since nobody
        knows how far that has come."""
        batch, self.batch, self.alone, self.rows = self.batch, None, None, {}
        with suppress(Exception):
            if batch is not None:
                batch.abandon()
        del batch
        with suppress(Exception):  # no more is being computed in this thread
            mx.synchronize(self.stream)
        gc.collect()

    def tidy_while_idle(self, is_wanted: Callable[[], bool]) -> None:
        """Write prefixes to disk, give memory back, and look at the memory."""
        cache = self.models.prompt_cache
        self._tidied = self._clock()
        if hasattr(cache, "tidy"):
            cache.tidy(is_wanted)
        if self._worked_at and self._tidied - self._worked_at >= RETURN_MEMORY_SECONDS:
            self._worked_at = 0.0
            for pool in self.models.pools:
                pool.return_memory()
            trim_heap()
        seconds = self.models.idle_unload
        if seconds is not None and self._used_at is not None and self._tidied - self._used_at >= seconds:
            self._used_at = None
            self.close_batch(None)
            self.models.unload()
            trim_heap()
            logging.info("no request for %g s: models are unloaded until the next", seconds)
        self._memory.keep(None, self.models.pool, cache)


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Return a function that says whether so many seconds have passed."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin > seconds


def fetch_logprobs(asking: list[tuple[Any, int]]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """Return, by uid, the log-probability of each token and of the likeliest.

    Args:
        asking: responses, and how many of the likeliest each wants.
    """
    if not asking:
        return {}
    rows, tokens = mx.stack([response.logprobs for response, _ in asking]), [response.token for response, _ in asking]
    found = likeliest_of(rows, tokens, max(top for _, top in asking))
    wanted = zip(asking, found, strict=True)
    return {response.uid: (logprob, likeliest[:top]) for (response, top), (logprob, likeliest) in wanted}


def likeliest_of(rows: mx.array, tokens: list[int], num_top: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the log-probability of each row's token, and the row's likeliest tokens with theirs: all computed
    together, in one transfer."""
    wanted, most = mx.array(tokens)[:, None], min(num_top, rows.shape[-1])
    if most:
        likeliest = mx.argpartition(-rows, kth=most - 1, axis=-1)[:, :most].astype(mx.int32)
        wanted = mx.concatenate([wanted, likeliest], axis=1)
    values = mx.take_along_axis(rows, wanted, axis=1).astype(mx.float32)
    # Both in one array; float32 is exact for as many tokens as there are.
    fetched: Any = mx.stack([wanted.astype(mx.float32), values], axis=1).tolist()
    return [
        (logprobs[0], tuple(sorted(zip(map(int, ids[1:]), logprobs[1:], strict=True), key=lambda pair: -pair[1])))
        for ids, logprobs in fetched
    ]


def check_pool(pool: BlockPool, prompt_cache: Any) -> None:
    """Raise unless a pool's accounts and prefixes agree, and what is in it can be computed in this thread."""
    pool.check_integrity()
    if hasattr(prompt_cache, "tree_of"):
        prompt_cache.tree_of(pool).check_integrity()
    with pool.lock:
        mx.eval([array for group in pool.groups for array in group.latest()])
