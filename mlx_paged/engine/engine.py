"""Engine: continuous batching of one model's requests on block tables, within a memory budget."""

from __future__ import annotations

import copy
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx

from ..cache.batch import FailedRow
from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..device import confirm
from ..errors import (
    ConfigError,
    DeviceWatch,
    PoolExhaustedError,
    RequestFailedError,
    RequestTooLargeError,
    check_device,
    without_frames,
)
from ..kernels.availability import on_metal
from ..kv.budget import PoolBudget
from ..kv.pool import BlockPool
from ..prefix.prefix_cache import SharedPrefixes
from ..warn import warn_once
from . import appends
from .decode_batch import DecodeBatch, Delivery
from .draft_steps import NO_DRAFTS_REASON, DraftSteps
from .peers import Peers
from .prefill import (
    IN_PLACE_STEP_TOKENS,
    LATENCY_MS,
    UNCUT_TOKENS,
    UPSTREAM_PREFILLING,
    UPSTREAM_STEP_TOKENS,
    Prefill,
    PrefillPace,
    can_pack,
    chunk_cap,
    grid_tokens,
    most_step_tokens,
    packs_by_default,
)
from .proposer import Proposer
from .request import Request, sequence_of
from .scheduler import Chunk, Growth, Scheduler
from .sharing import Sharing
from .step_logits import TokenLogits
from .upstream import TokenResponse

CLEAR_AFTER_PREFILLS = 8  # prefill steps, of different sizes, between clearings of MLX's buffer cache
# Up to 1/64 of the device's memory stays in that cache: on CUDA clearing it stops the device for 10 ms.
BUFFER_CACHE_SHARE = 64
CLEAR_EVERY = 512  # decode steps between clearings, as in mlx-lm


class Engine:
    """Runs requests step by step: the scheduler decides, prefill and the decode batch compute. It also implements the
    scheduler's :class:`.scheduler.Memory`: it admits, preempts, cancels and fails requests.

    An error of one request's own doing (its grammar, its sampler, no memory for it) fails only that request. It is
    noted where it happens (``_note``), and the request fails between two parts of a step (``_fail_noted``).
    A model call that raises fails the requests in it. Nothing is repeated.

    Args:
        batch: an empty batch of the model. Its prompt caches are paged, or hold states that mlx-lm can batch, or both.
        counters: mlx-lm's counters of work done.
        prefill_step_size: prompt tokens computed in a step (see Scheduler).
        completion_batch_size: most requests that run at a time.
        prefill_batch_size: most of them whose prompt is being computed.
        prefixes: a prefix cache.
        factory: makes the requests' caches, all of them in one pool.
        packs: compute chunks of several prompts as packs if the model :func:`.prefill.can_pack`; None: see
            :func:`.prefill.packs_by_default`.
        reads_blocks_only: see :func:`.prefill.can_pack`.
        state_interval: see :class:`.sharing.Sharing`.
        prefill_latency: milliseconds that the prompts of a step may take beside requests that decode or wait, where
            time bounds them (see :class:`PrefillPace`).
        proposer: proposes drafts.
        look_up: makes the proposer of rows that ask for prompt look-up, if there is no other.

    Raises:
        ConfigError: there is a proposer, and the model cannot verify drafts.
        DeviceError: the device has failed since the prefix cache was made.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        counters: Any,
        *,
        prefill_step_size: int,
        completion_batch_size: int,
        prefill_batch_size: int,
        prefixes: SharedPrefixes | None = None,
        factory: Callable[[], list[Any]],
        packs: bool | None = None,
        reads_blocks_only: bool = True,
        state_interval: int | None = None,
        prefill_latency: int = LATENCY_MS,
        proposer: Proposer | None = None,
        look_up: Callable[[BlockPool, Peers], Proposer] | None = None,
    ) -> None:
        self.batch, self.counters = batch, counters
        self.requests: dict[int, Request] = {}
        self.failures: deque[RequestFailedError] = deque()
        self.device = DeviceWatch()  # once it has failed, requests can only be removed
        self._noted: dict[Request, Exception] = {}  # requests that will fail, and why
        self._finished: weakref.WeakValueDictionary[int, TokenResponse] = weakref.WeakValueDictionary()  # oldest first
        self._fresh = factory
        fresh = factory()
        sequence = sequence_of(fresh)
        self.pool: BlockPool | None = None if sequence is None else sequence.pool
        self.peers = batch.peers
        self.all_paged = all(isinstance(cache, PagedKVCache) for cache in leaves(fresh))
        self.in_place = self.all_paged and self.pool is not None and all(g.in_place for g in self.pool.groups)
        self.can_pack = can_pack(
            fresh, batch.upstream.state_cache, reads_blocks_only=reads_blocks_only, takes_rows=batch.takes_rows
        )
        packs = packs_by_default(self.pool) if packs is None else packs
        self.packs = packs and self.can_pack
        self.sharing: Sharing | None = None
        self.budget: PoolBudget | None = None
        # Caches that keep a prompt's first tokens (max_kv_size): what a token sees depends on where chunks begin.
        self.keeps_tokens = any(getattr(cache, "keep", 0) for cache in leaves(fresh))
        if prefixes is not None and not self.keeps_tokens:
            prefixes.pool.lock.device.check()
            self.sharing = Sharing(prefixes, self.requests, has_states=not self.all_paged, interval=state_interval)
            prefixes.pool.memory.keeps_states = not self.all_paged and bool(prefixes.pool.groups)
        if self.pool is not None:
            chunk = min(prefill_step_size, most_step_tokens()) if self.packs else prefill_step_size
            self.budget = PoolBudget(self.pool, chunk=chunk)
        self.scheduler = self._new_scheduler(prefill_step_size, completion_batch_size, prefill_batch_size)
        self.computed_prompt_tokens = self.num_steps = 0
        self.prefill = Prefill(batch.model, in_place=self.in_place, packs=self.packs, call=batch.call)
        self.drafts: DraftSteps | None = None
        if self.can_pack and self.pool is not None and self.budget is not None:
            has_room = partial(appends.has_room, self.budget)
            drafting = proposer if proposer is not None or look_up is None else look_up(self.pool, self.peers)
            if drafting is not None:
                self.drafts = DraftSteps(batch, self.pool, has_room, drafting)
        elif proposer is not None:
            raise ConfigError(f"{type(batch.model).__module__} cannot verify drafts: {NO_DRAFTS_REASON}")
        # Steps are not bounded by time over ranks, whose clocks differ, nor (but on Metal) where chunks lie on a grid.
        bounded = not self.in_place and not self.packs and self.scheduler.grid is None
        self._pace: PrefillPace | None = None
        if self.peers.is_alone and (bounded or self._is_on_metal or (self.packs and on_metal())):
            self._pace = PrefillPace(prefill_latency, self.scheduler.most_tokens)
        self._prefill_steps = 0
        info = mx.device_info()
        self._most_cached_bytes = int(info.get("memory_size") or info.get("total_memory") or 0) // BUFFER_CACHE_SHARE

    @property
    def _is_on_metal(self) -> bool:
        """Whether prompts are computed over blocks in place on an Apple GPU."""
        return self.in_place and on_metal()

    def _new_scheduler(self, step_size: int, most_running: int, most_prefilling: int) -> Scheduler:
        """Return a scheduler with the step sizes that suit how prompts are computed."""
        chunk = min(step_size, most_step_tokens())
        grid = min(step_size, grid_tokens()) if self.in_place or self.packs else step_size
        token_budget, has_chunks = grid, self.packs or self._is_on_metal
        if has_chunks:  # an explicit step size bounds every step
            token_budget = chunk if chunk < UPSTREAM_STEP_TOKENS else most_step_tokens()
            if self._is_on_metal and not self.peers.is_alone:  # no bound by time: the clocks of ranks differ
                token_budget = chunk = min(chunk, IN_PLACE_STEP_TOKENS)
        chosen_by_none = self.packs and most_prefilling >= UPSTREAM_PREFILLING
        return Scheduler(
            weakref.proxy(self),  # weak: a dropped engine is freed at once, with what its requests hold
            token_budget=token_budget,
            chunk=chunk if has_chunks else None,
            cap=chunk_cap(self.pool) if has_chunks and self.peers.is_alone else None,  # the GPUs of ranks may differ
            grid=grid if self.in_place or self.packs or self.keeps_tokens else None,
            max_running=most_running,
            # A step of packs is bounded by its tokens only, unless a smaller number of prompts was chosen.
            max_prefilling=max(most_prefilling, most_running) if chosen_by_none else most_prefilling,
            headroom=1 if self.pool is None else self.pool.block_size,
        )

    # Steps ----------------------------------------------------------------------------------------------------

    def next(self) -> tuple[list[Any], list[TokenResponse]]:
        """Take steps until there is something to deliver; return two empty lists when no work is left.

        Raises:
            RequestFailedError: a request has failed. Each is reported once, and the others go on.
            RankError: another rank has ended.
            DeviceError: the device has failed since the engine was made; all requests are lost.
        """
        self.device.check()
        while True:
            if self.failures:
                raise self.failures.popleft()
            if not len(self.scheduler):
                self.batch.detach_old_logits(all_steps=True)
                return [], []
            prompts, generated = self._step()
            if prompts or generated:
                return prompts, generated

    def _step(self) -> tuple[list[Any], list[TokenResponse]]:
        self.num_steps += 1
        self.peers.begin_step()
        if not self.peers.is_alone:
            while self._drop_finished():  # callers may hold responses for different times on each rank
                pass
        if self._pace is not None:
            self.scheduler.token_budget = min(self.scheduler.most_tokens, max(self._pace.tokens, self._uncut_tokens()))
        plan = self.scheduler.plan()
        alive = plan
        if plan.failed or self._noted:
            for request, num_tokens in plan.failed:
                self._end_failed(request, self._exhausted(request, num_tokens))
            self._fail_noted()
            alive = plan._replace(
                decode=[request for request in plan.decode if self._is_alive(request)],
                chunks=[chunk for chunk in plan.chunks if self._is_alive(chunk.request)],
            )
        if plan.chunks and self.budget is not None:
            soon = islice(self.requests.values(), self.scheduler.max_running)
            appends.grow_for(self.budget, plan.chunks, soon, shares=self.sharing is not None)
        joining = [r for r in alive.decode if r not in self.batch.members and r.caches is not None]
        prompts = self._begin_rows(joining) if joining or self._noted else []
        generated = self._decode(alive.chunks) if self.batch.rows else []
        if self._noted:
            self._fail_noted()
        if plan.chunks:
            prompts += self._prefill(plan.chunks)
            self._fail_noted()
        self.peers.note_step(plan, generated, self.failures, self.pool)
        return prompts, generated

    def _begin_rows(self, joining: Sequence[Request]) -> list[Any]:
        """Add requests to the decode batch. Return the callers' responses for prompts that are computed now."""
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
        return prompts

    def _uncut_tokens(self) -> int:
        """Return the prompt tokens of a step in which nothing decodes and nobody else waits: all requests are one
        client's, and their prompts can be computed together. Otherwise 0."""
        if self.batch.rows or len(self.requests) > self.scheduler.max_prefilling:
            return 0
        if len({request.options.client for request in self.requests.values()}) > 1:
            return 0
        cap = self.scheduler.cap
        return len(self.requests) * max(UNCUT_TOKENS, 0 if cap is None else cap.least)

    def _is_alive(self, request: Request) -> bool:
        return request.uid in self.requests

    def _decode(self, chunks: Sequence[Chunk]) -> list[TokenResponse]:
        begin = time.perf_counter()
        try:
            deliveries = None if self.drafts is None else self.drafts.step(chunks)
            if deliveries is None:
                self._reserve()
                deliveries = self.batch.step() if self.batch.rows else []
        except Exception as caught:
            self.batch.fail_all(caught)
            deliveries = []
        failed, self.batch.failed = {request: without_frames(error) for request, error in self.batch.failed}, []
        responses, finished, unwanted = self._deliver_all(deliveries)
        if self.drafts is not None:
            self._finish_drafts(unwanted)
        if finished:
            self._remove_from_batch([request for request, _ in finished])
        for request, response in finished:
            failed.pop(request, None)  # the token that failed is not delivered
            self._cut(request, unwanted[request])
            self._finish(request, response)
        for request, error in failed.items():
            self._note(request, error)
        if finished and self._noted:  # a request that failed while finishing has not finished
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
        """Reserve blocks for every row's next token. The plan has made room; if not enough, evict, preempt or fail."""
        while self.batch.rows:
            try:
                failed = self.batch.reserve()
            except Exception as error:  # not for lack of blocks: fail the row that joined last, as it worked before
                failed = FailedRow(len(self.batch.rows) - 1, without_frames(error))
            if failed is None:
                return
            request = self.batch.rows[failed.row]
            if isinstance(failed.error, PoolExhaustedError) and (
                self._drop_finished() or self.scheduler.preempt_for(self.scheduler.running[0])
            ):
                continue
            self._fail(request, failed.error)

    def _deliver_all(
        self, deliveries: Sequence[Delivery]
    ) -> tuple[list[TokenResponse], list[tuple[Request, TokenResponse]], Counter[Request]]:
        """Return the callers' responses; the requests that end, with their last response; and how many tokens of each
        request follow its last one."""
        responses, finished = [], []
        ended: set[Request] = set()
        unwanted: Counter[Request] = Counter()
        for delivery in deliveries:
            request = delivery.row
            if request in ended:
                unwanted[request] += 1
                continue
            response = self._deliver(*delivery)
            if response is None:
                ended.add(request)
                continue
            responses.append(response)
            if response.finish_reason is not None:
                ended.add(request)
                finished.append((request, response))
        return responses, finished, unwanted

    def _finish_drafts(self, unwanted: Counter[Request]) -> None:
        assert self.drafts is not None
        try:
            self.drafts.finish(unwanted)
        except Exception as error:
            self._fail_batch(error)

    def _cut(self, request: Request, num_tokens: int) -> None:
        """Drop the last tokens of a request that has left the batch from its cache."""
        if num_tokens and request not in self._noted:
            try:
                assert request.sequence is not None
                request.sequence.cut(num_tokens)
                del request.source[-num_tokens:]
                request.length -= num_tokens
            except Exception as error:
                self._note(request, error)

    def _deliver(self, request: Request, token: int, logits: TokenLogits) -> TokenResponse | None:
        try:
            request.num_generated += 1
            reason = "length" if request.num_generated >= request.max_tokens else None
            if request.matcher.advance(token):
                reason = "stop"
            respond = self.batch.upstream.response
            return respond(request.uid, token, logits, reason, num_cached=request.num_cached or 0)
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
        self.scheduler.remove([request])
        del self.requests[request.uid]
        response.attach(request)
        self._finished[request.uid] = response

    # Prompts --------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Any]:
        if self._pace is not None and not self.in_place and self.batch.rows:
            mx.eval(self.batch.inputs)  # keeps the step under way out of the measured time
        begin = time.perf_counter()
        # Requests without caches were preempted for one that needed more blocks than planned.
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
        if is_due and mx.get_cache_memory() > self._most_cached_bytes:
            mx.clear_cache()
        seconds = time.perf_counter() - begin
        self.counters.prompt_time += seconds
        timings, self.prefill.timings = self.prefill.timings, []
        if self._pace is not None and self.in_place:
            for timing in timings:
                self._pace.note(*timing)
        elif self._pace is not None and len(computed) == len(chunks):
            self._pace.note(sum(num_tokens for _, num_tokens in chunks), seconds)
        return responses

    def _call_failed(self, call: Sequence[Chunk], error: Exception) -> None:
        """Fail the requests of a call that raised. Those for which blocks are lacking wait for others: these may have
        taken a block that the plan had counted on."""
        check_device(error)
        for request, _ in call:
            if isinstance(error, PoolExhaustedError) and len(self.scheduler.running) > 1:
                self.scheduler.preempt(request)
            else:
                self._fail(request, error)

    def _report(self, request: Request) -> Any | None:
        """Return the progress of a prompt; None while what was reported before is recomputed."""
        done = request.length - request.kept
        if request.logits is not None or done <= request.num_reported:
            return None
        self.counters.prompt_tokens += done - request.num_reported
        request.num_reported = done
        at_end = request.length in request.segment_ends or request.length == request.prefill_end
        return self.batch.upstream.prompt_response(request.uid, (done, request.prompt_length), at_end, False)

    # scheduler.Memory: nothing here raises while a step is planned --------------------------------------------

    def fits(self, growth: Growth) -> bool:
        """Return whether the growth fits, after dropping caches of finished requests if necessary."""
        try:
            return self.budget is None or appends.fits(self.budget, growth, self.sharing, self._drop_finished)
        except Exception as error:  # charged to the last request, which fails before anything is appended
            self._note(growth[-1][0], error)
            return True

    def _drop_finished(self) -> bool:
        """Release the oldest finished request's cache that nobody has read. Returns whether there was one."""
        while (uid := next(iter(self._finished), None)) is not None:
            response = self._finished.pop(uid, None)
            if response is not None and response.drop_cache():
                return True
        return False

    def admit(self, request: Request) -> bool:
        """Give the request its caches, unless a running request is computing its prefix. Errors are noted, not
        raised."""
        if request not in self._noted:
            try:
                if self.sharing is not None and self.sharing.must_wait(request):
                    return False
                self._admit(request)
            except Exception as error:
                self._note(request, error)
        return True

    def _admit(self, request: Request) -> None:
        if request.given is not None:
            request.caches = copy.deepcopy(request.given)  # references to its blocks
            return
        request.caches = self._fresh()
        if self.sharing is not None:
            request.length = request.confirmed = self.sharing.match(request)
        if request.num_cached is None:
            request.num_cached = request.length
        request.num_reported = max(request.num_reported, request.length)

    def release(self, request: Request) -> None:
        """Release the blocks of a preempted request; whole blocks stay in the prefix cache."""
        has_computed = request.num_generated > 0 or request.length != request.num_cached
        if not has_computed:
            request.num_cached = None  # it may find less when it starts again
        try:
            if request in self.batch.members:
                self.batch.suspend(request)
            if self.sharing is not None:
                self.sharing.insert_delivered(request)
        except Exception as error:
            self._note(request, error)
            if request in self.batch.members:
                self._fail_batch(error)
        self._release(request)
        if self.pool is not None and has_computed:
            self.pool.preemptions += 1

    def _exhausted(self, request: Request, num_tokens: int) -> Exception:
        """Return the error of a request that does not fit."""
        assert self.budget is not None
        try:
            return self.budget.exhausted(request.tables, num_tokens)
        except Exception as error:
            return without_frames(error)

    @property
    def nbytes(self) -> int:
        """Bytes held for unfinished requests; shared blocks count in each."""
        states = self.batch.state_nbytes
        for request in self.requests.values():
            caches = request.given if request.caches is None else request.caches
            in_batch = request in self.batch.members
            states += sum(c.nbytes for c in leaves(caches or []) if isinstance(c, PagedKVCache) or not in_batch)
        return states

    # Requests -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise RequestTooLargeError if the request could not even begin to decode, DeviceError if all is lost."""
        self.device.check()
        if request.given is None or self.budget is None:
            if self.budget is not None and not self.budget.holds(request.prefill_end + 2):
                raise RequestTooLargeError(request.prefill_end + 1)
        # The cache that it came with stays as it is, and counts as well.
        elif not self.budget.holds(request.prefill_end + 2 - request.kept, request.tables):
            raise RequestTooLargeError(request.prefill_end + 1)

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.options.prompt_lookup and self.drafts is None:
            warn_once(f"prompt_lookup has no effect in {type(self.batch.model).__module__}: {NO_DRAFTS_REASON}")
        self.peers.note("insert", [request.uid, request.kept, request.max_tokens], request.source)
        self.requests[request.uid] = request
        self.scheduler.add(request)

    def remove(self, uids: Sequence[int], *, finished: bool = False) -> None:
        """Cancel requests: release what they hold, and drop failures not reported yet. With ``finished`` all that they
        computed goes to the prefix cache, as after a stop token; else whole blocks."""
        self.peers.note("finish" if finished else "remove", uids)
        named = set(uids)
        self.failures = deque(failure for failure in self.failures if failure.uid not in named)
        gone = [self.requests[uid] for uid in dict.fromkeys(uids) if uid in self.requests]
        self.scheduler.remove(gone)
        for request in gone:
            if request.caches is not None:  # it runs
                if not self.device.is_lost:
                    self._remove_from_batch([request], keep_caches=finished)
                    self._share(request, finished)
                self._release(request)
            self._noted.pop(request, None)
            del self.requests[request.uid]

    def _share(self, request: Request, finished: bool) -> None:
        """Put what a cancelled request has computed into the prefix cache."""
        try:
            confirm()
            if self.sharing is not None and finished:
                self.sharing.insert_all(request, request.cached_tokens())
            elif self.sharing is not None:
                self.sharing.insert_delivered(request)
        except Exception as error:  # its caller has the last token already
            check_device(error)

    def extract(self, uid: int) -> tuple[list[Any], list[int]]:
        """Return a copy (references) of a request's caches, and the tokens in them."""
        request = self.requests[uid]
        if request.caches is None:
            caches = self._fresh() if request.given is None else copy.deepcopy(request.given)
            return caches, list(request.history)
        caches = self.batch.fork(request) if request in self.batch.members else copy.deepcopy(request.caches)
        return caches, request.cached_tokens()

    # Failures -------------------------------------------------------------------------------------------------

    def _note(self, request: Request, error: Exception) -> None:
        """Note an error of a request, which fails once the others are in a consistent state."""
        check_device(error)
        self._noted.setdefault(request, error)

    def _fail_noted(self) -> None:
        while self._noted:
            self._fail(*self._noted.popitem())

    def _fail(self, request: Request, error: Exception) -> None:
        """Fail a request; the others must be in a consistent state."""
        self.scheduler.remove([request])
        self._end_failed(request, error)

    def _end_failed(self, request: Request, error: Exception) -> None:
        """Fail a request that the scheduler has already removed."""
        self._remove_from_batch([request], keep_caches=False)
        self._release(request)
        if self.sharing is not None:
            self.sharing.forget(request)
        self._noted.pop(request, None)
        del self.requests[request.uid]
        self.failures.append(RequestFailedError.without_frames(request.uid, error))

    def _release(self, request: Request) -> None:
        try:
            request.release()
        except Exception as error:
            self._note(request, error)

    def _join(self, requests: Sequence[Request]) -> None:
        """Add requests to the decode batch."""
        try:
            self.batch.add(requests)
        except Exception as error:
            self._fail_batch(error, requests)

    def _remove_from_batch(self, requests: Sequence[Request], *, keep_caches: bool = True) -> None:
        """Remove requests from the decode batch."""
        try:
            self.batch.remove(requests, keep_caches=keep_caches)
        except Exception as error:
            self._fail_batch(error, requests)

    def _fail_batch(self, error: Exception, requests: Sequence[Request] = ()) -> None:
        """Note the failure of these requests and of all rows of the decode batch, whose state is unknown."""
        self.batch.fail_all(error)
        failed, self.batch.failed = self.batch.failed, []
        for request in {*requests, *(request for request, _ in failed)}:
            self._note(request, error)
