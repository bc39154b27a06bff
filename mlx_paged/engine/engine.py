"""Engine: continuous batching of one model's requests on block tables, in a memory budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..cache.batch_tables import FailedRow
from ..errors import PoolExhaustedError, without_frames
from ..prefix.store import PrefixStore
from ..warn import warn_once
from .decode_batch import DecodeBatch, Delivery
from .live_requests import LiveRequests
from .lookup.look_up import WHY_NOT, LookUp
from .pace import PrefillPace
from .prefill import Prefill
from .request import Request
from .scheduler import Chunk
from .upstream import TokenResponse

CLEAR_AFTER_PREFILLS = 8  # steps with prompts, of different sizes, between clearings of MLX's buffer cache
# Of the GPU's memory, what that cache may hold without being cleared: on CUDA a clearing stops the device for 10 ms.
KEPT_PART = 64
CLEAR_EVERY = 512  # decode steps between clearings, as in mlx-lm
IDLE_SECONDS = 5  # without work, until the pool gives memory back


class Engine(LiveRequests):
    """Runs requests, step by step: the scheduler decides, prefill and the decode batch compute.

    Args:
        batch, prefixes, factory: as for :class:`LiveRequests`.
        counters: mlx-lm's counters of work done.
        prefill_step_size, completion_batch_size, prefill_batch_size, packs: as for :class:`LiveRequests`.
        reads_blocks_only: the model's attention hands keys and values to attention functions, and does nothing else.
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
        packs: bool | None = None,
        reads_blocks_only: bool = True,
    ) -> None:
        super().__init__(
            batch,
            prefill_step_size=prefill_step_size,
            completion_batch_size=completion_batch_size,
            prefill_batch_size=prefill_batch_size,
            prefixes=prefixes,
            factory=factory,
            packs=packs if reads_blocks_only else False,
        )
        self.counters = counters
        self.computed_prompt_tokens = self.num_steps = 0
        self.prefill = Prefill(
            batch.model, in_place=self.in_place, shares_calls=self.shares_calls, packs=self.packs, call=batch.call
        )
        self.look_up: LookUp | None = None
        if self.can_pack and reads_blocks_only and self.pool is not None and self.budget is not None:
            self.look_up = LookUp(batch, self.pool, self.budget.has_room)
        # Over ranks, whose clocks differ, and where chunks lie on a grid, the tokens of a step do not depend on time.
        bounded = not self.in_place and not self.packs and self.agreement is None and self.scheduler.grid is None
        self._pace = PrefillPace(batch.model) if bounded else None
        self._step_tokens = self.scheduler.token_budget
        self._prefill_steps = 0
        info = mx.device_info()
        self._most_kept = int(info.get("memory_size") or info.get("total_memory") or 0) // KEPT_PART
        self._worked_at: float | None = None  # None: memory has been given back since

    def add(self, request: Request) -> None:
        if request.options.prompt_lookup and self.look_up is None:
            warn_once(f"prompt_lookup has no effect in {type(self.batch.model).__module__}: {WHY_NOT}")
        super().add(request)

    # Steps ----------------------------------------------------------------------------------------------------

    def next(self) -> tuple[list[Any], list[TokenResponse]]:
        """Steps until there is something to say; two empty lists when there is no work left.

        Raises:
            RequestFailedError: a request has failed. Each is reported once, and the others go on.
            RankError: another rank has ended.
        """
        while True:
            if self.failures:
                raise self.failures.popleft()
            if not len(self.scheduler):
                self.batch.let_go(all_steps=True)
                self._return_memory()
                return [], []
            prompts, generated = self._step()
            self._worked_at = time.perf_counter()
            if prompts or generated:
                return prompts, generated

    def _return_memory(self) -> None:
        """Called without work, now and then: give memory back that nothing has needed for a while."""
        is_due = self._worked_at is not None and time.perf_counter() - self._worked_at >= IDLE_SECONDS
        if self.agreement is not None:
            is_due = self.agreement.ranks.broadcast(is_due)
        if is_due:
            self._worked_at = None
            if self.pool is not None:
                self.pool.return_memory()

    def _step(self) -> tuple[list[Any], list[TokenResponse]]:
        self.num_steps += 1
        if self.agreement is not None:
            self.agreement.begin_step()
            while self._drop_finished():  # who holds a response, and how long, may differ
                pass
        if self._pace is not None:
            most = self._pace.most_tokens(len(self.scheduler) == 1)
            self.scheduler.token_budget = self._step_tokens if most is None else min(self._step_tokens, most)
        plan = self.scheduler.plan()
        for request, error in plan.failed:
            self._end_failed(request, error)
        self._fail_noted()
        alive = plan._replace(
            decode=[request for request in plan.decode if self._is_alive(request)],
            chunks=[chunk for chunk in plan.chunks if self._is_alive(chunk.request)],
        )
        if self.budget is not None:
            self.budget.grow_for(alive, self.requests.values(), self.scheduler.max_running)
        joining = [r for r in alive.decode if r not in self.batch.members and r.caches is not None]
        self._join(joining)
        self._fail_noted()
        prompts = []
        for request in joining:
            if request in self.batch.members and request.num_reported < request.prompt_length:
                request.num_reported = request.prompt_length
                self.computed_prompt_tokens += 1
                prompts.append(
                    self.batch.upstream.prompt_response(request.uid, (request.prompt_length,) * 2, True, True)
                )
        generated = self._decode(alive.chunks) if self.batch.rows else []
        self._fail_noted()
        prompts += self._prefill(plan.chunks)
        self._fail_noted()
        if self.agreement is not None:
            self.agreement.note_step(plan, generated, self.failures)
        return prompts, generated

    def _is_alive(self, request: Request) -> bool:
        return request.uid in self.requests

    def _decode(self, chunks: Sequence[Chunk]) -> list[TokenResponse]:
        begin = time.perf_counter()
        try:
            requests = list(self.batch.rows)
            deliveries = self.look_up.step(chunks) if self.look_up is not None and self.batch.proposers else None
            if deliveries is None:
                self._reserve()
                requests = list(self.batch.rows)
                deliveries = self.batch.step() if requests else []
        except Exception as caught:
            self.batch.fail_all(caught)
            requests, deliveries = [], []
        failed, self.batch.failed = {request: without_frames(error) for request, error in self.batch.failed}, []
        for request in requests:
            if request in self.batch.members:
                request.length = request.kept + len(request.source)
        responses, unwanted = self._deliver_all(deliveries)
        finished = [(self.requests[r.uid], r) for r in responses if r.finish_reason is not None]
        self._remove_from_batch([request for request, _ in finished])
        for request, response in finished:
            failed.pop(request, None)  # what failed is a token that nobody is going to see
            self._cut(request, unwanted[request])
            self._finish(request, response)
        for request, error in failed.items():
            self._note(request, error)
        if finished and self._noted:  # a request that failed as it finished has not finished
            lost = {response.uid for request, response in finished if request in self._noted}
            responses = [response for response in responses if response.uid not in lost]
        if deliveries:
            self.counters.decode_time += time.perf_counter() - begin
            self.counters.generation_tokens += len(deliveries) - unwanted.total()
            self.counters.generation_steps += 1
            if self.counters.generation_steps % CLEAR_EVERY == 0:
                mx.clear_cache()
        return responses

    def _reserve(self) -> None:
        """Blocks for every request's next token. The plan saw to it that there are; if not, evict, preempt or fail."""
        while self.batch.rows:
            try:
                failed = self.batch.reserve()
            except Exception as error:  # not for want of blocks: what went well before fails with who joined last
                failed = FailedRow(len(self.batch.rows) - 1, error)
            if failed is None:
                return
            request = self.batch.rows[failed.row]
            if isinstance(failed.error, PoolExhaustedError) and (
                self._evict_idle() or self.scheduler.preempt_for(self._oldest())
            ):
                continue
            self._fail(request, failed.error)

    def _oldest(self) -> Request:
        return self.scheduler.running[0]

    def _deliver_all(self, deliveries: Sequence[Delivery]) -> tuple[list[TokenResponse], Counter[Request]]:
        """What the callers get, and how many tokens of each request come behind its last one."""
        responses = []
        ended: set[Request] = set()
        unwanted: Counter[Request] = Counter()
        for delivery in deliveries:
            if delivery.row in ended:
                unwanted[delivery.row] += 1
                continue
            response = self._deliver(delivery)
            if response is not None:
                responses.append(response)
            if response is None or response.finish_reason is not None:
                ended.add(delivery.row)
        return responses, unwanted

    def _cut(self, request: Request, num_tokens: int) -> None:
        """Have a request that is out of the batch end where its last tokens are not in its cache."""
        if num_tokens and request not in self._noted:
            try:
                assert request.sequence is not None
                request.sequence.cut(num_tokens)
                del request.source[-num_tokens:]
                request.length -= num_tokens
            except Exception as error:
                self._note(request, error)

    def _deliver(self, delivery: Delivery) -> TokenResponse | None:
        request = delivery.row
        try:
            request.num_generated += 1
            reason = "length" if request.num_generated >= request.max_tokens else None
            if request.matcher.advance(delivery.token):
                reason = "stop"
            respond = self.batch.upstream.response
            return respond(request.uid, delivery.token, delivery.logits, reason, num_cached=request.num_cached or 0)
        except Exception as error:
            self._note(request, error)
            return None

    def _finish(self, request: Request, response: TokenResponse) -> None:
        if request in self._noted:  # it could not leave the batch
            return
        response.all_tokens = request.cached_tokens()
        try:
            if self.sharing is not None:
                self.sharing.insert_all(request, response.all_tokens)
        except Exception as error:
            self._note(request, error)
            return
        self.scheduler.remove(request)
        del self.requests[request.uid]
        response.attach(request)
        self._finished[request.uid] = response

    # Prompts --------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Any]:
        if not chunks:
            return []
        begin = time.perf_counter()
        # Without caches: preempted for a request that the plan had counted less for.
        chunks = [chunk for chunk in chunks if self._is_alive(chunk.request) and chunk.request.caches is not None]
        computed = self.prefill.compute(chunks, self._call_failed)
        self.computed_prompt_tokens += sum(num_tokens for request, num_tokens in chunks if request in computed)
        responses = []
        for request in computed:
            try:
                if self.sharing is not None:
                    self.sharing.insert_chunk(request)
                response = self._report(request)
            except Exception as error:
                self._note(request, error)
                continue
            if response is not None:
                responses.append(response)
        self._prefill_steps += 1
        is_last = not self.scheduler.has_prompts
        if is_last:
            self.prefill.wait()
        is_due = is_last or self._prefill_steps % CLEAR_AFTER_PREFILLS == 0
        if is_due and mx.get_cache_memory() > self._most_kept:
            mx.clear_cache()
        seconds = time.perf_counter() - begin
        self.counters.prompt_time += seconds
        if self._pace is not None and len(computed) == len(chunks):
            self._pace.note(sum(num_tokens for _, num_tokens in chunks), seconds)
        return responses

    def _call_failed(self, call: Sequence[Chunk], error: Exception) -> None:
        # Others may have taken a block that the plan had counted on: then it waits for them.
        must_wait = isinstance(error, PoolExhaustedError) and len(self.scheduler.running) > 1
        if len(call) == 1 and not must_wait:
            self._fail(call[0].request, error)
            return
        for request, _ in call:  # whose fault it is shows when each is computed again, alone
            request.alone = True
            self.scheduler.preempt(request)

    def _report(self, request: Request) -> Any | None:
        """Progress of a prompt; None while what was reported before is computed again."""
        done = request.length - request.kept
        if request.logits is not None or done <= request.num_reported:
            return None
        self.counters.prompt_tokens += done - request.num_reported
        request.num_reported = done
        at_end = request.length in request.segment_ends or request.length == request.prefill_end
        return self.batch.upstream.prompt_response(request.uid, (done, request.prompt_length), at_end, False)
