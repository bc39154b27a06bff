"""A pool drops its tensors when nothing is held; `glance` reads a pool in use without waiting."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.lock import HeldLocks
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache
from mlx_paged.server.report import blocks_of
from tests.support.cases import slow
from tests.support.models.batch_runs import mlx_lm_generate
from tests.support.models.builders import build, prompt_of
from tests.support.prefixes import add, make_tree
from tests.support.processes import threads

LONG = 60.0  # seconds, enough for any thread that is not blocked


def small_pool() -> BlockPool:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    x = mx.zeros((1, 1, 1, 8))
    pool.set_geometry(0, x, x, batch=1)
    return pool


@pytest.fixture
def patched() -> Iterator[None]:
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory=64 << 20))
    yield
    mlx_paged.remove_patches()


@pytest.mark.parametrize("way", ["batch", *slow("single"), "generator dropped"])
def test_memory_is_back_when_the_last_user_is_gone(patched: None, way: str) -> None:
    model, prompts = build("llama"), [prompt_of(60, seed).tolist() for seed in range(6)]

    def run() -> list[list[int]]:
        if way == "single":
            return [[t for t, _ in mlx_lm_generate.generate_step(mx.array(p), model, max_tokens=6)] for p in prompts]
        generator = mlx_lm_generate.BatchGenerator(model)
        uids = generator.insert(prompts, [6] * len(prompts))
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            assert mlx_paged.pool_of(model).stats().bytes_reserved > 0
            for response in responses:
                tokens[response.uid].append(response.token)
        if way == "batch":
            generator.close()
        return [tokens[uid] for uid in uids]

    gc.disable()
    try:
        first = run()
        pool = mlx_paged.pool_of(model)
        assert pool.groups[0].bytes_reserved == 0
        pool.check_integrity()
        assert run() == first
        assert pool.groups[0].bytes_reserved == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "end",
    [PrefixCache.clear, lambda tree: tree.pool.memory.evict(1 << 40), lambda tree: None],
    ids=["clear", "evict", "drop"],
)
def test_a_prefix_keeps_the_tensors_until_it_is_evicted_or_dropped(
    end: Callable[[PrefixCache], None],
) -> None:
    tree, pool = make_tree([None, 8])
    add(tree, list(range(9)))
    assert pool.stats().bytes_reserved > 0
    gc.disable()
    try:
        end(tree)
        del tree
        assert pool.groups[0].bytes_reserved == pool.groups[1].bytes_reserved == 0
    finally:
        gc.enable()
    pool.check_integrity()


def test_tensors_stay_while_a_section_lasts() -> None:
    """A step that releases all blocks and takes new ones does not make new tensors."""
    pool = small_pool()
    with HeldLocks():
        pool.append_tokens(table := pool.new_table(), 40)
        pool.release_table(table)
        reserved = pool.groups[0].bytes_reserved
        pool.append_tokens(table := pool.new_table(), 40)
        assert pool.groups[0].bytes_reserved == reserved > 0
        pool.release_table(table)
    assert pool.groups[0].bytes_reserved == 0


@contextmanager
def locked(pool: BlockPool) -> Iterator[None]:
    """Hold the pool's lock in another thread."""
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with pool.lock:
            entered.set()
            assert leave.wait(LONG)

    ended = threads.start(work)
    assert entered.wait(LONG)
    yield
    leave.set()
    ended()


def test_who_holds_the_lock_drops_for_a_table_that_goes_meanwhile() -> None:
    pool = small_pool()
    table = pool.new_table()
    pool.append_tokens(table, 40)
    with locked(pool):
        del table  # waits for nobody
        assert pool.groups[0].allocator.num_live == 10
    assert pool.groups[0].allocator.num_live == pool.groups[0].bytes_reserved == 0


def test_dropped_pool_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        pool = small_pool()
        table = pool.new_table()
        pool.append_tokens(table, 40)
        groups = pool.groups
        del pool
        assert sys.getrefcount(groups) == 2, "a table does not keep its pool"
        del table
    finally:
        gc.enable()


def test_failure_in_one_pool_releases_the_locks_of_the_others() -> None:
    first, second = small_pool(), small_pool()

    class Failing:
        num_blocks = 0

        @property
        def pending(self) -> list[mx.array]:
            raise MemoryError("out of memory")

    def work() -> None:
        with pytest.raises(MemoryError), HeldLocks():
            for pool in (first, second):
                with pool.lock:
                    pool.lock.is_dirty = True
            first.groups[0].blocks = [Failing()]  # type: ignore[list-item]

    threads.in_thread(work)

    def other() -> bool:
        with second.lock:
            return True

    assert threads.in_thread(other)


@pytest.mark.parametrize(("rounds", "makers"), [(50, 2), *slow((6000, 3))])
def test_tables_are_dropped_while_other_threads_make_some(rounds: int, makers: int) -> None:
    """Make, write and drop tables in one thread while others make and drop some; now and then none is left."""
    pool, stop = small_pool(), threading.Event()

    def make() -> None:
        kept = []
        while not stop.is_set():
            kept.append(pool.new_table())
            pool.append_tokens(kept[-1], 7)
            if len(kept) > 3:
                kept.clear()

    others = [threading.Thread(target=make) for _ in range(makers)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in others:
            thread.start()
        for number in range(rounds):
            table = pool.new_table()
            pool.append_tokens(table, 40)
            x = mx.full((1, 1, 40, 8), float(number))
            pool.write_prefill(table, 0, x, x)
            assert mx.array_equal(pool.gather_visible(table, 0)[0], x)
            del table
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in others:
            thread.join()
    others.clear()
    pool.check_integrity()
    assert pool.groups[0].allocator.num_live == pool.groups[0].bytes_reserved == 0


def test_stats_and_block_map_do_not_wait_for_the_lock() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    tree = PrefixCache(pool)
    table = pool.new_table()
    pool.append_tokens(table, 9)
    with locked(pool):
        assert pool.stats().live_blocks == 3
        assert blocks_of(pool)[0]["runs"][0] == ("l", 3)
        assert tree.nbytes == 0


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
