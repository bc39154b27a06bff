"""Engine: continuous batching of one model's requests on block tables, in a memory budget."""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from ..cache.batch_tables import FailedRow
from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..errors import PoolExhaustedError, RequestFailedError, RequestTooLargeError, without_frames
from ..kv.budget import Append, PoolBudget
from ..kv.pool import BlockPool
from ..prefix.store import PrefixStore
from .decode_batch import DecodeBatch, Delivery
from .prefill import RowChunk, calls_of, can_share_calls, compute_together
from .row import Row, sequence_of
from .scheduler import Chunk, Growth, Request, ScheduledStep, Scheduler
from .sharing import PrefixSharing
from .snapshots import Snapshots
from .upstream import TokenResponse

CLEAR_AFTER_PREFILLS = 8  # steps with prompts, of different sizes, between clearings of MLX's buffer cache
# Prompt tokens a step on a GPU: less memory and shorter waits for decode than with longer chunks (docs/adr/0006).
IN_PLACE_STEP_TOKENS = 512
CLEAR_EVERY = 512  # decode steps between clearings, as in mlx-lm
IDLE_SECONDS = 5  # without work, until the pool gives memory back


class Engine:
    """Runs requests: the scheduler decides, rows hold the state, the decode batch computes.

    What fails for one request, in whatever part of its life, fails that request: it is noted where it happens and
    given up where everything else is in order (``_note`` and ``_give_up_noted``). If what fails is the decode batch
    itself, its other rows are computed again.

    Args:
        batch: an empty one of the model, whose prompt caches are paged, or hold states that mlx-lm can batch, or both.
        counters: mlx-lm's counters of work done.
        prefill_step_size: tokens computed in a step (see Scheduler).
        completion_batch_size: most requests that run at a time.
        prefill_batch_size: most of them whose prompt is being computed.
        prefixes: a prefix cache.
        factory: makes the requests' caches; all of them in one pool.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        counters: Any,
        *,
        prefill_step_size: int,
        completion_batch_size: int,
        prefill_batch_size: int,
        prefixes: PrefixStore | None = None,
        factory: Callable[[], list[Any]],
    ) -> None:
        self.model = batch.model
        self._fresh = factory
        self.counters = counters
        self.rows: dict[int, Row] = {}
        self.computed_prompt_tokens = 0
        self.failures: deque[RequestFailedError] = deque()
        self._noted: dict[Row, Exception] = {}  # requests to be given up
        self._prefill_steps = 0
        self._worked_at: float | None = None  # None: memory has been given back since
        self._finished: weakref.WeakValueDictionary[int, TokenResponse] = weakref.WeakValueDictionary()  # oldest first
        fresh = factory()
        self.batch = batch
        sequence = sequence_of(fresh)
        self.pool: BlockPool | None = None if sequence is None else sequence.pool
        self.budget = None if self.pool is None else PoolBudget(self.pool, chunk=prefill_step_size)
        self.all_paged = all(isinstance(cache, PagedKVCache) for cache in fresh)
        self.sharing: PrefixSharing | Snapshots | None = None
        pins_tokens = self.pool is not None and self.pool.pins_tokens
        if prefixes is not None and not pins_tokens:
            pool = self.pool if self.all_paged else None
            self.sharing = Snapshots(self.rows) if pool is None else PrefixSharing(prefixes, pool, self.rows)
        grid = None
        self._is_in_place = self._shares_calls = False
        if self.pool is not None:
            self._is_in_place = self.all_paged and all(group.in_place for group in self.pool.groups)
            self._shares_calls = self._is_in_place and self.batch.kind == "together" and can_share_calls(fresh)
            if self._is_in_place:
                prefill_step_size = grid = min(prefill_step_size, IN_PLACE_STEP_TOKENS)
            elif pins_tokens:
                grid = prefill_step_size  # what a chunk's tokens see depends on where it begins
        self.scheduler = Scheduler(
            weakref.proxy(self),  # its owner: an engine that is dropped goes at once, with what its requests hold
            token_budget=prefill_step_size,
            grid=grid,
            max_running=completion_batch_size,
            max_prefilling=prefill_batch_size,
            headroom=1 if self.pool is None else self.pool.block_size,
        )

    # What the scheduler asks (scheduler.Memory); nothing of it raises while a step is planned ----------------------

    def holds(self, num_tokens: int) -> bool:
        return self.budget is None or self.budget.holds(num_tokens)

    def fits(self, growth: Growth) -> bool:
        try:
            return self._fits(growth)
        except Exception as error:  # on behalf of the last one, which is given up before anything is appended
            self._note(self.rows[growth[-1][0].uid], error)
            return True

    def _fits(self, growth: Growth) -> bool:
        if self.budget is None:
            return True
        if all(num_tokens == 1 for _, num_tokens in growth) and self.budget.fits_blocks(len(growth)):
            return True  # every decode step asks, and there mostly is plenty
        listed = []
        for request, num_tokens in growth:
            row = self.rows[request.uid]
            if row.sequence is None and self.sharing is not None and self.pool is not None:
                shared = min(self.sharing.available(row), num_tokens - 1)
                num_tokens -= shared - shared % self.pool.block_size  # a block shared in part is copied
            listed.append(_append(row, num_tokens))
        while not self.budget.fits(listed):
            if not self._give_up_idle():
                return False
        return True

    def _give_up_idle(self) -> bool:
        """Give up something that nobody is using. Returns whether there was anything."""
        return self._give_up_finished() or (self.sharing is not None and self.sharing.give_up())

    def _give_up_finished(self) -> bool:
        """Release a finished request's cache that came with its last response and that nobody has looked at."""
        while (uid := next(iter(self._finished), None)) is not None:
            response = self._finished.pop(uid, None)
            if response is not None and response.give_up():
                return True
        return False

    def admit(self, request: Request) -> None:
        row = self.rows[request.uid]
        if row not in self._noted:
            try:
                self._admit(row)
            except Exception as error:
                self._note(row, error)

    def _admit(self, row: Row) -> None:
        request = row.request
        if row.given is not None:
            row.caches = copy.deepcopy(row.given)  # references to its blocks
            return
        row.caches = self._fresh()
        if self.sharing is not None:
            request.length = self.sharing.adopt(row)
        if row.num_cached is None:
            row.num_cached = request.length
        row.num_reported = max(row.num_reported, request.length)

    def must_wait(self, request: Request) -> bool:
        row = self.rows[request.uid]
        try:
            return self.sharing is not None and self.sharing.must_wait(row)
        except Exception as error:
            self._note(row, error)
            return False

    def release(self, request: Request) -> None:
        row = self.rows[request.uid]
        has_computed = row.num_generated > 0 or request.length != row.num_cached
        if not has_computed:
            row.num_cached = None  # it may find less when it starts again
        try:
            if row in self.batch.members:
                self.batch.suspend(row)
            if self.sharing is not None:
                self.sharing.leave(row)
        except Exception as error:
            self._note(row, error)
            if row in self.batch.members:
                self._disband()
        self._let_go(row)
        if self.pool is not None and has_computed:
            self.pool.preemptions += 1

    def exhausted(self, request: Request, num_tokens: int) -> Exception:
        assert self.budget is not None
        try:
            return self.budget.exhausted(self.rows[request.uid].tables, num_tokens)
        except Exception as error:
            return error

    @property
    def nbytes(self) -> int:
        """Bytes held for unfinished requests; shared blocks count in each."""
        states = self.batch.state_nbytes
        for row in self.rows.values():
            caches = row.given if row.caches is None else row.caches
            in_batch = row in self.batch.members
            states += sum(c.nbytes for c in leaves(caches or []) if isinstance(c, PagedKVCache) or not in_batch)
        return states

    # Requests -------------------------------------------------------------------------------------------------

    def check(self, row: Row) -> None:
        """Raise RequestTooLargeError if the request could not even begin to decode."""
        if row.given is None or self.budget is None:
            self.scheduler.check(row.request.goal + 1)
        elif not self.budget.holds(row.request.goal + 2 - row.base, row.tables):  # the cache stays as it came
            raise RequestTooLargeError(row.request.goal + 1)

    def add(self, row: Row) -> None:
        self.rows[row.uid] = row
        self.scheduler.add(row.request)

    def remove(self, uids: Sequence[int], *, finished: bool = False) -> None:
        """Cancel requests; what they held is released, and a failure not reported yet is dropped. With ``finished``
        other requests find all that was computed, as after a stop token."""
        self.failures = deque(failure for failure in self.failures if failure.uid not in uids)
        for uid in uids:
            row = self.rows.get(uid)
            if row is None:
                continue
            self.scheduler.remove(row.request)
            self._take_out([row], keep_caches=finished)
            with suppress(Exception):  # nobody is left to be told what becomes of its prefix
                if self.sharing is not None and finished:
                    self.sharing.leave_all(row, row.cached_tokens())
                elif self.sharing is not None:
                    self.sharing.leave(row)
            self._let_go(row)
            self._noted.pop(row, None)
            del self.rows[uid]

    def extract(self, uid: int) -> tuple[list[Any], list[int]]:
        """A copy (references) of a request's caches, and the tokens in them."""
        row = self.rows[uid]
        if row.caches is None:
            caches = self._fresh() if row.given is None else copy.deepcopy(row.given)
            return caches, list(row.history)
        caches = self.batch.fork(row) if row in self.batch.members else copy.deepcopy(row.caches)
        return caches, row.cached_tokens()

    # Failures -------------------------------------------------------------------------------------------------

    def _note(self, row: Row, error: Exception) -> None:
        """Something has failed for a request. It is given up when the others are in order."""
        self._noted.setdefault(row, error)

    def _give_up_noted(self) -> None:
        while self._noted:
            self._give_up(*self._noted.popitem())

    def _give_up(self, row: Row, error: Exception) -> None:
        self.scheduler.remove(row.request)
        self._fail(row, error)

    def _fail(self, row: Row, error: Exception) -> None:
        """Give a request up that the scheduler has forgotten already."""
        self._take_out([row], keep_caches=False)
        self._let_go(row)
        if self.sharing is not None:
            self.sharing.forget(row)
        self._noted.pop(row, None)
        del self.rows[row.uid]
        self.failures.append(RequestFailedError.without_frames(row.uid, error))

    def _let_go(self, row: Row) -> None:
        try:
            row.release()
        except Exception as error:
            self._note(row, error)

    def _join(self, rows: Sequence[Row]) -> None:
        """Have rows join the decode batch, except those for which that fails."""
        try:
            self.batch.join(rows)
        except Exception as error:
            self._disband()
            if len(rows) == 1:
                self._note(rows[0], error)
                return
            for row in rows:  # whose fault it is shows when each joins alone
                self._join([row])

    def _take_out(self, rows: Sequence[Row], *, keep_caches: bool = True) -> None:
        """Have rows leave the decode batch. One for which that fails is out of it, too, but its caches are no good."""
        try:
            self.batch.leave(rows, keep_caches=keep_caches)
        except Exception as error:
            if len(rows) == 1:
                self._note(rows[0], error)
                self._disband()
                return
            for row in rows:
                if row in self.batch.members:
                    self._take_out([row], keep_caches=keep_caches)
                else:  # taken out with all others, when one of these failed
                    self._note(row, error)

    def _disband(self) -> None:
        """The decode batch is in an unknown state: whoever is in it makes room, and is computed again."""
        try:
            rows = self.batch.disband()
        except Exception as error:  # not even the tokens can be had
            self.batch.fail_all(error)
            self._note_failed()
            return
        for row in rows:
            if row.request in self.scheduler.running:
                self.scheduler.preempt(row.request)

    def _note_failed(self) -> None:
        """Note the rows that the batch has found failing."""
        failed, self.batch.failed = self.batch.failed, []
        for row, error in failed:
            self._note(row, error)

    # Steps ----------------------------------------------------------------------------------------------------

    def next(self) -> tuple[list[Any], list[TokenResponse]]:
        """Steps until there is something to say; two empty lists when there is no work left.

        Raises:
            RequestFailedError: a request has failed. Each is reported once, and the others go on.
        """
        while True:
            if self.failures:
                raise self.failures.popleft()
            if not len(self.scheduler):
                self._return_memory()
                return [], []
            prompts, generated = self._step()
            self._worked_at = time.perf_counter()
            if prompts or generated:
                return prompts, generated

    def _return_memory(self) -> None:
        """Called without work, now and then: give memory back that nothing has needed for a while."""
        if self._worked_at is not None and time.perf_counter() - self._worked_at >= IDLE_SECONDS:
            self._worked_at = None
            if self.pool is not None:
                self.pool.return_memory()

    def _step(self) -> tuple[list[Any], list[TokenResponse]]:
        plan = self.scheduler.plan()
        for request, error in plan.failed:
            self._fail(self.rows[request.uid], error)
        self._give_up_noted()
        self._make_room(plan)
        rows = [row for request in plan.decode if (row := self.rows.get(request.uid)) is not None]
        joining = [row for row in rows if row not in self.batch.members and row.caches is not None]
        self._join(joining)
        self._give_up_noted()
        prompts = []
        for row in joining:
            if row in self.batch.members and row.num_reported < row.prompt_length:
                row.num_reported = row.prompt_length
                self.computed_prompt_tokens += 1
                prompts.append(self.batch.upstream.prompt_response(row.uid, (row.prompt_length,) * 2, True, True))
        generated = self._decode() if self.batch.rows else []
        self._give_up_noted()
        prompts += self._prefill(plan.chunks)
        self._give_up_noted()
        return prompts, generated

    def _make_room(self, plan: ScheduledStep) -> None:
        """Have the pool grow for the plan, but not beyond what the requests known now can come to need."""
        if self.budget is None:
            return
        groups, size = self.budget.pool.groups, self.budget.pool.block_size
        enough = len(plan.decode) + sum(chunk.num_tokens // size + 2 for chunk in plan.chunks)
        if all(group.allocator.num_free >= enough for group in groups):
            return
        soon = [(request, 1) for request in plan.decode] + [(c.request, c.num_tokens) for c in plan.chunks]
        rows = [(row, n) for request, n in soon if (row := self.rows.get(request.uid)) is not None]
        with suppress(Exception):  # whoever appends without room for it grows the pool then, or fails alone
            self.budget.grow_for(
                [_append(row, n) for row, n in rows],
                lambda: [_append(row, row.num_missing) for row in self.rows.values()],
            )

    def _decode(self) -> list[TokenResponse]:
        begin = time.perf_counter()
        try:
            self._reserve()
            rows = list(self.batch.rows)
            deliveries = self.batch.step() if rows else []
        except Exception as caught:
            self.batch.fail_all(caught)
            rows, deliveries = [], []
        failed, self.batch.failed = {row: without_frames(error) for row, error in self.batch.failed}, []
        for row in rows:
            if row in self.batch.members:
                self.scheduler.advance(row.request, 1)
        responses = [response for delivery in deliveries if (response := self._deliver(delivery)) is not None]
        finished = [(self.rows[r.uid], r) for r in responses if r.finish_reason is not None]
        self._take_out([row for row, _ in finished])
        for row, response in finished:
            failed.pop(row, None)  # what failed is a token that nobody is going to see
            self._finish(row, response)
        for row, error in failed.items():
            self._note(row, error)
        if finished and self._noted:  # a request that failed as it finished has not finished
            lost = {response.uid for row, response in finished if row in self._noted}
            responses = [response for response in responses if response.uid not in lost]
        if deliveries:
            self.counters.decode_time += time.perf_counter() - begin
            self.counters.generation_tokens += len(deliveries)
            self.counters.generation_steps += 1
            if self.counters.generation_steps % CLEAR_EVERY == 0:
                mx.clear_cache()
        return responses

    def _reserve(self) -> None:
        """Blocks for every row's next token. The plan has seen to it that there are; if not so, make room or fail."""
        while self.batch.rows:
            try:
                failed = self.batch.reserve()
            except Exception as error:  # not for want of blocks: what went well before fails with who joined last
                failed = FailedRow(len(self.batch.rows) - 1, error)
            if failed is None:
                return
            row = self.batch.rows[failed.row]
            if isinstance(failed.error, PoolExhaustedError) and (
                self._give_up_idle() or self.scheduler.preempt_for(self._oldest())
            ):
                continue
            self._give_up(row, failed.error)

    def _oldest(self) -> Request:
        return self.scheduler.running[0]

    def _deliver(self, delivery: Delivery) -> TokenResponse | None:
        row = delivery.row
        try:
            row.num_generated += 1
            reason = "length" if row.num_generated >= row.max_tokens else None
            if row.matcher.advance(delivery.token):
                reason = "stop"
            respond = self.batch.upstream.response
            return respond(row.uid, delivery.token, delivery.logits, reason, num_cached=row.num_cached or 0)
        except Exception as error:
            self._note(row, error)
            return None

    def _finish(self, row: Row, response: TokenResponse) -> None:
        if row in self._noted:  # it could not leave the batch
            return
        response.all_tokens = row.cached_tokens()
        try:
            if self.sharing is not None:
                self.sharing.leave_all(row, response.all_tokens)
        except Exception as error:
            self._note(row, error)
            return
        self.scheduler.remove(row.request)
        del self.rows[row.uid]
        response.attach(row)
        self._finished[row.uid] = response

    # Prompts --------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Any]:
        if not chunks:
            return []
        begin = time.perf_counter()
        responses = []
        for row in self._compute(chunks):
            try:
                if self.sharing is not None:
                    self.sharing.leave_chunk(row)
                response = self._report(row)
            except Exception as error:
                self._note(row, error)
                continue
            if response is not None:
                responses.append(response)
        self._prefill_steps += 1
        if self._prefill_steps % CLEAR_AFTER_PREFILLS == 0 or not self.scheduler.is_prefilling:
            mx.clear_cache()
        self.counters.prompt_time += time.perf_counter() - begin
        return responses

    def _compute(self, chunks: Sequence[Chunk]) -> list[Row]:
        """The chunks' rows, without those that failed. Long chunks run alone: nothing is padded, and the fused causal
        attention needs no mask."""
        found = [(self.rows.get(chunk.request.uid), chunk.num_tokens) for chunk in chunks]
        # Without caches: made room for a row that the plan had counted less for.
        pairs = [RowChunk(row, count) for row, count in found if row is not None and row.caches is not None]
        calls = calls_of(pairs, IN_PLACE_STEP_TOKENS) if self._shares_calls else [[pair] for pair in pairs]
        done = {row for call in calls for row in self._call(call)}
        computed = [row for row, _ in pairs if row in done]
        try:
            if self._is_in_place:
                mx.eval([cache.state for row in computed for cache in row.caches or ()])
        except Exception as error:
            for row in computed:
                self._give_up(row, error)
            return []
        return computed

    def _call(self, call: Sequence[RowChunk]) -> list[Row]:
        """Compute the chunks of one model call. Returns the rows for which that worked."""
        try:
            if len(call) > 1:
                compute_together(self.model, call)
            else:
                row, num_tokens = call[0]
                self.model(mx.array(row.chunk(num_tokens), mx.uint32)[None], cache=row.caches)
                if not self._is_in_place:  # its reads must be over before the next one writes, or the pool is copied
                    mx.eval([cache.state for cache in row.caches or ()])
        except Exception as error:
            # Others may have taken a block that the plan had counted on: then it waits for them.
            must_wait = isinstance(error, PoolExhaustedError) and len(self.scheduler.running) > 1
            if len(call) == 1 and not must_wait:
                self._give_up(call[0].row, error)
                return []
            for row, _ in call:  # whose fault it is shows when each is computed again, alone
                row.alone = True
                self.scheduler.preempt(row.request)
            return []
        for row, num_tokens in call:
            self.scheduler.advance(row.request, num_tokens)
            self.computed_prompt_tokens += num_tokens
        return [row for row, _ in call]

    def _report(self, row: Row) -> Any | None:
        """Progress of a prompt; None while what was reported before is computed again."""
        done = row.request.length - row.base
        if row.logits is not None or done <= row.num_reported:
            return None
        self.counters.prompt_tokens += done - row.num_reported
        row.num_reported = done
        at_end = row.request.length in row.segment_ends or row.request.length == row.request.goal
        return self.batch.upstream.prompt_response(row.uid, (done, row.prompt_length), at_end, False)


def _append(row: Row, num_tokens: int) -> Append:
    """The request's next tokens; a cache that it came with stays as it is."""
    return Append(row.tables, num_tokens, forked=row.caches is None and row.given is not None)
