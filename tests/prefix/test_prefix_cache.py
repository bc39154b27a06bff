"""Prefixes in whole blocks: what is found, stored, evicted, and in what order."""

import gc
import weakref

import pytest

from mlx_paged.errors import BlockStateError
from mlx_paged.prefix import prefix_cache
from mlx_paged.prefix.prefix_cache import KEPT_SHARE, PrefixCache
from tests.support.prefixes import add, check_contents, compute, found, hold, make_pool, make_tree


def test_whole_blocks_are_found_and_the_last_token_is_left_to_compute() -> None:
    cache, _pool = make_tree((None,))
    add(cache, range(10), "a")
    assert [found(cache, range(n), "a") for n in (3, 4, 5, 8, 10, 12)] == [0, 4, 4, 8, 8, 8]
    assert [cache.match(tokens, "a").length for tokens in (range(8), [*range(6), 99, 98], [99, *range(8)], [])] == [
        4,
        4,
        0,
        0,
    ]
    assert [found(cache, range(10), salt) for salt in ("a", "b", None, 1)] == [8, 0, 0, 0]


def test_tokens_are_compared_on_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks whose keys collide are not taken for each other."""
    monkeypatch.setattr(prefix_cache, "next_key", lambda key, tokens: key[:8] + bytes(8))
    cache, _pool = make_tree((None,))
    add(cache, range(4))
    assert cache.match([5, 6, 7, 8, 9]).length == 0
    add(cache, [5, 6, 7, 8])
    assert len(cache.entries) == 1 and cache.match([0, 1, 2, 3, 9]).length == 4


def test_a_path_that_was_found_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, pool = make_tree((None,))
    add(cache, range(20))
    match, table = cache.adopt(range(24))
    hashed: list[tuple[int, ...]] = []
    own = prefix_cache.next_key
    monkeypatch.setattr(prefix_cache, "next_key", lambda key, tokens: hashed.append(tokens) or own(key, tokens))
    compute(pool, table, range(24))
    cache.insert(range(24), table, after=match.path)
    assert cache.match(range(24), after=match.path).path == [*match.path] and hashed == [(20, 21, 22, 23)]
    pool.release_table(table)
    cache.evict(0, 3)  # leaves first: what is left of the path is used
    assert cache.match(range(24), after=match.path) == cache.match(range(24)) and cache.match(range(24)).length == 12


def test_short_prefixes_are_not_spread_over_more_memory_than_they_hold() -> None:
    """Their sequences had room to grow into, which later ones use."""
    cache, pool = make_tree((None,))
    for n in range(300):
        add(cache, range(10 * n, 10 * n + 6))
    stats = pool.stats()
    assert stats.cached_blocks == 300 and stats.total_blocks < 600


@pytest.mark.parametrize("problem", ["too short", "released", "other pool"])
def test_tables_that_do_not_hold_the_tokens_are_refused(problem: str) -> None:
    cache, pool = make_tree((None, None))
    table = hold(pool, range(8))
    if problem == "released":
        pool.release_table(table)
    if problem == "other pool":
        table = hold(make_pool(), range(8))
    with pytest.raises(ValueError, match="does not hold"):
        cache.insert(range(9 if problem == "too short" else 8), table)
    assert not cache.entries


# Windows -------------------------------------------------------------------------------------------------------------


def test_blocks_inside_a_window_group_go_first_and_come_back() -> None:
    cache, pool = make_tree((None, 6))
    for end in (12, 24):
        table = hold(pool, range(end))
        cache.insert(range(end), table)
        pool.release_table(table)
    in_windows, num_entries = cache.reclaimable(1), len(cache.entries)
    assert cache.evict(1, 1) == 1 and len(cache.entries) == num_entries
    cache.check_integrity()
    pool.check_integrity()
    assert cache.reclaimable(1) == in_windows - 1 and found(cache, range(24)) == 24


# Who holds what ------------------------------------------------------------------------------------------------------


def test_dropped_cache_releases_its_blocks_without_the_collector() -> None:
    gc.disable()
    try:
        cache, pool = make_tree((None, 5))
        for n in range(4):
            add(cache, [n, *range(20)])
        assert pool.stats().live_blocks > 0
        reference = weakref.ref(cache)
        del cache
        assert reference() is None
        pool.lock.collect()
        assert pool.stats().live_blocks == 0
    finally:
        gc.enable()


def test_cache_does_not_keep_its_pool_alive() -> None:
    cache, pool = make_tree((None,))
    reference = weakref.ref(pool)
    del pool
    gc.collect()
    assert reference() is None
    with pytest.raises(BlockStateError, match="no longer exists"):
        cache.match([1, 2])


@pytest.mark.parametrize("damage", ["blocks", "children", "order", "key"])
def test_integrity_check_finds_damage(damage: str) -> None:
    cache, _pool = make_tree((None,))
    add(cache, range(12))
    leaf, *_, first = cache.entries.values()
    if damage == "blocks":
        leaf.blocks[0] += 1
    elif damage == "children":
        leaf.num_children += 1
    elif damage == "order":
        cache.entries.move_to_end(leaf.key)
    elif damage == "key":
        cache.entries[b"other"] = cache.entries.pop(first.key)
    with pytest.raises(BlockStateError):
        cache.check_integrity()


# Eviction ------------------------------------------------------------------------------------------------------------


def test_least_recently_used_leaf_is_evicted_first() -> None:
    cache, _pool = make_tree((None,))
    prompts = [[n, *range(11)] for n in range(4)]
    for tokens in prompts:
        add(cache, tokens)
    found(cache, prompts[0])
    assert cache.evict(0, 4) == 4
    assert [found(cache, tokens) for tokens in prompts] == [12, 0, 8, 12]
    cache.check_integrity()


def test_match_of_a_waiting_request_is_evicted_after_the_others() -> None:
    cache, _pool = make_tree((None,))
    for n in range(2):
        add(cache, [n, *range(11)])
    assert cache.match([0, *range(12)]).length == 12
    assert cache.evict(0, 3) == 3
    assert cache.match([0, *range(12)]).length == 12
    cache.check_integrity()


def test_entry_in_use_is_evicted_to_reach_those_before_it() -> None:
    """A sequence has a block of its own for tokens that another one inserted first."""
    cache, pool = make_tree((None,))
    table = hold(pool, range(8))
    other = hold(pool, range(4))
    cache.insert(range(4), other)
    pool.release_table(other)
    cache.insert(range(8), table)
    assert cache.reclaimable(0) == 1
    assert cache.evict(0, 1) == 1 and not cache.entries
    check_contents(pool, table, range(8))
    pool.release_table(table)


def test_kept_prefix_is_evicted_after_newer_ones() -> None:
    cache, _pool = make_tree((None,))
    add(cache, range(12), keep=8)
    for n in range(3):
        add(cache, [n + 50, *range(7)])
    assert cache.evict(0, 7) == 7
    assert found(cache, range(12)) == 8
    assert cache.evict(0, 2) == 2 and not cache.entries


def test_kept_prefixes_are_limited_to_a_share_of_the_budget() -> None:
    pool = make_pool(num_blocks=20)
    cache = PrefixCache(pool)
    for n in range(8):
        add(cache, [n + 50, *range(7)], keep=8)
    assert 0 < len(cache._kept) <= 20 * KEPT_SHARE
    cache.check_integrity()


def test_time_to_live() -> None:
    now = [0.0]
    pool = make_pool()
    cache = PrefixCache(pool, ttl=10, clock=lambda: now[0])
    add(cache, range(8))
    add(cache, [50, *range(7)])
    now[0] = 6
    assert found(cache, range(8)) == 8
    now[0] = 11
    cache.expire()
    assert (found(cache, range(8)), len(cache.entries)) == (8, 2)
    now[0] = 30
    assert found(cache, range(8)) == 0 and pool.stats().live_blocks == 0


def test_caches_of_a_pool_are_evicted_in_order_and_held_weakly() -> None:
    first, pool = make_tree([None])
    second = PrefixCache(pool)
    for cache, tokens in ((first, range(8)), (second, range(100, 112))):
        cache.insert(tokens, table := hold(pool, tokens))
        pool.release_table(table)
    pool.memory.evict(3 * pool.groups[0].bytes_per_block)
    assert (len(first.entries), len(second.entries)) == (0, 2)
    del first, cache
    assert pool.memory.holders() == [second]
