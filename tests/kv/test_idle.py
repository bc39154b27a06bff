"""Idle pools return their memory; `glance` reads a pool in use without waiting."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.kv import idle
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.lock import HeldLocks
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache
from mlx_paged.server.report import block_map
from tests.support.cases import slow
from tests.support.models.batch_runs import mlx_lm_generate
from tests.support.models.builders import build, prompt_of
from tests.support.prefixes import add, make_tree
from tests.support.processes import threads

LONG = 60.0  # seconds, enough for any thread that is not blocked


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; fail after ``LONG`` seconds."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def small_pool() -> BlockPool:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    x = mx.zeros((1, 1, 1, 8))
    pool.set_geometry(0, x, x, batch=1)
    return pool


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(idle, "LOOK_SECONDS", 0.01)


@pytest.fixture
def patched() -> Iterator[None]:
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=64 << 20))
    yield
    mlx_paged.remove_patches()


@pytest.mark.parametrize("way", ["batch", *slow("single"), "generator dropped"])
def test_tensors_are_dropped_after_the_last_user_is_gone(soon: None, patched: None, way: str) -> None:
    model, prompts = build("llama"), [prompt_of(60, seed).tolist() for seed in range(6)]

    def run() -> list[list[int]]:
        if way == "single":
            return [[t for t, _ in mlx_lm_generate.generate_step(mx.array(p), model, max_tokens=6)] for p in prompts]
        generator = mlx_lm_generate.BatchGenerator(model)
        uids = generator.insert(prompts, [6] * len(prompts))
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                tokens[response.uid].append(response.token)
        if way == "batch":
            generator.close()
        return [tokens[uid] for uid in uids]

    first = run()
    pool = mlx_paged.pool_of(model)
    wait_until(lambda: pool.stats().bytes_reserved == 0)
    pool.check_integrity()
    assert run() == first
    assert pool.stats().bytes_reserved > 0 or way != "batch"
    wait_until(lambda: pool.stats().bytes_reserved == 0)


def test_return_memory_drops_all_tensors_at_once() -> None:
    pool = small_pool()
    table = pool.new_table()
    pool.append_tokens(table, 400)
    pool.release_table(table)
    assert pool.stats().bytes_reserved > 0
    pool.return_memory()
    assert pool.stats().bytes_reserved == 0 and pool.stats().total_blocks <= 1
    table = pool.new_table()
    pool.append_tokens(table, 9)
    x = mx.random.normal((1, 1, 9, 8))
    pool.write_prefill(table, 0, x, x)
    assert mx.array_equal(pool.gather_visible(table, 0)[0], x)
    pool.check_integrity()


def test_drop_if_idle_keeps_tensors_in_use(soon: None) -> None:
    tree, pool = make_tree([None])
    add(tree, list(range(9)))
    reserved = pool.stats().bytes_reserved
    assert reserved and pool.drop_if_idle() and pool.stats().bytes_reserved == reserved
    pool.check_integrity()
    tree.clear()
    assert pool.drop_if_idle() and pool.stats().bytes_reserved == 0


def test_drop_if_idle_returns_false_while_the_lock_is_held() -> None:
    pool = small_pool()
    table = pool.new_table()
    pool.append_tokens(table, 40)
    pool.release_table(table)
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with pool.lock:
            entered.set()
            leave.wait(LONG)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(LONG)
    assert not pool.drop_if_idle()
    leave.set()
    thread.join()
    assert pool.drop_if_idle() and pool.stats().bytes_reserved == 0


def test_dropped_pool_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        pool = small_pool()
        table = pool.new_table()
        pool.append_tokens(table, 40)
        del table
        groups = pool.groups
        assert sys.getrefcount(groups) > 2
        del pool
        wait_until(lambda: sys.getrefcount(groups) == 2)  # the idle thread may hold it for a moment
    finally:
        gc.enable()


def test_failure_in_one_pool_releases_the_locks_of_the_others() -> None:
    first, second = small_pool(), small_pool()

    def fail() -> list[mx.array]:
        raise MemoryError("out of memory")

    def work() -> None:
        with pytest.raises(MemoryError), HeldLocks():
            for pool in (first, second):
                with pool.lock:
                    pool.lock.is_dirty = True
            first.groups[0].ready = fail  # type: ignore[method-assign]

    done = threading.Event()

    def other() -> None:
        with second.lock:
            done.set()

    for target in (work, other):
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(LONG)
    assert done.is_set()


def shrink_beside_makers(rounds: int, makers: int) -> None:
    """Shrink a pool again and again while other threads make and drop caches."""
    pool, stop = small_pool(), threading.Event()

    def make() -> None:
        kept = []
        while not stop.is_set():
            kept.append(pool.new_table())
            if len(kept) > 300:
                kept.clear()

    threads = [threading.Thread(target=make) for _ in range(makers)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            junk, table = pool.new_table(), pool.new_table()
            pool.append_tokens(junk, 4 * 40)
            pool.append_tokens(table, 40)  # behind the blocks of junk
            pool.release_table(junk)
            pool.return_memory()
            assert len(set(table.block_ids)) == 10
            other = pool.new_table()
            pool.append_tokens(other, 40)
            assert not set(other.block_ids) & set(table.block_ids)
            pool.release_table(other)
            pool.release_table(table)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    pool.check_integrity()


def test_a_pool_shrinks_while_other_threads_make_caches() -> None:
    shrink_beside_makers(20, 2)


@pytest.mark.slow
def test_a_pool_shrinks_while_other_threads_make_caches_for_long() -> None:
    shrink_beside_makers(6000, 2)


def test_adding_tables_during_renumbering_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may add a table between any two steps of the loop over the tables."""
    pool = small_pool()
    junk, table = pool.new_table(), pool.new_table()
    pool.append_tokens(junk, 4 * 40)
    pool.append_tokens(table, 40)
    pool.release_table(junk)
    others: list[BlockTable] = []
    forget = BlockTable.forget_indices

    def added_meanwhile(self: BlockTable) -> None:
        if len(others) < 3:
            others.append(pool.new_table())
        forget(self)

    monkeypatch.setattr(BlockTable, "forget_indices", added_meanwhile)
    pool.return_memory()
    assert max(table.block_ids) < 40 and others
    pool.check_integrity()


def test_stats_and_block_map_do_not_wait_for_the_lock() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    tree = PrefixCache(pool)
    table = pool.new_table()
    pool.append_tokens(table, 9)
    has_turn, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        with pool.lock:
            has_turn.set()
            assert may_end.wait(60)

    ended = threads.start(compute)
    assert has_turn.wait(60)
    assert pool.stats().live_blocks == 3
    assert block_map(pool)[0][0] == ("l", 3)
    assert tree.nbytes == 0
    may_end.set()
    ended()


def test_glance_retries_a_read_that_raced_with_a_change() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    seen: list[bool] = []

    def read(is_exact: bool) -> int:
        seen.append(is_exact)
        if len(seen) < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return 7

    with pytest.raises(RuntimeError):  # nothing changes under the lock, so the error is real
        pool.lock.glance(read)
    seen.clear()
    with pool.lock:
        assert threads.in_thread(lambda: pool.lock.glance(read)) == 7
    assert seen == [False, False, False]
    seen[:] = [True]
    assert pool.lock.glance(lambda is_exact: is_exact)

    def broken(is_exact: bool) -> int:
        raise KeyError("gone")

    with pool.lock, pytest.raises(KeyError):
        threads.in_thread(lambda: pool.lock.glance(broken))
