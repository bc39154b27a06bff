"""Engine: continuous batching of one model's requests on block tables, within a memory budget."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx

from ..cache.batch import NoBlocksError
from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..device import confirm
from ..errors import DeviceWatch, PoolExhaustedError, RequestFailedError, check_device, without_frames
from ..kernels.availability import on_metal
from ..kv.pool import BlockPool
from ..prefix.prefix_cache import SharedPrefixes
from ..warn import warn_once
from .decode_batch import DecodeBatch, Delivery
from .draft_steps import NO_DRAFTS_REASON, DraftSteps
from .interfaces import Proposer, TokenResponse
from .memory import RequestMemory
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
from .request import Request, TokenLogits, sequence_of
from .scheduler import Chunk, ScheduledStep, Scheduler
from .sharing import Sharing

CLEAR_AFTER_PREFILLS = 8  # prefill steps, of different sizes, between clearings of MLX's buffer cache
# Up to 1/64 of the device's memory stays in that cache: on CUDA clearing it stops the device for 10 ms.
BUFFER_CACHE_SHARE = 64
CLEAR_EVERY = 512  # decode steps between clearings, as in mlx-lm


class Engine:
    """Runs requests step by step: the scheduler plans, the decode batch and prefill run the model, tokens are
    delivered, and requests finish.

    An error of one request's own doing (its grammar, its sampler, no memory for it) fails that request. A model call
    that raises fails the requests in it. Any other error in a step fails all running requests, since their state is
    unknown. Nothing is repeated.

    Args:
        batch: an empty batch of the model. Its prompt caches are paged, or hold states that mlx-lm can batch, or both.
        counters: mlx-lm's counters of work done.
        prefill_step_size: prompt tokens computed in a step (see Scheduler).
        completion_batch_size: most requests that run at a time.
        prefill_batch_size: most of them whose prompt is being computed.
        prefixes: a prefix cache.
        factory: makes the requests' caches, all of them in one pool.
        reads_blocks_only: see :func:`.prefill.can_pack`.
        state_interval: see :class:`.sharing.Sharing`.
        prefill_latency: milliseconds that the prompts of a step may take beside requests that decode or wait, where
            time bounds them (see :class:`PrefillPace`).
        proposer: proposes drafts, if the model can verify them.

    Raises:
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
        reads_blocks_only: bool = True,
        state_interval: int | None = None,
        prefill_latency: int = LATENCY_MS,
        proposer: Proposer | None = None,
    ) -> None:
        self.batch, self.counters = batch, counters
        self.requests: dict[int, Request] = {}
        self.failures: deque[RequestFailedError] = deque()
        self.device = DeviceWatch()  # once it has failed, requests can only be removed
        fresh = factory()
        sequence = sequence_of(fresh)
        self.pool: BlockPool | None = None if sequence is None else sequence.pool
        self.peers = batch.peers
        self.all_paged = all(isinstance(cache, PagedKVCache) for cache in leaves(fresh))
        self.in_place = self.all_paged and self.pool is not None and all(g.in_place for g in self.pool.groups)
        self.can_pack = can_pack(
            fresh, batch.upstream.state_cache, reads_blocks_only=reads_blocks_only, takes_rows=batch.takes_rows
        )
        self.packs = self.can_pack and packs_by_default(self.pool)
        self.sharing: Sharing | None = None
        # Caches that keep a prompt's first tokens (max_kv_size): what a token sees depends on where chunks begin.
        self.keeps_tokens = any(getattr(cache, "keep", 0) for cache in leaves(fresh))
        if prefixes is not None and not self.keeps_tokens:
            prefixes.pool.lock.device.check()
            self.sharing = Sharing(prefixes, self.requests, has_states=not self.all_paged, interval=state_interval)
            prefixes.pool.memory.keeps_states = not self.all_paged and bool(prefixes.pool.groups)
        chunk = min(prefill_step_size, most_step_tokens()) if self.packs else prefill_step_size
        self.memory = RequestMemory(batch, self.pool, factory, chunk=chunk, sharing=self.sharing)
        self.scheduler = self._new_scheduler(prefill_step_size, completion_batch_size, prefill_batch_size)
        if self.sharing is not None:
            self.sharing.running = self.scheduler.running
        self.computed_prompt_tokens = self.num_steps = 0
        self.drafts: DraftSteps | None = None
        if proposer is not None and self.can_pack and self.pool is not None:
            self.drafts = DraftSteps(batch, self.pool, partial(self.memory.fits, for_drafts=True), proposer)
        # Steps are not bounded by time over ranks, whose clocks differ, nor (but on Metal) where chunks lie on a grid.
        bounded = not self.in_place and not self.packs and self.scheduler.grid is None
        pace: PrefillPace | None = None
        if self.peers.is_alone and (bounded or self._is_on_metal or (self.packs and on_metal())):
            pace = PrefillPace(prefill_latency, self.scheduler.most_tokens)
        self.prefill = Prefill(batch, in_place=self.in_place, packs=self.packs, pace=pace)
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
            self.memory,
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
        plan = ScheduledStep([], [], [])
        prompts: list[Any] = []
        generated: list[TokenResponse] = []
        try:
            plan = self._plan()
            self._join([r for r in plan.decode if r not in self.batch.members], prompts)
            if self.batch.rows:
                self._decode(plan.chunks, generated)
            if plan.chunks:
                self._prefill(plan.chunks, prompts)
        except Exception as error:
            self._fail_running(error)
            lost = {failure.uid for failure in self.failures}  # what failed while it finished has not finished
            generated = [each for each in generated if each.finish_reason is None or each.uid not in lost]
        self.peers.note_step(plan, generated, self.failures, self.pool)
        return prompts, generated

    # Plan -----------------------------------------------------------------------------------------------------

    def _plan(self) -> ScheduledStep:
        """Decide what the step computes, and fail requests that cannot go on."""
        if not self.peers.is_alone:
            while self.memory.drop_finished():  # callers may hold responses for different times on each rank
                pass
        if (pace := self.prefill.pace) is not None:
            self.scheduler.token_budget = min(self.scheduler.most_tokens, max(pace.tokens, self._uncut_tokens()))
        plan = self.scheduler.plan()
        for request, num_tokens in plan.failed:
            self._fail(request, self.memory.exhausted(request, num_tokens))
        while self.memory.refused:
            self._fail(*self.memory.refused.pop())
        if plan.chunks:
            self.memory.grow_for(plan.chunks, islice(self.requests.values(), self.scheduler.max_running))
        return plan

    def _uncut_tokens(self) -> int:
        """Return the prompt tokens of a step in which nothing decodes and nobody else waits: all requests are one
        client's, and their prompts can be computed together. Otherwise 0."""
        if self.batch.rows or len(self.requests) > self.scheduler.max_prefilling:
            return 0
        if len({request.options.client for request in self.requests.values()}) > 1:
            return 0
        cap = self.scheduler.cap
        return len(self.requests) * max(UNCUT_TOKENS, 0 if cap is None else cap.least)

    # Run ------------------------------------------------------------------------------------------------------

    def _join(self, requests: Sequence[Request], prompts: list[Any]) -> None:
        """Add requests to the decode batch, and to ``prompts`` the callers' responses for those computed with that."""
        if requests:
            self.batch.add(requests)
        for request in requests:
            if request.num_reported < request.prompt_length:
                request.num_reported = request.prompt_length
                self.computed_prompt_tokens += 1
                done = request.prompt_length, request.prompt_length
                prompts.append(self.batch.upstream.prompt_response(request.uid, done, True, True))

    def _decode(self, chunks: Sequence[Chunk], generated: list[TokenResponse]) -> None:
        """Compute the next token of each row, and deliver the ones before to ``generated``."""
        begin = time.perf_counter()
        try:
            deliveries = self._run_decode(chunks)
        except Exception as error:
            rows = self.batch.rows
            self.batch.clear()
            self._call_failed(rows, error)
            return
        failed, self.batch.failed = dict(self.batch.failed), []
        num_delivered = self._deliver(deliveries, generated, failed)
        for request, its_own in failed.items():
            self._fail(request, its_own)
        if deliveries:
            self.counters.decode_time += time.perf_counter() - begin
            self.counters.generation_tokens += num_delivered
            self.counters.generation_steps += 1
            if self.counters.generation_steps % CLEAR_EVERY == 0:
                mx.clear_cache()

    def _run_decode(self, chunks: Sequence[Chunk]) -> list[Delivery]:
        """Take a step with drafts or a plain one; rows may have to leave to make room for others."""
        deliveries = None if self.drafts is None else self.drafts.step(chunks)
        while deliveries is None and self.batch.rows:
            try:
                deliveries = self.batch.step()
            except NoBlocksError as lack:
                self._make_room(self.batch.rows[lack.row], lack.error)
        return deliveries or []

    def _prefill(self, chunks: Sequence[Chunk], prompts: list[Any]) -> None:
        """Compute chunks of prompts, and add the callers' responses to ``prompts``."""
        if self.prefill.pace is not None and not self.in_place and self.batch.rows:
            mx.eval(self.batch.inputs)  # keeps the step under way out of the measured time
        begin = time.perf_counter()
        # Requests without caches were preempted for one that needed more blocks than planned.
        chunks = [chunk for chunk in chunks if chunk.request.caches is not None]
        computed = self.prefill.compute(chunks, self._make_room, self._call_failed)
        self.computed_prompt_tokens += sum(num_tokens for request, num_tokens in chunks if request in computed)
        for request in computed:
            if self.sharing is not None:
                self.sharing.insert_chunk(request)
            self._report(request, prompts)
        self._prefill_steps += 1
        is_last = not self.scheduler.has_prompts
        if is_last:
            self.prefill.wait()
        is_due = is_last or self._prefill_steps % CLEAR_AFTER_PREFILLS == 0
        if is_due and mx.get_cache_memory() > self._most_cached_bytes:
            mx.clear_cache()
        self.counters.prompt_time += time.perf_counter() - begin

    def _make_room(self, request: Request, error: Exception) -> None:
        """Make room for a request that found no block, because others have taken one that the plan had counted on:
        drop a finished request's cache that nobody has read, or preempt a later request. Otherwise it fails."""
        is_full = isinstance(error, PoolExhaustedError)
        if not (is_full and (self.memory.drop_finished() or self.scheduler.preempt_for(self.scheduler.running[0]))):
            self._fail(request, error)

    # Deliver --------------------------------------------------------------------------------------------------

    def _report(self, request: Request, prompts: list[Any]) -> None:
        """Report the progress of a prompt, but not while what was reported before is recomputed."""
        done = request.length - request.kept
        if request.logits is not None or done <= request.num_reported:
            return
        self.counters.prompt_tokens += done - request.num_reported
        request.num_reported = done
        at_end = request.length in request.segment_ends or request.length == request.prefill_end
        respond = self.batch.upstream.prompt_response
        prompts.append(respond(request.uid, (done, request.prompt_length), at_end, False))

    def _deliver(
        self, deliveries: Sequence[Delivery], generated: list[TokenResponse], failed: dict[Request, Exception]
    ) -> int:
        """Add the callers' responses for a step's tokens to ``generated``, and finish requests that end. Returns the
        number of tokens delivered. ``failed`` has the requests whose next token failed, which does not matter to those
        that end; those whose stop matcher raises are added."""
        finished: dict[Request, TokenResponse] = {}
        ended: set[Request] = set()
        unwanted: Counter[Request] = Counter()  # tokens of a request that follow its last one
        for request, token, logits in deliveries:
            if request in ended:
                unwanted[request] += 1
                continue
            try:
                response = self._response_of(request, token, logits)
            except Exception as error:
                check_device(error)
                failed.setdefault(request, error)
                ended.add(request)
                continue
            generated.append(response)
            if response.finish_reason is not None:
                finished[request] = response
                ended.add(request)
        if self.drafts is not None:
            self.drafts.finish(unwanted)
        if finished:
            self.batch.remove(list(finished))
        for request, response in finished.items():
            failed.pop(request, None)
            self._finish(request, response, unwanted[request])
        return len(deliveries) - unwanted.total()

    def _response_of(self, request: Request, token: int, logits: TokenLogits) -> TokenResponse:
        request.num_generated += 1
        reason = "length" if request.num_generated >= request.max_tokens else None
        if request.matcher.advance(token):
            reason = "stop"
        return self.batch.upstream.response(request.uid, token, logits, reason, num_cached=request.num_cached or 0)

    # Finish ---------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, response: TokenResponse, num_unwanted: int) -> None:
        """Finish a request that has left the batch: its cache goes to the prefix cache and to its last response,
        without the last ``num_unwanted`` tokens."""
        if num_unwanted:
            assert request.sequence is not None
            request.sequence.cut(num_unwanted)
            del request.source[-num_unwanted:]
            request.length -= num_unwanted
        response.all_tokens = request.cached_tokens()
        if self.sharing is not None:
            self.sharing.insert(request, finished=True)
        self.scheduler.remove([request])
        del self.requests[request.uid]
        response.attach(request)
        self.memory.finished[request.uid] = response

    def _call_failed(self, requests: Sequence[Request], error: Exception) -> None:
        """Fail the requests of a model call that raised."""
        for request in requests:
            self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """Fail a request; the others go on."""
        failure = RequestFailedError(request.uid, without_frames(error))
        self.scheduler.remove([request])
        self.batch.remove([request], keep_caches=False)
        del self.requests[request.uid]
        self.failures.append(failure)
        request.release()

    def _fail_running(self, error: Exception) -> None:
        """Fail all running requests after an error that is none of a single one, or all if none runs."""
        check_device(error)
        self.batch.clear()
        running = [r for r in self.requests.values() if r.caches is not None or r in self.scheduler.running]
        self._call_failed(running or list(self.requests.values()), error)

    # Requests -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise RequestTooLargeError if the request could not even begin to decode, DeviceError if all is lost."""
        self.device.check()
        self.memory.check(request)

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
            del self.requests[request.uid]
        running = [request for request in gone if request.caches is not None]
        if running and not self.device.is_lost:
            try:
                self.batch.remove(running, keep_caches=finished)
                confirm()
                if self.sharing is not None:
                    for request in running:
                        self.sharing.insert(request, finished=finished)
            except Exception as error:
                self._fail_running(error)
        for request in running:
            request.release()

    @property
    def nbytes(self) -> int:
        """Bytes held for unfinished requests; shared blocks count in each."""
        return self.memory.nbytes(self.requests.values())

    def extract(self, uid: int) -> tuple[list[Any], list[int]]:
        """Return a copy (references) of a request's caches, and the tokens in them."""
        return self.memory.copy_of(self.requests[uid])
