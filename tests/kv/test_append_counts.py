"""The count of blocks that an append needs is what the append takes, and what a budget adds up."""

from __future__ import annotations

import random

import pytest

from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.budget import Append, PoolBudget
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import BLOCK_BYTES, kv, pool_of

SIZE = 4


def one_group(window: int | None, pinned: int = 0) -> BlockPool:
    return BlockPool([LayerGroup((0,), window, "one", pinned)], block_size=SIZE)


@pytest.mark.parametrize(("window", "pinned"), [(None, 0), (1, 0), (6, 0), (8, 0), (13, 3), (9, 5)])
def test_an_append_takes_the_blocks_that_were_counted(window: int | None, pinned: int) -> None:
    rng = random.Random(f"{window} {pinned}")
    pool = one_group(window, pinned)
    allocator = pool.groups[0].allocator
    tables = [pool.new_table()]
    for _ in range(300):
        if rng.random() < 0.2:
            tables.append(pool.fork(rng.choice(tables)))
        if len(tables) > 4:
            pool.release_table(tables.pop(rng.randrange(len(tables))))
        table, num_tokens = rng.choice(tables), rng.choice([1, 1, 2, SIZE, 11])
        pool.slide([table])
        counted, shared = pool.groups[0].blocks_to_append(table, num_tokens), pool.groups[0].tail_references(table) > 1
        before = allocator.num_live
        pool.append_tokens(table, num_tokens)
        assert allocator.num_live - before == counted, "a copied block was another's, who keeps it"
        assert shared <= (counted > 0)
        pool.check_integrity()


@pytest.mark.parametrize(("window", "pinned"), [(None, 0), (6, 0), (8, 0), (13, 3)])
@pytest.mark.parametrize("forked", [False, True])
def test_a_sequence_appended_in_chunks_takes_no_more_than_was_counted(
    window: int | None, pinned: int, forked: bool
) -> None:
    rng = random.Random(f"{window} {pinned} {forked}")
    for _ in range(40):
        pool, chunk = one_group(window, pinned), rng.choice([3, 4, 7])
        group, table = pool.groups[0], pool.new_table()
        for _ in range(rng.randrange(6)):
            pool.append_tokens(table, rng.randrange(1, 6))
        pool.slide([table])
        num_tokens = rng.randrange(1, 40)
        counted = group.blocks_to_append(table, num_tokens, chunk=chunk, forked=forked)
        assert counted == PoolBudget(pool, chunk=chunk)._blocks(0, Append([table], num_tokens, forked))
        target, before, most = pool.fork(table) if forked else table, group.allocator.num_live, 0
        while num_tokens:
            step = min(chunk, num_tokens)
            pool.append_tokens(target, step)
            num_tokens -= step
            most = max(most, group.allocator.num_live - before)
        assert most <= counted


def test_what_holds_nothing_yet_is_counted_as_an_empty_table_is() -> None:
    for window in (None, 5, 8):
        pool = one_group(window)
        for num_tokens in range(1, 30):
            of_none = pool.groups[0].blocks_to_append(None, num_tokens)
            assert of_none == pool.groups[0].blocks_to_append(pool.new_table(), num_tokens) == -(-num_tokens // SIZE)


def test_a_budget_counts_in_bytes_what_its_pool_can_give() -> None:
    pool = pool_of(memory_budget=6 * BLOCK_BYTES)  # five blocks and the null block
    k, v = kv(0, 1)
    pool.set_geometry(0, k, v, batch=1)
    budget = PoolBudget(pool, chunk=16)
    assert budget.holds(20) and not budget.holds(21) and budget.bytes_for(20) == 6 * BLOCK_BYTES
    assert budget.fits([Append(None, 12), Append(None, 8)]) and not budget.fits([Append(None, 12), Append(None, 9)])
    error = budget.exhausted(None, 21)
    assert isinstance(error, PoolExhaustedError) and error.blocks_needed == 6
    table = pool.new_table()
    budget.grow_for([([table], 4)], lambda: [([table], 9)])
    assert 1 <= pool.groups[0].allocator.num_free <= 3, "no more than is going to be appended in all"
