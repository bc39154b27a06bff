"""PagedPromptCache: mlx-lm's ``LRUPromptCache`` over a RadixTree, so that prefixes are shared and never copied."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ...cache.composites import leaves, with_leaves
from ...cache.sequence import SequenceTables
from ...errors import PoolExhaustedError
from ...kv.pool import BlockPool
from ...prefix.radix import RadixTree
from ...prefix.radix_node import RadixNode
from ...prefix.spill import SpillStore
from ...prefix.store import Salted, SharedPrefixes, salted
from .layer_cache import PagedLayerCache

# A prompt cache may hold the caches of several models, target and draft. The layout lists for each model, in order, its
# pool and the classes of its caches, composed as the caches are.
_Kinds = list[Any]
_Layout = list[tuple[weakref.ref[BlockPool], _Kinds]]
MAX_UNPAGED = 10  # mlx-lm's default; nothing else bounds the caches that are copied


class PagedPromptCache:
    """Stands in for mlx-lm's ``LRUPromptCache``, with these differences:

    - paged caches go in and come out by reference: nothing is copied, and blocks shared by prefixes count once;
    - the longest common prefix is found to the token, with sliding windows too where the window is still held;
    - at least one token is always left to compute, where mlx-lm returns an empty remainder;
    - an entry is a prefix that is not the beginning of another, so entries that a longer one contains do not count.

    Caches that are not paged, or that pin tokens, are kept whole in an ``LRUPromptCache`` of mlx-lm's.
    As in mlx-lm, a model's key must identify its weights: weights that are changed in place need another key.

    Args:
        max_size: most entries, for paged and other caches separately. None: no limit for paged ones, 10 others.
        max_bytes: most bytes of blocks held.
        ttl: evict prefixes idle for longer than this, in seconds.
        clock: returns the time in seconds.
        spill: store on disk that evicted prefixes are written to and restored from.
        identify: returns the name of a model on disk that stays the same across restarts (see ``model_identity``);
            called once each time a model is loaded. If it returns None, nothing is spilled.
    """

    def __init__(
        self,
        max_size: int | None = 10,
        max_bytes: int = 1 << 63,
        *,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        spill: SpillStore | None = None,
        identify: Callable[[Hashable], str | None] = lambda model: None,
    ) -> None:
        self.max_size, self.max_bytes, self.ttl, self.clock = max_size, max_bytes, ttl, clock
        self.spill, self.identify = spill, identify
        self.unpaged = LRUPromptCache(MAX_UNPAGED if max_size is None else max_size, max_bytes)
        self._kinds: list[str] = list(self.unpaged.stats_by_type())
        self._trees: weakref.WeakKeyDictionary[BlockPool, RadixTree] = weakref.WeakKeyDictionary()
        self._layouts: dict[Hashable, _Layout] = {}
        self._salt: Hashable = None
        self._saved: weakref.WeakKeyDictionary[BlockPool, int] = weakref.WeakKeyDictionary()
        # By pool, not by key: a model loaded again under the same key has another pool and may be a different model.
        self._identities: weakref.WeakKeyDictionary[BlockPool, str] = weakref.WeakKeyDictionary()

    def tree_of(self, pool: BlockPool) -> RadixTree:
        """Return the pool's tree, which batches may share. Its salts are ``(model, number)``: the key of the model, and
        0 for the model's own caches or 1 for its draft model's. Requests with a salt use :class:`Salted` ones of these.
        """
        tree = self._trees.get(pool)
        if tree is None:
            tree = self._trees[pool] = RadixTree(
                pool, ttl=self.ttl, clock=self.clock, on_evict=self._spill_to_disk(pool)
            )
        return tree

    def shared_prefixes(self, model: Hashable, pool: BlockPool) -> SharedPrefixes:
        """Return the prefixes of a model's own caches, for a batch to share. The pool's budget and the time to live
        bound what the batch inserts; :meth:`insert_cache` and :meth:`trim_to` count it too when next called."""
        self._note_identity(model, [pool])
        if self.spill is None:
            return SharedPrefixes(self.tree_of(pool), (model, 0))
        restores = partial(self._restore, model), partial(self._restore_checkpoint, model, weakref.ref(pool))
        return SharedPrefixes(self.tree_of(pool), (model, 0), *restores)

    @contextmanager
    def salted(self, salt: Hashable) -> Iterator[None]:
        """Limit a ``with`` block to the prefixes of requests with this salt."""
        before, self._salt = self._salt, salt
        try:
            yield
        finally:
            self._salt = before

    def learn_layout(self, model: Hashable, caches: Sequence[Any]) -> None:
        """Note which pools a model's caches lie in. Needed only to restore from disk before the first insert."""
        sequences = _sequences(caches)
        if sequences:
            own = [[c for c in caches if leaves([c])[0].sequence is s] for s in sequences]
            kinds = [with_leaves(part, [type(c) for c in leaves(part)]) for part in own]
            self._layouts[model] = [(weakref.ref(s.pool), kind) for s, kind in zip(sequences, kinds, strict=True)]
            self._note_identity(model, [sequence.pool for sequence in sequences])

    def _note_identity(self, model: Hashable, pools: Sequence[BlockPool]) -> None:
        """Remember the model's identity for its pools, as long as the pools exist."""
        if self.spill is not None and any(pool not in self._identities for pool in pools):
            identity = self.identify(model)
            if identity is not None:
                self._identities.update(dict.fromkeys(pools, identity))

    def forget_unloaded(self) -> None:
        """Drop the caches that are not paged when another model is loaded. They do not go with their model, and the new
        one may be a different model under the same name."""
        self.unpaged.trim_to(n_sequences=0)

    def tidy(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Evict expired prefixes and write those that are not on disk yet, so that they survive a crash. For idle time.

        Args:
            should_stop: called between prefixes; once it returns True, the rest is left for the next call. Prefixes are
                written in random order, so that repeated short calls reach all of them.
        """
        for tree in self._live_trees():
            tree.expire()
        if self.spill is not None:
            self.spill.collect_written()
        for tree in self._live_trees():
            save = self._spill_to_disk(tree.pool, wait=True)
            if save is None or self._saved.get(tree.pool) == tree.uses:
                continue
            uses = tree.uses
            nodes = list(tree.nodes())
            random.shuffle(nodes)
            for node in nodes:
                if should_stop():
                    return
                save(tree.salt_of(node), node)
            self._saved[tree.pool] = uses

    # mlx-lm's interface ---------------------------------------------------------------------------------------

    def fetch_nearest_cache(self, model: Hashable, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Return a cache with the longest known prefix of ``tokens``, which the caller may extend, and the remaining
        tokens."""
        pools = self._pools(model)
        length = self._common_length(model, pools, tokens)
        if not length:
            return self._fetch_unpaged(model, tokens)
        caches: list[Any] = []
        for number, (pool, kinds) in enumerate(pools):
            _, tables = self.tree_of(pool).adopt(tokens[: length + 1], self._key(model, number))
            sequence = SequenceTables.over(pool, tables)
            caches += with_leaves(kinds, [kind(sequence, layer) for layer, kind in enumerate(leaves(kinds))])
        return caches, tokens[length:]

    def insert_cache(
        self, model: Hashable, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Remember that ``prompt_cache`` holds ``tokens``. The caller keeps the cache and may extend it."""
        sequences = _sequences(prompt_cache)
        if not sequences:
            self.unpaged.insert_cache(salted(model, self._salt), tokens, prompt_cache, cache_type=cache_type)
            return
        self.learn_layout(model, prompt_cache)
        for number, sequence in enumerate(sequences):
            computed = tokens[: sequence.length]
            if computed:
                tree, key = self.tree_of(sequence.pool), self._key(model, number)
                tree.insert(computed, sequence.tables, key, label=cache_type)
        self._trim(self.max_size, self.max_bytes, newest=(model, tokens))

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict entries down to these numbers, least recently used ones of the most dispensable type first."""
        self._trim(
            None if n_sequences is None else max(0, n_sequences), 1 << 63 if n_bytes is None else max(0, n_bytes)
        )
        self.unpaged.trim_to(
            n_sequences=None if n_sequences is None else max(0, n_sequences - self._num_paged()),
            n_bytes=None if n_bytes is None else max(0, n_bytes - self._paged_bytes()),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes kept."""
        return self._paged_bytes() + int(self.unpaged.nbytes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes in all trees; a node is a run of tokens between two branching points."""
        return self._num_of(lambda tree, node: True)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return entries and bytes by type; a block that several nodes share counts for the type of the first."""
        result: dict[str, dict[str, int]] = self.unpaged.stats_by_type()
        for tree in list(self._trees.values()):
            for name, counted in tree.pool.lock.glance(partial(self._by_type, tree)).items():
                for figure, number in counted.items():
                    result[name][figure] += number
        return result

    def _by_type(self, tree: RadixTree, _: bool) -> dict[str, dict[str, int]]:
        found = {name: {"n_sequences": 0, "n_bytes": 0} for name in self._kinds}
        seen: list[set[int]] = [{0} for _ in tree.pool.groups]
        for node in tree.nodes():
            kind = found[self._kind(node)]
            kind["n_sequences"] += self._counts(tree, node)
            for known, group, blocks in zip(seen, tree.pool.groups, node.blocks, strict=True):
                new = set(blocks) - known
                known |= new
                kind["n_bytes"] += len(new) * group.bytes_per_block
        return found

    def figures(self) -> dict[str, Any]:
        """Return the figures for ``/v1/cache/stats``."""
        return {
            "entries": len(self),
            "bytes": self.nbytes,
            "nodes": self.num_nodes,
            "by_type": self.stats_by_type(),
            "checkpoints": self._checkpoints(),
            "on_disk": None
            if self.spill is None
            else {"blocks": len(self.spill), "bytes": self.spill.nbytes, "dropped": self.spill.dropped},
        }

    def _checkpoints(self) -> dict[str, int]:
        """Return the number of checkpoints of states, their bytes, and how many were dropped."""
        held = [tree.checkpoints for tree in list(self._trees.values())]
        return {
            "number": sum(map(len, held)),
            "bytes": sum(each.nbytes for each in held),
            "dropped": sum(each.dropped for each in held),
        }

    def __len__(self) -> int:
        return self._num_paged() + len(self.unpaged)

    def close(self) -> None:
        """Drop everything; with a spill store, write it to disk first."""
        self._saved.clear()
        self.tidy()
        for tree in self._live_trees():
            tree.clear()
        if self.spill is not None:
            self.spill.flush()
        self.unpaged.trim_to(n_sequences=0)

    # Inside ---------------------------------------------------------------------------------------------------

    def _pools(self, model: Hashable) -> list[tuple[BlockPool, _Kinds]]:
        layout = self._layouts.get(model, [])
        pools = [(pool, kinds) for ref, kinds in layout if (pool := ref()) is not None and not pool.is_lost]
        if len(pools) < len(layout):
            del self._layouts[model]  # the model was unloaded, and its blocks with it, or the device has failed
            return []
        return pools

    def _key(self, model: Hashable, number: int) -> Hashable:
        """Return the tree's salt for the present request."""
        return salted((model, number), self._salt)

    def _restore(self, model: Hashable, tokens: Sequence[int], salt: Hashable = None) -> None:
        """Restore blocks from disk that extend the prefixes in memory."""
        if self.spill is None:
            return
        for number, (pool, _) in enumerate(self._pools(model)):
            identity = self._identities.get(pool)
            if identity is None:
                continue
            try:
                key = salted((model, number), salt)
                self.spill.restore(self.tree_of(pool), list(tokens), key, _on_disk(identity, number, salt))
            except PoolExhaustedError:
                return  # use what is in the tree

    def _restore_checkpoint(
        self, model: Hashable, ref: weakref.ref[BlockPool], tokens: Sequence[int], salt: Hashable = None
    ) -> None:
        """Restore from disk a checkpoint deeper than those in memory, and the blocks before it."""
        pool = ref()
        identity = None if pool is None else self._identities.get(pool)
        if self.spill is not None and pool is not None and identity is not None:
            with suppress(PoolExhaustedError):  # use what is in the tree
                tree, key = self.tree_of(pool), salted((model, 0), salt)
                self.spill.restore_checkpoint(tree, list(tokens), key, _on_disk(identity, 0, salt))

    def _common_length(self, model: Hashable, pools: list[tuple[BlockPool, _Kinds]], tokens: list[int]) -> int:
        """Return the longest prefix that all of a model's pools can serve."""
        self._restore(model, tokens, self._salt)
        length = len(tokens) - 1 if pools else 0
        while length > 0:
            lengths = [
                self.tree_of(pool).match(tokens[: length + 1], self._key(model, number)).length
                for number, (pool, _) in enumerate(pools)
            ]
            if min(lengths) == length:
                break
            length = min(lengths)
        return max(0, length)

    def _fetch_unpaged(self, model: Hashable, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        model = salted(model, self._salt)
        cache, rest = self.unpaged.fetch_nearest_cache(model, tokens)
        if cache is None or rest:
            return cache, rest
        if can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, 1)
            return cache, tokens[-1:]
        cache, rest = self.unpaged.fetch_nearest_cache(model, tokens[:-1])
        return cache, rest + tokens[-1:]

    def _spill_to_disk(self, pool: BlockPool, *, wait: bool = False) -> Callable[[Hashable, RadixNode], None] | None:
        if self.spill is None:
            return None
        spill, identities, pool_ref = self.spill, self._identities, weakref.ref(pool)

        def on_evict(salt: Any, node: RadixNode) -> None:
            of_request = None
            if isinstance(salt, Salted):
                salt, of_request = salt
            _, number = salt
            alive = pool_ref()
            identity = None if alive is None else identities.get(alive)
            if identity is not None and alive is not None:
                spill.save(alive, node, _on_disk(identity, number, of_request), wait=wait)

        return on_evict

    def _trim(self, max_size: int | None, max_bytes: int, newest: tuple[Hashable, list[int]] | None = None) -> None:
        keep = None
        if newest is not None:
            pools = self._pools(newest[0])
            keep = self.tree_of(pools[0][0]).match([*newest[1], -1], self._key(newest[0], 0)).node if pools else None
        while (max_size is not None and self._num_paged() > max_size) or self._paged_bytes() > max_bytes:
            victim = self._next_victim(keep)
            if victim is None:
                return
            tree, node = victim
            tree.remove(node)

    def _next_victim(self, keep: RadixNode | None) -> tuple[RadixTree, RadixNode] | None:
        """Return the next entry to evict, in mlx-lm's order: of the first type with at least as many entries as the
        type after it."""
        by_kind: dict[str, list[tuple[RadixTree, RadixNode]]] = {kind: [] for kind in self._kinds}
        for tree in self._live_trees():
            for node in tree.leaves():
                if node is not keep:
                    by_kind[self._kind(node)].append((tree, node))
        for kind, following in zip(self._kinds, [*self._kinds[1:], None], strict=True):
            if by_kind[kind] and (following is None or len(by_kind[kind]) >= len(by_kind[following])):
                return min(by_kind[kind], key=lambda each: each[1].used_at)
        # No type has: take an entry of the last type that has any.
        return next((min(by_kind[k], key=lambda each: each[1].used_at) for k in self._kinds[::-1] if by_kind[k]), None)

    def _kind(self, node: RadixNode) -> str:
        return node.label if isinstance(node.label, str) and node.label in self._kinds else self._kinds[0]

    def _counts(self, tree: RadixTree, node: RadixNode) -> bool:
        """Return whether the node is an entry: a leaf that does not belong to a draft model."""
        salt: Any = tree.salt_of(node)
        key: Any = salt.base if isinstance(salt, Salted) else salt
        return not node.children and key[1] == 0

    def _num_paged(self) -> int:
        return self._num_of(self._counts)

    def _num_of(self, counts: Callable[[RadixTree, RadixNode], bool]) -> int:
        """Return how many nodes of all trees satisfy ``counts``."""
        return sum(tree.pool.lock.glance(partial(_num_nodes, tree, counts)) for tree in self._live_trees())

    def _paged_bytes(self) -> int:
        return sum(tree.nbytes for tree in self._live_trees())

    def _live_trees(self) -> list[RadixTree]:
        """Return the trees whose blocks were not lost in an error of the device."""
        return [tree for pool, tree in list(self._trees.items()) if not pool.is_lost]


# The server's prompt cache: mlx-lm's, of size 0, if the prefix cache is disabled.
PromptStore: TypeAlias = PagedPromptCache | LRUPromptCache


def salted_store(store: PromptStore, salt: Hashable) -> AbstractContextManager[None]:
    """Limit a ``with`` block to the prefixes of requests with this salt."""
    return store.salted(salt) if isinstance(store, PagedPromptCache) else nullcontext()


def _num_nodes(tree: RadixTree, counts: Callable[[RadixTree, RadixNode], bool], _: bool) -> int:
    return sum(counts(tree, node) for node in tree.nodes())


def _on_disk(identity: str, number: int, salt: Hashable) -> str:
    """Return the name of a model's prefixes on disk; requests with a salt have a separate one."""
    return f"{identity}/{number}" if salt is None else f"{identity}/{number}/{salt}"


def _sequences(caches: Sequence[Any]) -> list[SequenceTables]:
    """Return the sequences of a prompt cache; none unless all layers of each are paged and present, in order."""
    parts = leaves(caches)
    if not parts or not all(isinstance(cache, PagedLayerCache) for cache in parts):
        return []
    sequences: list[SequenceTables] = []
    for cache in parts:
        if not sequences or cache.sequence is not sequences[-1]:
            sequences.append(cache.sequence)
    expected = [(id(s), layer) for s in sequences for layer in range(s.num_layers)]
    return sequences if [(id(c.sequence), c.layer) for c in parts] == expected else []
