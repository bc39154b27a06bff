"""PoolBudget: appends that fit can be made in any order; appends that do not fit cannot."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.memory import Append, PoolBudget
from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.cases import crossed, quick
from tests.support.pools import BLOCK_BYTES, kv

SIZE, CHUNK = 4, 6
WINDOWS = [(None,), (9,), (None, 9), (1, None)]


def pool_of(windows: Sequence[int | None], num_blocks: int) -> BlockPool:
    """Return a pool with one layer per group and a budget of ``num_blocks`` blocks, null blocks included."""
    groups = [LayerGroup((layer,), window, f"group {layer}") for layer, window in enumerate(windows)]
    pool = BlockPool(groups, block_size=SIZE, memory_budget=num_blocks * BLOCK_BYTES)
    for layer in range(len(windows)):
        pool.set_geometry(layer, *kv(0, 1), batch=1)
    return pool


def extend(pool: BlockPool, table: BlockTable, num_tokens: int) -> None:
    pool.append_tokens(table, num_tokens)
    x = mx.full((1, 2, num_tokens, 8), float(table.length))
    for layer in range(len(pool.groups)):
        pool.write_prefill(table, layer, x, x)


def extend_until_full(pool: BlockPool, most: int) -> int:
    """Return the length that a sequence reaches in an empty pool, appended a chunk at a time."""
    table = pool.new_table()
    while table.length < most:
        try:
            extend(pool, table, min(CHUNK, most - table.length))
        except PoolExhaustedError:
            break
    return table.length


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17, 90])
def test_bytes_for_is_enough_and_half_of_it_is_not(windows: tuple[int | None, ...], num_tokens: int) -> None:
    least = PoolBudget(pool_of(windows, 1000), chunk=CHUNK).bytes_for(num_tokens)
    enough = -(-least // BLOCK_BYTES)
    for num_blocks, is_held in ((enough, True), (enough - 1, False)):
        if num_blocks < 2 * len(windows):  # not even one block of each group beside the null block
            with pytest.raises(PoolExhaustedError, match="which needs at least"):
                pool_of(windows, num_blocks)
            continue
        pool = pool_of(windows, num_blocks)
        assert PoolBudget(pool, chunk=CHUNK).holds(num_tokens) is is_held
        if is_held:
            assert extend_until_full(pool, num_tokens) == num_tokens
    if num_tokens > SIZE:
        assert extend_until_full(pool_of(windows, enough // 2 + len(windows) - 1), num_tokens) < num_tokens


def test_a_budget_for_window_and_chunk_holds_any_length() -> None:
    budget = PoolBudget(pool_of((9,), 6), chunk=CHUNK)
    assert budget.holds(100_000) and budget.bytes_for(100_000) == budget.bytes_for(1000)
    assert not PoolBudget(pool_of((9,), 4), chunk=CHUNK).holds(100_000)


@pytest.mark.parametrize(
    ("windows", "seed"), quick(crossed(WINDOWS, range(3)), ((None,), 0), ((1, None), 0), ((9,), 1), ((None, 9), 2)),
    ids=str
)  # fmt: skip
def test_what_fits_can_be_appended_in_any_order(windows: tuple[int | None, ...], seed: int) -> None:
    """Last blocks are shared or partial. Without a window and shared blocks, appends that do not fit cannot be made
    either. With shared blocks they may: the last writer of a shared block need not copy it."""
    rng = np.random.default_rng(seed)
    pool = pool_of(windows, {(None,): 17, (9,): 10}.get(windows, 34))
    budget = PoolBudget(pool, chunk=CHUNK)
    sequences = [pool.new_table() for _ in range(4)]
    fitted = refused = 0
    for _ in range(150):
        growth = [int(rng.integers(1, CHUNK + 1)) if rng.random() < 0.3 else 1 for _ in sequences]
        fits = budget.fits(list(map(Append, sequences, growth)))
        fitted, refused = fitted + fits, refused + (not fits)
        order = rng.permutation(len(sequences))
        is_exact = windows == (None,) and pool.stats().shared_blocks == 0
        try:
            for index in order:
                extend(pool, sequences[index], growth[index])
            assert fits or not is_exact, "refused, although there was room"
        except PoolExhaustedError:
            assert not fits
        if not fits:
            index = int(rng.integers(len(sequences)))
            pool.release_table(sequences[index])
            other = sequences[index - 1]
            sequences[index] = pool.new_table() if rng.random() < 0.5 else pool.fork(other)
        pool.check_integrity()
    assert fitted > 20 and refused > 5


def test_forked_append_counts_the_copy_of_its_first_block() -> None:
    pool = pool_of((None,), 5)  # the null block, two held, two left
    budget = PoolBudget(pool, chunk=CHUNK)
    table = pool.new_table()
    extend(pool, table, 6)
    assert budget.fits([Append(table, 10)])
    assert budget.fits([Append(table, 6, forked=True)]) and not budget.fits([Append(table, 7, forked=True)])
    fork = pool.fork(table)
    extend(pool, fork, 6)
    with pytest.raises(PoolExhaustedError):
        extend(pool, fork, 1)
    assert table.length == 6


def test_budget_queries_do_not_change_the_pool() -> None:
    pool = pool_of((None, None), 40)
    budget = PoolBudget(pool, chunk=CHUNK)
    table = pool.new_table()
    extend(pool, table, 13)
    before = pool.stats(), [list(ids) for ids in table.block_ids]
    assert budget.fits([Append(table, 5), Append(None, 20)]) and not budget.fits([Append(table, 400)])
    assert budget.holds(30) and not budget.holds(4000) and budget.has_plenty([3])
    budget.exhausted(table, 400)
    assert (pool.stats(), [list(ids) for ids in table.block_ids]) == before


def test_blocks_that_a_window_will_release_count_as_free() -> None:
    pool = pool_of((5,), 6)  # five besides the null block
    budget = PoolBudget(pool, chunk=16)
    table = pool.new_table()
    extend(pool, table, 16)
    assert not budget.has_plenty([1])
    assert budget.fits([Append(table, 4), Append(None, 12)])
    assert pool.stats().live_blocks < 4, "blocks behind the window are released"
    extend(pool, table, 4)
    extend(pool, pool.new_table(), 12)


@pytest.mark.parametrize("windows", [(None,), (None, None)], ids=["one group", "two"])
def test_exhausted_returns_the_error_that_an_append_raises(windows: tuple[None, ...]) -> None:
    pool = pool_of(windows, 3 * len(windows))
    table = pool.new_table()
    extend(pool, table, 5)
    error = PoolBudget(pool, chunk=CHUNK).exhausted(table, 9)
    assert error.blocks_needed == 2 * len(windows) and error.bytes_needed == error.blocks_needed * BLOCK_BYTES
    assert (error.budget_bytes, error.bytes_reserved) == (pool.memory_budget, pool.stats().bytes_reserved)
    if len(windows) == 1:
        with pytest.raises(PoolExhaustedError) as caught:
            pool.append_tokens(table, 9)
        assert vars(caught.value) == vars(error)


def test_layers_with_more_heads_need_more_of_a_budget() -> None:
    narrow, wide = mx.zeros((1, 1, 1, 8)), mx.zeros((1, 4, 1, 8))
    groups = [LayerGroup((0,), name="narrow"), LayerGroup((1,), name="wide")]
    least = 2 * SIZE * (1 + 4) * 2 * 8 * 4
    for budget in (least, least - 1):
        pool = BlockPool(groups, block_size=SIZE, memory_budget=budget)
        pool.set_geometry(0, narrow, narrow, batch=1)
        if budget < least:
            with pytest.raises(PoolExhaustedError, match=f"at least {least:,} bytes"):
                pool.set_geometry(1, wide, wide, batch=1)
        else:
            pool.set_geometry(1, wide, wide, batch=1)
            assert PoolBudget(pool, chunk=CHUNK).bytes_for(SIZE) == least
