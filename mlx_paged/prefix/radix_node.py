"""RadixNode: a run of tokens and the blocks that hold their keys and values; and what a path of nodes can serve."""

from __future__ import annotations

import heapq
import operator
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ..errors import BlockStateError
from ..kv.allocator import NULL_BLOCK
from ..kv.attention_params import Window
from ..kv.block_table import BlockTable
from ..kv.memory import StateSlot
from ..kv.pool import BlockPool


class HeldBlocks:
    """A tree's references to blocks, one for each node that holds a block. Used under the pool's lock; released when
    this object is dropped. Null blocks in arguments are skipped.

    Args:
        pool: held by a weak reference.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = weakref.ref(pool)
        self.block_size = pool.block_size
        self.windows = [group.spec.sees for group in pool.groups]
        self.counts: list[Counter[int]] = [Counter() for _ in pool.groups]  # by block id
        weakref.finalize(self, _abandon, self._pool, self.counts).atexit = False

    @property
    def pool(self) -> BlockPool:
        """The tree's pool. Raises BlockStateError if it is gone."""
        pool = self._pool()
        if pool is None:
            raise BlockStateError("the tree's pool no longer exists")
        return pool

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, each counted once."""
        groups = self.pool.groups
        return sum(len(count) * group.bytes_per_block for count, group in zip(self.counts, groups, strict=True))

    def hold(self, group: int, block_ids: Sequence[int]) -> None:
        """Take a reference on each block."""
        ids = [b for b in block_ids if b != NULL_BLOCK]
        self.pool.retain(group, ids)
        self.counts[group].update(ids)

    def drop(self, group: int, block_ids: Sequence[int]) -> int:
        """Release one reference to each block. Returns how many blocks became free."""
        ids = [b for b in block_ids if b != NULL_BLOCK]
        held, freed = self.counts[group], self.num_unshared(group, ids)
        self.pool.release(group, ids)
        for block_id in ids:
            held[block_id] -= 1
            if not held[block_id]:
                del held[block_id]
        return freed

    def num_unshared(self, group: int, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have exactly one reference."""
        refcount = self.pool.groups[group].allocator.refcount
        return sum(b != NULL_BLOCK and refcount(b) == 1 for b in block_ids)

    def num_cached(self, group: int, without: Iterable[int] = (), enough: int | None = None) -> int:
        """Return how many blocks only the tree holds, except those in ``without``; counting stops at ``enough``."""
        held, refcount = self.counts[group], self.pool.groups[group].allocator.refcount
        excluded = self.num_cached_of(group, set(without))
        # Called in many steps while the pool is full, so it runs no Python code per block.
        cached = filter(None, map(operator.eq, map(refcount, held), held.values()))
        return sum(islice(cached, None if enough is None else enough + excluded)) - excluded

    def num_cached_of(self, group: int, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks, all different, only the tree holds."""
        held, refcount = self.counts[group], self.pool.groups[group].allocator.refcount
        return sum(b != NULL_BLOCK and refcount(b) == held[b] for b in block_ids)

    def reset(self, group: int, block_ids: Iterable[int]) -> None:
        """Hold exactly one reference for each element of ``block_ids``."""
        wanted, held = Counter(b for b in block_ids if b != NULL_BLOCK), self.counts[group]
        missing, surplus = wanted - held, held - wanted
        self.hold(group, list(missing.elements()))
        self.drop(group, list(surplus.elements()))


def _abandon(pool: weakref.ref[BlockPool], counts: list[Counter[int]]) -> None:
    """Release the references of a tree that was dropped."""
    if (alive := pool()) is not None:
        for group, blocks in enumerate(counts):
            alive.abandon(group, list(blocks.elements()))


class RadixNode:
    """A run of tokens, ``start .. end - 1``, that follows those of the node's ancestors.

    Blocks belong to absolute positions: block ``i`` to ``[i * block_size, (i + 1) * block_size)``. A node holds every
    block that one of its tokens lies in, so at a boundary inside a block both sides hold one. Block size 4::

        position    0 1 2 3 | 4 5 6 7 | 8 9
        parent      a b c d   e f                   [0, 6)   blocks 10 11
        child               .  .  g h   i j         [6, 10)  blocks    12 13
        other child         .  .  x                 [6, 7)   blocks    14

    Blocks 11, 12 and 14 all hold ``e f``: a child's first block is valid from the block's start on, because a sequence
    that continues from a shared, partially filled block writes into a copy. So a prefix is always served by the block
    of the deepest node on its path. After a split inside a block both sides hold the same block, each with a reference
    of its own.

    Attributes:
        tokens: the run; empty only in a root.
        blocks: per group, the blocks ``start // block_size .. (end - 1) // block_size``; the null block where the
            group's keys are not held.
        valid_from: per group, the first position whose keys are held; from there they are held up to ``end``.
            At most the start of the node's first block if all are held, ``end`` if none.
        locks: number of locks on this node and its descendants.
        tick: rises with each use, so the least is the least recently used.
        used_at: time of the last use.
        label: the owner's label for the prefix that ends here, which the tree does not interpret; of a root, the salt.
        checkpoint: states of layers without blocks at the node's end, or None.
    """

    __slots__ = (
        "blocks",
        "checkpoint",
        "children",
        "label",
        "locks",
        "parent",
        "start",
        "tick",
        "tokens",
        "used_at",
        "valid_from",
    )

    def __init__(
        self,
        tokens: tuple[int, ...],
        start: int,
        parent: RadixNode | None,
        blocks: list[list[int]],
        valid_from: list[int],
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.blocks = blocks
        self.valid_from = valid_from
        self.children: dict[int, RadixNode] = {}
        self.locks = 0
        self.tick = 0
        self.used_at = 0.0
        self.label: Hashable = None
        self.checkpoint: Checkpoint | None = None

    @property
    def end(self) -> int:
        """Number of tokens of the prefix that ends here."""
        return self.start + len(self.tokens)

    @property
    def is_root(self) -> bool:
        """Whether the node is a root."""
        return self.parent is None

    @property
    def is_attached(self) -> bool:
        """Whether the node is a child of its parent: it is not a root, and was not removed."""
        return self.parent is not None and self.parent.children.get(self.tokens[0]) is self

    def path(self) -> list[RadixNode]:
        """Return the nodes from below the root down to this one."""
        nodes: list[RadixNode] = []
        node: RadixNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self) -> tuple[int, ...]:
        """Return all tokens from position 0 to the node's end."""
        return tuple(token for node in self.path() for token in node.tokens)

    def descendants(self) -> Iterator[RadixNode]:
        """Yield this node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def split(self, at: int, block_size: int) -> RadixNode:
        """Insert a node with the first ``at`` tokens above this one, which keeps the rest; its users may go on using
        this object. A block that both hold is in both lists: the caller must take one more reference on it.

        Returns:
            The new upper node.
        """
        cut = self.start + at
        first, floor = self.start // block_size, cut // block_size * block_size
        upper_blocks, lower_blocks = [], []
        for blocks, valid_from in zip(self.blocks, self.valid_from, strict=True):
            upper = blocks[: -(-cut // block_size) - first]
            if valid_from >= cut:
                upper = [NULL_BLOCK] * len(upper)
            upper_blocks.append(upper)
            lower_blocks.append(blocks[cut // block_size - first :])
        upper_node = RadixNode(
            self.tokens[:at], self.start, self.parent, upper_blocks, [min(v, cut) for v in self.valid_from]
        )
        lower_valid_from = [max(v, floor) for v in self.valid_from]
        upper_node.locks, upper_node.tick, upper_node.used_at = self.locks, self.tick, self.used_at
        assert self.parent is not None
        self.parent.children[self.tokens[0]] = upper_node
        upper_node.children[self.tokens[at]] = self
        self.tokens, self.start, self.parent = self.tokens[at:], cut, upper_node
        self.blocks, self.valid_from = lower_blocks, lower_valid_from
        return upper_node

    def cut(self, index: int, block_size: int) -> list[list[int]]:
        """Remove the blocks from index ``index`` on, and the tokens in them. Returns these blocks, per group."""
        self.tokens = self.tokens[: (self.start // block_size + index) * block_size - self.start]
        tails = [blocks[index:] for blocks in self.blocks]
        for blocks in self.blocks:
            del blocks[index:]
        return tails

    def common_length(self, tokens: Sequence[int], position: int, limit: int) -> int:
        """Return how many of the node's tokens equal ``tokens[position:limit]``."""
        count = min(len(self.tokens), limit - position)
        if tuple(tokens[position : position + count]) == self.tokens[:count]:
            return count
        return next(i for i in range(count) if tokens[position + i] != self.tokens[i])

    def __repr__(self) -> str:
        return f"RadixNode([{self.start}, {self.end}), blocks={self.blocks}, locks={self.locks})"


def unlink_nodes(roots: Mapping[Hashable, RadixNode]) -> None:
    """Break parent and child cycles, so that an abandoned tree is freed without the garbage collector."""
    for root in roots.values():
        for node in list(root.descendants()):
            node.children.clear()


# How nodes take the blocks that they do not have yet -----------------------------------------------------------


def add_leaf(held: HeldBlocks, parent: RadixNode, tokens: tuple[int, ...], tables: Sequence[BlockTable]) -> None:
    """Add a leaf to ``parent`` with the tokens that follow the parent's."""
    start, size = parent.end, held.block_size
    first, last = start // size, -(-len(tokens) // size)
    leaf = RadixNode(tokens[start:], start, parent, [], [])
    for table in tables:
        valid_from = min(max(table.logical_start, first * size), len(tokens))
        ids = table.block_ids[valid_from // size : last] if valid_from < len(tokens) else []
        held.hold(table.group, ids)
        leaf.blocks.append([NULL_BLOCK] * (last - first - len(ids)) + ids)
        leaf.valid_from.append(valid_from)
    parent.children[tokens[start]] = leaf


def replace_tail(held: HeldBlocks, node: RadixNode, tables: Sequence[BlockTable]) -> None:
    """If no other node holds the node's partially filled last block, replace it by the tables' fuller one: one block
    then serves both this prefix and the one about to continue it."""
    index, offset = divmod(node.end, held.block_size)
    if not offset:
        return
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


def improves(held: HeldBlocks, node: RadixNode, tables: Sequence[BlockTable], end: int) -> bool:
    """Return whether the tables hold keys of the node's tokens before ``end`` that the node has lost."""
    floor = node.start // held.block_size * held.block_size
    return any(max(t.logical_start, floor) < min(node.valid_from[t.group], end) for t in tables)


def refill(held: HeldBlocks, node: RadixNode, tables: Sequence[BlockTable]) -> None:
    """Give the node blocks of window groups back that were evicted from it and that the tables hold."""
    size = held.block_size
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


# Paths and whole trees ------------------------------------------------------------------------------------------

Windows = Sequence[Window | None]


def servable_length(path: Sequence[RadixNode], limit: int, windows: Windows, block_size: int) -> int:
    """Return the length of the longest prefix of the path, up to ``limit`` tokens, of which every group holds all that
    the next token sees."""
    length = limit
    while True:
        ends = (_servable_by(group, path, length, window, block_size) for group, window in enumerate(windows))
        shortest = min(ends, default=length)
        if shortest == length:
            return length
        length = shortest


def _servable_by(group: int, path: Sequence[RadixNode], limit: int, window: Window | None, block_size: int) -> int:
    run_start, best = 0, 0  # keys are held without a gap from run_start to the end of the current node
    for node in path:
        end = min(node.end, limit)
        if node.start >= end:
            break
        floor = node.start // block_size * block_size
        valid_from = node.valid_from[group]
        # A node's first block is valid from the block's start, so a run may begin a little before the node.
        run_start = min(run_start, floor) if valid_from <= floor else valid_from
        needed = _needed_from(window, end)
        if run_start <= needed:
            best = end
        elif _needed_from(window, needed) == needed:  # the next token there sees only itself, as at a chunk's start
            best = max(best, needed)
    return best


def _needed_from(window: Window | None, length: int) -> int:
    """Return the first position that the token after ``length`` tokens sees."""
    return 0 if window is None else window.first_seen(length)


def path_blocks(path: Sequence[RadixNode], length: int, windows: Windows, block_size: int) -> tuple[list[int], ...]:
    """Return, per group, the blocks of a servable prefix by absolute position, null before the window.

    Where two nodes hold a block for the same position, the deeper node's is taken (see RadixNode).
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
            del ids[behind:]  # nothing is visible: the next token begins a block of its own
        result.append(ids)
    return tuple(result)


def check_tree(roots: Mapping[Hashable, RadixNode], block_size: int, held: Sequence[Counter[int]]) -> None:
    """Raise BlockStateError unless parents and children agree and nodes hold exactly the references ``held``."""
    counted: list[Counter[int]] = [Counter() for _ in held]
    for salt, root in roots.items():
        if root.label != salt or not root.children or root.tokens:
            raise BlockStateError(f"the root of {salt!r} has tokens, no children or another label")
        for node in root.descendants():
            _check_node(node, block_size)
            for count, blocks in zip(counted, node.blocks, strict=True):
                count.update(b for b in blocks if b != NULL_BLOCK)
    if counted != list(held):
        raise BlockStateError("the nodes' blocks do not match the references that the tree holds")


def _check_node(node: RadixNode, block_size: int) -> None:
    for token, child in node.children.items():
        if child.parent is not node or child.start != node.end or not child.tokens or child.tokens[0] != token:
            raise BlockStateError(f"{child} does not follow {node}")
    if node.is_root:
        return
    if node.locks < sum(child.locks for child in node.children.values()):
        raise BlockStateError(f"{node} has fewer locks than its children")
    first, last = node.start // block_size, -(-node.end // block_size)
    for blocks, valid_from in zip(node.blocks, node.valid_from, strict=True):
        begin = max(first, valid_from // block_size) if valid_from < node.end else last
        if len(blocks) != last - first or valid_from > node.end:
            raise BlockStateError(f"{node} has a wrong number of blocks, or none that is valid")
        if any((b == NULL_BLOCK) != (index < begin) for index, b in enumerate(blocks, first)):
            raise BlockStateError(f"{node} does not hold its blocks from {valid_from} on")


# Largest share of a pool's budget for checkpoints. Keys and values are useless without a checkpoint at their end, and
# checkpoints without keys and values.
CHECKPOINT_SHARE = 1 / 4
# Largest share of it for prefixes that requests ask to keep, so that others always have room.
KEPT_SHARE = 1 / 2


class Checkpoint:
    """The states at the end of a node's prefix.

    Attributes:
        slot: slot that holds the states.
        hits: how often a request continued from here.
        priority: see :class:`Checkpoints`.
    """

    __slots__ = ("hits", "priority", "slot")

    def __init__(self, slot: StateSlot) -> None:
        self.slot = slot
        self.hits = 0
        self.priority = 0.0


class Checkpoints:
    """The nodes of one tree that have a checkpoint, by value. Used under the pool's lock.

    A checkpoint's value is ``tokens * (1 + hits) / bytes``, where the tokens are those since the nearest checkpoint
    before it. Its priority is the value plus the highest priority dropped so far (GDSF), so that a checkpoint that was
    popular long ago is dropped in the end.
    """

    def __init__(self) -> None:
        self.nodes: dict[RadixNode, None] = {}
        self.nbytes = 0
        self.dropped = 0  # because there was no room
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self.nodes)

    def put(self, node: RadixNode, slot: StateSlot) -> None:
        """Give a checkpoint to a node that has none."""
        node.checkpoint = Checkpoint(slot)
        self.nodes[node] = None
        self.nbytes += slot.nbytes
        self._value(node, node.checkpoint)

    def hit(self, node: RadixNode) -> Checkpoint:
        """Return the node's checkpoint for a sequence that adopts it, and count a hit."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.hits += 1
        self._value(node, checkpoint)
        return checkpoint

    def _value(self, node: RadixNode, checkpoint: Checkpoint) -> None:
        before, saved = node.parent, node.end
        while before is not None:
            if before.checkpoint is not None:
                saved -= before.end
                break
            before = before.parent
        checkpoint.priority = self._clock + saved * (1 + checkpoint.hits) / max(1, checkpoint.slot.nbytes)

    def forget(self, node: RadixNode) -> None:
        """Remove the node's checkpoint, if it has one."""
        checkpoint, node.checkpoint = node.checkpoint, None
        if checkpoint is not None:
            del self.nodes[node]
            self.nbytes -= checkpoint.slot.nbytes

    def cheapest(self, num_bytes: int, kept: Mapping[RadixNode, None]) -> list[RadixNode]:
        """Return unlocked nodes, lowest priority first and kept ones last, until their checkpoints have ``num_bytes``
        bytes in all or there are no more."""
        heap = [
            (node in kept, node.checkpoint.priority, node.tick, node)
            for node in self.nodes
            if node.checkpoint and not node.locks
        ]
        heapq.heapify(heap)
        found: list[RadixNode] = []
        while heap and num_bytes > 0:
            _, priority, _, node = heapq.heappop(heap)
            assert node.checkpoint is not None
            num_bytes -= node.checkpoint.slot.nbytes
            self._clock = max(self._clock, priority)
            found.append(node)
        return found

    def reset(self, nodes: Iterable[RadixNode]) -> None:
        """Count exactly the checkpoints of these nodes."""
        self.nodes = {node: None for node in nodes if node.checkpoint is not None}
        self.nbytes = sum(node.checkpoint.slot.nbytes for node in self.nodes if node.checkpoint)
