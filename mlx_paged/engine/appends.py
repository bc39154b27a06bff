"""Appends of requests to a pool: whether they fit its budget."""

from __future__ import annotations

from collections.abc import Callable

from ..kv.budget import Append, PoolBudget
from .request import Request
from .scheduler import Growth
from .sharing import Sharing


def append_of(request: Request, num_tokens: int, sharing: Sharing | None = None, block_size: int = 1) -> Append:
    """Return the append of the request's next tokens. A cache that it came with is forked, not written to.

    Args:
        request: the request that grows.
        num_tokens: tokens that it grows by, those of a cached prefix included.
        sharing: finds the prefix of a request that has not started; None: no prefix.
        block_size: tokens per block of that prefix.
    """
    is_forked = request.caches is None and request.given is not None
    if request.sequence is not None or sharing is None:
        return Append(request.tables, num_tokens, is_forked)
    cached = min(sharing.available(request), num_tokens - 1)
    cached -= cached % block_size  # a block shared in part is copied
    # The pool counts the prefix's blocks as evictable; once the request holds them, they are not.
    return Append(request.tables, num_tokens - cached, is_forked, sharing.held_alone(request), cached)


def fits(budget: PoolBudget, growth: Growth, sharing: Sharing | None, evict: Callable[[], bool]) -> bool:
    """Return whether all these requests can grow together.

    Args:
        budget: budget of their pool.
        growth: requests, and the number of tokens that each grows by.
        sharing: see :func:`append_of`.
        evict: frees something unused; returns False if nothing is left.
    """
    most = sum(budget.most_blocks(num_tokens) for _, num_tokens in growth) + 1
    if budget.fits_blocks(most) or budget.has_blocks(most):
        return True  # asked in every step; blocks are mostly plentiful, and no table is looked at
    # Listed before `evict` frees finished caches: prefix blocks that one of them shared would then count as taken over,
    # plus a copy of the last one, for which a request that just fits the budget has no room.
    listed = [append_of(request, num_tokens, sharing, budget.pool.block_size) for request, num_tokens in growth]
    while not budget.fits(listed):
        if not evict():
            return False
    return True


def has_room(budget: PoolBudget, growth: Growth) -> bool:
    """Return whether running requests can grow by these tokens. Unused prefixes count as room, but are not evicted."""
    most = sum(budget.most_blocks(num_tokens) for _, num_tokens in growth)
    return budget.fits_blocks(most) or fits(budget, growth, None, lambda: False)
