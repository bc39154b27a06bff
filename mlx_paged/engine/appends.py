"""Appends of requests to a pool: whether they fit its budget, and growing the pool for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from ..errors import check_device
from ..kv.budget import Append, PoolBudget
from .request import Request
from .scheduler import Growth, ScheduledStep
from .sharing import Sharing

# Most generated tokens of a request that the pool grows for at once (docs/adr/0001).
GENERATED_AHEAD = 512


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
    num_blocks = len(growth)
    if {num_tokens for _, num_tokens in growth} == {1} and (
        budget.fits_blocks(num_blocks) or budget.has_blocks(num_blocks)
    ):
        return True  # fast path: every decode step asks, and free blocks are mostly plentiful
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


def grow_for(
    budget: PoolBudget, plan: ScheduledStep, requests: Iterable[Request], most_running: int, sharing: Sharing | None
) -> None:
    """Grow the pool if a step needs it: at once for all that the known requests are expected to append.

    Args:
        budget: budget of the pool.
        plan: the step.
        requests: all requests that run or wait, oldest first.
        most_running: most requests that run at a time.
        sharing: finds the prefixes of requests that have not started; None: no prefixes.
    """
    pool = budget.pool
    enough = len(plan.decode) + sum(chunk.num_tokens // pool.block_size + 2 for chunk in plan.chunks)
    if all(group.allocator.num_free >= enough for group in pool.groups):
        return
    soon = [(request, 1) for request in plan.decode] + [(c.request, c.num_tokens) for c in plan.chunks]
    try:
        budget.grow_for(
            [append_of(request, num_tokens) for request, num_tokens in soon],
            lambda: _expected(budget, list(islice(requests, most_running)), sharing),
        )
    except Exception as error:  # without room the append itself grows the pool, or fails alone
        check_device(error)


def _expected(budget: PoolBudget, requests: Sequence[Request], sharing: Sharing | None) -> list[Append]:
    """Return the appends expected of requests that can run together: their prompts without the cached part, and at
    most :data:`GENERATED_AHEAD` generated tokens each, since few answers reach ``max_tokens``."""
    expected = []
    left = budget.pool.memory.unheld_bytes
    cached = [0] * len(requests) if sharing is None else sharing.will_find(requests)
    for request, found in zip(requests, cached, strict=True):
        prompt = max(0, request.prefill_end + 1 - request.length)
        num_tokens = min(request.num_missing, prompt + GENERATED_AHEAD)
        if request.sequence is None:
            num_tokens -= min(found - found % budget.pool.block_size, num_tokens - 1)
        expected.append(append_of(request, num_tokens))
        left -= budget.bytes_to_append(expected[-1])
        if left < 0 and request.caches is None:
            break  # those after it wait until others have finished
    return expected
