"""RequestBudget: whether requests can grow in a pool's memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ..kv.block_table import BlockTable
from ..kv.budget import Append, PoolBudget
from ..kv.pool import BlockPool
from .request import Request
from .scheduler import Growth, ScheduledStep


class RequestBudget:
    """A :class:`PoolBudget` in terms of requests.

    Args:
        pool: of their caches.
        chunk: most tokens of a prompt computed at a time.
        cached: tokens of a request that has not started which it would find in a prefix cache.
    """

    def __init__(self, pool: BlockPool, *, chunk: int, cached: Callable[[Request], int]) -> None:
        self.budget = PoolBudget(pool, chunk=chunk)
        self._block_size = pool.block_size
        self._cached = cached

    def holds(self, num_tokens: int, tables: Sequence[BlockTable] | None = None) -> bool:
        """See :meth:`PoolBudget.holds`."""
        return self.budget.holds(num_tokens, tables)

    def fits(self, growth: Growth, evict: Callable[[], bool]) -> bool:
        """Whether all these requests can grow by so many tokens.

        Args:
            evict: frees something that nobody uses; False if there is nothing left.
        """
        if all(num_tokens == 1 for _, num_tokens in growth) and self.budget.fits_blocks(len(growth)):
            return True  # every decode step asks, and there mostly is plenty
        listed = []
        for request, num_tokens in growth:
            if request.sequence is None:
                cached = min(self._cached(request), num_tokens - 1)
                num_tokens -= cached - cached % self._block_size  # a block shared in part is copied
            listed.append(_append(request, num_tokens))
        while not self.budget.fits(listed):
            if not evict():
                return False
        return True

    def grow_for(self, plan: ScheduledStep, requests: Iterable[Request]) -> None:
        """Have the pool grow for a step, but not beyond what the requests known now can come to need."""
        groups = self.budget.pool.groups
        enough = len(plan.decode) + sum(chunk.num_tokens // self._block_size + 2 for chunk in plan.chunks)
        if all(group.allocator.num_free >= enough for group in groups):
            return
        soon = [(request, 1) for request in plan.decode] + [(c.request, c.num_tokens) for c in plan.chunks]
        with suppress(Exception):  # whoever appends without room for it grows the pool then, or fails alone
            self.budget.grow_for(
                [_append(request, num_tokens) for request, num_tokens in soon],
                lambda: [_append(request, request.num_missing) for request in requests],
            )

    def exhausted(self, request: Request, num_tokens: int) -> Exception:
        """See :meth:`PoolBudget.exhausted`."""
        return self.budget.exhausted(request.tables, num_tokens)


def _append(request: Request, num_tokens: int) -> Append:
    """The request's next tokens; a cache that it came with stays as it is."""
    return Append(request.tables, num_tokens, forked=request.caches is None and request.given is not None)
