"""BlockTable: how tokens lie in blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.kv.allocator import NULL_BLOCK
from mlx_paged.kv.block_table import BlockTable, Segment


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


def test_consecutive_whole_blocks_are_one_segment() -> None:
    assert table_of([5, 6, 7], 12).tail_segments(12) == [Segment(5, 3, 0, 12, 0)]


def test_segments_break_at_gaps_and_at_descending_ids() -> None:
    assert table_of([5, 6, 8, 7], 16).tail_segments(16) == [
        Segment(5, 2, 0, 8, 0),
        Segment(8, 1, 0, 4, 8),
        Segment(7, 1, 0, 4, 12),
    ]


def test_partial_blocks_at_both_ends_stand_alone_even_if_consecutive() -> None:
    assert table_of([1, 2, 3, 4], 14).tail_segments(12) == [
        Segment(1, 1, 2, 2, 0),
        Segment(2, 2, 0, 8, 2),
        Segment(4, 1, 0, 2, 10),
    ]


def test_a_run_inside_one_block() -> None:
    assert table_of([9, 2], 7).tail_segments(2) == [Segment(2, 1, 1, 2, 0)]
    assert table_of([9, 2], 7).tail_segments(0) == []


def test_cached_segments_follow_length_and_are_forgotten_with_the_blocks() -> None:
    table = table_of([3, 4], 5)
    first = table.tail_segments(1)
    assert first == [Segment(4, 1, 0, 1, 0)]
    assert table.tail_segments(1) is first
    table.length = 6
    assert table.tail_segments(1) == [Segment(4, 1, 1, 1, 0)]
    table.block_ids[1] = 9
    table.forget_indices()
    assert table.tail_segments(1) == [Segment(9, 1, 1, 1, 0)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from([4, 8, 16]), st.integers(1, 90), st.data())
def test_segments_place_every_token_once(block_size: int, length: int, data: st.DataObject) -> None:
    num_blocks = -(-length // block_size)
    ids = data.draw(st.permutations(range(1, num_blocks + 1)))
    num_tokens = data.draw(st.integers(1, length))
    table = table_of(list(ids), length, block_size)
    placed: dict[int, tuple[int, int]] = {}
    for block_id, blocks, offset, count, source in table.tail_segments(num_tokens):
        assert (blocks == 1 and offset + count <= block_size) or (offset == 0 and count == blocks * block_size)
        for i in range(count):
            assert source + i not in placed
            placed[source + i] = (block_id + (offset + i) // block_size, (offset + i) % block_size)
    first = length - num_tokens
    assert placed == {i: (ids[(first + i) // block_size], (first + i) % block_size) for i in range(num_tokens)}


def test_repr_says_what_it_holds() -> None:
    table = table_of([NULL_BLOCK, 3], 6)
    assert repr(table) == "BlockTable(group=0, length=6, logical_start=0, blocks=1)"
    table.released = True
    assert "released" in repr(table)
