"""What RadixTree gives up and what it keeps: locks, recency, limits, time to live."""

from typing import Any

import pytest

from mlx_paged.errors import BlockStateError, PoolExhaustedError
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.budget import PoolBudget
from mlx_paged.kv.memory import EVICTED_SHARE
from mlx_paged.prefix.radix import RadixTree
from tests.support.prefixes import add, check_contents, found, hold, make_pool, make_tree, release


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_least_recently_used_leaves_are_evicted_first() -> None:
    tree, _pool = make_tree((None,))
    system = tuple(range(8))
    prefixes = [(*system, 100 + n, *range(7)) for n in range(3)]
    for tokens in prefixes:
        add(tree, tokens)
    found(tree, prefixes[0])
    assert tree.evict(0, 2) == 2
    assert [found(tree, tokens) for tokens in prefixes] == [16, 8, 16]
    found(tree, prefixes[0])
    assert tree.evict(0, 4) == 4
    assert [found(tree, tokens) for tokens in prefixes] == [8, 8, 8]
    assert tree.evict(0, 99) == 2 and len(tree) == 0 and tree.evictions == 8


def test_a_leaf_gives_its_end_up_before_its_beginning() -> None:
    tree = RadixTree(pool := make_pool())
    add(tree, range(22))
    assert tree.evict(0, 2) == 2 and found(tree, range(22)) == 16
    add(tree, range(22))
    assert found(tree, range(22)) == 22
    tree.check_integrity()
    assert pool.stats().evictions == 2


def test_locked_nodes_stay() -> None:
    tree, _pool = make_tree((None,))
    add(tree, range(12))
    add(tree, [0, 1, 2, 3, 99, 98, 97, 96])
    match = tree.match([*range(12), -1])
    tree.lock(match.node)
    tree.lock(match.node)
    assert (tree.reclaimable(0), tree.evict(0, 99)) == (1, 1)
    tree.unlock(match.node)
    tree.clear()
    assert found(tree, range(12)) == 12
    with pytest.raises(BlockStateError):
        tree.remove(match.node)
    tree.unlock(match.node)
    with pytest.raises(BlockStateError):
        tree.unlock(match.node)
    tree.clear()
    assert len(tree) == 0
    with pytest.raises(BlockStateError, match="no longer in the tree"):
        tree.lock(match.node)


def test_a_lock_holds_through_a_split() -> None:
    tree, _pool = make_tree((None,))
    node = add(tree, range(12)).node
    tree.lock(node)
    add(tree, [0, 1, 2, 3, 4, 99])
    assert [each.locks for each in node.path()] == [1, 1]
    assert tree.evict(0, 99) == 1 and found(tree, range(12)) == 12
    tree.unlock(node)
    assert tree.evict(0, 99) == 3


def test_blocks_that_sequences_hold_do_not_become_free() -> None:
    tree = RadixTree(pool := make_pool())
    tables = hold(pool, range(10))
    tree.insert(range(10), tables)
    add(tree, [50, 51])
    stats = pool.stats()
    assert (stats.live_blocks, stats.cached_blocks, tree.reclaimable(0)) == (4, 1, 1)
    assert tree.evict(0, 5) == 1 and found(tree, range(10)) == 10  # what would free nothing stays
    release(pool, tables)
    assert (tree.reclaimable(0), pool.stats().cached_blocks) == (3, 3)


def test_a_leaf_in_use_goes_if_it_stands_before_blocks_that_are_not() -> None:
    tree = RadixTree(pool := make_pool())
    add(tree, range(8))
    own = hold(pool, range(12))  # computed without looking: only its third block goes into the tree
    tree.insert(range(12), own)
    assert tree.reclaimable(0) == 2 and tree.evict(0, 2) == 2
    assert found(tree, range(12)) == 0
    check_contents(pool, own, range(12))


def test_the_pool_asks_before_it_refuses() -> None:
    pool = make_pool(num_blocks=9)  # eight that can be used
    tree = RadixTree(pool)
    add(tree, range(12))
    add(tree, range(50, 62))
    tables = hold(pool, range(100, 116))
    assert pool.stats().evictions == 2 and [found(tree, t) for t in (range(12), range(50, 62))] == [4, 12]
    before = pool.stats()
    with pytest.raises(PoolExhaustedError):
        pool.append_tokens(tables[0], 17)  # five blocks; four are cached
    assert pool.stats() == before and found(tree, range(50, 62)) == 12  # nothing is given up for nothing
    pool.append_tokens(tables[0], 16)
    assert pool.stats().cached_blocks == 0
    pool.check_integrity()


def test_a_full_pool_looks_at_few_of_its_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(num_blocks=402)
    tree = RadixTree(pool)
    for n in range(200):
        add(tree, range(1000 * n, 1000 * n + 8))
    tables, looked_at = hold(pool, range(4)), []
    refcount = BlockAllocator.refcount
    monkeypatch.setattr(BlockAllocator, "refcount", lambda own, block: looked_at.append(block) or refcount(own, block))
    pool.append_tokens(tables[0], 4)
    assert tree.evictions == 1 and len(looked_at) < 40
    assert PoolBudget(pool, chunk=64).fits([(tables, 8)]) and len(looked_at) < 80
    assert tree.reclaimable(0) == 399 and tree.reclaimable(0, 5) == 5 and tree.reclaimable(0, 500) == 399


def test_a_large_full_pool_frees_blocks_for_the_next_steps_too() -> None:
    pool = make_pool(num_blocks=2 * EVICTED_SHARE)
    tree = RadixTree(pool)
    tables = hold(pool, range(4 * (2 * EVICTED_SHARE - 10)))
    tree.insert(range(4 * (2 * EVICTED_SHARE - 10)), tables)
    release(pool, tables)
    own = hold(pool, range(4 * 9))
    assert tree.evictions == 0 and pool.groups[0].allocator.num_free == 0
    pool.append_tokens(own[0], 1)
    assert tree.evictions == 2 and pool.groups[0].allocator.num_free == 1
    tree.check_integrity()
    pool.check_integrity()


def test_nodes_go_in_the_order_of_use_whatever_goes_with_them() -> None:
    """More nodes than are looked at at a time, some of them in use, and parents that become leaves meanwhile."""
    tree = RadixTree(pool := make_pool())
    in_use = []
    for n in range(100):
        add(tree, range(1000 * n, 1000 * n + 4))
        add(tree, tokens := [*range(1000 * n, 1000 * n + 4), *range(4)])
        if n % 3 == 0:
            _, tables = tree.adopt([*tokens, -1])
            in_use.append(tables)
    assert tree.evict(0, 100) == 100
    tree.check_integrity()
    left = {node.tokens[0] // 1000 for node in tree.nodes() if node.start == 0}
    assert left == {n for n in range(100) if n % 3 == 0 or n >= 75}
    for tables in in_use:
        release(pool, tables)
    assert tree.evict(0, 10**6) == 100 and not list(tree.nodes())


def test_time_to_live() -> None:
    clock = Clock()
    tree, _pool = make_tree((None,), ttl=10, clock=clock)
    add(tree, range(8))
    add(tree, [*range(8), 1, 2, 3, 4])
    add(tree, range(50, 54))
    clock.now = 6
    assert found(tree, range(8)) == 8  # and so its beginning stays on
    clock.now = 11
    assert [found(tree, t) for t in ([*range(8), 1, 2, 3, 4], range(50, 54))] == [8, 0]
    clock.now = 30
    assert found(tree, range(8)) == 0 and len(tree) == 0
    node = add(tree, range(8)).node
    tree.lock(node)
    clock.now = 60
    assert found(tree, range(8)) == 8
    clock.now = 100
    tree.expire()
    assert len(tree) == 1
    tree.unlock(node)
    clock.now = 109
    assert found(tree, range(8)) == 8
    clock.now = 120
    tree.expire()
    assert len(tree) == 0


def test_on_evict_sees_blocks_that_are_still_held() -> None:
    pool = make_pool((None, 6))
    seen: list[tuple[Any, tuple[int, ...]]] = []

    def on_evict(salt: Any, node: Any) -> None:
        assert all(pool.groups[g].allocator.refcount(b) for g, ids in enumerate(node.blocks) for b in ids if b)
        seen.append((salt, node.prefix()))

    tree = RadixTree(pool, on_evict=on_evict)
    add(tree, range(4), "salt")
    add(tree, range(10), "salt")
    tree.clear()
    assert seen == [("salt", tuple(range(10))), ("salt", tuple(range(4)))]
