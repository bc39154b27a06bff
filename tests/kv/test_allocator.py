"""BlockAllocator, and the number of blocks that appends take."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.engine.memory import Append, PoolBudget
from mlx_paged.errors import BlockStateError
from mlx_paged.kv.allocator import NULL_BLOCK, SPACING, BlockAllocator
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool


def allocator_of(num_blocks: int) -> BlockAllocator:
    allocator = BlockAllocator()
    allocator.grow(num_blocks)
    return allocator


def snapshot(allocator: BlockAllocator) -> tuple[object, ...]:
    counts = [allocator.refcount(b) for b in range(allocator.num_blocks)]
    return counts, allocator.num_free, allocator.num_live, allocator.num_shared


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
        assert counted == PoolBudget(pool, chunk=chunk)._blocks(0, Append(table, num_tokens, forked))
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
