"""PoolLock: order of several pools, fairness, and what is left at its exit."""

import sys
import threading
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_paged.kv.lock import HeldLocks
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import joined, pool_of, put
from tests.support.processes.threads import in_thread, start, together


@pytest.fixture
def often_switched() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def write_in_steps(first: BlockPool, second: BlockPool, steps: int) -> None:
    """Write to both pools, in this order, in steps that keep the locks. Check what was written before."""
    tables, held = [(pool, pool.new_table()) for pool in (first, second)], {}
    for step in range(steps):
        with HeldLocks():
            for pool, table in tables:
                part = put(pool, table, step, 1 + step % 3)
                held[pool] = joined(held[pool], part) if pool in held else part
        for pool, table in tables:
            got, _ = pool.gather_visible(table, 0)
            assert mx.array_equal(got, held[pool][0]).item()


@pytest.mark.usefixtures("often_switched")
def test_threads_take_two_pools_in_opposite_order_without_deadlock() -> None:
    one, two = pool_of(), pool_of()
    together([lambda: write_in_steps(one, two, 150), lambda: write_in_steps(two, one, 150)] * 2)
    for pool in (one, two):
        pool.lock.collect()
        pool.check_integrity()
        assert pool.stats().live_blocks == 0


def test_lock_is_kept_through_a_section_and_released_at_its_end() -> None:
    pool = pool_of()
    with HeldLocks():
        with HeldLocks(), pool.lock:
            pass
        assert not in_thread(lambda: pool.lock._acquire(timeout=0))
    assert in_thread(lambda: pool.lock._acquire(timeout=0) and pool.lock.__exit__() is None)


def test_waiting_thread_gets_the_lock_before_it_is_taken_again() -> None:
    pool, order, may_go = pool_of(), [], threading.Event()

    def wait() -> None:
        may_go.set()
        with pool.lock:
            order.append("other")

    with pool.lock:
        ended = start(wait)
        may_go.wait(60)
        while pool.lock._gate.acquire(blocking=False):  # until the other thread stands at the gate
            pool.lock._gate.release()
    with pool.lock:
        order.append("own")
    ended()
    assert order == ["other", "own"]


def test_reads_of_a_thread_that_has_ended_are_computed() -> None:
    """Another thread's write must not find lazy reads that only their thread could compute."""
    pool = pool_of()
    table = pool.new_table()
    k, _ = put(pool, table, 1, 9)

    def read() -> mx.array:
        with mx.stream(mx.new_stream(mx.default_device())), pool.lock:
            ((keys, _),) = pool.blocks_of(0).read(pool.tokens_of(0, [table], 1))
            output = keys + 1
            pool.blocks_of(0).pending.append(output)
            pool.lock.is_dirty = True
        return output

    output = in_thread(read)
    pool.trim(table, 9)
    put(pool, table, 2, 9)
    assert mx.array_equal(output, k + 1).item()
