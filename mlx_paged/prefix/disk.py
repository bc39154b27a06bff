"""DiskTier: prefixes that a cache evicts go to a shelf, and come back when they are looked up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..device import confirm, device_errors
from ..errors import BlockStateError, PoolExhaustedError
from ..kv.allocator import NULL_BLOCK
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from .entry import Checkpoint, Entry, is_saved, next_key, serves
from .prefix_cache import PrefixCache
from .shelf import Shelf

STATES = "states"


class _Found(NamedTuple):
    """A prefix on disk.

    Attributes:
        end: number of its tokens; 0 if there is none.
        keys: key of each of its blocks.
    """

    end: int
    keys: list[bytes]


class DiskTier:
    """Saves entries of prefix caches on a shelf, and restores them.

    Args:
        shelf: where they are.
        exchange: takes a number of this rank and returns those of all ranks that compute the model. Each rank has a
            folder with its own part of the keys and values; a prefix is restored as far as every rank has it.
    """

    def __init__(self, shelf: Shelf, exchange: Callable[[int], Sequence[int]] = lambda number: [number]) -> None:
        self.shelf, self.exchange = shelf, exchange

    # Saving ---------------------------------------------------------------------------------------------------

    @device_errors()
    def save(self, cache: PrefixCache, entry: Entry, *, wait: bool = False) -> None:
        """Queue what the entry holds and the shelf does not for writing. Blocks are copied to host memory. Warns, and
        does not raise, if that fails.

        Args:
            wait: wait until the queue has room; otherwise what it has no room for is dropped.

        Raises:
            DeviceError: the device has failed, now or before: the blocks and states are lost.
        """
        if entry.stays_in_memory:
            return
        cache.pool.lock.device.check()  # states need no lock, and their copies may not have been computed
        pool, shelf = cache.pool, self.shelf
        for group, block in enumerate(entry.blocks):
            if block != NULL_BLOCK:
                nbytes = pool.groups[group].bytes_per_block
                read = _reader(pool, group, entry)
                shelf.save(_name(entry.key, group), nbytes, read, wait=wait)
        if entry.checkpoint is not None:
            states = entry.checkpoint.arrays, entry.checkpoint.text
            shelf.save(_name(entry.key), entry.checkpoint.nbytes, lambda: states, wait=wait)

    # Coming back ----------------------------------------------------------------------------------------------

    @device_errors()
    def restore(self, cache: PrefixCache, tokens: Sequence[int], salt: Hashable, to_state: bool) -> int:
        """Load the longest prefix of ``tokens`` on disk into the cache, if it is longer than what is there. A prefix
        that the pool cannot hold stays on disk.

        Args:
            tokens, salt, to_state: see :meth:`PrefixCache.match`.

        Returns:
            Number of tokens that the cache can serve more than before.
        """
        if not is_saved(salt) or any(group.geometry is None for group in cache.pool.groups):
            return 0
        match = cache.match(tokens, salt, to_state=to_state)
        limit = len(tokens) - 1
        while True:
            found = self._find(cache, tokens, salt, match.length, limit, to_state)
            ends = self.exchange(found.end)
            if not min(ends):
                return 0
            if min(ends) < max(ends):
                limit = min(ends)
                continue
            loaded = self._load(cache, found, match.length, to_state)
            if min(self.exchange(int(loaded is not None))):
                break
            limit = found.end - 1  # bad files have been deleted: look again
        assert loaded is not None
        num_held, firsts = match.length // cache.block_size, _first_blocks(cache, found.end)
        # What windows have left in the cache behind their first blocks is not taken.
        ids = [
            blocks[:num_held] if first <= num_held else [NULL_BLOCK] * min(first, found.end // cache.block_size)
            for blocks, first in zip(match.blocks, firsts, strict=True)
        ]
        starts = [first * cache.block_size for first in firsts]
        try:
            table = cache.pool.table_over(ids, found.end, [min(start, found.end) for start in starts])
        except BlockStateError:  # another thread has evicted a block since it was found
            return 0
        try:
            self._write_back(cache, table, num_held, firsts, loaded)
            states = partial(loaded.pop, STATES) if to_state else None
            done = cache.insert(tokens[: found.end], table, salt, states=states)
            return found.end - match.length if done else 0
        except PoolExhaustedError:
            return 0
        finally:
            cache.pool.release_table(table)

    def _find(
        self, cache: PrefixCache, tokens: Sequence[int], salt: Hashable, length: int, limit: int, to_state: bool
    ) -> _Found:
        """Return the longest prefix of ``tokens[:limit]`` that can be served with the shelf's blocks after ``length``
        tokens of the cache."""
        size, windows = cache.block_size, cache.windows
        full = [group for group, window in enumerate(windows) if window is None]
        keys = [cache.root(salt)]

        def is_held(index: int, group: int) -> bool:
            if index < length // size:
                return True  # in the cache, as far as the windows of a longer prefix need it
            return self.shelf.has(_name(chain[index], group))

        for low in range(0, limit - size + 1, size):
            key = next_key(keys[-1], tuple(tokens[low : low + size]))
            if low + size > length and not all(self.shelf.has(_name(key, group)) for group in full):
                break
            keys.append(key)
        for number in range(len(keys) - 1, -1, -1):
            low = number * size
            tails = range(min(size - 1, limit - low), 0, -1) if to_state else ()
            for end in (*(low + count for count in tails), low):
                if end <= length:
                    continue
                chain = keys[1 : number + 1]
                if end > low:
                    chain.append(next_key(keys[number], tuple(tokens[low:end])))
                is_end = not to_state or self.shelf.has(_name(chain[-1]))
                if is_end and serves(windows, size, end, is_held):
                    return _Found(end, chain)
            if low + size <= length:
                break
        return _Found(0, [])

    def _load(self, cache: PrefixCache, found: _Found, length: int, to_state: bool) -> dict[str, Any] | None:
        """Return the arrays of each layer, in parts, by ``k<layer>`` and ``v<layer>``, and the states; None if a file
        was bad."""
        loaded: dict[str, Any] = {}
        for index in range(length // cache.block_size, len(found.keys)):
            for group, first in enumerate(_first_blocks(cache, found.end)):
                if index < first:
                    continue
                read = self.shelf.load(_name(found.keys[index], group))
                if read is None:
                    return None
                for name, array in read[0].items():
                    loaded.setdefault(name, []).append(array)
        if to_state:
            read = self.shelf.load(_name(found.keys[-1]))
            if read is None:
                return None
            loaded[STATES] = Checkpoint(read[1], read[0])
        return loaded

    @staticmethod
    def _write_back(
        cache: PrefixCache, table: BlockTable, num_held: int, firsts: Sequence[int], loaded: dict[str, Any]
    ) -> None:
        """Write the loaded arrays to new blocks of the table, whose first ``num_held`` blocks the cache holds.

        ``firsts``: of each group, the first block that the table's next token needs.
        """
        pool = cache.pool
        for group, first in zip(pool.groups, firsts, strict=True):
            start = max(num_held, first) * cache.block_size
            if start >= table.length:
                continue  # the next token sees only itself
            pool.fill(table, group.index, start)
            for layer in group.spec.layers:
                k, v = (mx.concatenate(loaded[f"{name}{layer}"], axis=2) for name in "kv")
                pool.write(layer, [table], k, v, stored=True)
                mx.eval(pool.ready(layer))


def _name(key: bytes, group: int | None = None) -> str:
    """Return the name of the file of a group's keys and values, or without a group of a checkpoint."""
    return f"{key.hex()}.states" if group is None else f"{key.hex()}.kv{group}"


def _first_blocks(cache: PrefixCache, end: int) -> list[int]:
    """Return, per group, the first block that the token after ``end`` tokens needs."""
    size = cache.block_size
    seen = [0 if window is None else window.first_seen(end) for window in cache.windows]
    return [-(-first // size) if first == end else first // size for first in seen]


def _reader(pool: BlockPool, group: int, entry: Entry) -> Callable[[], tuple[dict[str, mx.array], str]]:
    """Return a function that returns an entry's keys and values in every layer of a group, as pages hold them."""

    def read() -> tuple[dict[str, mx.array], str]:
        low = entry.end - len(entry.tokens)
        ids: list[list[int]] = [[] for _ in pool.groups]
        starts = [entry.end] * len(ids)
        ids[group], starts[group] = [NULL_BLOCK] * (low // pool.block_size) + [entry.blocks[group]], low
        table = pool.table_over(ids, entry.end, starts)
        try:
            arrays: dict[str, mx.array] = {}
            for layer in pool.groups[group].spec.layers:
                pair = zip("kv", pool.gather_visible(table, layer, stored=True), strict=True)
                arrays.update({f"{name}{layer}": mx.contiguous(x) for name, x in pair})
            mx.eval(list(arrays.values()))
        finally:
            pool.release_table(table)
        confirm()  # before anything is written: the device may report later that the blocks were not computed
        return arrays, ""

    return read
