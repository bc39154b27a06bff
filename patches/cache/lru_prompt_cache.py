"""PagedPromptCache: mlx-lm's ``LRUPromptCache`` over prefix caches, so that prefixes are shared and never copied."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ...cache.composites import leaves, with_leaves
from ...cache.sequence import SequenceTables
from ...kv.pool import BlockPool
from ...prefix.disk import DiskTier
from ...prefix.entry import SavedName
from ...prefix.prefix_cache import PrefixCache, SharedPrefixes
from .layer_cache import PagedLayerCache

# A prompt cache may hold the caches of several models, target and draft. The layout lists for each model, in order, its
# pool and the classes of its caches, composed as the caches are.
_Kinds = list[Any]
_Layout = list[tuple[weakref.ref[BlockPool], _Kinds]]
MAX_UNPAGED = 10  # mlx-lm's default; nothing else bounds the caches that are copied


class PagedPromptCache:
    """Stands in for mlx-lm's ``LRUPromptCache``, with these differences:

    - paged caches go in and come out by reference: nothing is copied, and blocks shared by prefixes count once;
    - the longest common prefix is found in whole blocks, with sliding windows too where the window is still held;
    - at least one token is always left to compute, where mlx-lm returns an empty remainder;
    - an entry is a prefix that is not the beginning of another, so entries that a longer one contains do not count;
    - entries have no type: the least recently used one is evicted first.

    Caches that are not paged, or that pin tokens, are kept whole in an ``LRUPromptCache`` of mlx-lm's.
    As in mlx-lm, a model's key must identify its weights: weights that are changed in place need another key.

    Args:
        max_size: most entries, for paged and other caches separately. None: no limit for paged ones, 10 others.
        ttl: evict prefixes idle for longer than this, in seconds.
        clock: returns the time in seconds.
        disk: where evicted prefixes are written to and restored from.
        identify: returns the name of a model on disk that stays the same across restarts (see ``model_identity``);
            called once each time a model is loaded. If it returns None, nothing of it is written.
    """

    def __init__(
        self,
        max_size: int | None = 10,
        *,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskTier | None = None,
        identify: Callable[[Hashable], str | None] = lambda model: None,
    ) -> None:
        self.max_size, self.ttl, self.clock = max_size, ttl, clock
        self.disk, self.identify = disk, identify
        self.unpaged = LRUPromptCache(MAX_UNPAGED if max_size is None else max_size)
        self._caches: weakref.WeakKeyDictionary[BlockPool, PrefixCache] = weakref.WeakKeyDictionary()
        self._drafts: weakref.WeakSet[BlockPool] = weakref.WeakSet()  # pools of draft models
        self._layouts: dict[Hashable, _Layout] = {}
        self._salt: Hashable = None
        self._saved: weakref.WeakKeyDictionary[BlockPool, int] = weakref.WeakKeyDictionary()
        # A model loaded again under the same key has another pool and may be a different model.
        self._identities: weakref.WeakKeyDictionary[BlockPool, str] = weakref.WeakKeyDictionary()

    def cache_of(self, pool: BlockPool) -> PrefixCache:
        """Return the pool's prefix cache, which batches may share."""
        cache = self._caches.get(pool)
        if cache is None:
            cache = self._caches[pool] = PrefixCache(pool, ttl=self.ttl, clock=self.clock)
            cache.tier = self.disk
        return cache

    def shared_prefixes(self, model: Hashable, pool: BlockPool, number: int = 0) -> SharedPrefixes:
        """Return the prefixes of a model's own caches (0), or of its draft model's (1), for a batch to share.

        The pool's budget and the time to live bound what the batch inserts; :meth:`insert_cache` and :meth:`trim_to`
        count it too when next called.
        """
        if number:
            self._drafts.add(pool)
        else:
            self._note_identity(model, [pool])
        return SharedPrefixes(self.cache_of(pool), self._name(model, number, pool))

    @contextmanager
    def salted(self, salt: Hashable) -> Iterator[None]:
        """Limit a ``with`` block to the prefixes of requests with this salt."""
        before, self._salt = self._salt, salt
        try:
            yield
        finally:
            self._salt = before

    def learn_layout(self, model: Hashable, caches: Sequence[Any]) -> None:
        """Note which pools a model's caches lie in. Needed only to restore from disk before the first insert; the pools
        must know their geometry."""
        sequences = _sequences(caches)
        if sequences:
            own = [[c for c in caches if leaves([c])[0].sequence is s] for s in sequences]
            kinds = [with_leaves(part, [type(c) for c in leaves(part)]) for part in own]
            self._layouts[model] = [(weakref.ref(s.pool), kind) for s, kind in zip(sequences, kinds, strict=True)]
            self._drafts.update(sequence.pool for sequence in sequences[1:])
            self._note_identity(model, [sequence.pool for sequence in sequences])

    def _note_identity(self, model: Hashable, pools: Sequence[BlockPool]) -> None:
        """Remember the model's identity for its pools, as long as the pools exist."""
        if self.disk is not None and any(pool not in self._identities for pool in pools):
            identity = self.identify(model)
            if identity is not None:
                self._identities.update({pool: identity for pool in pools})

    def _name(self, model: Hashable, number: int, pool: BlockPool) -> Hashable:
        """Return the name of a model's prefixes in a pool: on disk, if it has an identity there."""
        identity = self._identities.get(pool)
        return (model, number) if identity is None else SavedName(identity, number)

    def forget_unloaded(self) -> None:
        """Drop the caches that are not paged when another model is loaded. They do not go with their model, and the new
        one may be a different model under the same name."""
        self.unpaged.trim_to(n_sequences=0)

    def tidy(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Evict expired prefixes and write those that are not on disk yet, so that they survive a crash. For idle time.

        Args:
            should_stop: called between blocks; once it returns True, the rest is left for the next call.
        """
        for cache in self._live_caches():
            cache.expire()
            if self.disk is None or self._saved.get(cache.pool) == cache.version:
                continue
            version = cache.version
            for entry in list(
                reversed(cache.entries.values())
            ):  # those before others first: without them, others are useless
                if should_stop():
                    return
                self.disk.save(cache, entry, wait=True)
            self.disk.shelf.flush()
            self._saved[cache.pool] = version

    # mlx-lm's interface ---------------------------------------------------------------------------------------

    def fetch_nearest_cache(self, model: Hashable, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Return a cache with the longest known prefix of ``tokens``, which the caller may extend, and the remaining
        tokens."""
        shared = self._shared(model)
        length = self._common_length([prefixes for prefixes, _ in shared], tokens)
        if not length:
            return self._fetch_unpaged(model, tokens)
        caches: list[Any] = []
        for prefixes, kinds in shared:
            _, table = prefixes.adopt(tokens[: length + 1], self._salt)
            sequence = SequenceTables(prefixes.pool, table)
            caches += with_leaves(kinds, [kind(sequence, layer) for layer, kind in enumerate(leaves(kinds))])
        return caches, tokens[length:]

    def insert_cache(
        self, model: Hashable, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Remember that ``prompt_cache`` holds ``tokens``. The caller keeps the cache and may extend it."""
        sequences = _sequences(prompt_cache)
        if not sequences:
            self.unpaged.insert_cache((model, self._salt), tokens, prompt_cache, cache_type=cache_type)
            return
        self.learn_layout(model, prompt_cache)
        for number, sequence in enumerate(sequences):
            prefixes = SharedPrefixes(self.cache_of(sequence.pool), self._name(model, number, sequence.pool))
            prefixes.insert(tokens[: sequence.length], sequence.table, self._salt)
        self._trim(self.max_size)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict least recently used entries down to these numbers."""
        most_bytes = math.inf if n_bytes is None else max(0, n_bytes)
        self._trim(None if n_sequences is None else max(0, n_sequences), most_bytes)
        self.unpaged.trim_to(
            n_sequences=None if n_sequences is None else max(0, n_sequences - self._num_paged()),
            n_bytes=None if n_bytes is None else max(0, n_bytes - self._paged_bytes()),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes kept."""
        return self._paged_bytes() + int(self.unpaged.nbytes)

    def figures(self) -> dict[str, Any]:
        """Return the figures for ``/v1/cache/stats``."""
        caches = list(self._caches.values())
        return {
            "entries": len(self),
            "bytes": self.nbytes,
            "blocks": sum(len(cache.entries) for cache in caches),
            "checkpoints": {
                "number": sum(cache.num_states for cache in caches),
                "bytes": sum(cache.state_nbytes for cache in caches),
                "dropped": sum(cache.dropped_states for cache in caches),
            },
            "on_disk": None
            if self.disk is None
            else {
                "blocks": len(self.disk.shelf),
                "bytes": self.disk.shelf.nbytes,
                "dropped": self.disk.shelf.dropped,
            },
        }

    def __len__(self) -> int:
        return self._num_paged() + len(self.unpaged)

    def close(self) -> None:
        """Drop everything; with a disk tier, write it to disk first."""
        self._saved.clear()
        self.tidy()
        for cache in self._live_caches():
            cache.clear()
        if self.disk is not None:
            self.disk.shelf.flush()
        self.unpaged.trim_to(n_sequences=0)

    # Inside ---------------------------------------------------------------------------------------------------

    def _shared(self, model: Hashable) -> list[tuple[SharedPrefixes, _Kinds]]:
        """Return the prefixes of each of a model's pools, and the classes of its caches there."""
        layout = self._layouts.get(model, [])
        pools = [(pool, kinds) for ref, kinds in layout if (pool := ref()) is not None and not pool.is_lost]
        if len(pools) < len(layout):
            del self._layouts[model]  # the model was unloaded, and its blocks with it, or the device has failed
            return []
        names = [self._name(model, number, pool) for number, (pool, _) in enumerate(pools)]
        return [
            (SharedPrefixes(self.cache_of(pool), name), kinds) for (pool, kinds), name in zip(pools, names, strict=True)
        ]

    def _common_length(self, shared: Sequence[SharedPrefixes], tokens: list[int]) -> int:
        """Return the longest prefix that all of a model's pools can serve."""
        for prefixes in shared:
            prefixes.restore(tokens, self._salt)
        length = len(tokens) - 1 if shared else 0
        while length > 0:
            lengths = [prefixes.match(tokens[: length + 1], self._salt).length for prefixes in shared]
            if min(lengths) == length:
                break
            length = min(lengths)
        return max(0, length)

    def _fetch_unpaged(self, model: Hashable, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        salted = model, self._salt
        cache, rest = self.unpaged.fetch_nearest_cache(salted, tokens)
        if cache is None or rest:
            return cache, rest
        if can_trim_prompt_cache(cache):
            trim_prompt_cache(cache, 1)
            return cache, tokens[-1:]
        cache, rest = self.unpaged.fetch_nearest_cache(salted, tokens[:-1])
        return cache, rest + tokens[-1:]

    def _trim(self, max_size: int | None, max_bytes: float = math.inf) -> None:
        while (max_size is not None and self._num_paged() > max_size) or self._paged_bytes() > max_bytes:
            caches = [cache for cache in self._live_caches() if cache.entries]
            if not caches:
                return
            min(caches, key=lambda cache: next(iter(cache.entries.values())).used_at).evict_oldest()

    def _num_paged(self) -> int:
        """Return the number of entries, without those of draft models."""
        own = [cache for cache in self._live_caches() if cache.pool not in self._drafts]
        return sum(cache.pool.lock.glance(partial(_num_leaves, cache)) for cache in own)

    def _paged_bytes(self) -> int:
        return sum(cache.nbytes for cache in self._live_caches())

    def _live_caches(self) -> list[PrefixCache]:
        """Return the caches whose blocks were not lost in an error of the device."""
        return [cache for pool, cache in list(self._caches.items()) if not pool.is_lost]


def _num_leaves(cache: PrefixCache, _: bool) -> int:
    return cache.num_leaves


def _sequences(caches: Sequence[Any]) -> list[SequenceTables]:
    """Return the sequences of a prompt cache; none unless all layers of each are paged and present, in order."""
    parts = leaves(caches)
    if not parts or not all(isinstance(cache, PagedLayerCache) for cache in parts):
        return []
    sequences: list[SequenceTables] = []
    for cache in parts:
        if not sequences or cache.sequence is not sequences[-1]:
            sequences.append(cache.sequence)
    expected = [(id(s), layer) for s in sequences for layer in range(len(s.pool.places))]
    return sequences if [(id(c.sequence), c.layer) for c in parts] == expected else []
