"""RequestBudget: whether requests can grow in a pool's memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from ..kv.block_table import BlockTable
from ..kv.budget import Append, PoolBudget
from ..kv.pool import BlockPool
from .request import Request
from .scheduler import Growth, ScheduledStep
from .sharing import CheckpointSharing, PrefixSharing

# Tokens to be generated that the pool grows for at once (docs/adr/0001).
GENERATED_AHEAD = 512


class RequestBudget:
    """A :class:`PoolBudget` in terms of requests.

    Args:
        pool: of their caches.
        chunk: most tokens of a prompt computed at a time.
        sharing: finds the prefixes of requests that have not started; None: there are none.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        chunk: int,
        sharing: PrefixSharing | CheckpointSharing | None = None,
    ) -> None:
        self.budget = PoolBudget(pool, chunk=chunk)
        self._block_size = pool.block_size
        self._sharing = sharing

    def holds(self, num_tokens: int, tables: Sequence[BlockTable] | None = None) -> bool:
        """See :meth:`PoolBudget.holds`."""
        return self.budget.holds(num_tokens, tables)

    def fits(self, growth: Growth, evict: Callable[[], bool]) -> bool:
        """Return whether all these requests can grow by so many tokens.

        Args:
            evict: frees something unused; False if there is nothing left.
        """
        num_blocks = len(growth)
        if all(num_tokens == 1 for _, num_tokens in growth) and (
            self.budget.fits_blocks(num_blocks) or self.has_blocks(num_blocks)
        ):
            return True  # every decode step asks, and there mostly is plenty
        listed = []
        for request, num_tokens in growth:
            held_alone: Sequence[int] = ()
            num_cached = 0
            if request.sequence is None and self._sharing is not None:
                cached = min(self._sharing.available(request), num_tokens - 1)
                num_cached = cached - cached % self._block_size  # a block shared in part is copied
                # The pool counts these among the blocks that can be had. Once the request holds them, they cannot.
                held_alone = self._sharing.held_alone(request)
            append = _append(request, num_tokens - num_cached)
            listed.append(append._replace(held_alone=held_alone, num_cached=num_cached))
        while not self.budget.fits(listed):
            if not evict():
                return False
        return True

    def most_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of each group a request takes at most that grows by so many tokens: behind a block
        that is full but for one token, or behind one that others hold, too, and that is copied."""
        return -(-(num_tokens - 1) // self._block_size) + 1

    def has_blocks(self, num_blocks: int) -> bool:
        """See :meth:`PoolBudget.has_blocks`."""
        return self.budget.has_blocks(num_blocks)

    def has_room(self, growth: Growth) -> bool:
        """Like `fits`, for running requests; never evicts prefixes."""
        most = sum(self.most_blocks(num_tokens) for _, num_tokens in growth)
        return self.budget.fits_blocks(most) or self.fits(growth, lambda: False)

    def grow_for(self, plan: ScheduledStep, requests: Iterable[Request], most_running: int) -> None:
        """Have the pool grow for a step, once for the requests known now.

        Args:
            plan: the step.
            requests: all that run or wait, oldest first.
            most_running: most of them that run at a time.
        """
        groups = self.budget.pool.groups
        enough = len(plan.decode) + sum(chunk.num_tokens // self._block_size + 2 for chunk in plan.chunks)
        if all(group.allocator.num_free >= enough for group in groups):
            return
        soon = [(request, 1) for request in plan.decode] + [(c.request, c.num_tokens) for c in plan.chunks]
        with suppress(Exception):  # an append without room grows the pool then, or fails alone
            self.budget.grow_for(
                [_append(request, num_tokens) for request, num_tokens in soon],
                lambda: self._expected(list(islice(requests, most_running))),
            )

    def _expected(self, requests: Sequence[Request]) -> list[Append]:
        """Return what requests that can run together are going to append: their prompts but for what they will find
        cached, and the tokens that they may generate, no more than :data:`GENERATED_AHEAD` of them: few answers are as
        long as they may be."""
        expected = []
        left = self.budget.pool.memory.unheld_bytes
        cached = [0] * len(requests) if self._sharing is None else self._sharing.will_find(requests)
        for request, found in zip(requests, cached, strict=True):
            prompt = max(0, request.prefill_end + 1 - request.length)
            num_tokens = min(request.num_missing, prompt + GENERATED_AHEAD)
            if request.sequence is None:
                num_tokens -= min(found - found % self._block_size, num_tokens - 1)
            expected.append(_append(request, num_tokens))
            left -= self.budget.bytes_to_append(expected[-1])
            if left < 0 and request.caches is None:
                break  # those after it wait until others have finished
        return expected

    def exhausted(self, request: Request, num_tokens: int) -> Exception:
        """See :meth:`PoolBudget.exhausted`."""
        return self.budget.exhausted(request.tables, num_tokens)


def _append(request: Request, num_tokens: int) -> Append:
    """Return the request's next tokens; a cache that it came with stays as it is."""
    return Append(request.tables, num_tokens, forked=request.caches is None and request.given is not None)
