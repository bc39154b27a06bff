"""What the nodes along a path can serve, tables over it, and whether a whole tree's nodes agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from ..errors import BlockStateError
from ..kv.allocator import NULL_BLOCK
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.storage.scoring import Window
from .radix_node import RadixNode

Windows = Sequence[Window | None]


def servable_length(path: Sequence[RadixNode], limit: int, windows: Windows, block_size: int) -> int:
    """The longest prefix of the path, up to ``limit`` tokens, of which every group holds what the next token needs."""
    length = limit
    while True:
        shortest = min(_servable_by(group, path, length, window, block_size) for group, window in enumerate(windows))
        if shortest == length:
            return length
        length = shortest


def _servable_by(group: int, path: Sequence[RadixNode], limit: int, window: Window | None, block_size: int) -> int:
    run_start, best = 0, 0  # keys are held without a gap from run_start to the end of the node looked at
    for node in path:
        end = min(node.end, limit)
        if node.start >= end:
            break
        floor = node.start // block_size * block_size
        valid_from = node.valid_from[group]
        # A node's first block is right from its beginning, so a run may begin a little before the node.
        run_start = min(run_start, floor) if valid_from <= floor else valid_from
        needed = _needed_from(window, end)
        if run_start <= needed:
            best = end
        elif _needed_from(window, needed) == needed:  # what comes next there sees itself only, as at a chunk's start
            best = max(best, needed)
    return best


def _needed_from(window: Window | None, length: int) -> int:
    """Of a prefix of so many tokens, the first one that the next token sees."""
    return 0 if window is None else window.first_seen(length)


def path_blocks(path: Sequence[RadixNode], length: int, windows: Windows, block_size: int) -> tuple[list[int], ...]:
    """Per group, the blocks of a servable prefix by absolute position, null behind the window.

    Where two nodes hold a block for the same position, the deeper one's (see RadixNode).
    """
    result = []
    for group, window in enumerate(windows):
        ids = [NULL_BLOCK] * -(-length // block_size)
        for node in path:
            first = node.start // block_size
            blocks = node.blocks[group][: len(ids) - first]
            ids[first : first + len(blocks)] = blocks
        needed = _needed_from(window, length)
        behind = min(len(ids), needed // block_size)
        ids[:behind] = [NULL_BLOCK] * behind
        if needed == length:
            del ids[behind:]  # nothing is visible: the block that the next token falls into is its own
        result.append(ids)
    return tuple(result)


def table_over(pool: BlockPool, group: int, block_ids: Sequence[int], length: int) -> BlockTable:
    """A table over blocks that others hold too, with a reference of its own on each, as a prefill cut at ``length``
    would have left it.

    Args:
        pool: the blocks' pool.
        group: index of their group.
        block_ids: by absolute position, ``ceil(length / block_size)`` of them; null behind the group's window, but for
            pinned tokens. Where the next token sees itself only, whole blocks.
        length: tokens they hold.
    """
    spec = pool.groups[group].spec
    with pool.lock:
        table = pool.new_table(group)
        pool.retain(group, block_ids)
        table.block_ids.extend(block_ids)
        table.length = length
        table.logical_start, table.ring_origin = spec.first_kept(length), spec.ring_origin(length)
        table.forget_indices()
        return table


def check_tree(roots: Mapping[Hashable, RadixNode], block_size: int, held: Sequence[Counter[int]]) -> None:
    """Raise BlockStateError unless the nodes hang together and hold exactly the references ``held``."""
    counted: list[Counter[int]] = [Counter() for _ in held]
    for salt, root in roots.items():
        if root.label != salt or not root.children or root.tokens:
            raise BlockStateError(f"root of {salt!r} is not in order")
        for node in root.descendants():
            _check_node(node, block_size)
            for count, blocks in zip(counted, node.blocks, strict=True):
                count.update(b for b in blocks if b != NULL_BLOCK)
    if counted != list(held):
        raise BlockStateError("the nodes' blocks are not the references the tree has taken")


def _check_node(node: RadixNode, block_size: int) -> None:
    for token, child in node.children.items():
        if child.parent is not node or child.start != node.end or not child.tokens or child.tokens[0] != token:
            raise BlockStateError(f"{child} does not follow {node}")
    if node.is_root:
        return
    if node.locks < sum(child.locks for child in node.children.values()):
        raise BlockStateError(f"{node} is locked less often than what is below it")
    first, last = node.start // block_size, -(-node.end // block_size)
    for blocks, valid_from in zip(node.blocks, node.valid_from, strict=True):
        begin = max(first, valid_from // block_size) if valid_from < node.end else last
        if len(blocks) != last - first or valid_from > node.end:
            raise BlockStateError(f"{node} has blocks for other positions than its own")
        if any((b == NULL_BLOCK) != (index < begin) for index, b in enumerate(blocks, first)):
            raise BlockStateError(f"{node} does not hold its blocks from {valid_from} on")
