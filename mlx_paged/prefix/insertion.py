"""How the nodes of a RadixTree take the blocks of an inserted prefix that they do not have yet."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv.allocator import NULL_BLOCK
from ..kv.block_table import BlockTable
from ..kv.storage.scoring import Window
from .held_blocks import HeldBlocks
from .radix_node import RadixNode


def check_tables(windows: Sequence[Window | None], tokens: tuple[int, ...], tables: Sequence[BlockTable]) -> None:
    """Raise ValueError unless the tables, one per group, hold the tokens."""
    if not tokens:
        raise ValueError("a prefix has at least one token")
    if [table.group for table in tables] != list(range(len(windows))):
        raise ValueError("one table per group of the pool, in order")
    for table, window in zip(tables, windows, strict=True):
        if table.released or table.length < len(tokens):
            raise ValueError(f"{table} does not hold {len(tokens)} tokens")
        if window is None and table.logical_start:
            raise ValueError(f"{table} does not hold its first tokens")


def split(held: HeldBlocks, node: RadixNode, at: int) -> RadixNode:
    """See :meth:`RadixNode.split`; with the reference that both sides need on a block they share."""
    upper = node.split(at, held.block_size)
    if upper.end % held.block_size:
        for group, blocks in enumerate(upper.blocks):
            held.hold(group, blocks[-1:])
    return upper


def add_leaf(held: HeldBlocks, parent: RadixNode, tokens: tuple[int, ...], tables: Sequence[BlockTable]) -> int:
    """Hang a leaf with the tokens behind the parent's on it. Returns the blocks taken, as the others here."""
    start, size = parent.end, held.block_size
    first, last = start // size, -(-len(tokens) // size)
    leaf = RadixNode(tokens[start:], start, parent, [], [])
    taken = 0
    for table in tables:
        valid_from = min(max(table.logical_start, first * size), len(tokens))
        ids = table.block_ids[valid_from // size : last] if valid_from < len(tokens) else []
        held.hold(table.group, ids)
        leaf.blocks.append([NULL_BLOCK] * (last - first - len(ids)) + ids)
        leaf.valid_from.append(valid_from)
        taken += len(ids)
    parent.children[tokens[start]] = leaf
    return taken


def replace_tail(held: HeldBlocks, node: RadixNode, tables: Sequence[BlockTable]) -> int:
    """Where the node's partial tail block is its alone, hold the longer one of the tables in its place: one block
    then serves both this prefix and the one about to go on from it."""
    index, offset = divmod(node.end, held.block_size)
    if not offset:
        return 0
    taken = 0
    for table in tables:
        group = table.group
        valid_from = max(node.valid_from[group], index * held.block_size)
        old = node.blocks[group][-1]
        if old == NULL_BLOCK or held.counts[group][old] > 1 or table.logical_start > valid_from:
            continue
        new = table.block_ids[index]
        if new == old:
            continue
        held.hold(group, [new])
        node.blocks[group][-1] = new
        held.drop(group, [old])
        taken += 1
    return taken


def improves(held: HeldBlocks, node: RadixNode, tables: Sequence[BlockTable], end: int) -> bool:
    """Whether the tables hold keys of the node's tokens before ``end`` that the node's blocks do not hold any more."""
    floor = node.start // held.block_size * held.block_size
    return any(max(t.logical_start, floor) < min(node.valid_from[t.group], end) for t in tables)


def refill(held: HeldBlocks, node: RadixNode, tables: Sequence[BlockTable]) -> int:
    """Take the blocks of a window group that were evicted from the node and that the tables hold."""
    size, taken = held.block_size, 0
    first = node.start // size
    for table in tables:
        group, old_start = table.group, node.valid_from[table.group]
        new_start = max(table.logical_start, first * size)
        if new_start >= old_start or new_start >= node.end:
            continue
        low, high = new_start // size, -(-old_start // size)
        new, replaced = table.block_ids[low:high], slice(low - first, high - first)
        held.hold(group, new)
        old, node.blocks[group][replaced] = node.blocks[group][replaced], new
        node.valid_from[group] = new_start
        held.drop(group, old)
        taken += len(new)
    return taken
