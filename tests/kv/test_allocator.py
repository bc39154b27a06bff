"""BlockAllocator: free list, reference counts, and errors that change nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.errors import BlockStateError
from mlx_paged.kv.allocator import NULL_BLOCK, BlockAllocator


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
    with pytest.raises(BlockStateError, match="1 blocks asked for, 0 free"):
        allocator.allocate(1)


def test_ids_are_handed_out_lowest_first_and_never_the_null_block() -> None:
    allocator = allocator_of(6)
    assert allocator.allocate(5) == [1, 2, 3, 4, 5]
    allocator.release([4, 2, 5])
    assert allocator.allocate(2) == [2, 4]
    allocator.grow(8)
    assert allocator.allocate(3) == [5, 6, 7]


def test_allocating_too_many_takes_none() -> None:
    allocator = allocator_of(4)
    before = snapshot(allocator)
    with pytest.raises(BlockStateError, match="4 blocks asked for, 3 free"):
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
    with pytest.raises(BlockStateError, match=f"block {bad} {action}"):
        getattr(allocator, action)([a, bad])
    assert snapshot(allocator) == before


def test_double_release_is_refused_also_within_one_call() -> None:
    allocator = allocator_of(4)
    a, b = allocator.allocate(2)
    allocator.retain([b])
    before = snapshot(allocator)
    with pytest.raises(BlockStateError, match=f"block {a} released more often"):
        allocator.release([b, b, a, a])
    assert snapshot(allocator) == before
    allocator.release([b, b, a])
    assert allocator.num_live == 0
    with pytest.raises(BlockStateError, match=f"block {a} released while free"):
        allocator.release([a])
    assert allocator.num_free == 3


def test_shrink_forgets_trailing_free_blocks_only() -> None:
    allocator = allocator_of(9)
    allocator.allocate(6)
    allocator.release([2, 5, 6])
    allocator.shrink()
    assert (allocator.num_blocks, allocator.num_free, allocator.num_live) == (5, 1, 3)
    allocator.check_integrity([[1, 3, 4]])
    allocator.grow(7)
    assert allocator.allocate(3) == [2, 5, 6]
    allocator.release([1, 2, 3, 4, 5, 6])
    allocator.shrink()
    assert (allocator.num_blocks, allocator.num_free) == (1, 0)


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
    allocator._free.append(a)
    with pytest.raises(BlockStateError, match="free list"):
        allocator.check_integrity([[a]])
    allocator._free.remove(a)
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
