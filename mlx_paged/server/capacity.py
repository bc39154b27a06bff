"""How many tokens a model's pool can hold at all, and what the server says of it."""

from __future__ import annotations

import logging

from ..errors import ConfigError
from ..kv.budget import PoolBudget
from ..kv.pool import BlockPool

MAX_TOKENS = 1 << 24


def capacity(pool: BlockPool | None, chunk: int) -> int | None:
    """Most tokens of one sequence, prompt and answer; None: any number, or the model has no pool.

    Args:
        pool: of the model.
        chunk: tokens of a prompt that are computed at a time.
    """
    if pool is None:
        return None
    budget = PoolBudget(pool, chunk=chunk)
    if budget.holds(MAX_TOKENS):
        return None
    low, high = 0, MAX_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if budget.holds(middle) else (low, middle)
    return low


def check_capacity(pool: BlockPool | None, chunk: int) -> None:
    """Raise ConfigError if the budget has no room for any request: a token of a prompt and one of an answer."""
    if pool is None or (budget := PoolBudget(pool, chunk=chunk)).holds(2):
        return
    raise ConfigError(
        f"a KV cache budget of {pool.memory_budget:,} bytes holds no request of this model, which takes at least "
        f"{budget.bytes_for(2):,}: raise kv_cache_memory (--kv-cache-memory)"
    )


def announce(model: str, pool: BlockPool | None, chunk: int) -> None:
    """Log which model is ready, and its pool's size."""
    if pool is None:
        size = "no paged KV cache"
    else:
        most = capacity(pool, chunk)
        tokens = "a request of any length" if most is None else f"{most:,} tokens"
        size = f"a KV cache of {pool.memory_budget:,} bytes, which holds {tokens}"
    logging.info("the model %s is ready, with %s", model, size)
