"""LiveRequests: the requests of a batch, from insertion to their end: what they hold, and what becomes of them."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..errors import RequestFailedError, RequestTooLargeError
from ..kernels.availability import prepares_plans
from ..kv.pool import BlockPool
from ..prefix.store import PrefixStore
from .decode_batch import DecodeBatch
from .prefill import (
    IN_PLACE_STEP_TOKENS,
    STEP_TOKENS,
    UPSTREAM_PREFILLING,
    UPSTREAM_STEP_TOKENS,
    can_pack,
    can_share_calls,
)
from .ranks.agreement import Agreement
from .request import Request, sequence_of
from .request_budget import RequestBudget
from .scheduler import Growth, Scheduler
from .sharing.prefix_sharing import PrefixSharing
from .sharing.snapshots import Snapshots
from .upstream import TokenResponse


class LiveRequests:
    """Admits, preempts, cancels and fails requests, as the scheduler decides (:class:`.scheduler.Memory`).

    What fails for one request, in whatever part of its life, fails that request: it is noted where it happens, and the
    request fails where everything else is in order (``_note`` and ``_fail_noted``). If what fails is the decode batch
    itself, its other requests are computed again.

    Args:
        batch: an empty one of the model, whose prompt caches are paged, or hold states that mlx-lm can batch, or both.
        prefill_step_size: tokens computed in a step (see Scheduler).
        completion_batch_size: most requests that run at a time.
        prefill_batch_size: most of them whose prompt is being computed.
        prefixes: a prefix cache.
        factory: makes the requests' caches; all of them in one pool.
        packs: chunks of several prompts go through the model as packs, if its caches allow it; None: where blocks are
            written in place and MLX's attention prepares plans.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        *,
        prefill_step_size: int,
        completion_batch_size: int,
        prefill_batch_size: int,
        prefixes: PrefixStore | None = None,
        factory: Callable[[], list[Any]],
        packs: bool | None = None,
    ) -> None:
        self.batch = batch
        self.requests: dict[int, Request] = {}
        self.failures: deque[RequestFailedError] = deque()
        self._noted: dict[Request, Exception] = {}  # requests that are going to fail
        self._finished: weakref.WeakValueDictionary[int, TokenResponse] = weakref.WeakValueDictionary()  # oldest first
        self._fresh = factory
        fresh = factory()
        sequence = sequence_of(fresh)
        self.pool: BlockPool | None = None if sequence is None else sequence.pool
        self.agreement = None if batch.ranks is None else Agreement(batch.ranks, self.pool)
        if self.agreement is not None and self.pool is not None:
            self.pool.drops_when_idle = False
        self.all_paged = all(isinstance(cache, PagedKVCache) for cache in fresh)
        self.in_place = self.all_paged and self.pool is not None and all(g.in_place for g in self.pool.groups)
        self.shares_calls = self.in_place and batch.kind == "together" and can_share_calls(fresh)
        if packs is None:
            packs = self.in_place and prepares_plans()
        self.can_pack = self.all_paged and batch.kind == "together" and can_pack(fresh)
        self.packs = packs and self.can_pack
        self.sharing: PrefixSharing | Snapshots | None = None
        self.budget: RequestBudget | None = None
        pins_tokens = self.pool is not None and self.pool.pins_tokens
        if prefixes is not None and not pins_tokens:
            pool = self.pool if self.all_paged else None
            self.sharing = Snapshots(self.requests) if pool is None else PrefixSharing(prefixes, pool)
        chunk = min(prefill_step_size, STEP_TOKENS) if self.packs else prefill_step_size
        if self.pool is not None:
            self.budget = RequestBudget(self.pool, chunk=chunk, sharing=self.sharing)
        grid = min(prefill_step_size, IN_PLACE_STEP_TOKENS) if self.in_place or self.packs else prefill_step_size
        token_budget = grid
        if self.packs:  # a step size that somebody has chosen bounds every step
            token_budget = chunk if chunk < UPSTREAM_STEP_TOKENS else STEP_TOKENS
        chosen_by_none = self.packs and prefill_batch_size >= UPSTREAM_PREFILLING
        self.scheduler = Scheduler(
            weakref.proxy(self),  # its owner: an engine that is dropped goes at once, with what its requests hold
            token_budget=token_budget,
            chunk=chunk if self.packs else None,
            # Where tokens are pinned, what a chunk's tokens see depends on where it begins.
            grid=grid if self.in_place or self.packs or pins_tokens else None,
            max_running=completion_batch_size,
            # A step of packs is bounded by its tokens, unless somebody has chosen fewer prompts.
            max_prefilling=max(prefill_batch_size, completion_batch_size) if chosen_by_none else prefill_batch_size,
            headroom=1 if self.pool is None else self.pool.block_size,
        )

    # What the scheduler asks (scheduler.Memory); nothing of it raises while a step is planned ----------------------

    def holds(self, num_tokens: int) -> bool:
        return self.budget is None or self.budget.holds(num_tokens)

    def fits(self, growth: Growth) -> bool:
        try:
            return self.budget is None or self.budget.fits(growth, self._evict_idle)
        except Exception as error:  # on behalf of the last one, which fails before anything is appended
            self._note(growth[-1][0], error)
            return True

    def most_blocks(self, num_tokens: int) -> int:
        return 0 if self.budget is None else self.budget.most_blocks(num_tokens)

    def has_blocks(self, num_blocks: int) -> bool:
        try:
            return self.budget is None or self.budget.has_blocks(num_blocks)
        except Exception:  # :meth:`fits` knows whose fault it is to be
            return False

    def _evict_idle(self) -> bool:
        """Free something that nobody is using. Returns whether there was anything."""
        return self._drop_finished() or (self.sharing is not None and self.sharing.evict())

    def _drop_finished(self) -> bool:
        """Release a finished request's cache that came with its last response and that nobody has looked at."""
        while (uid := next(iter(self._finished), None)) is not None:
            response = self._finished.pop(uid, None)
            if response is not None and response.drop_cache():
                return True
        return False

    def admit(self, request: Request) -> None:
        if request not in self._noted:
            try:
                self._admit(request)
            except Exception as error:
                self._note(request, error)

    def _admit(self, request: Request) -> None:
        if request.given is not None:
            request.caches = copy.deepcopy(request.given)  # references to its blocks
            return
        request.caches = self._fresh()
        if self.sharing is not None:
            request.length = self.sharing.match(request)
        if request.num_cached is None:
            request.num_cached = request.length
        request.num_reported = max(request.num_reported, request.length)

    def must_wait(self, request: Request) -> bool:
        try:
            return self.sharing is not None and self.sharing.must_wait(request)
        except Exception as error:
            self._note(request, error)
            return False

    def release(self, request: Request) -> None:
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
                self._disband()
        self._release(request)
        if self.pool is not None and has_computed:
            self.pool.preemptions += 1

    def exhausted(self, request: Request, num_tokens: int) -> Exception:
        assert self.budget is not None
        try:
            return self.budget.exhausted(request, num_tokens)
        except Exception as error:
            return error

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
        """Raise RequestTooLargeError if the request could not even begin to decode."""
        if request.given is None or self.budget is None:
            self.scheduler.check(request.prefill_end + 1)
        # The cache that it came with stays as it is.
        elif not self.budget.holds(request.prefill_end + 2 - request.kept, request.tables):
            raise RequestTooLargeError(request.prefill_end + 1)

    def add(self, request: Request) -> None:
        if self.agreement is not None:
            self.agreement.note_insertion(request)
        self.requests[request.uid] = request
        self.scheduler.add(request)

    def remove(self, uids: Sequence[int], *, finished: bool = False) -> None:
        """Cancel requests; what they held is released, and a failure not reported yet is dropped. With ``finished``
        other requests find all that was computed, as after a stop token."""
        if self.agreement is not None:
            self.agreement.note_removal(uids, finished)
        named = set(uids)
        self.failures = deque(failure for failure in self.failures if failure.uid not in named)
        gone = [self.requests[uid] for uid in dict.fromkeys(uids) if uid in self.requests]
        self.scheduler.remove_all(gone)
        for request in gone:
            if request.caches is not None:  # it runs
                self._remove_from_batch([request], keep_caches=finished)
                with suppress(Exception):  # nobody is left to be told what becomes of its prefix
                    if self.sharing is not None and finished:
                        self.sharing.insert_all(request, request.cached_tokens())
                    elif self.sharing is not None:
                        self.sharing.insert_delivered(request)
                self._release(request)
            self._noted.pop(request, None)
            del self.requests[request.uid]

    def extract(self, uid: int) -> tuple[list[Any], list[int]]:
        """A copy (references) of a request's caches, and the tokens in them."""
        request = self.requests[uid]
        if request.caches is None:
            caches = self._fresh() if request.given is None else copy.deepcopy(request.given)
            return caches, list(request.history)
        caches = self.batch.fork(request) if request in self.batch.members else copy.deepcopy(request.caches)
        return caches, request.cached_tokens()

    # Failures -------------------------------------------------------------------------------------------------

    def _note(self, request: Request, error: Exception) -> None:
        """Something has failed for a request, which fails when the others are in order."""
        self._noted.setdefault(request, error)

    def _fail_noted(self) -> None:
        while self._noted:
            self._fail(*self._noted.popitem())

    def _fail(self, request: Request, error: Exception) -> None:
        """A request has failed; the others are in order."""
        self.scheduler.remove(request)
        self._end_failed(request, error)

    def _end_failed(self, request: Request, error: Exception) -> None:
        """A request that the scheduler has forgotten already has failed."""
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
        """Have requests join the decode batch, except those for which that fails."""
        try:
            self.batch.add(requests)
        except Exception as error:
            self._disband()
            if len(requests) == 1:
                self._note(requests[0], error)
                return
            for request in requests:  # whose fault it is shows when each joins alone
                self._join([request])

    def _remove_from_batch(self, requests: Sequence[Request], *, keep_caches: bool = True) -> None:
        """Of the decode batch. A request for which that fails is out of it, too, but its caches are no good."""
        try:
            self.batch.remove(requests, keep_caches=keep_caches)
        except Exception as error:
            if len(requests) == 1:
                self._note(requests[0], error)
                self._disband()
                return
            for request in requests:
                if request in self.batch.members:
                    self._remove_from_batch([request], keep_caches=keep_caches)
                else:  # taken out with all others, when one of these failed
                    self._note(request, error)

    def _disband(self) -> None:
        """The decode batch is in an unknown state: whoever is in it is preempted, and computed again."""
        try:
            requests = self.batch.disband()
        except Exception as error:  # not even the tokens can be had
            self.batch.fail_all(error)
            self._note_failed()
            return
        for request in requests:
            if request in self.scheduler.running:
                self.scheduler.preempt(request)

    def _note_failed(self) -> None:
        """Note the requests that the batch has found failing."""
        failed, self.batch.failed = self.batch.failed, []
        for request, error in failed:
            self._note(request, error)
