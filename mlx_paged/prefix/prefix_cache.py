"""PrefixCache: whole blocks of one pool, found by the tokens before them; the least recently used leaf goes first."""

from __future__ import annotations

import hashlib
import operator
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

from ..errors import BlockStateError
from ..kv.allocator import NULL_BLOCK
from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from ..kv.pool_memory import STATES_SHARE
from .entry import Checkpoint, Entry, Match, is_saved, next_key, serves

# Largest share of a pool's budget for prefixes that requests ask to keep, so that others always have room.
KEPT_SHARE = 1 / 2


class Tier(Protocol):
    """Takes the entries that a cache evicts, and gives them back."""

    def save(self, cache: PrefixCache, entry: Entry) -> None:
        """Save what an entry holds, before it or a part of it is evicted."""

    def restore(self, cache: PrefixCache, tokens: Sequence[int], salt: Hashable, to_state: bool) -> int:
        """Insert the longest prefix of ``tokens`` that was saved, before it is looked up."""


class PrefixCache:
    """Prefixes of the sequences of one pool, shared by reference.

    A block's key is a hash of its tokens and of the key before it, so equal beginnings are stored once. The tokens are
    compared on a hit. Blocks outlive the sequences that computed them; the pool evicts from here before an allocation
    fails. Every method is atomic under the pool's lock.

    In a group with a window, a prefix can be served if the window before its end is held.

    Args:
        pool: held by a weak reference: a cache must not keep a model's memory alive.
        ttl: evict prefixes idle for longer than this, in seconds.
        clock: the time, in seconds.

    Attributes:
        entries: by key, least recently used first, and each after its children.
        evictions, hit_tokens: see :class:`.memory.BlockHolder`.
        state_nbytes: bytes of the checkpoints.
        dropped_states: checkpoints dropped because there was no room.
        version: rises with each change of what is held.
        tier: where evicted entries go; None: they are gone.
    """

    def __init__(
        self, pool: BlockPool, *, ttl: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = weakref.ref(pool)
        self.block_size = pool.block_size
        self.windows = [group.spec.sees for group in pool.groups]
        self.ttl, self.clock = ttl, clock
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.evictions = self.hit_tokens = self.state_nbytes = self.dropped_states = self.version = 0
        self.tier: Tier | None = None
        self._counts: list[Counter[int]] = [Counter() for _ in pool.groups]  # references by block
        self._kept: dict[Entry, None] = {}  # evicted after the others
        self._states: OrderedDict[Entry, None] = OrderedDict()  # entries with a checkpoint, least recently used first
        self._tails: dict[bytes, list[Entry]] = {}  # tails by the key before them
        # Per group with a window, entries with children from which no sequence has continued: only a sequence that
        # diverges there needs their blocks.
        self._behind: list[OrderedDict[Entry, None]] = [OrderedDict() for _ in pool.groups]
        specs = [(group.spec.layers, group.spec.sees) for group in pool.groups]
        self._layout = f"{pool.block_size} {pool.page_format} {specs}"
        pool.memory.add_holder(self)
        weakref.finalize(self, _abandon, self._pool, self._counts).atexit = False

    @property
    def pool(self) -> BlockPool:
        """The cache's pool. Raises BlockStateError if it is gone."""
        pool = self._pool()
        if pool is None:
            raise BlockStateError("the prefix cache's pool no longer exists")
        return pool

    # Looking up -----------------------------------------------------------------------------------------------

    def root(self, salt: Hashable) -> bytes:
        """Return the key before a prefix's first block. ``salt`` is all that keys and values depend on besides the
        tokens, such as the model, and whoever may share them; it is told from others by its ``repr``."""
        return hashlib.sha256(f"{self._layout} {salt!r}".encode("utf-8", "surrogatepass")).digest()[:16]

    def match(
        self, tokens: Sequence[int], salt: Hashable = None, *, to_state: bool = False, after: Sequence[Entry] = ()
    ) -> Match:
        """Return the longest prefix of ``tokens`` that every group can serve, never all of them: the last token is left
        to compute. Takes no reference (see :meth:`adopt`), but marks its path as used: a waiting request, most often a
        preempted one, will soon need it.

        Args:
            tokens: tokens to look up.
            salt: see :meth:`root`.
            to_state: the longest that ends at a checkpoint.
            after: path of an earlier match of a beginning of these tokens; what is still here is not looked up again.
        """
        with self.pool.lock:
            self.pool.lock.device.check()
            self.expire()
            for path in self._candidates(tokens, salt, to_state, after):
                length = path[-1].end
                if serves(self.windows, self.block_size, length, partial(_is_held, path)):
                    self._touch(path)
                    return Match(length, path, self._blocks_of(path, length))
            return Match(0, [], tuple([] for _ in self.windows))

    def _candidates(
        self, tokens: Sequence[int], salt: Hashable, to_state: bool, after: Sequence[Entry]
    ) -> Iterator[list[Entry]]:
        """Yield the prefixes of ``tokens[:-1]`` that are here, longest first; with ``to_state`` those that end at a
        checkpoint."""
        path, keys = self._walk(tokens, self.root(salt), after)
        for number in range(len(path), -1, -1):
            low = number * self.block_size
            if to_state:
                tails = [t for t in self._tails.get(keys[number], ()) if t.end < len(tokens)]
                fits = [tail for tail in tails if tuple(tokens[low : tail.end]) == tail.tokens]
                yield from ([*path[:number], tail] for tail in sorted(fits, key=lambda tail: -tail.end))
            if number and (not to_state or path[number - 1].checkpoint is not None):
                yield path[:number]

    def _walk(self, tokens: Sequence[int], root: bytes, after: Sequence[Entry] = ()) -> tuple[list[Entry], list[bytes]]:
        """Return the entries along ``tokens[:-1]``, whole blocks only, and the keys before each of them and at the
        end."""
        path = self._still_here(after, (len(tokens) - 1) // self.block_size)
        keys = [root, *(entry.key for entry in path)]
        for low in range(len(path) * self.block_size, len(tokens) - self.block_size, self.block_size):
            part = tuple(tokens[low : low + self.block_size])
            key = next_key(keys[-1], part)
            entry = self.entries.get(key)
            if entry is None or entry.tokens != part:
                break
            path.append(entry)
            keys.append(key)
        return path, keys

    def _still_here(self, path: Sequence[Entry], most: int) -> list[Entry]:
        """Return the entries of a path that were not evicted, whole blocks only, at most the first ``most``."""
        found = list(path[:most])
        # An entry goes after its children, so all before one that is here are here.
        while found and (len(found[-1].tokens) < self.block_size or self.entries.get(found[-1].key) is not found[-1]):
            found.pop()
        return found

    def _blocks_of(self, path: Sequence[Entry], length: int) -> tuple[list[int], ...]:
        found = []
        for group, window in enumerate(self.windows):
            needed = 0 if window is None else window.first_seen(length)
            behind = min(len(path), needed // self.block_size)
            ids = [NULL_BLOCK] * behind + [entry.blocks[group] for entry in path[behind:]]
            found.append(ids[:behind] if needed == length else ids)  # the next token begins a block of its own
        return tuple(found)

    def adopt(
        self, tokens: Sequence[int], salt: Hashable = None, *, to_state: bool = False, after: Sequence[Entry] = ()
    ) -> tuple[Match, BlockTable]:
        """Return the longest prefix (:meth:`match`), and a table over its blocks, which the caller owns and must
        release. No bytes are copied; a write to a shared, partially filled block copies it first."""
        if self.tier is not None:
            self.tier.restore(self, tokens, salt, to_state)
        with self.pool.lock:
            match = self.match(tokens, salt, to_state=to_state, after=after)
            self.hit_tokens += match.length
            table = self.pool.table_over(match.blocks, match.length)
            for window, behind in zip(self.windows, self._behind, strict=True):
                seen = 0 if window is None else window.first_seen(match.length) // self.block_size
                for entry in match.path[seen:] if behind else ():
                    behind.pop(entry, None)
            if to_state and match.path:
                self._states.move_to_end(match.path[-1])
            return match, table

    def num_alone(self, match: Match) -> list[int]:
        """Return, per group, how many blocks of a match only this cache holds."""
        return [self._num_alone(group, set(ids)) for group, ids in enumerate(match.blocks)]

    def known_length(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many leading tokens are here in whole blocks, whether they can be served or not."""
        with self.pool.lock:
            return len(self._walk(tokens, self.root(salt))[0]) * self.block_size

    # Inserting ------------------------------------------------------------------------------------------------

    def insert(
        self,
        tokens: Sequence[int],
        table: BlockTable,
        salt: Hashable = None,
        *,
        states: Callable[[], Checkpoint | None] | None = None,
        keep: int = 0,
        after: Sequence[Entry] = (),
    ) -> bool:
        """Take references on the whole blocks of ``tokens``, and with ``states`` on the block of the last ones.

        The caller keeps the table and may go on writing: a partially filled block is shared then, and copied first.

        Args:
            tokens: from position 0 on.
            table: holds the tokens.
            salt: see :meth:`root`.
            states: returns a checkpoint of the tokens' end, or None if there cannot be one; called if there is none.
            keep: number of leading tokens that are evicted after others. They take up to :data:`KEPT_SHARE` of the
                pool's budget; beyond it, those kept first become ordinary ones.
            after: see :meth:`match`.

        Returns:
            False if there is no room for the states: checkpoints take up to :data:`STATES_SHARE` of the budget.
            Then nothing is inserted.

        Raises:
            ValueError: the table does not hold the tokens. Nothing was changed.
        """
        if table.released or table.length < len(tokens) or len(table.block_ids) != len(self.windows):
            raise ValueError(f"{table} does not hold {len(tokens)} tokens of this pool")
        if not tokens:
            return True
        with self.pool.lock:
            self.pool.lock.device.check()
            self.expire()
            checkpoint = None
            if states is not None and not self._has_state(tokens, salt, after):
                checkpoint = states()
                if checkpoint is None or not self._has_room(checkpoint.nbytes):
                    self.dropped_states += 1
                    return False
            path = self._still_here(after, len(tokens) // self.block_size)
            try:
                self._add(path, tokens if states is not None else self._whole(tokens), table, salt)
            finally:
                self._touch(path)
            if checkpoint is not None and path and path[-1].end == len(tokens):
                path[-1].checkpoint = checkpoint
                self._states[path[-1]] = None
                self.state_nbytes += checkpoint.nbytes
            if keep:
                self._keep([entry for entry in path if entry.end <= keep])
            return True

    def _whole(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[: len(tokens) - len(tokens) % self.block_size]

    def _has_state(self, tokens: Sequence[int], salt: Hashable, after: Sequence[Entry]) -> bool:
        longest = next(self._candidates([*tokens, -1], salt, True, after), None)
        return longest is not None and longest[-1].end == len(tokens)

    def _has_room(self, nbytes: int) -> bool:
        """Return whether there is room for a checkpoint, after dropping others if necessary."""
        memory, most = self.pool.memory, int(self.pool.memory.budget * STATES_SHARE)
        if self.state_nbytes + nbytes > most:
            self.evict_states(self.state_nbytes + nbytes - most)
        return self.state_nbytes + nbytes <= most and nbytes <= memory.unreserved_bytes

    def _add(self, path: list[Entry], tokens: Sequence[int], table: BlockTable, salt: Hashable) -> None:
        """Add the entries of ``tokens`` that are missing, and append all of them to ``path``, which may have the first
        ones already."""
        parent = path[-1] if path else None
        key = self.root(salt) if parent is None else parent.key
        for index, known in enumerate(path if any(self.windows) else ()):
            self._hold(known, table, index)  # blocks that a window's group has lost come back
        for low in range(len(path) * self.block_size, len(tokens), self.block_size):
            before, part = key, tuple(tokens[low : low + self.block_size])
            key = next_key(before, part)
            entry = self.entries.get(key)
            if entry is not None and entry.tokens != part:
                return  # another prefix has the same hash
            if entry is None:
                nothing = [NULL_BLOCK] * len(self.windows)
                entry = Entry(before, key, parent, part, nothing, stays_in_memory=not is_saved(salt))
                self._hold(entry, table, low // self.block_size)
                self.entries[key] = entry
                if len(part) < self.block_size:
                    self._tails.setdefault(before, []).append(entry)
                if parent is not None:
                    parent.num_children += 1
                    self._note_behind(parent)
            else:
                self._hold(entry, table, low // self.block_size)
            path.append(entry)
            parent = entry

    def _hold(self, entry: Entry, table: BlockTable, index: int) -> None:
        """Take references on the table's blocks at ``index`` that the entry does not hold yet."""
        for group, ids in enumerate(table.block_ids):
            block = ids[index] if index < len(ids) else NULL_BLOCK
            if entry.blocks[group] == NULL_BLOCK != block:
                self.pool.retain(group, [block])
                self._counts[group][block] += 1
                entry.blocks[group] = block
                self.version += 1

    def _note_behind(self, parent: Entry) -> None:
        """Note a block that only sequences which diverge here need, once an entry has its first child."""
        if parent.num_children == 1:
            for window, behind in zip(self.windows, self._behind, strict=True):
                if window is not None:
                    behind[parent] = None

    def _keep(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):  # deepest first: useless without their ancestors
            self._kept.pop(entry, None)
            self._kept[entry] = None
        excess = sum(map(self._nbytes_of, self._kept)) - self.pool.memory.budget * KEPT_SHARE
        while excess > 0 and self._kept:
            entry = next(iter(self._kept))
            del self._kept[entry]
            excess -= self._nbytes_of(entry)

    def _nbytes_of(self, entry: Entry) -> int:
        held = zip(entry.blocks, self.pool.groups, strict=True)
        states = 0 if entry.checkpoint is None else entry.checkpoint.nbytes
        return states + sum(group.bytes_per_block for block, group in held if block != NULL_BLOCK)

    def _touch(self, path: Sequence[Entry]) -> None:
        """Mark a path as used. Its entries come to lie behind their children."""
        now = self.clock()
        for entry in reversed(path):
            entry.used_at = now
            self.entries.move_to_end(entry.key)

    # Evicting -------------------------------------------------------------------------------------------------

    def reclaimable(self, group: int, enough: int | None = None) -> int:
        """Return how many blocks of the group only this cache holds; counting stops at ``enough``."""
        with self.pool.lock:
            held, refcount = self._counts[group], self.pool.groups[group].allocator.refcount
            # Called in many steps while the pool is full, so it runs no Python code per block.
            alone = filter(None, map(operator.eq, map(refcount, held), held.values()))
            return sum(islice(alone, enough))

    def _num_alone(self, group: int, blocks: Iterable[int]) -> int:
        held, refcount = self._counts[group], self.pool.groups[group].allocator.refcount
        return sum(b != NULL_BLOCK and refcount(b) == held[b] for b in blocks)

    def evict(self, group: int, num_blocks: int) -> int:
        """Free blocks of a group: in a group with a window first those that only a diverging sequence would need; then
        of the least recently used leaves. Entries that a sequence uses go last, only to reach those before them.

        Returns:
            Number of blocks that became free: at least ``num_blocks``, or fewer if there are no more.
        """
        with self.pool.lock:
            freed = self._evict_behind(group, num_blocks)
            freed += self._evict_leaves(group, num_blocks - freed, self._is_kept_or_used)
            freed += self._evict_leaves(group, num_blocks - freed, self._is_used)
            left = self.reclaimable(group, max(0, num_blocks - freed))
            return freed + self._evict_leaves(group, left, lambda entry: False)

    def _evict_behind(self, group: int, num_blocks: int) -> int:
        """Free blocks of a group with a window that only a diverging sequence would need."""
        freed, behind = 0, self._behind[group]
        for _ in range(len(behind)):
            if freed >= num_blocks:
                break
            entry = next(iter(behind))
            if entry.blocks[group] != NULL_BLOCK and not self._num_alone(group, [entry.blocks[group]]):
                behind.move_to_end(entry)  # a sequence uses it
                continue
            self._save(entry)
            freed += self._drop(entry, group)
            del behind[entry]
        return freed

    def _evict_leaves(self, group: int, num_blocks: int, spares: Callable[[Entry], bool]) -> int:
        """Free blocks of the least recently used entries without children, but not of those to spare, which count as
        used now."""
        freed, spared = 0, set[Entry]()
        while freed < num_blocks and self.entries:
            entry = next(iter(self.entries.values()))
            if entry in spared:
                break
            if spares(entry):
                path = entry.path()
                self._touch(path)
                spared.update(path)
            else:
                freed += self._remove(entry)[group]
        return freed

    def _save(self, entry: Entry) -> None:
        if self.tier is not None:
            self.tier.save(self, entry)

    def _is_used(self, entry: Entry) -> bool:
        return any(b != NULL_BLOCK and not self._num_alone(g, [b]) for g, b in enumerate(entry.blocks))

    def _is_kept_or_used(self, entry: Entry) -> bool:
        return entry in self._kept or self._is_used(entry)

    def _remove(self, entry: Entry) -> list[int]:
        """Evict an entry without children. Returns how many blocks of each group became free."""
        self._save(entry)
        freed = [self._drop(entry, group) for group in range(len(entry.blocks))]
        self._drop_state(entry)
        del self.entries[entry.key]
        self._kept.pop(entry, None)
        for behind in self._behind:
            behind.pop(entry, None)
        if entry.parent is not None:
            entry.parent.num_children -= 1
        if len(entry.tokens) < self.block_size:
            self._tails[entry.before].remove(entry)
            if not self._tails[entry.before]:
                del self._tails[entry.before]
        self.version += 1
        return freed

    def _drop(self, entry: Entry, group: int) -> int:
        """Drop an entry's reference on a block. Returns how many blocks became free, 0 or 1, counted as evictions."""
        block = entry.blocks[group]
        if block == NULL_BLOCK:
            return 0
        freed = int(self.pool.groups[group].allocator.refcount(block) == 1)
        self.pool.release(group, [block])
        entry.blocks[group] = NULL_BLOCK
        self._counts[group][block] -= 1
        if not self._counts[group][block]:
            del self._counts[group][block]
        self.evictions += freed
        self.version += 1
        return freed

    @property
    def num_states(self) -> int:
        """Number of checkpoints."""
        return len(self._states)

    def evict_states(self, num_bytes: int) -> int:
        """Drop the least recently used checkpoints, kept ones last, and entries that are useless without them. Returns
        checkpoints' bytes."""
        with self.pool.lock:
            freed = 0
            for entry in sorted(self._states, key=self._kept.__contains__):
                if freed >= num_bytes:
                    break
                self._save(entry)
                freed += self._drop_state(entry)
                self.dropped_states += 1
                last: Entry | None = entry
                while last is not None and not last.num_children and last.checkpoint is None:
                    parent = last.parent
                    self._remove(last)
                    last = parent
            return freed

    def _drop_state(self, entry: Entry) -> int:
        checkpoint, entry.checkpoint = entry.checkpoint, None
        self._states.pop(entry, None)
        if checkpoint is None:
            return 0
        self.state_nbytes -= checkpoint.nbytes
        self.version += 1
        return checkpoint.nbytes

    def evict_oldest(self) -> None:
        """Evict the least recently used prefix, as far as no other begins with it."""
        with self.pool.lock:
            entry: Entry | None = next(iter(self.entries.values()), None)
            while entry is not None and not entry.num_children:
                parent = entry.parent
                self._remove(entry)
                entry = parent

    def clear(self) -> None:
        """Evict everything."""
        with self.pool.lock:
            for entry in list(self.entries.values()):
                self._remove(entry)

    def expire(self) -> None:
        """Evict prefixes that were not used for ``ttl`` seconds. Costs nothing while none is due."""
        if self.ttl is None:
            return
        with self.pool.lock:
            due = self.clock() - self.ttl
            while self.entries and (entry := next(iter(self.entries.values()))).used_at <= due:
                self._remove(entry)

    # Accounts -------------------------------------------------------------------------------------------------

    @property
    def num_leaves(self) -> int:
        """Number of prefixes that no other prefix begins with."""
        return sum(not entry.num_children for entry in self.entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held, each counted once, and of the checkpoints."""
        held = zip(self._counts, self.pool.groups, strict=True)
        return self.state_nbytes + sum(len(count) * group.bytes_per_block for count, group in held)

    def held(self, group: int) -> list[list[int]]:
        """Return the blocks of the group, once for each reference."""
        return [list(self._counts[group].elements())]

    def check_integrity(self) -> None:
        """Raise BlockStateError unless entries, their order, blocks and references agree. See also the pool's."""
        with self.pool.lock:
            counts: list[Counter[int]] = [Counter() for _ in self.windows]
            children: Counter[Entry] = Counter()
            seen: set[Entry] = set()
            for key, entry in self.entries.items():
                for count, block in zip(counts, entry.blocks, strict=True):
                    count.update([block] if block != NULL_BLOCK else [])
                if entry.parent is not None:
                    children[entry.parent] += 1
                if key != entry.key or entry.parent in seen:
                    raise BlockStateError(f"the entry {entry.tokens} is under another key, or after its parent")
                seen.add(entry)
            if counts != self._counts:
                raise BlockStateError("the entries' blocks do not match the references that the cache holds")
            if any(entry.num_children != children[entry] for entry in seen) or not seen >= children.keys():
                raise BlockStateError("the numbers of children do not match the entries")
            slots = [entry.checkpoint.nbytes for entry in self._states if entry.checkpoint is not None]
            if {entry for entry in seen if entry.checkpoint} != set(self._states) or sum(slots) != self.state_nbytes:
                raise BlockStateError("the checkpoints do not match the entries")
            tails = {entry for each in self._tails.values() for entry in each}
            if tails != {entry for entry in seen if len(entry.tokens) < self.block_size} or not seen >= set(self._kept):
                raise BlockStateError("tails or kept entries do not match the entries")


def _is_held(path: Sequence[Entry], index: int, group: int) -> bool:
    return path[index].blocks[group] != NULL_BLOCK


def _abandon(pool: weakref.ref[BlockPool], counts: list[Counter[int]]) -> None:
    """Release the references of a cache that was dropped."""
    if (alive := pool()) is not None:
        alive.lock.abandon([list(blocks.elements()) for blocks in counts])


class SharedPrefixes:
    """A prefix cache as one model's batch sees it.

    Args:
        cache: cache over the batch's pool.
        name: what all its salts have in common: the model, and which of its caches.
    """

    def __init__(self, cache: PrefixCache, name: Hashable = None) -> None:
        self.cache, self.name = cache, name

    @property
    def pool(self) -> BlockPool:
        """Pool of the prefixes; it has no blocks if no layer is paged."""
        return self.cache.pool

    def match(self, tokens: Sequence[int], salt: Hashable = None, **options: Any) -> Match:
        """See :meth:`PrefixCache.match`."""
        return self.cache.match(tokens, (self.name, salt), **options)

    def adopt(self, tokens: Sequence[int], salt: Hashable = None, **options: Any) -> tuple[Match, BlockTable]:
        """See :meth:`PrefixCache.adopt`."""
        return self.cache.adopt(tokens, (self.name, salt), **options)

    def restore(self, tokens: Sequence[int], salt: Hashable = None) -> None:
        """Bring a longer prefix of ``tokens`` back from disk, if there is one."""
        if self.cache.tier is not None:
            self.cache.tier.restore(self.cache, tokens, (self.name, salt), False)

    def known_length(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """See :meth:`PrefixCache.known_length`."""
        return self.cache.known_length(tokens, (self.name, salt))

    def insert(self, tokens: Sequence[int], table: BlockTable, salt: Hashable = None, **options: Any) -> bool:
        """Insert the tokens that the table holds; see :meth:`PrefixCache.insert`."""
        return self.cache.insert(tokens[: table.length], table, (self.name, salt), **options)
