"""BlockOwners: tables give their blocks back once, however they go, and whoever holds moved blocks is told."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from mlx_paged.errors import BlockStateError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import BlockGroup, LayerGroup
from mlx_paged.kv.idle import IdleWatch
from mlx_paged.kv.owners import BlockOwners


class Cache:
    """A prefix cache that holds some blocks of group 0."""

    evictions = hit_tokens = 0

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.group: BlockGroup | None = None

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

    def renumber(self, group: int, moves: dict[int, int]) -> None:
        self.blocks = [moves.get(b, b) for b in self.blocks]


def some_holders(num_blocks: int = 9) -> tuple[BlockOwners, BlockGroup]:
    group = BlockGroup(LayerGroup((0,)), 4)
    group.allocator.grow(num_blocks)
    watch = cast(IdleWatch, SimpleNamespace(note=lambda: None, put=lambda abandoned, blocks: abandoned.append(blocks)))
    return BlockOwners([group], threading.RLock(), watch), group


def a_table(holders: BlockOwners, group: BlockGroup, num_blocks: int) -> BlockTable:
    table = holders.add_table(BlockTable(0, 4))
    table.block_ids.extend(group.allocator.allocate(num_blocks))
    return table


def test_a_dropped_table_gives_its_blocks_back_when_they_are_collected() -> None:
    holders, group = some_holders()
    table = a_table(holders, group, 3)
    assert holders.tables() == [table]
    del table
    assert holders.tables() == [] and group.allocator.num_live == 3
    holders.collect()
    holders.collect()
    assert group.allocator.num_live == 0


def test_only_tables_in_use_of_these_holders_pass() -> None:
    holders, group = some_holders()
    table, stranger = a_table(holders, group, 1), a_table(*some_holders(), 1)
    holders.check(table)
    table.released = True
    for wrong in (table, stranger, BlockTable(0, 4)):
        with pytest.raises(BlockStateError, match="after release, or of another pool"):
            holders.check(wrong)


def test_everyone_who_holds_a_moved_block_has_its_new_id() -> None:
    holders, group = some_holders()
    table, dropped = a_table(holders, group, 2), a_table(holders, group, 2)
    cache = Cache(group.allocator.allocate(1))
    abandoned = group.allocator.allocate(1)
    holders.add_cache(cache)
    holders.abandon(0, abandoned)
    version = table.version
    del dropped
    holders.renumber(0, {1: 11, 3: 13, 5: 15, 6: 16})
    assert (table.block_ids, cache.blocks, abandoned) == ([11, 2], [15], [16]) and table.version > version
    holders.renumber(0, {11: 1, 13: 3, 15: 5, 16: 6})
    holders.collect()
    assert sorted(table.block_ids + cache.blocks) == [1, 2, 5] and group.allocator.num_live == 3


def test_caches_are_asked_in_turn_and_not_kept() -> None:
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
