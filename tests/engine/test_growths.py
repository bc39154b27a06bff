"""How often, and by how much, the pool grows for known requests."""

import pytest

from mlx_paged.engine.appends import GENERATED_AHEAD
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.models.toy_engine import BLOCK_BYTES, BLOCK_SIZE, ToyEngine, make_pool, prompt_of


def count_growths(pool: BlockPool) -> list[int]:
    """Return a list to which the pool's sizes are added whenever it grows."""
    sizes: list[int] = []
    for group in pool.groups:
        grow = group.grow

        def counted(num_blocks: int, grow=grow) -> None:
            sizes.append(num_blocks)
            grow(num_blocks)

        group.grow = counted  # type: ignore[method-assign]
    return sizes


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@pytest.mark.parametrize("most_running", [8, 32])
def test_requests_known_at_once_make_the_pool_grow_once(most_running: int) -> None:
    pool = make_pool()
    engine = ToyEngine(pool, completion_batch_size=most_running, prefill_batch_size=8)
    sizes = count_growths(pool)
    for i in range(32):
        engine.add(prompt_of(10 + i % 7, seed=i), max_tokens=6)
    while engine.step():
        for responses in engine.responses.values():
            responses.clear()  # the last one of a request holds its cache
    assert len(sizes) == 1, sizes
    assert sizes[0] <= 1 + most_running * blocks_for(16 + 6 + 1), "for those that run together, with all their tokens"


def test_long_prompts_known_at_once_make_the_pool_grow_once() -> None:
    pool = make_pool()
    engine = ToyEngine(pool, prefill_step_size=64, completion_batch_size=16)
    sizes = count_growths(pool)
    for i in range(16):
        engine.add(prompt_of(256, seed=i), max_tokens=2)
    engine.run()
    assert not engine.failures
    assert len(sizes) == 1 and sizes[0] >= 16 * blocks_for(257), sizes


def test_window_group_grows_only_for_its_window() -> None:
    pool = make_pool(window=8)
    engine = ToyEngine(pool, completion_batch_size=8)
    sizes = count_growths(pool)
    for i in range(8):
        engine.add(prompt_of(100, seed=i), max_tokens=4)
    engine.run()
    assert not engine.failures
    assert len(sizes) == 1 and sizes[0] < 8 * blocks_for(50), sizes


def test_no_memory_is_taken_for_tokens_that_may_never_come() -> None:
    pool = make_pool()
    engine = ToyEngine(pool)
    sizes = count_growths(pool)
    uids = [engine.add(prompt_of(20, seed=i), max_tokens=1_000_000) for i in range(4)]
    while len(engine.tokens(uids[-1])) < 5:
        engine.step()
    assert len(sizes) == 1 and sizes[0] <= 1 + 4 * blocks_for(20 + GENERATED_AHEAD + BLOCK_SIZE)


def test_requests_beyond_the_budget_wait_and_take_none_of_it() -> None:
    pool = make_pool(num_blocks=40)
    engine = ToyEngine(pool, completion_batch_size=32)
    sizes = count_growths(pool)
    for i in range(32):
        engine.add(prompt_of(20, seed=i), max_tokens=6)
    engine.run()
    assert not engine.failures and len(sizes) <= 3 and max(sizes) <= 40, sizes
    assert pool.stats().bytes_reserved <= 40 * BLOCK_BYTES


def test_a_prefix_that_a_burst_shares_is_counted_once() -> None:
    pool = make_pool()
    engine = ToyEngine(pool, prefixes=SharedPrefixes(PrefixCache(pool)), completion_batch_size=16)
    sizes = count_growths(pool)
    shared = prompt_of(200)
    for i in range(16):
        engine.add([*shared, *prompt_of(8, seed=1 + i)], max_tokens=4)
    engine.run()
    assert not engine.failures
    assert len(sizes) == 1 and sizes[0] <= 1 + blocks_for(200) + 16 * (blocks_for(8 + 4 + 1) + 2), sizes


def test_a_cached_prefix_is_not_counted() -> None:
    pool = make_pool()
    engine = ToyEngine(pool, prefixes=SharedPrefixes(PrefixCache(pool)))
    shared = prompt_of(200)
    engine.add(shared, max_tokens=2)
    engine.run()
    engine.responses[0].clear()
    before, sizes = pool.stats().total_blocks, count_growths(pool)
    for i in range(4):
        engine.add([*shared, *prompt_of(8, seed=1 + i)], max_tokens=4)
    engine.run()
    assert not engine.failures
    assert len(sizes) <= 1 and pool.stats().total_blocks < before + 4 * (blocks_for(8 + 4 + 1) + 2), sizes


def test_memory_of_a_burst_is_returned() -> None:
    pool = make_pool()
    engine = ToyEngine(pool, completion_batch_size=16)
    for i in range(16):
        engine.add(prompt_of(200, seed=i), max_tokens=4)
    engine.run()
    taken = pool.stats().bytes_reserved
    engine.responses.clear()
    pool.return_memory()
    assert pool.stats().live_blocks == 0 and pool.stats().bytes_reserved < taken / 16
    sizes = count_growths(pool)
    for i in range(16):
        engine.add(prompt_of(200, seed=i), max_tokens=4)
    engine.run()
    assert not engine.failures
    assert len(sizes) == 1, sizes
