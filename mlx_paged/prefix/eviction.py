"""Which nodes of a RadixTree can free blocks, in what order, and which of their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from .held_blocks import HeldBlocks
from .radix_node import RadixNode

LOOKED_AT = 64  # nodes copied at a time from an order that changes meanwhile


def least_recently_used(held: HeldBlocks, group: int, order: Mapping[RadixNode, None]) -> Iterator[RadixNode]:
    """Return the nodes of a tree that blocks of a group can be evicted from, the least recently used first.

    Only what is asked for is looked at. The caller may remove the nodes it gets, and no others; a parent whose last
    child was removed takes its place among the others.

    Args:
        held: the tree's references.
        group: index of the group.
        order: all nodes of the tree, least recently used first.
    """

    def is_evictable(node: RadixNode) -> bool:
        return not node.locks and (not node.children or (has_window and node.valid_from[group] < node.end))

    has_window = held.windows[group] is not None
    seen, num_nodes = 0, len(order)
    while nodes := list(islice(order, seen - (num_nodes - len(order)), seen + LOOKED_AT - (num_nodes - len(order)))):
        seen += len(nodes)
        for node in nodes:
            while node in order and is_evictable(node):
                yield node
                parent = node.parent
                if node in order or parent is None or parent.tick > node.tick:
                    break  # the node stays, or its parent comes later
                node = parent


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
