"""Which nodes of a RadixTree can free blocks, in what order, and which of their blocks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import count

from .held_blocks import HeldBlocks
from .radix_node import RadixNode


def least_recently_used(held: HeldBlocks, group: int, nodes: Iterable[RadixNode]) -> Iterator[RadixNode]:
    """Those nodes of a tree that blocks of a group can be evicted from, the least recently used first. Nodes may be
    removed meanwhile; a parent whose last child was takes its place among the others."""

    def is_evictable(node: RadixNode) -> bool:
        if node.is_root or node.locks:
            return False
        return not node.children or (has_window and node.valid_from[group] < node.end)

    has_window = held.windows[group] is not None
    serial = count()  # breaks ties, so that nodes are never compared
    heap = [(node.tick, next(serial), node) for node in nodes if is_evictable(node)]
    heapq.heapify(heap)
    while heap:
        _, _, node = heapq.heappop(heap)
        if not node.is_attached:
            continue
        parent = node.parent
        yield node
        if parent is not None and not parent.children and is_evictable(parent):
            heapq.heappush(heap, (parent.tick, next(serial), parent))


def shortest_tail(held: HeldBlocks, leaf: RadixNode, group: int, num_blocks: int) -> int | None:
    """Index of the first block to evict so that the leaf's front stays; None if the whole leaf must go.

    With a window, a prefix is of use only at the ends it was kept for, so there a leaf goes as a whole.
    """
    if any(window is not None for window in held.windows):
        return None
    refcount = held.pool.groups[group].allocator.refcount
    gain, index = 0, len(leaf.blocks[group])
    while index > 0 and gain < num_blocks:
        index -= 1
        gain += refcount(leaf.blocks[group][index]) == 1
    keeps_tokens = (leaf.start // held.block_size + index) * held.block_size > leaf.start
    return index if keeps_tokens and gain >= num_blocks else None
