"""RadixTree, one rule at a time: matching, inserting, windows, accounting, eviction."""

import gc
import threading
from typing import Any

import pytest

from mlx_paged.errors import BlockStateError, PoolExhaustedError
from mlx_paged.kv.attention_params import Window
from mlx_paged.kv.budget import PoolBudget
from mlx_paged.kv.memory import EVICTED_SHARE
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.radix_node import KEPT_SHARE
from tests.support.prefixes import add, check_contents, compute, found, hold, make_pool, make_tree, new_tables, release
from tests.support.without_collector import without_collector

# Matching and inserting -----------------------------------------------------------------------------------------------


def test_example_in_the_docstring_of_radix_node() -> None:
    pool = make_pool()
    tree = RadixTree(pool)
    add(tree, range(6))
    assert pool.stats().live_blocks == 2
    add(tree, range(10))  # the child holds blocks 1 and 2; its block 1 also replaces the parent's tail
    assert pool.stats().live_blocks == 3  # the shorter tail block is free again
    add(tree, [*range(6), 99])
    assert pool.stats().live_blocks == 4
    parent, *children = tree.nodes()
    assert (parent.start, parent.end) == (0, 6) and [child.start for child in children] == [6, 6]
    assert [found(tree, tokens) for tokens in (range(10), range(6), range(5), [*range(6), 99], [0, 9])] == [
        10,
        6,
        5,
        7,
        1,
    ]
    assert len(tree) == 2


def test_the_last_token_is_always_left_to_compute() -> None:
    tree = RadixTree(pool := make_pool())
    add(tree, range(8))
    for length in range(1, 9):
        match = tree.match(range(length))
        assert match.length == length - 1 and len(match.block_ids[0]) == -(-(length - 1) // 4)
    assert tree.match([]).length == 0 and tree.match([7]).node.is_root
    assert pool.stats().prefix_hit_tokens == 0  # nothing is adopted yet
    tree.adopt(range(8))
    assert pool.stats().prefix_hit_tokens == 7


def test_prefix_that_ends_at_a_chunk_boundary_needs_no_earlier_blocks() -> None:
    tree, pool = make_tree((None, Window(10, 10)))
    add(tree, range(36), chunks=(9, 17, 25, 33))  # the table holds its last chunk
    # Held: the last chunk, from position 30 on. A shorter prefix is found up to the start of its last chunk.
    assert [found(tree, range(length)) for length in (36, 34, 31, 30, 29, 21, 20, 19, 10, 9)] == [
        36, 34, 31, 30, 20, 20, 20, 10, 10, 0,
    ]  # fmt: skip
    _, tables = tree.adopt([*range(20), -1])
    assert (tables[1].length, tables[1].logical_start, tables[1].num_blocks) == (20, 20, 0)
    compute(pool, tables, range(33))
    check_contents(pool, tables, range(33))
    assert tree.insert(range(29), tables).valid_from[1] == 20 and found(tree, range(29)) == 29
    release(pool, tables)
    tree.check_integrity()


def test_salts_do_not_share_prefixes() -> None:
    tree, _pool = make_tree((None,))
    add(tree, range(9), ("model", "adapter"))
    assert (found(tree, range(9), ("model", "adapter")), found(tree, range(9), ("model", None))) == (9, 0)
    add(tree, range(9), ("model", None))
    assert found(tree, range(9), ("model", None)) == 9 and len(tree) == 2


def test_inserting_cached_tokens_again_holds_no_more_blocks() -> None:
    tree = RadixTree(pool := make_pool())
    add(tree, range(20))
    own = hold(pool, range(20))
    tree.insert(range(20), own)
    tree.insert(range(7), own)
    release(pool, own)
    assert pool.stats().live_blocks == 5 and len(list(tree.nodes())) == 1


def test_donor_continues_in_a_copy_of_its_tail_block() -> None:
    tree = RadixTree(pool := make_pool())
    tables = hold(pool, range(6))
    tree.insert(range(6), tables)
    compute(pool, tables, [*range(6), 50, 51, 52])
    assert pool.stats().cow_forks == 1 and found(tree, range(6)) == 6
    check_contents(pool, tables, [*range(6), 50, 51, 52])


@pytest.mark.parametrize(
    "problem", ["no tokens", "too short", "a group missing", "other order", "released", "beginning not held"]
)
def test_tables_that_do_not_hold_the_tokens_are_refused(problem: str) -> None:
    pool = make_pool((None, None))
    tree = RadixTree(pool)
    tables, tokens = hold(pool, range(8)), tuple(range(8))
    if problem == "no tokens":
        tokens = ()
    elif problem == "too short":
        tokens = tuple(range(9))
    elif problem == "a group missing":
        tables = tables[:1]
    elif problem == "other order":
        tables = tables[::-1]
    elif problem == "released":
        release(pool, tables)
    else:
        tables[1] = pool.new_table(1, start=4)
        pool.append_tokens(tables[1], 4)
    before = pool.stats()
    with pytest.raises(ValueError):
        tree.insert(tokens, tables)
    assert pool.stats() == before and len(tree) == 0
    tree.check_integrity()


# Windows --------------------------------------------------------------------------------------------------------------


def test_window_group_serves_only_prefixes_whose_window_is_held() -> None:
    tree, _pool = make_tree((None, 6))
    add(tree, range(30), chunks=(14, 22))  # the window group holds positions 17 to 29
    assert [found(tree, range(n)) for n in (30, 27, 22, 21, 14)] == [30, 27, 22, 0, 0]
    add(tree, range(14))
    assert [found(tree, range(n)) for n in (30, 22, 21, 14, 9)] == [30, 22, 14, 14, 9]


def test_match_is_the_longest_prefix_that_all_groups_can_serve() -> None:
    tree, _pool = make_tree((None, 6, 12))
    add(tree, range(30), chunks=(20,))
    # The window of 12 is held from 9 on, so up to 20; that of 6 from 15 on, so up to 20 as well.
    assert [found(tree, range(n)) for n in (30, 24, 20, 19)] == [30, 24, 20, 0]


def test_window_blocks_of_inner_nodes_are_evicted_first_and_restored() -> None:
    pool = make_pool((None, 6))
    tree = RadixTree(pool)
    for end in (8, 16, 24):
        add(tree, range(end))
    in_windows = pool.groups[1].allocator.num_live
    assert [found(tree, range(n)) for n in (8, 16, 24)] == [8, 16, 24]
    found(tree, range(24))
    assert tree.evict(1, 2) == 2 and pool.groups[1].allocator.num_live == in_windows - 2
    assert [found(tree, range(n)) for n in (8, 16, 24)] == [0, 16, 24]
    tree.check_integrity()
    own = new_tables(pool)
    compute(pool, own, range(8))
    tree.insert(range(8), own)
    assert [found(tree, range(n)) for n in (5, 8, 16, 24)] == [5, 8, 16, 24]
    release(pool, own)
    assert pool.groups[1].allocator.num_live == in_windows
    tree.check_integrity()
    pool.check_integrity()


# Accounts -------------------------------------------------------------------------------------------------------------


def test_dropped_tree_releases_its_blocks() -> None:
    pool = make_pool((None, 6))
    tree = RadixTree(pool)
    add(tree, range(20))
    assert pool.stats().cached_blocks == pool.stats().live_blocks > 0
    del tree
    gc.collect(0)
    assert pool.stats().live_blocks == 0 and pool.holders() == []
    pool.check_integrity()


def test_nodes_of_a_dropped_tree_are_freed_without_the_collector() -> None:
    tree = RadixTree(pool := make_pool((None, 6)))
    with without_collector():
        for tail in range(3):
            add(tree, [*range(20), tail, tail])
        assert len(list(tree.nodes())) > 3
        del tree
    assert pool.stats().live_blocks == 0


def test_tree_does_not_keep_its_pool_alive() -> None:
    tree = RadixTree(pool := make_pool())
    add(tree, range(4))
    del pool
    gc.collect(0)
    with pytest.raises(BlockStateError, match="no longer exists"):
        tree.match([1])


@pytest.mark.parametrize("damage", ["blocks", "tokens", "locks", "reference", "valid_from"])
def test_integrity_check_finds_damage(damage: str) -> None:
    pool = make_pool((None, 6))
    tree = RadixTree(pool)
    add(tree, range(6))
    add(tree, range(12))
    parent, child = tree.nodes()
    if damage == "blocks":
        parent.blocks[0].pop()
    elif damage == "tokens":
        parent.tokens += (1,)
    elif damage == "locks":
        child.locks = 1
    elif damage == "valid_from":
        child.valid_from[1] = child.end
    else:
        pool.retain(0, child.blocks[0][:1])
    with pytest.raises(BlockStateError):
        tree.check_integrity()
        pool.check_integrity()


def test_other_threads_can_read_the_tree_while_it_changes() -> None:
    pool = make_pool(num_blocks=40)
    tree = RadixTree(pool)
    errors: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                stats = pool.stats()
                assert stats.cached_blocks <= stats.live_blocks and tree.reclaimable(0) <= 40
                tree.check_integrity()
                pool.check_integrity()
                list(tree.leaves())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for n in range(40):
            add(tree, [n % 3, n % 2, *range(n % 30)])
    finally:
        done.set()
        thread.join()
    assert not errors


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


def test_leaf_is_evicted_from_its_end() -> None:
    tree = RadixTree(pool := make_pool())
    add(tree, range(22))
    assert tree.evict(0, 2) == 2 and found(tree, range(22)) == 16
    add(tree, range(22))
    assert found(tree, range(22)) == 22
    tree.check_integrity()
    assert pool.stats().evictions == 2


def test_kept_prefix_is_evicted_after_newer_ones() -> None:
    tree = RadixTree(pool := make_pool(num_blocks=40))
    add(tree, range(10), keep=10)
    add(tree, range(100, 116))
    assert tree.evict(0, 4) == 4 and (found(tree, range(100, 116)), found(tree, range(10))) == (0, 10)
    add(tree, [*range(10), *range(50, 56)], keep=10)  # tokens after the kept ones are evicted like others
    add(tree, range(100, 116))
    assert tree.evict(0, 1) == 1 and found(tree, [*range(10), *range(50, 56)]) == 12
    assert tree.evict(0, 4) == 4 and found(tree, range(10)) == 10
    assert tree.evict(0, 99) == 3 and len(tree) == 0  # when there is nothing else
    assert pool.stats().cached_blocks == 0


def test_kept_prefixes_are_limited_to_a_share_of_the_budget() -> None:
    tree = RadixTree(pool := make_pool(num_blocks=16))
    size = int(16 * KEPT_SHARE)
    for start in (0, 100, 200, 300):
        add(tree, range(start, start + 12), keep=12)  # 3 blocks
        assert sum(map(tree._nbytes_of, tree._kept)) <= pool.memory.budget * KEPT_SHARE
    assert size // 3 == 2 and sorted(node.tokens[0] for node in tree._kept) == [200, 300]
    add(tree, range(200, 212), keep=12)  # asked for again
    add(tree, range(400, 412), keep=12)
    assert sorted(node.tokens[0] for node in tree._kept) == [200, 400]
    add(tree, range(500, 540), keep=40)  # more than the share
    assert not tree._kept


def test_kept_checkpoints_are_evicted_last() -> None:
    tree = RadixTree(pool := make_pool(num_blocks=400))
    for start in (0, 100, 200):
        tables = hold(pool, range(start, start + 8))
        assert tree.insert_checkpoint(range(start, start + 8), tables, lambda: (64, []), keep=8 * (start == 0))
        release(pool, tables)
    tree.check_integrity()
    assert tree.evict_states(128) == 128
    assert [tree.held_checkpoint([*range(start, start + 8), -1])[0] for start in (0, 100, 200)] == [8, 0, 0]
    assert tree.evict_states(1) == 64 and not tree._kept


def test_locked_nodes_are_not_evicted() -> None:
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
    node = add(tree, range(12))
    tree.lock(node)
    add(tree, [0, 1, 2, 3, 4, 99])
    assert [each.locks for each in node.path()] == [1, 1]
    assert tree.evict(0, 99) == 1 and found(tree, range(12)) == 12
    tree.unlock(node)
    assert tree.evict(0, 99) == 3


def test_blocks_held_by_sequences_are_not_reclaimable() -> None:
    tree = RadixTree(pool := make_pool())
    tables = hold(pool, range(10))
    tree.insert(range(10), tables)
    add(tree, [50, 51])
    stats = pool.stats()
    assert (stats.live_blocks, stats.cached_blocks, tree.reclaimable(0)) == (4, 1, 1)
    assert tree.evict(0, 5) == 1 and found(tree, range(10)) == 10  # eviction that frees nothing is skipped
    release(pool, tables)
    assert (tree.reclaimable(0), pool.stats().cached_blocks) == (3, 3)


def test_leaf_in_use_is_evicted_to_free_the_blocks_of_its_parent() -> None:
    tree = RadixTree(pool := make_pool())
    add(tree, range(8))
    own = hold(pool, range(12))  # computed without a lookup: the tree takes only its third block
    tree.insert(range(12), own)
    assert tree.reclaimable(0) == 2 and tree.evict(0, 2) == 2
    assert found(tree, range(12)) == 0
    check_contents(pool, own, range(12))


def test_pool_evicts_cached_blocks_before_it_raises() -> None:
    pool = make_pool(num_blocks=9)  # eight usable ones
    tree = RadixTree(pool)
    add(tree, range(12))
    add(tree, range(50, 62))
    tables = hold(pool, range(100, 116))
    assert pool.stats().evictions == 2 and [found(tree, t) for t in (range(12), range(50, 62))] == [4, 12]
    before = pool.stats()
    with pytest.raises(PoolExhaustedError):
        pool.append_tokens(tables[0], 17)  # five blocks; four are cached
    assert pool.stats() == before and found(tree, range(50, 62)) == 12  # nothing is evicted if that is not enough
    pool.append_tokens(tables[0], 16)
    assert pool.stats().cached_blocks == 0
    pool.check_integrity()


def test_allocation_in_a_full_pool_inspects_few_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(num_blocks=402)
    tree = RadixTree(pool)
    for n in range(200):
        add(tree, range(1000 * n, 1000 * n + 8))
    tables, looked_at = hold(pool, range(4)), []
    allocator = pool.groups[0].allocator
    refcount = allocator.refcount
    monkeypatch.setattr(allocator, "refcount", lambda block: looked_at.append(block) or refcount(block))
    pool.append_tokens(tables[0], 4)
    assert tree.evictions == 1 and len(looked_at) < 40
    assert PoolBudget(pool, chunk=64).fits([(tables, 8)]) and len(looked_at) < 80
    assert tree.reclaimable(0) == 399 and tree.reclaimable(0, 5) == 5 and tree.reclaimable(0, 500) == 399


def test_large_full_pool_evicts_for_the_next_steps_too() -> None:
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


def test_nodes_are_evicted_in_the_order_of_use() -> None:
    """There are more nodes than one batch of the eviction order; some are in use, and parents become leaves
    meanwhile."""
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
    assert found(tree, range(8)) == 8  # this use keeps the prefix
    clock.now = 11
    assert [found(tree, t) for t in ([*range(8), 1, 2, 3, 4], range(50, 54))] == [8, 0]
    clock.now = 30
    assert found(tree, range(8)) == 0 and len(tree) == 0
    node = add(tree, range(8))
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
