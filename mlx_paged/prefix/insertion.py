"""How a RadixTree takes the blocks of an inserted prefix that it does not have yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..kv.allocator import NULL_BLOCK
from ..kv.block_table import BlockTable
from .radix_node import RadixNode

if TYPE_CHECKING:
    from .radix import RadixTree


def add_leaf(tree: RadixTree, parent: RadixNode, tokens: tuple[int, ...], tables: Sequence[BlockTable]) -> int:
    start, size = parent.end, tree.block_size
    first, last = start // size, -(-len(tokens) // size)
    leaf = RadixNode(tokens[start:], start, parent, [], [])
    taken = 0
    for table in tables:
        valid_from = min(max(table.logical_start, first * size), len(tokens))
        held = table.block_ids[valid_from // size : last] if valid_from < len(tokens) else []
        tree.hold_blocks(table.group, held)
        leaf.blocks.append([NULL_BLOCK] * (last - first - len(held)) + held)
        leaf.valid_from.append(valid_from)
        taken += len(held)
    parent.children[tokens[start]] = leaf
    return taken


def replace_tail(tree: RadixTree, node: RadixNode, tables: Sequence[BlockTable]) -> int:
    """Where the node's partial tail block is its alone, hold the longer one of the tables in its place: one block
    then serves both this prefix and the one about to go on from it."""
    index, offset = divmod(node.end, tree.block_size)
    if not offset:
        return 0
    taken = 0
    for table in tables:
        valid_from = max(node.valid_from[table.group], index * tree.block_size)
        old = node.blocks[table.group][-1]
        if old == NULL_BLOCK or tree.references(table.group, old) > 1 or table.logical_start > valid_from:
            continue
        new = table.block_ids[index]
        if new == old:
            continue
        tree.hold_blocks(table.group, [new])
        node.blocks[table.group][-1] = new
        tree.unhold_blocks(table.group, [old])
        taken += 1
    return taken


def improves(tree: RadixTree, node: RadixNode, tables: Sequence[BlockTable], end: int) -> bool:
    """Whether the tables hold keys of the node's tokens before ``end`` that the node has given up."""
    floor = node.start // tree.block_size * tree.block_size
    return any(max(t.logical_start, floor) < min(node.valid_from[t.group], end) for t in tables)


def heal(tree: RadixTree, node: RadixNode, tables: Sequence[BlockTable]) -> int:
    """Take the blocks of a window group that the node has given up and the tables hold."""
    size, taken = tree.block_size, 0
    first = node.start // size
    for table in tables:
        group, old_start = table.group, node.valid_from[table.group]
        new_start = max(table.logical_start, first * size)
        if new_start >= old_start or new_start >= node.end:
            continue
        low, high = new_start // size, -(-old_start // size)
        new = table.block_ids[low:high]
        tree.hold_blocks(group, new)
        old = [b for b in node.blocks[group][low - first : high - first] if b != NULL_BLOCK]
        node.blocks[group][low - first : high - first] = new
        node.valid_from[group] = new_start
        tree.unhold_blocks(group, old)
        taken += len(new)
    return taken
