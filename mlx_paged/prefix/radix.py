"""RadixTree: token prefix -> blocks of one pool, each prefix stored once, the least recently used evicted first."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from ..errors import BlockStateError
from ..kv.allocator import NULL_BLOCK
from ..kv.attention_params import Window
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from .radix_node import (
    CHECKPOINT_SHARE,
    KEPT_SHARE,
    Checkpoints,
    HeldBlocks,
    RadixNode,
    add_leaf,
    check_tree,
    improves,
    path_blocks,
    refill,
    replace_tail,
    servable_length,
    unlink_nodes,
)

NODES_PER_SLICE = 64  # nodes copied at a time from the eviction order, which changes while it is read


class MatchResult(NamedTuple):
    """The longest prefix every group can serve.

    Attributes:
        length: number of its tokens.
        node: the deepest node on its path; lock it before anything else may allocate. A root if ``length`` is 0.
        block_ids: per group, by absolute position; the null block before the group's window.
    """

    length: int
    node: RadixNode
    block_ids: tuple[list[int], ...]


class RadixTree:
    """Finished prefixes of the sequences of one pool.

    Every method is atomic under the pool's lock. The tree retains each block once per node that holds it, so blocks
    outlive the sequences that computed them, and the pool evicts from the tree before an allocation fails.

    In a group with a window, a prefix can be served if the window before its end is held. That group's blocks may have
    been evicted from inner nodes; inserting the same tokens again brings them back.

    Args:
        pool: held by a weak reference: a cache must not keep a model's memory alive.
        ttl: evict prefixes idle for longer than this, in seconds.
        clock: the time, in seconds.
        on_evict: called with a prefix's salt and a node before any of the node's blocks are evicted.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[Hashable, RadixNode], None] | None = None,
    ) -> None:
        self._held = HeldBlocks(pool)
        self.block_size, self.windows = self._held.block_size, self._held.windows
        self.ttl, self.clock, self.on_evict = ttl, clock, on_evict
        self.evictions = self.hit_tokens = 0
        self._roots: dict[Hashable, RadixNode] = {}
        self.checkpoints = Checkpoints()
        self._order: dict[RadixNode, None] = {}  # all nodes but the roots, least recently used first
        self._locked: set[RadixNode] = set()
        self._kept: dict[RadixNode, None] = {}  # evicted after the others, and in this order
        self._tick = 0
        self._next_expiry = 0.0
        pool.add_holder(self)
        weakref.finalize(self, unlink_nodes, self._roots).atexit = False

    @property
    def pool(self) -> BlockPool:
        """The tree's pool. Raises BlockStateError if it is gone."""
        return self._held.pool

    # Looking up -----------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], salt: Hashable = None) -> MatchResult:
        """Return the longest prefix of ``tokens`` under ``salt`` that every group can serve, never all of them: the
        last token is left to compute. Marks its path as used; takes no reference, so see :meth:`adopt` or :meth:`lock`.

        Args:
            tokens: tokens to look up.
            salt: as for :meth:`insert`.
        """
        with self.pool.lock:
            self.expire()
            path, limit = self._walk(tokens, salt)
            length = servable_length(path, limit, self.windows, self.block_size)
            path = [node for node in path if node.start < length]
            for node in path:
                self._touch(node)
            ids = path_blocks(path, length, self.windows, self.block_size)
            return MatchResult(length, path[-1] if path else self._root(salt), ids)

    def held_alone(self, tokens: Sequence[int], salt: Hashable = None) -> list[int]:
        """Return, per group, how many blocks of the longest prefix (see :meth:`match`) only this tree holds."""
        with self.pool.lock:
            found = self.match(tokens, salt).block_ids
            return [self._held.num_cached_of(group, block_ids) for group, block_ids in enumerate(found)]

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable]]:
        """Return tables over the blocks of the longest prefix (see :meth:`match`), one per group; no bytes are copied.

        Returns:
            The number of tokens that they hold, and the tables, which the caller owns and must release. A write
            to a shared, partially filled block copies it first.
        """
        with self.pool.lock:
            match = self.match(tokens, salt)
            self.hit_tokens += match.length
            return match.length, [
                table_over(self.pool, group, ids, match.length) for group, ids in enumerate(match.block_ids)
            ]

    def match_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> MatchResult:
        """Like :meth:`match`, for models with states: return the longest prefix that ends at a checkpoint."""
        with self.pool.lock:
            self.expire()
            path, limit = self._walk(tokens, salt)
            while path and not self._is_adoptable(path, limit):
                path.pop()
            for node in path:
                self._touch(node)
            if not path:
                return MatchResult(0, self._root(salt), tuple([] for _ in self.windows))
            length = path[-1].end
            return MatchResult(length, path[-1], path_blocks(path, length, self.windows, self.block_size))

    def _is_adoptable(self, path: Sequence[RadixNode], limit: int) -> bool:
        """Return whether a sequence can continue from the end of the path, which must not exceed ``limit``."""
        end = path[-1].end
        if path[-1].checkpoint is None or end > limit:
            return False
        return servable_length(path, end, self.windows, self.block_size) == end

    def adopt_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable], Any]:
        """Like :meth:`adopt`, also returning the states at the prefix's end: caches that the caller must copy, or
        :class:`SavedStates`; None if there is no checkpoint."""
        with self.pool.lock:
            match = self.match_checkpoint(tokens, salt)
            if not match.length:
                return 0, [], None
            self.hit_tokens += match.length
            caches = self.checkpoints.hit(match.node).slot.caches
            ids = enumerate(match.block_ids)
            return match.length, [table_over(self.pool, group, each, match.length) for group, each in ids], caches

    def held_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[int]]:
        """Return the length of the longest prefix that ends at a checkpoint, and per group how many of its blocks only
        this tree holds."""
        with self.pool.lock:
            found = self.match_checkpoint(tokens, salt)
            return found.length, [self._held.num_cached_of(*each) for each in enumerate(found.block_ids)]

    def known_length(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many leading tokens match a prefix in the tree, whether it can be served or not."""
        with self.pool.lock:
            return self._walk(tokens, salt)[1]

    def _root(self, salt: Hashable) -> RadixNode:
        """Return the salt's root, or a new one that is not in the tree yet."""
        root = self._roots.get(salt)
        if root is not None:
            return root
        root = RadixNode((), 0, None, [[] for _ in self.windows], [0] * len(self.windows))
        root.label = salt
        return root

    def _walk(self, tokens: Sequence[int], salt: Hashable) -> tuple[list[RadixNode], int]:
        """Return the nodes along ``tokens[:-1]``, and how many of these tokens match."""
        node, position, limit = self._roots.get(salt), 0, len(tokens) - 1
        path: list[RadixNode] = []
        while node is not None and position < limit:
            child = node.children.get(tokens[position])
            if child is None:
                break
            path.append(child)
            position += child.common_length(tokens, position, limit)
            node = child if position == child.end else None
        return path, position

    # Inserting ------------------------------------------------------------------------------------------------

    def insert(
        self,
        tokens: Sequence[int],
        tables: Sequence[BlockTable],
        salt: Hashable = None,
        *,
        label: Hashable = None,
        keep: int = 0,
    ) -> RadixNode:
        """Insert ``tokens``, whose keys and values the tables hold in every layer. Returns the node that the prefix
        ends in.

        Takes references on the blocks that the tree does not hold yet. The caller keeps the tables and may go on
        writing: a partially filled block is shared from now on, and is copied first.

        Args:
            tokens: from position 0 on; at least one.
            tables: one per group, each at least as long as ``tokens``.
            salt: what else the keys depend on: model, adapter, dtype, cache configuration.
            label: label of the node that the prefix ends in.
            keep: number of leading tokens whose nodes are evicted after all others. Kept nodes take up to
                :data:`KEPT_SHARE` of the pool's budget; beyond it, those kept first become ordinary ones.

        Raises:
            ValueError: the tables do not hold the tokens. Nothing was changed.
        """
        run, held = tuple(tokens), self._held
        _check_tables(self.windows, run, tables)
        with self._changing():
            self.expire()
            node = self._roots[salt] = self._root(salt)
            position = 0
            while position < len(run):
                child = node.children.get(run[position])
                if child is None:
                    replace_tail(held, node, tables)
                    add_leaf(held, node, run, tables)
                    child, position = node.children[run[position]], len(run)
                else:
                    common = child.common_length(run, position, len(run))
                    position += common
                    if common < len(child.tokens) and (position < len(run) or improves(held, child, tables, position)):
                        child = self._split(child, common)
                    if child.end == position:
                        refill(held, child, tables)
                self._touch(child)
                node = child
            if label is not None and node.end == len(run):
                node.label = label
            if keep:
                self._keep(node, keep)
            return node

    def insert_checkpoint(
        self,
        tokens: Sequence[int],
        tables: Sequence[BlockTable],
        states: Callable[[], tuple[int, Any]],
        salt: Hashable = None,
        *,
        label: Hashable = None,
        keep: int = 0,
    ) -> bool:
        """Like :meth:`insert`, with the states at the end of ``tokens``: those that exactly these tokens make of an
        empty cache.

        Args:
            states: called if the tree has none there; returns their bytes, and caches that are never written to.

        Returns:
            Whether the tree has them now: checkpoints take up to :data:`CHECKPOINT_SHARE` of the pool's budget.
        """
        run = tuple(tokens)
        with self._changing():
            path, length = self._walk([*run, -1], salt)
            if length == len(run) and path and path[-1].end == length and path[-1].checkpoint is not None:
                self.insert(run, tables, salt, label=label, keep=keep)
                return True
            nbytes, caches = states()
            memory, most = self.pool.memory, int(self.pool.memory.budget * CHECKPOINT_SHARE)
            if self.checkpoints.nbytes + nbytes > most:
                self.evict_states(self.checkpoints.nbytes + nbytes - most)
            if self.checkpoints.nbytes + nbytes > most or nbytes > memory.unreserved_bytes:
                self.checkpoints.dropped += 1
                return False
            node = self.insert(run, tables, salt)
            if node.end > len(run):
                node = self._split(node, len(run) - node.start)
                self._touch(node)
            node.label = label
            self.checkpoints.put(node, memory.states.take(nbytes, caches))
            if keep:
                self._keep(node, keep)
            return True

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Split the node and return its upper part (:meth:`RadixNode.split`); take the second reference on a block that
        both parts hold."""
        upper = node.split(at, self.block_size)
        if upper.end % self.block_size:
            for group, blocks in enumerate(upper.blocks):
                self._held.hold(group, blocks[-1:])
        if upper.locks:
            self._locked.add(upper)
        if node in self._kept:
            self._kept[upper] = None
        return upper

    def _keep(self, node: RadixNode, length: int) -> None:
        """Keep the nodes of the first ``length`` tokens of the path to ``node``."""
        path = [each for each in node.path() if each.start < length]
        if path and path[-1].end > length:
            path[-1] = self._split(path[-1], length - path[-1].start)
            self._touch(path[-1])
        for each in sorted(path, key=lambda each: -each.start):  # deepest first: useless without their ancestors
            self._kept.pop(each, None)
            self._kept[each] = None
        sizes = {each: self._nbytes_of(each) for each in self._kept}
        excess = sum(sizes.values()) - self.pool.memory.budget * KEPT_SHARE
        for each, nbytes in sizes.items():
            if excess <= 0:
                break
            del self._kept[each]
            excess -= nbytes

    def _nbytes_of(self, node: RadixNode) -> int:
        sizes = (group.bytes_per_block for group in self.pool.groups)
        blocks = sum(size * sum(b != NULL_BLOCK for b in ids) for size, ids in zip(sizes, node.blocks, strict=True))
        return blocks + (0 if node.checkpoint is None else node.checkpoint.slot.nbytes)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the pool's lock while nodes change. After a failure, make the tree's accounts agree with its nodes."""
        with self.pool.lock:
            try:
                yield
            except Exception:
                for salt in [salt for salt, root in self._roots.items() if not root.children]:
                    del self._roots[salt]  # in place: the finalizer holds this dictionary
                self._order = dict.fromkeys(sorted(self.nodes(), key=lambda node: node.tick))
                self._locked = {node for node in self._order if node.locks}
                self._kept = {node: None for node in self._kept if node in self._order}
                self.checkpoints.reset(self._order)
                for group in range(len(self.windows)):
                    self._held.reset(group, [b for node in self.nodes() for b in node.blocks[group]])
                raise

    # In use ---------------------------------------------------------------------------------------------------

    def lock(self, node: RadixNode) -> None:
        """Protect the node and its ancestors from eviction until :meth:`unlock`; locks are counted.

        Raises:
            BlockStateError: the node has been evicted meanwhile: match again.
        """
        with self.pool.lock:
            path = node.path()
            if not all(each.is_attached for each in path):
                raise BlockStateError(f"{node} is no longer in the tree")
            for each in path:
                each.locks += 1
            self._locked.update(path)

    def unlock(self, node: RadixNode) -> None:
        """Release one lock. Raises BlockStateError if there is none."""
        with self.pool.lock:
            if node.locks < 1 and not node.is_root:
                raise BlockStateError(f"{node} is not locked")
            for each in node.path():
                each.locks -= 1
                if not each.locks:
                    self._locked.discard(each)
                self._touch(each)

    @property
    def uses(self) -> int:
        """Counter that rises with every use; while it is unchanged, the tree holds nothing new."""
        return self._tick

    def _touch(self, node: RadixNode) -> None:
        self._tick += 1
        node.tick, node.used_at = self._tick, self.clock()
        self._order.pop(node, None)
        self._order[node] = None

    # Evicting -------------------------------------------------------------------------------------------------

    def reclaimable(self, group: int, enough: int | None = None) -> int:
        """Return how many blocks of the group would become free if every unlocked node were evicted; counting stops at
        ``enough``."""
        with self.pool.lock:
            locked = (b for node in self._locked for b in node.blocks[group])
            return self._held.num_cached(group, locked, enough)

    def evict(self, group: int, num_blocks: int) -> int:
        """Free blocks of a group, from the least recently used leaves, and in a group with a window also from inner
        nodes: a prefix that ends a window later does not need them. Locked nodes stay, and blocks that a sequence holds
        do not become free.

        Returns:
            Number of blocks that became free: at least ``num_blocks``, or fewer if there are no more.
        """
        with self._changing():
            freed = 0
            # Nodes whose blocks are all in use elsewhere are evicted only in a second pass, to reach their ancestors.
            # In each pass, kept nodes come last.
            left_out: list[Mapping[RadixNode, None]] = [self._kept, {}] if self._kept else [{}]
            for only_useful, kept in itertools.product((True, False), left_out):
                if freed >= num_blocks:
                    break
                target = num_blocks if only_useful else freed + self.reclaimable(group, num_blocks - freed)
                for node in _least_recently_used(self._held, group, self._order, kept):
                    if freed >= target:
                        break
                    if not only_useful or self._held.num_unshared(group, node.blocks[group]):
                        freed += self._evict_from(node, group, target - freed)
            return freed

    def _evict_from(self, node: RadixNode, group: int, num_blocks: int) -> int:
        """Free ``num_blocks`` blocks of the group at this node, or all it has. Returns how many became free."""
        if node.children:
            # An inner node of a window group: a longer prefix whose window begins after the node does not need it.
            self._notify(node)
            self.checkpoints.forget(node)  # it cannot be adopted any more
            gone, node.blocks[group] = node.blocks[group], [NULL_BLOCK] * len(node.blocks[group])
            node.valid_from[group] = node.end
            return self._drop(group, gone)
        index = _shortest_tail(self._held, node, group, num_blocks)
        if index is None:
            return self._remove(node)[group]
        self._notify(node)
        return [self._drop(each, blocks) for each, blocks in enumerate(node.cut(index, self.block_size))][group]

    @property
    def state_nbytes(self) -> int:
        """Bytes of the checkpoints."""
        return self.checkpoints.nbytes

    def evict_states(self, num_bytes: int) -> int:
        """Drop the least valuable checkpoints, and nodes that are useless without them. Returns checkpoints' bytes."""
        with self._changing():
            freed = 0
            for node in self.checkpoints.cheapest(num_bytes, self._kept):
                freed += node.checkpoint.slot.nbytes if node.checkpoint is not None else 0
                self.checkpoints.dropped += 1
                if node.children:
                    self._notify(node)
                    self.checkpoints.forget(node)
                    continue
                each: RadixNode | None = node
                while each is not None and not (each.is_root or each.children or each.locks):
                    parent = each.parent
                    self._remove(each)
                    each = parent if parent is not None and parent.checkpoint is None else None
            return freed

    def remove(self, node: RadixNode) -> None:
        """Evict a leaf. Raises BlockStateError if it is locked or not a leaf of this tree."""
        with self._changing():
            self._remove(node)

    def _remove(self, node: RadixNode) -> list[int]:
        """Evict a leaf. Returns how many blocks of each group became free."""
        parent = node.parent
        if parent is None or node.children or node.locks or not node.is_attached:
            raise BlockStateError(f"cannot evict {node}: it is not an unlocked leaf")
        self._notify(node)
        del parent.children[node.tokens[0]]
        del self._order[node]
        self._kept.pop(node, None)
        self.checkpoints.forget(node)
        freed = [self._drop(group, blocks) for group, blocks in enumerate(node.blocks)]
        if self.ttl is not None:
            self._next_expiry = min(self._next_expiry, parent.used_at + self.ttl)
        if parent.is_root and not parent.children:
            self._roots.pop(parent.label, None)
        return freed

    def _notify(self, node: RadixNode) -> None:
        """Call :attr:`on_evict`, before blocks of the node are evicted."""
        if self.on_evict is not None:
            self.on_evict(self.salt_of(node), node)

    def _drop(self, group: int, block_ids: Sequence[int]) -> int:
        """Drop one reference to each block. Returns how many became free, and counts these as evictions."""
        freed = self._held.drop(group, block_ids)
        self.evictions += freed
        return freed

    def clear(self) -> None:
        """Evict every unlocked node, the least recently used ones first."""
        with self.pool.lock:
            while leaves := self.leaves():
                for leaf in leaves:
                    self.remove(leaf)

    def expire(self) -> None:
        """Evict prefixes that were not used for ``ttl`` seconds. Costs nothing while none can be due."""
        if self.ttl is None or self.clock() < self._next_expiry:
            return
        with self.pool.lock:
            due = self.clock() - self.ttl
            for node in reversed([*self.nodes()]):
                if node.used_at <= due and not node.children and not node.locks:
                    self.remove(node)
            oldest = min((node.used_at for node in self.leaves()), default=self.clock())
            self._next_expiry = oldest + self.ttl

    # Accounts -------------------------------------------------------------------------------------------------

    def salt_of(self, node: RadixNode) -> Hashable:
        """Return the salt that the node's prefix was inserted under."""
        while node.parent is not None:
            node = node.parent
        return node.label

    def nodes(self) -> Iterator[RadixNode]:
        """Yield every node but the roots, parents first. The tree must not change meanwhile."""
        for root in self._roots.values():
            for child in root.children.values():
                yield from child.descendants()

    def leaves(self) -> list[RadixNode]:
        """Return the unlocked leaves, least recently used first and kept ones last."""
        with self.pool.lock:
            found = [node for node in self._order if not node.children and not node.locks]
            return sorted(found, key=self._kept.__contains__) if self._kept else found

    def __len__(self) -> int:
        """Return the number of leaves: prefixes that no other prefix begins with."""
        with self.pool.lock:
            return sum(not node.children for node in self._order)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, each counted once, and of the checkpoints."""
        return self._held.nbytes + self.checkpoints.nbytes

    def check_integrity(self) -> None:
        """Raise BlockStateError unless nodes, blocks, locks and references agree. See also the pool's."""
        with self.pool.lock:
            check_tree(self._roots, self.block_size, self._held.counts)
            by_use = sorted(self.nodes(), key=lambda node: node.tick)
            if list(self._order) != by_use or self._locked != {node for node in by_use if node.locks}:
                raise BlockStateError("the order of use or the set of locked nodes does not match the tree")
            if not self._kept.keys() <= self._order.keys():
                raise BlockStateError("a kept node is not in the tree")
            carrying = [node for node in by_use if node.checkpoint is not None]
            nbytes = sum(node.checkpoint.slot.nbytes for node in carrying if node.checkpoint is not None)
            if set(self.checkpoints.nodes) != set(carrying) or self.checkpoints.nbytes != nbytes:
                raise BlockStateError("the counted checkpoints do not match the tree")

    def held(self, group: int) -> list[list[int]]:
        """Return the blocks of the group, once for each reference."""
        return [list(self._held.counts[group].elements())]


# Inserting -------------------------------------------------------------------------------------------------------


def _check_tables(windows: Sequence[Window | None], tokens: tuple[int, ...], tables: Sequence[BlockTable]) -> None:
    """Raise ValueError unless the tables, one per group, hold the tokens."""
    if not tokens:
        raise ValueError("a prefix must have at least one token")
    if [table.group for table in tables] != list(range(len(windows))):
        raise ValueError("tables must be one per group of the pool, in order")
    for table, window in zip(tables, windows, strict=True):
        if table.released or table.length < len(tokens):
            raise ValueError(f"{table} does not hold {len(tokens)} tokens")
        if window is None and table.logical_start:
            raise ValueError(f"{table} does not hold its first tokens")


# Evicting: which nodes can free blocks, in what order, and which of their blocks -----------------------------------


def _least_recently_used(
    held: HeldBlocks, group: int, order: Mapping[RadixNode, None], kept: Mapping[RadixNode, None]
) -> Iterator[RadixNode]:
    """Yield the nodes of a tree that blocks of a group can be evicted from, least recently used first.

    Lazy: looks at no more nodes than are taken. The caller may remove nodes that it was given, and no others; a parent
    whose last child was removed comes in its turn.

    Args:
        held: the tree's references.
        group: index of the group.
        order: all nodes of the tree, least recently used first.
        kept: nodes to leave out.
    """

    def is_evictable(node: RadixNode) -> bool:
        return (
            not node.locks
            and node not in kept
            and (not node.children or (has_window and node.valid_from[group] < node.end))
        )

    has_window = held.windows[group] is not None
    seen, num_nodes = 0, len(order)
    while nodes := list(
        islice(order, seen - (num_nodes - len(order)), seen + NODES_PER_SLICE - (num_nodes - len(order)))
    ):
        seen += len(nodes)
        for node in nodes:
            while node in order and is_evictable(node):
                yield node
                parent = node.parent
                if node in order or parent is None or parent.tick > node.tick:
                    break  # the node stays, or its parent comes later
                node = parent


def _shortest_tail(held: HeldBlocks, leaf: RadixNode, group: int, num_blocks: int) -> int | None:
    """Return the index of the first block to evict so that the leaf's beginning stays; None if the whole leaf must go.

    With a window or a checkpoint, a prefix can only be used up to the end that it was inserted with, so the leaf goes
    as a whole.
    """
    if leaf.checkpoint is not None or any(window is not None for window in held.windows):
        return None
    refcount = held.pool.groups[group].allocator.refcount
    gain, index = 0, len(leaf.blocks[group])
    while index > 0 and gain < num_blocks:
        index -= 1
        gain += refcount(leaf.blocks[group][index]) == 1
    keeps_tokens = (leaf.start // held.block_size + index) * held.block_size > leaf.start
    return index if keeps_tokens and gain >= num_blocks else None


def table_over(pool: BlockPool, group: int, block_ids: Sequence[int], length: int) -> BlockTable:
    """Return a table over shared blocks, with its own reference on each, as a prefill of ``length`` tokens would have
    left it.

    Args:
        pool: the blocks' pool.
        group: index of their group.
        block_ids: by absolute position, ``ceil(length / block_size)`` of them; null before the group's window. If the
            next token sees only itself, without a last block that is partially filled.
        length: number of tokens that they hold.
    """
    spec = pool.groups[group].spec
    with pool.lock:
        table = pool.new_table(group)
        pool.retain(group, block_ids)
        table.block_ids.extend(block_ids)
        table.length = length
        table.logical_start = spec.first_kept(length)
        table.forget_indices()
        return table
