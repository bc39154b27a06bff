"""RadixTree: token prefix -> blocks of one pool, each prefix stored once, the least recently used evicted first."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import BlockStateError, ConfigError
from ..kv.allocator import NULL_BLOCK
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from .eviction import least_recently_used, shortest_tail
from .held_blocks import HeldBlocks
from .insertion import add_leaf, check_tables, improves, refill, replace_tail, split
from .radix_node import RadixNode, part_nodes
from .radix_path import check_tree, path_blocks, servable_length, table_over


class MatchResult(NamedTuple):
    """The longest prefix every group can serve.

    Attributes:
        length: tokens of it.
        node: the deepest node on its path; lock it before anything else may allocate. A root if ``length`` is 0.
        block_ids: per group, by absolute position; the null block behind the group's window.
    """

    length: int
    node: RadixNode
    block_ids: tuple[list[int], ...]


class InsertResult(NamedTuple):
    """What an insertion changed.

    Attributes:
        new_tokens: tokens the tree did not hold before.
        new_blocks: references it took on the tables' blocks.
        node: the node the prefix ends in.
    """

    new_tokens: int
    new_blocks: int
    node: RadixNode


class RadixTree:
    """Finished prefixes of the sequences of one pool.

    Every method is atomic under the pool's lock. The tree retains each block once per node that holds it, so what it
    holds outlives the sequences that computed it, and the pool asks it for blocks before an allocation fails.

    In a group with a sliding window, a prefix can be served where the window before its end is held; that
    group's blocks may have been evicted from inner nodes, and a later insertion of the same tokens brings them back.

    Args:
        pool: kept weakly: a cache must not keep a model's memory alive.
        max_entries: most leaves (prefixes that are no other's beginning).
        max_bytes: most bytes of blocks held, shared ones counted once.
        ttl: seconds after which a prefix that nobody used is evicted.
        clock: the time, in seconds.
        on_evict: called with a prefix' salt and a node before any of the node's blocks are evicted.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_entries: int | None = None,
        max_bytes: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[Hashable, RadixNode], None] | None = None,
    ) -> None:
        if pool.pins_tokens:
            raise ConfigError("keys of a pool that pins tokens depend on how prompts were cut, so are not shared")
        self._held = HeldBlocks(pool)
        self.block_size, self.windows = self._held.block_size, self._held.windows
        self.max_entries, self.max_bytes, self.ttl = max_entries, max_bytes, ttl
        self.clock, self.on_evict = clock, on_evict
        self.evictions = self.hit_tokens = 0
        self._roots: dict[Hashable, RadixNode] = {}
        self._order: dict[RadixNode, None] = {}  # all nodes but the roots, least recently used first
        self._locked: set[RadixNode] = set()
        self._tick = 0
        self._next_expiry = 0.0
        pool.add_holder(self)
        weakref.finalize(self, part_nodes, self._roots).atexit = False

    @property
    def pool(self) -> BlockPool:
        """Raises BlockStateError if the pool is gone."""
        return self._held.pool

    # Looking up -----------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], salt: Hashable = None) -> MatchResult:
        """The longest prefix of ``tokens`` under ``salt`` that every group can serve, and never all of them: the last
        token is left to compute. Marks its path as used; takes no reference, so see :meth:`adopt` or :meth:`lock`.

        Args:
            tokens: whose beginning is looked for.
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
        """Return how many blocks of the longest prefix (see :meth:`match`) only this tree holds, for each group."""
        with self.pool.lock:
            found = self.match(tokens, salt).block_ids
            return [self._held.num_cached_of(group, block_ids) for group, block_ids in enumerate(found)]

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable]]:
        """Tables, one per group, over the blocks of the longest prefix (see :meth:`match`): references, no bytes.

        Returns:
            How many tokens they hold, and the tables; they are the caller's to use and to release. Whoever writes on
            in a shared, partially filled block writes into a copy of it.
        """
        with self.pool.lock:
            match = self.match(tokens, salt)
            self.hit_tokens += match.length
            return match.length, [
                table_over(self.pool, group, ids, match.length) for group, ids in enumerate(match.block_ids)
            ]

    def _root(self, salt: Hashable) -> RadixNode:
        """The salt's root; if it has none yet, one that the tree does not know."""
        root = self._roots.get(salt)
        if root is not None:
            return root
        root = RadixNode((), 0, None, [[] for _ in self.windows], [0] * len(self.windows))
        root.label = salt
        return root

    def _walk(self, tokens: Sequence[int], salt: Hashable) -> tuple[list[RadixNode], int]:
        """The nodes that ``tokens[:-1]`` runs through, and how many tokens agree."""
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
        self, tokens: Sequence[int], tables: Sequence[BlockTable], salt: Hashable = None, *, label: Hashable = None
    ) -> InsertResult:
        """Remember that the tables hold the keys and values of ``tokens``, written in every layer.

        Takes references on the blocks the tree does not have yet; the tables stay the caller's, which may go on
        writing: a partially filled block is shared from now on, and is copied first.

        Args:
            tokens: from position 0 on; at least one.
            tables: one per group, each at least as long as ``tokens``.
            salt: what else the keys depend on: model, adapter, dtype, cache configuration.
            label: for the node the prefix ends in.

        Raises:
            ValueError: the tables do not hold the tokens. Nothing was changed.
        """
        run, held = tuple(tokens), self._held
        check_tables(self.windows, run, tables)
        with self._changing():
            self.expire()
            node = self._roots[salt] = self._root(salt)
            position = new_tokens = new_blocks = 0
            while position < len(run):
                child = node.children.get(run[position])
                if child is None:
                    new_blocks += replace_tail(held, node, tables) + add_leaf(held, node, run, tables)
                    new_tokens = len(run) - position
                    child, position = node.children[run[position]], len(run)
                else:
                    common = child.common_length(run, position, len(run))
                    position += common
                    if common < len(child.tokens) and (position < len(run) or improves(held, child, tables, position)):
                        child = split(held, child, common)
                        if child.locks:
                            self._locked.add(child)
                    if child.end == position:
                        new_blocks += refill(held, child, tables)
                self._touch(child)
                node = child
            if label is not None and node.end == len(run):
                node.label = label
            self._keep_limits(node)
            return InsertResult(new_tokens, new_blocks, node)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The pool's lock, for a change of nodes. If it fails half-way, the tree holds what its nodes do."""
        with self.pool.lock:
            try:
                yield
            except Exception:
                for salt in [salt for salt, root in self._roots.items() if not root.children]:
                    del self._roots[salt]  # in place: the finalizer has this very dictionary
                self._order = dict.fromkeys(sorted(self.nodes(), key=lambda node: node.tick))
                self._locked = {node for node in self._order if node.locks}
                for group in range(len(self.windows)):
                    self._held.reset(group, [b for node in self.nodes() for b in node.blocks[group]])
                raise

    # In use ---------------------------------------------------------------------------------------------------

    def lock(self, node: RadixNode) -> None:
        """Keep the node and its ancestors until :meth:`unlock`; locks add up.

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
        """Take one lock back. Raises BlockStateError if there is none."""
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
        """Grows with every use: as long as it is the same, nothing new is held."""
        return self._tick

    def _touch(self, node: RadixNode) -> None:
        self._tick += 1
        node.tick, node.used_at = self._tick, self.clock()
        self._order.pop(node, None)
        self._order[node] = None

    # Evicting -------------------------------------------------------------------------------------------------

    def reclaimable(self, group: int, enough: int | None = None) -> int:
        """Return how many blocks of the group would be free if every unlocked node went; counting stops at
        ``enough``."""
        with self.pool.lock:
            locked = (b for node in self._locked for b in node.blocks[group])
            return self._held.num_cached(group, locked, enough)

    def evict(self, group: int, num_blocks: int) -> int:
        """Free blocks of a group: of the least recently used leaves, and in a group with a window also of inner nodes,
        whose longer prefixes do without. Locked nodes stay, and blocks that a sequence holds do not become free.

        Returns:
            Blocks that became free: ``num_blocks`` or more, or fewer if there are no more to be had.
        """
        with self._changing():
            freed = 0
            # Nodes whose blocks are all in use elsewhere go only in the second round, where they stand before others.
            for only_useful in (True, False):
                if freed >= num_blocks:
                    break
                target = num_blocks if only_useful else freed + self.reclaimable(group, num_blocks - freed)
                for node in least_recently_used(self._held, group, self._order):
                    if freed >= target:
                        break
                    if not only_useful or self._held.num_unshared(group, node.blocks[group]):
                        freed += self._evict_from(node, group, target - freed)
            return freed

    def _evict_from(self, node: RadixNode, group: int, num_blocks: int) -> int:
        """Free ``num_blocks`` blocks of the group at this node, or what it has. Returns how many became free."""
        if node.children:
            # An inner node of a window group: prefixes that end beyond its window need only what comes after it.
            self._notify(node)
            gone, node.blocks[group] = node.blocks[group], [NULL_BLOCK] * len(node.blocks[group])
            node.valid_from[group] = node.end
            return self._drop(group, gone)
        index = shortest_tail(self._held, node, group, num_blocks)
        if index is None:
            return self._remove(node)[group]
        self._notify(node)
        return [self._drop(each, blocks) for each, blocks in enumerate(node.cut(index, self.block_size))][group]

    def evict_bytes(self, num_bytes: int) -> int:
        """Evict least recently used leaves until ``num_bytes`` bytes of blocks are free. Returns bytes freed."""
        with self.pool.lock:
            before, freed = self.nbytes, 0
            while freed < num_bytes and (leaf := next(self._unlocked_leaves(), None)):
                self.remove(leaf)
                freed = before - self.nbytes
            return freed

    def remove(self, node: RadixNode) -> None:
        """Evict a leaf. Raises BlockStateError if it is locked or not a leaf of this tree."""
        with self._changing():
            self._remove(node)

    def _remove(self, node: RadixNode) -> list[int]:
        """Evict a leaf. Returns how many blocks of each group became free."""
        parent = node.parent
        if parent is None or node.children or node.locks or not node.is_attached:
            raise BlockStateError(f"{node} is not an unlocked leaf")
        self._notify(node)
        del parent.children[node.tokens[0]]
        del self._order[node]
        freed = [self._drop(group, blocks) for group, blocks in enumerate(node.blocks)]
        if self.ttl is not None:
            self._next_expiry = min(self._next_expiry, parent.used_at + self.ttl)
        if parent.is_root and not parent.children:
            self._roots.pop(parent.label, None)
        return freed

    def _notify(self, node: RadixNode) -> None:
        """To be called before blocks of the node are evicted."""
        if self.on_evict is not None:
            self.on_evict(self.salt_of(node), node)

    def _drop(self, group: int, block_ids: Sequence[int]) -> int:
        """Drop one reference of each block. Returns how many became free: the evictions."""
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
        """Evict what has not been used for the time to live. Costs nothing as long as nothing can be due."""
        if self.ttl is None or self.clock() < self._next_expiry:
            return
        with self.pool.lock:
            due = self.clock() - self.ttl
            for node in reversed([*self.nodes()]):
                if node.used_at <= due and not node.children and not node.locks:
                    self.remove(node)
            oldest = min((node.used_at for node in self.leaves()), default=self.clock())
            self._next_expiry = oldest + self.ttl

    def _keep_limits(self, newest: RadixNode) -> None:
        while self._over_limits():
            victim = next((node for node in self._unlocked_leaves() if node is not newest), None)
            if victim is None:
                return
            self.remove(victim)

    def _over_limits(self) -> bool:
        if self.max_entries is not None and len(self) > self.max_entries:
            return True
        return self.max_bytes is not None and self.nbytes > self.max_bytes

    # Accounts -------------------------------------------------------------------------------------------------

    def salt_of(self, node: RadixNode) -> Hashable:
        while node.parent is not None:
            node = node.parent
        return node.label

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the roots, parents first. The tree must not change meanwhile."""
        for root in self._roots.values():
            for child in root.children.values():
                yield from child.descendants()

    def leaves(self) -> list[RadixNode]:
        """Unlocked leaves, least recently used first."""
        with self.pool.lock:
            return list(self._unlocked_leaves())

    def _unlocked_leaves(self) -> Iterator[RadixNode]:
        return (node for node in self._order if not node.children and not node.locks)

    def __len__(self) -> int:
        """Leaves: prefixes that are no other's beginning."""
        with self.pool.lock:
            return sum(not node.children for node in self._order)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, each counted once."""
        return self._held.nbytes

    def check_integrity(self) -> None:
        """Raise BlockStateError unless nodes, blocks, locks and references agree. See also the pool's."""
        with self.pool.lock:
            check_tree(self._roots, self.block_size, self._held.counts)
            by_use = sorted(self.nodes(), key=lambda node: node.tick)
            if list(self._order) != by_use or self._locked != {node for node in by_use if node.locks}:
                raise BlockStateError("the order of use or the set of locked nodes is not that of the tree's nodes")

    def held(self, group: int) -> list[list[int]]:
        return [list(self._held.counts[group].elements())]

    def renumber(self, group: int, moves: Mapping[int, int]) -> None:
        """For the pool, which has moved blocks: they have other ids now."""
        with self.pool.lock:
            for node in self.nodes():
                node.blocks[group][:] = [moves.get(b, b) for b in node.blocks[group]]
            self._held.renumber(group, moves)
