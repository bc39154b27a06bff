"""RequestMemory: what requests hold: caches, blocks, shared prefixes. PoolBudget: whether they can hold more."""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..errors import PoolExhaustedError, RequestTooLargeError, without_frames
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.pool_memory import UNLIMITED
from .decode_batch import DecodeBatch
from .interfaces import TokenResponse
from .request import Request
from .scheduler import Chunk, Growth, Memory
from .sharing import Sharing

ANSWER_TOKENS = 256  # of an answer that count when a pool grows


class Append(NamedTuple):
    """Tokens to append to a sequence.

    Attributes:
        table: its table; None if the sequence holds nothing yet.
        num_tokens: tokens to append.
        forked: the table stays as it is, and a fork of it takes the tokens.
        held_alone: blocks of each group that only a prefix cache holds and that the sequence will adopt; () if none.
        num_cached: tokens in those blocks, which come before the tokens to append.
    """

    table: BlockTable | None
    num_tokens: int
    forked: bool = False
    held_alone: Sequence[int] = ()
    num_cached: int = 0


class PoolBudget:
    """The blocks that appends need, against those that each group can provide: free, not made yet, or held by prefix
    caches alone.

    A sequence that :meth:`holds` accepts can always continue once it runs alone: all that it takes is counted there.

    Args:
        pool: the pool of the sequences. Until its geometry is known, everything fits.
        chunk: most tokens appended to a sequence at a time: a sliding window holds no more than itself and a chunk.
    """

    def __init__(self, pool: BlockPool, *, chunk: int) -> None:
        self.pool = pool
        self.chunk = chunk

    def holds(self, num_tokens: int, table: BlockTable | None = None) -> bool:
        """Return whether a sequence of ``num_tokens`` tokens fits the whole budget, with nothing else in the pool; with
        ``table``, whether ``num_tokens`` tokens fit in addition to those that the table holds and keeps."""
        return self._are_held(self._blocks_alone(num_tokens, table), None)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the smallest budget, in bytes, for which :meth:`holds` is true."""
        counts = self._blocks_alone(num_tokens, None)
        return bisect_left(range(UNLIMITED), True, key=lambda budget: self._are_held(counts, budget))

    def _blocks_alone(self, num_tokens: int, table: BlockTable | None) -> list[int]:
        """Return the most blocks that a sequence takes in each group, null block included."""
        counts = []
        for index in range(len(self.pool.groups)):
            blocks = 1
            if table is not None:
                blocks += table.num_blocks(index)
            elif self.pool.memory.holders():
                blocks += 1  # the last block of a prompt goes to the prefix cache, and the next token into a copy
            counts.append(blocks + self._blocks(index, Append(table, num_tokens, forked=True)))
        return counts

    def _are_held(self, counts: Sequence[int], budget: int | None) -> bool:
        most = self.pool.memory.capacities(budget)
        return all(count <= blocks for count, blocks in zip(counts, most, strict=True))

    def has_plenty(self, counts: Iterable[int]) -> bool:
        """Return whether each group has blocks for appends of so many tokens whatever their tables hold: a copy of a
        shared last block that has room for one token, and blocks for the rest. Looks at no table."""
        self.pool.lock.collect()
        most = 1 + sum([-(-(count - 1) // self.pool.block_size) + 1 for count in counts])
        return self.pool.memory.can_provide([most] * len(self.pool.groups))

    def fits(self, growth: Sequence[Append]) -> bool:
        """Return whether all these appends fit together, in any order. If they do not at first, blocks that they would
        release behind sliding windows are released."""
        self.pool.lock.collect()
        tables = [each.table for each in growth if each.table is not None and not each.forked]
        return self._fits(growth) or (self.pool.slide(tables) and self._fits(growth))

    def _fits(self, growth: Sequence[Append]) -> bool:
        groups = range(len(self.pool.groups))
        return self.pool.memory.can_provide([sum(self._blocks(index, each) for each in growth) for index in groups])

    def exhausted(self, table: BlockTable | None, num_tokens: int) -> PoolExhaustedError:
        """Return the error for an append that does not fit."""
        groups = range(len(self.pool.groups))
        return self.pool.memory.exhausted({index: self._blocks(index, Append(table, num_tokens)) for index in groups})

    def _blocks(self, index: int, append: Append) -> int:
        group = self.pool.groups[index]
        blocks = group.blocks_to_append(append.table, append.num_tokens, chunk=self.chunk, forked=append.forked)
        if not append.held_alone:
            return blocks
        # A sliding window returns adopted blocks to the prefix cache: at most the blocks needed without a prefix, and a
        # copy of the last adopted block.
        in_all = group.blocks_to_append(None, append.num_cached + append.num_tokens, chunk=self.chunk)
        return min(append.held_alone[index] + blocks, in_all + 1)


class RequestMemory(Memory):
    """What an engine's requests hold. It gives caches to requests that start and takes them from preempted ones.

    Args:
        batch: the decode batch.
        pool: pool of the requests' blocks; None: no layer is paged, and everything fits.
        fresh: makes a request's empty caches, all of them in the pool.
        chunk: most tokens appended to a request at a time.
        sharing: shares prefixes; None: they are not shared.

    Attributes:
        refused: requests that could not start, and why; the engine fails them after the plan.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        pool: BlockPool | None,
        fresh: Callable[[], list[Any]],
        *,
        chunk: int,
        sharing: Sharing | None,
    ) -> None:
        self._batch, self._pool, self._fresh, self._sharing = batch, pool, fresh, sharing
        self._budget = None if pool is None else PoolBudget(pool, chunk=chunk)
        self.finished: weakref.WeakValueDictionary[int, TokenResponse] = weakref.WeakValueDictionary()  # oldest first
        self.refused: list[tuple[Request, Exception]] = []

    # What fits ------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise RequestTooLargeError if the request could not even begin to decode."""
        if self._budget is None:
            return
        # A cache that it came with stays as it is, and counts as well.
        table = None if request.given is None else request.table
        kept = 0 if request.given is None else request.kept
        if not self._budget.holds(request.prefill_end + 2 - kept, table):
            raise RequestTooLargeError(request.prefill_end + 1)

    def fits(self, growth: Growth, *, for_drafts: bool = False) -> bool:
        """See :meth:`.scheduler.Memory.fits`. Caches of finished requests that nobody has read are dropped, if
        necessary, but not for drafts."""
        budget = self._budget
        if budget is None:
            return True
        if budget.has_plenty([num_tokens for _, num_tokens in growth]):
            return True  # asked in every step; blocks are mostly plentiful
        # Listed before finished caches are freed: prefix blocks that one of them shared would then count as taken over,
        # plus a copy of the last one, for which a request that just fits the budget has no room.
        listed = [self._append_of(request, num_tokens) for request, num_tokens in growth]
        while not budget.fits(listed):
            if for_drafts or not self.drop_finished():
                return False
        return True

    def _append_of(self, request: Request, num_tokens: int) -> Append:
        """Return the append of a request's next tokens, those of a cached prefix included. A cache that it came with is
        forked, not written to."""
        sharing, is_forked = self._sharing, request.caches is None and request.given is not None
        if request.sequence is not None or sharing is None:
            return Append(request.table, num_tokens, is_forked)
        cached = min(sharing.available(request), num_tokens - 1)
        cached -= cached % sharing.pool.block_size  # a block shared in part is copied
        # The pool counts the prefix's blocks as evictable; once the request holds them, they are not.
        return Append(request.table, num_tokens - cached, is_forked, sharing.held_alone(request), cached)

    def exhausted(self, request: Request, num_tokens: int) -> Exception:
        """Return the error of a request that does not fit."""
        assert self._budget is not None
        return self._budget.exhausted(request.table, num_tokens)

    def grow_for(self, chunks: Sequence[Chunk], requests: Iterable[Request]) -> None:
        """Grow a pool that lacks blocks for a step's chunks once for the prompts of several requests and the beginnings
        of their answers: each growth copies the tensors, and each size needs compiled steps of its own. Evicts nothing;
        does nothing before it is known what a block takes.

        Args:
            chunks: the step's.
            requests: those that run or may run soon. If prefixes are shared, of prompts that begin with the same block
                only the longest counts: the others may share its blocks.
        """
        pool, budget = self._pool, self._budget
        if pool is None or budget is None:
            return
        enough = sum(chunk.num_tokens // pool.block_size + 2 for chunk in chunks)
        is_known = all(group.geometry is not None for group in pool.groups)
        if not is_known or all(group.allocator.num_free >= enough for group in pool.groups):
            return
        longest: dict[tuple[Any, ...], int] = {}
        for request in requests:
            start: tuple[Any, ...] = (request.uid,)
            if self._sharing is not None:
                start = (request.options.salt, *request.source[: pool.block_size])
            num_tokens = max(0, request.prefill_end - request.length) + min(request.max_tokens, ANSWER_TOKENS)
            longest[start] = max(longest.get(start, 0), num_tokens)
        counts = [
            sum(group.blocks_to_append(None, n, chunk=budget.chunk) for n in longest.values()) for group in pool.groups
        ]
        pool.memory.ensure_free(list(map(min, counts, pool.memory.room())))

    # Caches ---------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Give the request its caches, unless a running request is computing its prefix, or an error occurs."""
        try:
            if self._sharing is not None and self._sharing.must_wait(request):
                return False
            if request.given is not None:
                request.caches = copy.deepcopy(request.given)  # references to its blocks
                return True
            request.caches = self._fresh()
            if self._sharing is not None:
                request.length = self._sharing.match(request)
            if request.num_cached is None:
                request.num_cached = request.length
            request.num_reported = max(request.num_reported, request.length)
            return True
        except Exception as error:
            self.refused.append((request, without_frames(error)))
            return False

    def release(self, request: Request) -> None:
        """Release the blocks of a preempted request; whole blocks stay in the prefix cache."""
        has_computed = request.num_generated > 0 or request.length != request.num_cached
        if not has_computed:
            request.num_cached = None  # it may find less when it starts again
        if request in self._batch.members:
            self._batch.suspend(request)
        if self._sharing is not None:
            self._sharing.insert(request, finished=False)
        request.release()
        if self._pool is not None and has_computed:
            self._pool.preemptions += 1

    def drop_finished(self) -> bool:
        """Release the oldest finished request's cache that nobody has read. Returns whether there was one."""
        while (uid := next(iter(self.finished), None)) is not None:
            response = self.finished.pop(uid, None)
            if response is not None and response.drop_cache():
                return True
        return False

    def copy_of(self, request: Request) -> tuple[list[Any], list[int]]:
        """Return a copy (references) of a request's caches, and the tokens in them."""
        if request.caches is None:
            caches = self._fresh() if request.given is None else copy.deepcopy(request.given)
            return caches, list(request.history)
        in_batch = request in self._batch.members
        return self._batch.fork(request) if in_batch else copy.deepcopy(request.caches), request.cached_tokens()

    def nbytes(self, requests: Iterable[Request]) -> int:
        """Return the bytes held for requests; shared blocks count in each."""
        held = self._batch.state_nbytes
        for request in requests:
            caches = request.given if request.caches is None else request.caches
            in_batch = request in self._batch.members
            held += sum(c.nbytes for c in leaves(caches or []) if isinstance(c, PagedKVCache) or not in_batch)
        return held
