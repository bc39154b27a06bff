"""How much the pool grows for requests."""

from mlx_paged.kv.pool import BlockPool
from tests.support.models.toy_engine import BLOCK_BYTES, ToyEngine, make_pool, prompt_of


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


def test_requests_beyond_the_budget_wait_and_take_none_of_it() -> None:
    pool = make_pool(num_blocks=40)
    engine = ToyEngine(pool, completion_batch_size=32)
    sizes = count_growths(pool)
    for i in range(32):
        engine.add(prompt_of(20, seed=i), max_tokens=6)
    engine.run()
    assert not engine.failures and max(sizes) <= 40, sizes
    assert pool.stats().bytes_reserved <= 40 * BLOCK_BYTES


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
    for i in range(16):
        engine.add(prompt_of(200, seed=i), max_tokens=4)
    engine.run()
    assert not engine.failures
