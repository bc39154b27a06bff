"""Appends of requests to a pool: whether they fit its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..kv.budget import Append, PoolBudget
from .request import Request
from .scheduler import Chunk, Growth
from .sharing import Sharing

ANSWER_TOKENS = 256  # of an answer that count when a pool grows


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
        return Append(request.table, num_tokens, is_forked)
    cached = min(sharing.available(request), num_tokens - 1)
    cached -= cached % block_size  # a block shared in part is copied
    # The pool counts the prefix's blocks as evictable; once the request holds them, they are not.
    return Append(request.table, num_tokens - cached, is_forked, sharing.held_alone(request), cached)


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


def grow_for(budget: PoolBudget, chunks: Sequence[Chunk], requests: Iterable[Request], *, shares: bool) -> None:
    """Grow a pool that lacks blocks for a step's chunks once for the prompts of several requests and the beginnings of
    their answers: each growth copies the tensors, and each size needs compiled steps of its own. Evicts nothing; does
    nothing before it is known what a block takes.

    Args:
        budget: budget of the pool.
        chunks: the step's.
        requests: those that run or may run soon.
        shares: of prompts that begin with the same block only the longest counts: the others may share its blocks.
    """
    pool = budget.pool
    enough = sum(chunk.num_tokens // pool.block_size + 2 for chunk in chunks)
    is_known = all(group.geometry is not None for group in pool.groups)
    if not is_known or all(group.allocator.num_free >= enough for group in pool.groups):
        return
    longest: dict[tuple[Any, ...], int] = {}
    for request in requests:
        start = (request.options.salt, *request.source[: pool.block_size]) if shares else (request.uid,)
        num_tokens = max(0, request.prefill_end - request.length) + min(request.max_tokens, ANSWER_TOKENS)
        longest[start] = max(longest.get(start, 0), num_tokens)
    counts = [
        sum(group.blocks_to_append(None, n, chunk=budget.chunk) for n in longest.values()) for group in pool.groups
    ]
    pool.memory.ensure_free(list(map(min, counts, pool.memory.room())))


def has_room(budget: PoolBudget, growth: Growth) -> bool:
    """Return whether running requests can grow by these tokens. Unused prefixes count as room, but are not evicted."""
    most = sum(budget.most_blocks(num_tokens) for _, num_tokens in growth)
    return budget.fits_blocks(most) or fits(budget, growth, None, lambda: False)
