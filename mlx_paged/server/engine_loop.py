"""EngineLoop: takes requests and computes them, until it is told to end or fails."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import PoolExhaustedError, RequestFailedError
from ..kv.pool import BlockPool
from .answer_stream import AnswerStream, Begun, Generated, Outbox, Progress, Scores
from .errors import RequestRefused, unavailable
from .health.memory import MemoryGuard, trim_heap
from .request import ModelKey, ServerRequest
from .stops import StopScanner

if TYPE_CHECKING:
    from .backend import Models
    from .health.memory import MemoryWatch
    from .report.server_stats import ServerStats

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

    def take(self, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Generated:
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
        self._num_turns = self._num_alone = self._num_computed = 0
        self._memory = MemoryGuard(memory_watch)
        self._clock = clock
        self._tidied, self._worked_at = clock(), 0.0
        self._score_at = 0.0  # when the next slice of a prompt's scores may be computed beside others

    # By any thread --------------------------------------------------------------------------------------------

    def progress(self) -> object:
        """Return a value that changes with each turn, step, slice, and token of a request computed alone."""
        batch = self.batch
        return self._num_turns, None if batch is None else batch.num_steps, self._num_alone

    @property
    def num_waiting(self) -> int:
        batch = self.batch
        return self.requests.qsize() + len(self.pending) + (0 if batch is None else batch.num_waiting)

    def sequences(self) -> list[dict[str, Any]]:
        """Return how far each answer of the batch is."""
        rows, batch = dict(self.rows), self.batch
        return [
            {
                **each,
                "number": row.name,
                "order": (row.request.number, row.index),
                "age_seconds": round(time.monotonic() - row.request.asked_at, 1),
            }
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
            logging.exception("a step failed; its requests are given up")
            self.close_batch(error)
        self.outbox.flush()

    def turn(self) -> None:
        self._num_turns += 1
        self.take_requests()
        if self.alone is not None:
            self._go_on_alone()
            return
        while self.pending and self._start(self.pending[0]):
            self.pending.popleft()
        self._score()
        if self.batch is not None:
            self._memory.keep(self.batch, self.models.pool, self.models.prompt_cache)
            self._step()
        self._tidy_while_busy()

    @property
    def is_busy(self) -> bool:
        """Return whether somebody waits for an answer, as far as is known here."""
        return bool(self.pending or self.rows or self.scoring or self.alone is not None)

    def take_requests(self) -> None:
        """Take everything that has come; if there is nothing to do, wait for it a little, and tidy up."""
        if not self.is_busy:
            try:
                self.pending.append(self.requests.get(timeout=IDLE_SECONDS))
            except Empty:

                def is_wanted() -> bool:
                    self._num_turns += 1  # asked between prefixes that are written to disk, which may take long
                    return not self.requests.empty() or self.is_stopping()

                self.tidy_while_idle(is_wanted)
        while True:
            try:
                self.pending.append(self.requests.get_nowait())
            except Empty:
                break
        self.drop_gone()

    def drop_gone(self) -> None:
        """Let go of requests that have not begun, and whose clients have gone."""
        for queue in (self.pending, self.scoring):
            for work in [work for work in queue if not work.is_wanted]:
                queue.remove(work)
        if self.is_busy:
            self._worked_at = self._clock()

    # Requests begin -------------------------------------------------------------------------------------------

    def _start(self, work: Work) -> bool:
        """Begin a request, or answer it at once. False if it has to wait until the batch is done."""
        models, request = self.models, work.request
        is_busy = bool(self.rows or self.scoring)
        if self.alone is not None:
            return False
        try:
            if work.key is not None and (models.texts is None or work.key != models.texts.key):
                if is_busy:
                    return False
                self.is_loading = True
                models.load(work.key, lambda: self.close_batch(None))
            if request is None:  # only the model was wanted
                if models.texts is None:
                    raise RequestRefused(404, "the server was started without --model: name one", param="model")
                self.outbox.put(work.stream, models.texts)
                return True
            if not models.batches(request):
                if is_busy:
                    return False
                self.alone = self._compute_alone(work)
                return True
            if request.scores_prompt and work.scoring is None:
                work.scoring, work.state = self._scores_of(request), "scoring"
                self.scoring.append(work)
                return True
            self._insert(work)
        except Exception as error:
            self.fail(work, error)
        finally:
            self.is_loading = False
            self.outbox.flush()
        return True

    def _insert(self, work: Work) -> None:
        """Have the answers to a request computed in the batch: all of them, or none."""
        request, models = work.request, self.models
        assert request is not None and models.texts is not None
        if self.batch is None:
            self.batch = models.batch(self.stream)
            self._num_computed = 0
        work.state = "batched"
        uids = []
        try:
            for index in range(request.num_answers):
                uids.append(self.batch.insert(request, index))
        except Exception:
            self.batch.remove(uids)
            raise
        for index, uid in enumerate(uids):
            self.rows[uid] = row = Row(work, index, models.texts.detokenizer())
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
        work = self.scoring[0]
        assert work.scoring is not None
        begin = self._clock()
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
        self._drop_unwanted()
        batch = self.batch
        if batch is None or not self.rows:
            return
        try:
            prompts, generated = batch.next()
        except RequestFailedError as error:
            self._fail_row(error.uid, error)
            return
        finally:
            computed = batch.computed_prompt_tokens
            self.stats.count_computed(computed - self._num_computed)
            self._num_computed = computed
        if not prompts and not generated:  # nothing is left to do, and so nobody may be waiting for it
            self.close_batch(RuntimeError("the batch has lost its requests"))
            return
        for response in prompts:
            if (row := self.rows.get(response.uid)) is not None:
                self._note_start(row)
                self.outbox.put(row.work.stream, Progress(row.index, *response.progress))
        told = self._logprobs(generated)
        for response in generated:
            row = self.rows.get(response.uid)
            if row is None:
                continue
            try:
                self._deliver(batch, row, response, *told.get(response.uid, (None, ())))
            except Exception as error:
                batch.remove([response.uid])
                self._fail_row(response.uid, error)

    def _logprobs(self, generated: Iterable[Any]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """Return the log-probabilities of those that want them, by uid; a failure is that of these alone."""
        asking = [(r, self.rows[r.uid].request) for r in generated if r.uid in self.rows]
        asking = [(response, request) for response, request in asking if request.wants_logprobs]
        try:
            return fetch_logprobs([(response, request.top_logprobs or 0) for response, request in asking])
        except Exception as error:
            for response, _ in asking:
                if self.batch is not None:
                    self.batch.remove([response.uid])
                self._fail_row(response.uid, error)
            return {}

    def _deliver(
        self, batch: Any, row: Row, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]
    ) -> None:
        said = self._tell(row, response, logprob, top)
        if said.finish is not None:
            del self.rows[response.uid]
            batch.finish(response)
            self.models.trim(batch)

    def _tell(self, row: Row, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Generated:
        """Tell a client the next token of its answer."""
        stream, request = row.work.stream, row.request
        now = time.monotonic()
        if row.num_tokens == 0:
            self._note_start(row)
            prompt, num_cached = request.prompt_of(row.index), max(0, response.num_cached)
            self.stats.count_prompt(len(prompt.tokens), num_cached)
            self.stats.count_first_token(now - request.asked_at)
            self.outbox.put(stream, Begun(row.index, num_cached))
        said = row.take(response, logprob, top)
        self.stats.count_generated(1, None if row.last_at is None else now - row.last_at)
        row.last_at = now
        if said.finish is not None:
            self.stats.count_answer(row.num_tokens)
        self.outbox.put(stream, said)
        return said

    def _note_start(self, row: Row) -> None:
        """Count a row's start once something of it has been computed."""
        if not row.has_started:
            row.has_started = True
            self.stats.count_start(time.monotonic() - row.request.asked_at)

    def _drop_unwanted(self) -> None:
        """Free what requests hold whose clients have gone."""
        unwanted = [uid for uid, row in self.rows.items() if not row.work.is_wanted]
        if unwanted and self.batch is not None:
            self.batch.remove(unwanted)
            for uid in unwanted:
                del self.rows[uid]

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

    def _go_on_alone(self) -> None:
        assert self.alone is not None
        self._num_alone += 1
        if next(self.alone, False) is False:
            self.alone = None

    def _compute_alone(self, work: Work) -> Iterator[None]:
        """Compute the answers to a request that the batch cannot, one after the other."""
        request, texts = work.request, self.models.texts
        assert request is not None and texts is not None
        work.state = "alone"

        def note(done: int, total: int) -> None:
            self._num_alone += 1
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
                    logprob: float | None = None
                    top: tuple[tuple[int, float], ...] = ()
                    if request.wants_logprobs:
                        logprob, top = fetch_logprobs([(response, request.top_logprobs or 0)])[response.uid]
                    if row.num_tokens == 0:
                        num_prompt = len(request.prompt_of(index).tokens)
                        self.stats.count_computed(num_prompt - max(0, response.num_cached))
                    said = self._tell(row, response, logprob, top)
                    if said.finish is not None or not work.is_wanted:
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
        rows, self.rows = list(self.rows.values()), {}
        if error is not None:
            for work in dict.fromkeys(row.work for row in rows):
                self.fail(work, error)
        if batch is not None:
            batch.close()

    def refuse_all(self) -> None:
        """End in order."""
        refusal = unavailable(CLOSING)
        self.alone = None
        self.close_batch(refusal)
        for work in [*self.pending, *self.scoring]:
            self.fail(work, refusal)

    def wreck(self) -> None:
        """Let go of everything after :meth:`run` has failed. Nothing is kept of what was being computed, since nobody
        knows how far that has come."""
        batch, self.batch = self.batch, None
        self.pending.clear()
        self.scoring.clear()
        self.rows.clear()
        self.alone = None
        if batch is not None:
            with suppress(Exception):
                batch.abandon()
        del batch
        with suppress(Exception):  # no more is being computed in this thread
            mx.synchronize(self.stream)
        gc.collect()

    # Tidying --------------------------------------------------------------------------------------------------

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
        self._memory.keep(None, self.models.pool, cache)

    def _tidy_while_busy(self) -> None:
        """A little now and then, for a server that is never idle."""
        cache, now = self.models.prompt_cache, self._clock()
        if now - self._tidied > TIDY_EVERY_SECONDS and hasattr(cache, "tidy"):
            cache.tidy(for_seconds(TIDY_SECONDS))
            self._tidied = self._clock()


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Return a function that says whether so many seconds have passed."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin > seconds


def fetch_logprobs(asking: list[tuple[Any, int]]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """Return, by uid, the log-probability of each token and of the likeliest: computed together, in one transfer.

    Args:
        asking: responses, and how many of the likeliest each wants.

    Raises:
        ValueError: a log-probability is not a number, which no JSON has a word for.
    """
    if not asking:
        return {}
    rows = mx.stack([response.logprobs for response, _ in asking])
    tokens = mx.array([[response.token] for response, _ in asking])
    most = min(max(top for _, top in asking), rows.shape[-1])
    if most:
        likeliest = mx.argpartition(-rows, kth=most - 1, axis=-1)[:, :most].astype(mx.int32)
        tokens = mx.concatenate([tokens, likeliest], axis=1)
    values = mx.take_along_axis(rows, tokens, axis=1).astype(mx.float32)
    # Both in one array, so that there is one transfer; float32 is exact for as many tokens as there are.
    fetched: Any = mx.stack([tokens.astype(mx.float32), values], axis=1).tolist()
    told = {}
    for (response, top), (ids, logprobs) in zip(asking, fetched, strict=True):
        if any(value != value for value in logprobs):
            raise ValueError("the model's logits are not numbers")
        order = sorted(range(1, len(ids)), key=logprobs.__getitem__, reverse=True)[:top]
        told[response.uid] = logprobs[0], tuple((int(ids[place]), logprobs[place]) for place in order)
    return told


def check_pool(pool: BlockPool, prompt_cache: Any) -> None:
    """Raise unless a pool's accounts and prefixes agree, and what is in it can be computed in this thread."""
    pool.check_integrity()
    if hasattr(prompt_cache, "tree_of"):
        prompt_cache.tree_of(pool).check_integrity()
    with pool.lock:
        mx.eval([array for group in pool.groups for array in group.latest()])
