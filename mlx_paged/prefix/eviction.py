"""Which nodes of a RadixTree give blocks up, and in what order."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from ..kv.allocator import NULL_BLOCK
from .radix_node import RadixNode

if TYPE_CHECKING:
    from .radix import RadixTree


def evict_blocks(tree: RadixTree, group: int, num_blocks: int) -> int:
    """See RadixTree.evict; the pool's lock is held."""
    serial = count()  # breaks ties, so that nodes are never compared
    freed = 0
    # Nodes whose blocks are all in use elsewhere go only in the second round, where they stand before others.
    for only_useful in (True, False):
        if freed >= num_blocks:
            break
        target = num_blocks if only_useful else min(num_blocks, freed + tree.reclaimable(group))
        queue = [(node.tick, next(serial), node) for node in tree.nodes() if _may_give(tree, node, group)]
        heapq.heapify(queue)
        while queue and freed < target:
            _, _, node = heapq.heappop(queue)
            if not _is_in_tree(node) or (only_useful and not _gain(tree, node, group)):
                continue
            parent = node.parent
            freed += _give_up(tree, node, group, target - freed)
            if parent is not None and not parent.children and _may_give(tree, parent, group):
                heapq.heappush(queue, (parent.tick, next(serial), parent))
    return freed


def _may_give(tree: RadixTree, node: RadixNode, group: int) -> bool:
    if node.is_root or node.locks:
        return False
    return not node.children or (tree.windows[group] is not None and node.valid_from[group] < node.end)


def _is_in_tree(node: RadixNode) -> bool:
    return node.parent is not None and node.parent.children.get(node.tokens[0]) is node


def _gain(tree: RadixTree, node: RadixNode, group: int) -> int:
    allocator = tree.pool.groups[group].allocator
    return sum(b != NULL_BLOCK and allocator.refcount(b) == 1 for b in node.blocks[group])


def _give_up(tree: RadixTree, node: RadixNode, group: int, num_blocks: int) -> int:
    """Free ``num_blocks`` blocks of the group at this node, or what it has. Returns how many became free."""
    if node.children:
        # An inner node of a window group: prefixes that end beyond its window need only what comes after it.
        tree.notify(node)
        freed = tree.drop_blocks(group, node.blocks[group])
        node.blocks[group] = [NULL_BLOCK] * len(node.blocks[group])
        node.valid_from[group] = node.end
        return freed
    index = _shortest_tail(tree, node, group, num_blocks)
    if index is None:
        free_before = tree.pool.groups[group].allocator.num_free
        tree.remove(node)
        return tree.pool.groups[group].allocator.num_free - free_before
    tree.notify(node)
    node.tokens = node.tokens[: (node.start // tree.block_size + index) * tree.block_size - node.start]
    gone = [blocks[index:] for blocks in node.blocks]
    for blocks in node.blocks:
        del blocks[index:]
    dropped = [tree.drop_blocks(each, blocks) for each, blocks in enumerate(gone)]
    return dropped[group]


def _shortest_tail(tree: RadixTree, leaf: RadixNode, group: int, num_blocks: int) -> int | None:
    """Index of the first block to drop so that the leaf's front stays; None if the whole leaf must go.

    With a window, a prefix is of use only at the ends it was kept for, so there a leaf goes as a whole.
    """
    if any(window is not None for window in tree.windows):
        return None
    allocator = tree.pool.groups[group].allocator
    gain, index = 0, len(leaf.blocks[group])
    while index > 0 and gain < num_blocks:
        index -= 1
        gain += allocator.refcount(leaf.blocks[group][index]) == 1
    keeps_tokens = (leaf.start // tree.block_size + index) * tree.block_size > leaf.start
    return index if keeps_tokens and gain >= num_blocks else None
