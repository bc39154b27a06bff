"""BlockAllocator, BlockTable and BlockOwners, and the number of blocks that appends take."""

import contextlib
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.errors import BlockStateError, PoolExhaustedError
from mlx_paged.kv.allocator import NULL_BLOCK, SPACING, BlockAllocator
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.budget import Append, PoolBudget
from mlx_paged.kv.group import Group, LayerGroup
from mlx_paged.kv.owners import BlockOwners
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import BLOCK_BYTES, kv, pool_of


def allocator_of(num_blocks: int) -> BlockAllocator:
    allocator = BlockAllocator()
    allocator.grow(num_blocks)
    return allocator


def snapshot(allocator: BlockAllocator) -> tuple[object, ...]:
    counts = [allocator.refcount(b) for b in range(allocator.num_blocks)]
    return counts, allocator.num_free, allocator.num_live, allocator.num_shared


def test_a_new_allocator_knows_the_null_block_only() -> None:
    allocator = BlockAllocator()
    assert (allocator.num_blocks, allocator.num_free, allocator.num_live) == (1, 0, 0)
    with pytest.raises(BlockStateError, match="cannot allocate 1 blocks: 0 are free"):
        allocator.allocate(1)


def test_ids_are_handed_out_lowest_first_and_never_the_null_block() -> None:
    allocator = allocator_of(6)
    assert allocator.allocate(5) == [1, 2, 3, 4, 5]
    allocator.release([4, 2, 5])
    assert allocator.allocate(2) == [2, 4]
    allocator.grow(8)
    assert allocator.allocate(3) == [5, 6, 7]


def test_consecutive_blocks_follow_the_last_one_or_leave_room_around_them() -> None:
    allocator = allocator_of(100)
    assert allocator.find(3, NULL_BLOCK) == 1
    assert allocator.allocate(3, 1) == [1, 2, 3]
    assert allocator.find(2, 3) == 4
    second = allocator.find(2, NULL_BLOCK)
    assert second == 4 + SPACING
    assert allocator.allocate(2, second) == [second, second + 1]
    assert allocator.find(SPACING, 3) == 4
    assert allocator.find(SPACING + 1, 3) is None
    assert allocator.find(90, NULL_BLOCK) is None
    assert allocator.allocate(2) == [4, 5], "the lowest"
    allocator.check_integrity([[1, 2, 3], [second, second + 1], [4, 5]])


def test_allocating_too_many_takes_none() -> None:
    allocator = allocator_of(4)
    before = snapshot(allocator)
    with pytest.raises(BlockStateError, match="cannot allocate 4 blocks: 3 are free"):
        allocator.allocate(4)
    assert snapshot(allocator) == before
    assert allocator.allocate(3) == [1, 2, 3]


def test_reference_counts_and_shared_blocks() -> None:
    allocator = allocator_of(4)
    a, b = allocator.allocate(2)
    allocator.retain([a, a, b])
    assert [allocator.refcount(x) for x in (a, b)] == [3, 2]
    assert (allocator.num_shared, allocator.num_live, allocator.num_free) == (2, 2, 1)
    allocator.release([a])
    assert allocator.num_shared == 2
    allocator.release([a, b])
    assert (allocator.num_shared, allocator.num_live) == (0, 2)
    allocator.release([a, b])
    assert (allocator.num_live, allocator.num_free) == (0, 3)


def test_the_null_block_is_skipped() -> None:
    allocator = allocator_of(3)
    (a,) = allocator.allocate(1)
    allocator.retain([NULL_BLOCK, a, NULL_BLOCK])
    allocator.release([NULL_BLOCK, a])
    assert allocator.refcount(NULL_BLOCK) == 0
    assert allocator.refcount(a) == 1
    allocator.check_integrity([[NULL_BLOCK, a, NULL_BLOCK]])


@pytest.mark.parametrize("bad", [2, 4, 99, -1])
@pytest.mark.parametrize("action", ["retain", "release"])
def test_free_and_unknown_blocks_are_refused_before_any_change(action: str, bad: int) -> None:
    allocator = allocator_of(4)
    (a,) = allocator.allocate(1)
    before = snapshot(allocator)
    with pytest.raises(BlockStateError, match=f"block {bad} cannot be {action}"):
        getattr(allocator, action)([a, bad])
    assert snapshot(allocator) == before


def test_double_release_is_refused_also_within_one_call() -> None:
    allocator = allocator_of(4)
    a, b = allocator.allocate(2)
    allocator.retain([b])
    before = snapshot(allocator)
    with pytest.raises(BlockStateError, match=f"block {a} cannot be released more often"):
        allocator.release([b, b, a, a])
    assert snapshot(allocator) == before
    allocator.release([b, b, a])
    assert allocator.num_live == 0
    with pytest.raises(BlockStateError, match=f"block {a} cannot be released: it is free"):
        allocator.release([a])
    assert allocator.num_free == 3


def test_ids_are_dropped_only_when_no_block_is_held() -> None:
    allocator = allocator_of(9)
    ids = allocator.allocate(6)
    with pytest.raises(BlockStateError, match="cannot drop the ids of 6 blocks that are held"):
        allocator.clear()
    allocator.release(ids)
    allocator.clear()
    assert (allocator.num_blocks, allocator.num_free) == (1, 0)
    allocator.grow(3)
    assert allocator.allocate(2) == [1, 2]


def test_check_integrity_sees_leaks_and_missing_references() -> None:
    allocator = allocator_of(5)
    a, b = allocator.allocate(2)
    allocator.retain([a])
    allocator.check_integrity([[a, b], [a]])
    for holders in ([[a, b]], [[a, b], [a, b]], [[a], [a]], [[a, b], [a], [4]]):
        with pytest.raises(BlockStateError, match="reference counts differ"):
            allocator.check_integrity(holders)


def test_check_integrity_sees_a_damaged_free_list_and_count() -> None:
    allocator = allocator_of(4)
    (a,) = allocator.allocate(1)
    allocator._held[a] = 0
    with pytest.raises(BlockStateError, match="the free blocks are not"):
        allocator.check_integrity([[a]])
    allocator._held[a] = 1
    allocator.check_integrity([[a]])
    allocator._num_shared += 1
    with pytest.raises(BlockStateError, match="shared"):
        allocator.check_integrity([[a]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release", "grow"]), st.integers(0, 7)), max_size=60))
def test_random_operations_agree_with_a_counter(operations: list[tuple[str, int]]) -> None:
    allocator = allocator_of(4)
    known = 4
    counts: Counter[int] = Counter()
    for name, number in operations:
        if name == "grow":
            known += number % 3
            allocator.grow(known)
        elif name == "allocate":
            free = [b for b in range(1, known) if not counts[b]]
            if number > len(free):
                with pytest.raises(BlockStateError):
                    allocator.allocate(number)
            else:
                assert allocator.allocate(number) == free[:number]
                counts.update(free[:number])
        elif counts[number]:
            getattr(allocator, name)([number])
            counts[number] += 1 if name == "retain" else -1
        elif number != NULL_BLOCK:
            with pytest.raises(BlockStateError):
                getattr(allocator, name)([number])
        live = [b for b in range(1, known) if counts[b]]
        assert [allocator.refcount(b) for b in range(1, known)] == [counts[b] for b in range(1, known)]
        assert (allocator.num_live, allocator.num_free) == (len(live), known - 1 - len(live))
        assert allocator.num_shared == sum(counts[b] > 1 for b in live)
        allocator.check_integrity([list(counts.elements())])


def table_of(block_ids: list[int], length: int, block_size: int = 4) -> BlockTable:
    table = BlockTable(0, block_size)
    table.block_ids.extend(block_ids)
    table.length = length
    return table


@pytest.mark.parametrize(
    ("length", "new", "expected"),
    [(0, 1, 1), (0, 4, 1), (0, 5, 2), (3, 1, 0), (3, 2, 1), (4, 1, 1), (4, 8, 2), (5, 3, 0), (5, 4, 1)],
)
def test_blocks_for(length: int, new: int, expected: int) -> None:
    assert table_of(list(range(1, -(-length // 4) + 1)), length).blocks_for(new) == expected


def test_num_blocks_leaves_out_null_blocks() -> None:
    assert table_of([NULL_BLOCK, NULL_BLOCK, 7, 3], 15).num_blocks == 2


def test_repr_says_what_it_holds() -> None:
    table = table_of([NULL_BLOCK, 3], 6)
    assert repr(table) == "BlockTable(group=0, length=6, logical_start=0, blocks=1)"
    table.released = True
    assert "released" in repr(table)


class Cache:
    """A prefix cache that holds some blocks of group 0."""

    evictions = hit_tokens = 0

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.group: Group | None = None

    def held(self, group: int) -> list[list[int]]:
        return [self.blocks]

    def reclaimable(self, group: int, enough: int | None = None) -> int:
        return len(self.blocks)

    def evict(self, group: int, num_blocks: int) -> int:
        assert self.group is not None
        gone, self.blocks = self.blocks[:num_blocks], self.blocks[num_blocks:]
        self.group.allocator.release(gone)
        return len(gone)

    state_nbytes = 0

    def evict_states(self, num_bytes: int) -> int:
        return 0


class UnvisitedLock(contextlib.nullcontext[bool]):
    """A lock that another thread holds whenever a finalizer asks for it."""

    def visit(self) -> None:
        pass


def some_holders(num_blocks: int = 9) -> tuple[BlockOwners, Group]:
    group = Group(LayerGroup((0,)), 4)
    group.allocator.grow(num_blocks)
    return BlockOwners([group], UnvisitedLock()), group


def a_table(holders: BlockOwners, group: Group, num_blocks: int) -> BlockTable:
    table = holders.add_table(BlockTable(0, 4))
    table.block_ids.extend(group.allocator.allocate(num_blocks))
    return table


def test_blocks_of_a_dropped_table_are_freed_by_collect() -> None:
    holders, group = some_holders()
    table = a_table(holders, group, 3)
    assert holders.tables() == [table]
    kept = a_table(holders, group, 1)
    del table
    assert holders.tables() == [kept] and group.allocator.num_live == 4 and holders.has_abandoned
    holders.collect()
    holders.collect()
    assert group.allocator.num_live == 1 and not holders.has_abandoned


def test_check_refuses_released_and_foreign_tables() -> None:
    holders, group = some_holders()
    table, stranger = a_table(holders, group, 1), a_table(*some_holders(), 1)
    holders.check(table)
    table.released = True
    for wrong in (table, stranger, BlockTable(0, 4)):
        with pytest.raises(BlockStateError, match="was released, or belongs to another pool"):
            holders.check(wrong)


def test_caches_are_evicted_in_order_and_held_weakly() -> None:
    holders, group = some_holders()
    first, second = (Cache(group.allocator.allocate(n)) for n in (2, 3))
    for cache in (first, second):
        cache.group = group
        holders.add_cache(cache)
    assert holders.reclaimable(0) == 5
    holders.evict(0, 3)
    assert (len(first.blocks), len(second.blocks)) == (0, 2)
    del first, cache
    assert holders.caches() == [second]


SIZE = 4


def one_group(window: int | None) -> BlockPool:
    return BlockPool([LayerGroup((0,), window, "one")], block_size=SIZE)


@pytest.mark.parametrize("window", [None, 1, 6, 8, 13])
def test_append_takes_exactly_the_counted_blocks(window: int | None) -> None:
    rng = random.Random(f"{window}")
    pool = one_group(window)
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
        assert allocator.num_live - before == counted, "the other owner keeps a copied block"
        assert shared <= (counted > 0)
        pool.check_integrity()


@pytest.mark.parametrize("window", [None, 6, 8, 13])
@pytest.mark.parametrize("forked", [False, True])
def test_append_in_chunks_takes_at_most_the_counted_blocks(window: int | None, forked: bool) -> None:
    rng = random.Random(f"{window} {forked}")
    for _ in range(40):
        pool, chunk = one_group(window), rng.choice([3, 4, 7])
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


def test_blocks_to_append_without_a_table_equal_those_of_an_empty_one() -> None:
    for window in (None, 5, 8):
        pool = one_group(window)
        for num_tokens in range(1, 30):
            of_none = pool.groups[0].blocks_to_append(None, num_tokens)
            assert of_none == pool.groups[0].blocks_to_append(pool.new_table(), num_tokens) == -(-num_tokens // SIZE)


def test_pool_budget_agrees_with_the_memory_budget() -> None:
    pool = pool_of(memory_budget=6 * BLOCK_BYTES)  # five blocks and the null block
    k, v = kv(0, 1)
    pool.set_geometry(0, k, v, batch=1)
    budget = PoolBudget(pool, chunk=16)
    assert budget.holds(20) and not budget.holds(21) and budget.bytes_for(20) == 6 * BLOCK_BYTES
    assert budget.fits([Append(None, 12), Append(None, 8)]) and not budget.fits([Append(None, 12), Append(None, 9)])
    error = budget.exhausted(None, 21)
    assert isinstance(error, PoolExhaustedError) and error.blocks_needed == 6
