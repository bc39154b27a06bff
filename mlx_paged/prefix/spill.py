"""SpillStore: blocks of prefixes on disk, one file each, which outlive a restart."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from ..device import confirm, device_errors
from ..errors import PoolExhaustedError, check_device
from ..kv.attention_params import Window
from ..kv.block_table import BlockTable
from ..kv.geometry import first_keys
from ..kv.pool import BlockPool
from .radix import RadixTree, table_over
from .radix_node import RadixNode
from .spill_folder import (
    FORMAT,
    BlockGeometry,
    SavedStates,
    SpilledBlock,
    SpillFolder,
    block_geometry_of,
    geometry_of,
    packed,
)

LINGER_SECONDS = 0.1  # starting a thread for each block of a prefix would cost more than copying the block


class WriteQueue:
    """Runs jobs in order in a thread, which ends soon after the last job. Python waits for it at exit.

    Args:
        most_bytes: most bytes of waiting jobs; a single job may have more.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0  # of unfinished jobs
        self._changed = threading.Condition()
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._num_open = 0
        self._is_running = False

    def room(self, nbytes: int) -> int:
        """Return how many jobs of ``nbytes`` bytes fit now."""
        return max(int(not self.nbytes), (self.most_bytes - self.nbytes) // max(1, nbytes))

    def put(self, nbytes: int, job: Callable[[], None], *, wait: bool) -> bool:
        """Put a job, which must not raise. Returns whether it was put.

        Args:
            nbytes: memory that the job holds.
            job: called in the queue's thread.
            wait: wait until there is room; otherwise a full queue returns False.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self.room(nbytes))
            elif not self.room(nbytes):
                return False
            self._jobs.append((nbytes, job))
            self.nbytes += nbytes
            self._num_open += 1
            self._changed.notify_all()
            if self._is_running:
                return True
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="mlx_paged prefix writer").start()
        except RuntimeError:  # no more threads, or the interpreter ends
            self._run()
        return True

    def wait(self) -> None:
        """Wait until every job is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, LINGER_SECONDS):
                    self._is_running = False
                    return
                nbytes, job = self._jobs.popleft()
            try:
                job()
            finally:
                del job
                with self._changed:
                    self.nbytes -= nbytes
                    self._num_open -= 1
                    self._changed.notify_all()


class SpillStore:
    """A folder of prefix blocks, each found by the tokens before it.

    A block's key is its *chain*: a hash of the identity it was saved under (the model's, and what else the keys depend
    on), the pool's layout (block size, page format, layers and windows of its groups) and all tokens before it. So the
    same tokens after another prefix are another block, equal beginnings are stored once, and files of other models are
    never matched. The block's own tokens and the geometry of its keys and values are in the file and are compared.

    A file that turns out to be bad is deleted, with one warning; the others are served as if it had not been there.

    Args:
        folder: created if missing; see :class:`SpillFolder`.
        max_bytes: most bytes of all files; beyond it the least recently used files are deleted.
        queued_bytes: most host memory of blocks that wait to be written; blocks evicted beyond it are dropped.
        exchange: takes a number of this rank and returns those of all ranks that compute the model. Each rank has a
            folder with its own part of the keys and values; a prefix is restored as far as every rank has it.

    Raises:
        OSError: the folder cannot be created or read.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        max_bytes: int = 1 << 63,
        queued_bytes: int = 256 << 20,
        exchange: Callable[[int], Sequence[int]] = lambda number: [number],
    ) -> None:
        self.exchange = exchange
        self.folder = SpillFolder(Path(folder))
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.dropped = 0  # evicted blocks that were not written: too many were waiting
        self._queue = WriteQueue(queued_bytes)
        # Blocks that wait to be written, by chain (their path is their chain), and results of writing.
        self._waiting: dict[str, list[SpilledBlock]] = {}
        self._done: deque[tuple[SpilledBlock, SpilledBlock | BaseException]] = deque()
        self._chains: dict[str, list[SpilledBlock]] = {}
        self._order: dict[Path, SpilledBlock] = {}  # least recently used first
        for block in self.folder.blocks():
            self._chains.setdefault(block.chain, []).append(block)
            self._order[block.path] = block
            self.nbytes += block.nbytes
        self._enforce_limit()

    def __len__(self) -> int:
        return len(self._order)

    # Saving ---------------------------------------------------------------------------------------------------

    @device_errors()
    def save(self, pool: BlockPool, node: RadixNode, identity: str, *, wait: bool = True) -> int:
        """Write the node's blocks that are not on disk yet. If they cannot be written, warn once and do not raise.

        The blocks are copied to host memory, and a thread writes them.

        Args:
            pool: the blocks' pool.
            node: node of a tree over the pool, which still holds its blocks.
            identity: identity of the model and all else that the keys depend on; its meaning must never change.
            wait: wait until they are written. Otherwise blocks for which the queue has no room are dropped.

        Returns:
            Number of blocks written or, without ``wait``, queued.
        """
        if wait:
            self.flush()
        self.collect_written()
        if min(node.prefix()) < 0:
            return 0  # holds an image's id, a hash of its URL: the URL may show another image after a restart
        put = self._save_blocks(pool, node, identity, wait) if pool.groups else 0
        if node.checkpoint is not None:
            put += self._save_states(pool, node, identity, wait)
        if not put:
            return 0
        self._enforce_limit()
        return self.flush() if wait else put

    def _save_states(self, pool: BlockPool, node: RadixNode, identity: str, wait: bool) -> int:
        """Queue the node's checkpoint for writing. Returns how many were queued: 0 or 1."""
        assert node.checkpoint is not None
        low = (node.end - 1) // pool.block_size * pool.block_size
        prefix = node.prefix()
        chain, tokens = _chains(_root(identity, pool), pool.block_size, prefix[:low])[-1], prefix[low:]
        known = (*self._chains.get(chain, ()), *self._waiting.get(chain, ()))
        if any(each.is_states and each.tokens == tokens for each in known):
            return 0
        caches = node.checkpoint.slot.caches
        try:
            saved = caches if isinstance(caches, SavedStates) else SavedStates.of(caches or ())
        except ValueError as error:
            self.folder.warn(f"states are not written to {self.folder.path}: {error}")
            return 0
        if not wait and not self._queue.room(saved.nbytes):
            self.dropped += 1
            return 0
        data = packed(chain, tokens, (), (), saved.arrays, saved.text)
        put = self._put(SpilledBlock(Path(chain), tokens, (), (), 0, True), data, wait)
        self.dropped += not put
        return int(put)

    def _save_blocks(self, pool: BlockPool, node: RadixNode, identity: str, wait: bool) -> int:
        """Queue the node's blocks that are not on disk yet for writing. Returns how many were queued."""
        size, prefix = pool.block_size, node.prefix()
        first = node.start // size
        geometry = _geometries_of(pool)
        chains = _chains(_root(identity, pool), size, prefix[: (node.end - 1) // size * size])
        starts, wanted = {}, []
        for index in range(first, -(-node.end // size)):
            low, high = index * size, min(node.end, (index + 1) * size)
            starts[index] = tuple(min(max(v - low, 0), high - low) for v in node.valid_from)
            if not any(
                not known.is_states and known.geometry == geometry and _covers(known, prefix[low:high], starts[index])
                for known in (*self._chains.get(chains[index], ()), *self._waiting.get(chains[index], ()))
            ):
                wanted.append(index)
        room = len(wanted) if wait else self._queue.room(sum(group.bytes_per_block for group in pool.groups))
        self.dropped += len(wanted[room:])
        del wanted[room:]
        if not wanted:
            return 0
        layers = self._read(pool, node)
        for number, index in enumerate(wanted):
            low, high = index * size, min(node.end, (index + 1) * size)
            arrays = {}
            for name, (x, begin) in layers.items():
                if max(begin, low) < high:
                    arrays[name] = mx.contiguous(x[:, :, max(begin, low) - begin : high - begin])
            what = (chains[index], prefix[low:high], starts[index], geometry)
            if not self._put(SpilledBlock(Path(what[0]), *what[1:], 0), packed(*what, arrays), wait):
                self.dropped += len(wanted) - number
                del wanted[number:]
                break
        return len(wanted)

    def _put(self, block: SpilledBlock, data: memoryview, wait: bool) -> bool:
        """Queue a block, whose path is its chain, for writing. Returns whether the queue had room for it."""
        confirm()  # before anything is written: the device may report later that the blocks were not computed
        block = block._replace(nbytes=len(data))
        folder, done = self.folder, self._done

        def write() -> None:
            try:
                done.append((block, folder.write(block, data)))
            except BaseException as error:  # the thread goes on with the others
                done.append((block, error))

        if not self._queue.put(len(data), write, wait=wait):
            return False
        self._waiting.setdefault(block.chain, []).append(block)
        return True

    def collect_written(self) -> int:
        """Register the blocks that have been written since the last call, without waiting. Returns their number."""
        written = 0
        while self._done:
            block, result = self._done.popleft()
            waiting = self._waiting.pop(block.chain)
            waiting.remove(block)
            if waiting:
                self._waiting[block.chain] = waiting
            if isinstance(result, SpilledBlock):
                self._register(result)
                written += 1
            elif isinstance(result, Exception):
                check_device(result)
                self.folder.warn(f"a prefix was not written to {self.folder.path}: {result}")
            else:
                raise result
        self._enforce_limit()
        return written

    def flush(self) -> int:
        """Wait until all queued blocks are written. Returns their number."""
        self._queue.wait()
        return self.collect_written()

    def _read(self, pool: BlockPool, node: RadixNode) -> dict[str, tuple[mx.array, int]]:
        """Return the node's keys and values in every layer, as pages hold them, with the position they begin at."""
        layers: dict[str, tuple[mx.array, int]] = {}
        first = node.start // pool.block_size
        for group, (blocks, valid_from) in enumerate(zip(node.blocks, node.valid_from, strict=True)):
            if valid_from >= node.end:
                continue
            table = table_over(pool, group, [0] * first + blocks, node.end)
            table.logical_start = begin = max(valid_from, first * pool.block_size)
            for layer in pool.groups[group].spec.layers:
                for name, x in zip("kv", pool.read_stored(table, layer), strict=True):
                    layers[f"{name}{layer}"] = x, begin
                mx.eval([x for x, _ in layers.values()])
            pool.release_table(table)
        return layers

    # Coming back ----------------------------------------------------------------------------------------------

    @device_errors()
    def restore(self, tree: RadixTree, tokens: Sequence[int], salt: Hashable, identity: str) -> int:
        """Load the longest prefix of ``tokens`` on disk into the tree, if it is longer than what the tree holds.

        Returns:
            Number of tokens loaded; the tree's next match says what can be served.

        Raises:
            PoolExhaustedError: the pool cannot hold them; the tree is unchanged, except for evictions.
        """
        self.collect_written()
        size = tree.block_size
        match = tree.match(tokens, salt)
        base = match.length // size
        while True:
            blocks = self._find(tree.pool, tuple(tokens[:-1]), base, identity)
            blocks, end = self._servable(blocks, base * size, match.length, tree.windows)
            if end <= match.length:
                return 0
            loaded = [arrays for block in blocks if (arrays := self._load(tree.pool, block)) is not None]
            if not max(self.exchange(len(blocks) - len(loaded))):
                break  # otherwise bad files have been deleted: look again
        tree.lock(match.node)
        tables: list[BlockTable] = []
        try:
            self._write_back(tree, tokens, salt, match.length, end, base * size, blocks, loaded, tables)
            tree.insert(tuple(tokens[:end]), tables, salt)
        except PoolExhaustedError:
            raise
        except Exception as error:
            check_device(error)
            # The files are intact, but do not fit this pool.
            for block in blocks:
                self._forget(block.path)
            self.folder.warn(f"prefix files in {self.folder.path} do not match the model: {error}")
            return 0
        finally:
            for table in tables:
                tree.pool.release_table(table)
            tree.unlock(match.node)
        for block in blocks:
            self._note_use(block.path)
        return end - match.length

    @device_errors()
    def restore_checkpoint(self, tree: RadixTree, tokens: Sequence[int], salt: Hashable, identity: str) -> int:
        """Like :meth:`restore`, for models with states: load the deepest checkpoint on disk whose blocks are there too,
        if it is deeper than the tree's. Returns and raises the same."""
        self.collect_written()
        held = tree.match_checkpoint(tokens, salt).length
        files = self._find_states(tree.pool, tuple(tokens[:-1]), identity)
        limit = len(tokens) - 1
        while True:
            end = max((end for end in files if held < end <= limit), default=0)
            ends = self.exchange(end)
            if not min(ends):
                return 0
            limit = min(ends)
            if limit < max(ends):
                continue
            if min(self.exchange(self._restore_states(tree, tokens[:end], salt, identity, files[end]))):
                return end - held
            limit -= 1

    def _find_states(self, pool: BlockPool, tokens: tuple[int, ...], identity: str) -> dict[int, SpilledBlock]:
        """Return the files of states for prefixes of ``tokens``, by length of the prefix."""
        size, found = pool.block_size, {}
        chains = _chains(_root(identity, pool), size, tokens[: len(tokens) // size * size])
        if any(block.is_states for chain in chains for block in self._waiting.get(chain, ())):
            self.flush()
        for low, chain in zip(range(0, len(tokens) + 1, size), chains, strict=True):
            for block in self._chains.get(chain, ()):
                if block.is_states and tokens[low : low + len(block.tokens)] == block.tokens:
                    found[low + len(block.tokens)] = block
        return found

    def _restore_states(
        self, tree: RadixTree, tokens: Sequence[int], salt: Hashable, identity: str, file: SpilledBlock
    ) -> bool:
        """Load the states at the end of ``tokens``, and the blocks before it, into the tree. Returns whether both are
        there now."""
        end, wanted = len(tokens), [*tokens, -1]
        if tree.windows:
            self.restore(tree, wanted, salt, identity)
            if tree.match(wanted, salt).length < end:
                return False
        try:
            saved = self.folder.load_states(file)
        except Exception as error:
            check_device(error)
            self._delete(file)
            self.folder.warn(f"deleted the unusable file {file.path}: {type(error).__name__}: {error}")
            return False
        hits = tree.hit_tokens
        tables = tree.adopt(wanted, salt)[1] if tree.windows else []
        tree.hit_tokens = hits  # no request was served yet
        try:
            done = tree.insert_checkpoint(tokens, tables, lambda: (saved.nbytes, saved), salt)
        finally:
            for table in tables:
                tree.pool.release_table(table)
        self._note_use(file.path)
        return done

    def _note_use(self, path: Path) -> None:
        """Make a file the most recently used one, by its time on disk also after a restart."""
        if path in self._order:
            self._order[path] = self._order.pop(path)
            with suppress(OSError):  # another process may have deleted it
                os.utime(path)

    def _servable(
        self, blocks: list[SpilledBlock], base: int, length: int, windows: Sequence[Window | None]
    ) -> tuple[list[SpilledBlock], int]:
        """Return the blocks before the end that every rank can serve (:func:`_servable_end`), and this end."""
        while True:
            end = _servable_end(blocks, base, length, windows)
            ends = self.exchange(end)
            blocks = _until(blocks, base, min(ends))
            if min(ends) == max(ends):
                return blocks, end

    def _write_back(
        self,
        tree: RadixTree,
        tokens: Sequence[int],
        salt: Hashable,
        length: int,
        end: int,
        base: int,
        blocks: Sequence[SpilledBlock],
        loaded: Sequence[dict[str, mx.array]],
        tables: list[BlockTable],
    ) -> None:
        """Add to ``tables`` ones that continue the tree's first ``length`` tokens to ``end`` with the loaded arrays.
        The caller must release them, also after an error."""
        pool = tree.pool
        hits = tree.hit_tokens
        tables += tree.adopt(tokens[: length + 1], salt)[1]
        tree.hit_tokens = hits  # no request was served yet
        for group, window in enumerate(tree.windows):
            start = length
            if window is not None and window.first_seen(end) > length:
                start = window.first_seen(end)
                behind, tables[group] = tables[group], pool.new_table(group, start=start)
                pool.release_table(behind)
            if start == end:
                continue  # the next token sees only itself
            pool.append_tokens(tables[group], end - start)
            for layer in pool.groups[group].spec.layers:
                parts: dict[str, list[mx.array]] = {"k": [], "v": []}
                for index, (block, arrays) in enumerate(zip(blocks, loaded, strict=True)):
                    low = base + index * tree.block_size + block.starts[group]
                    high = min(end, base + index * tree.block_size + len(block.tokens))
                    if max(low, start) < high:
                        for name, part in parts.items():
                            part.append(arrays[f"{name}{layer}"][:, :, max(low, start) - low : high - low])
                k, v = (mx.concatenate(part, axis=2) for part in parts.values())
                if pool.groups[group].geometry is None:
                    known = next(each.geometry[group] for each in blocks if each.geometry[group] is not None)
                    pool.set_geometry(layer, *first_keys(geometry_of(known)), batch=1)
                pool.write_stored(layer, [tables[group]], k, v)
                mx.eval(pool.ready(layer))

    def _find(self, pool: BlockPool, tokens: tuple[int, ...], base: int, identity: str) -> list[SpilledBlock]:
        """Return files of consecutive blocks from block ``base`` on whose tokens match, the last perhaps in part."""
        found: list[SpilledBlock] = []
        size = pool.block_size
        geometry = _geometries_of(pool)
        chain = _chains(_root(identity, pool), size, tokens[: base * size])[-1]
        for low in range(base * size, len(tokens), size):
            here = tokens[low : low + size]
            if any(not each.is_states and _agreement(each.tokens, here) for each in self._waiting.get(chain, ())):
                self.flush()  # which may delete what was found
                return self._find(pool, tokens, base, identity)
            blocks = (block for block in self._chains.get(chain, ()) if not block.is_states)
            fitting = [block for block in blocks if _is_like(block.geometry, geometry)]
            best = max(fitting, key=lambda block: (_agreement(block.tokens, here), -sum(block.starts)), default=None)
            agreed = 0 if best is None else _agreement(best.tokens, here)
            if best is None or not agreed:
                break
            geometry = tuple(own or known for own, known in zip(best.geometry, geometry, strict=True))
            found.append(best._replace(tokens=here[:agreed]))
            if agreed < size:
                break
            chain = _next_chain(chain, here)
        return found

    def _load(self, pool: BlockPool, block: SpilledBlock) -> dict[str, mx.array] | None:
        """Return the file's arrays. If it is not what was written, delete it and return None."""
        whole = self._order[block.path]  # not cut to the tokens that match
        try:
            return self.folder.load(whole, [group.spec.layers for group in pool.groups])
        except Exception as error:
            check_device(error)
            self._delete(whole)
            self.folder.warn(f"deleted the unusable file {block.path}: {type(error).__name__}: {error}")
            return None

    # Files ----------------------------------------------------------------------------------------------------

    def _register(self, block: SpilledBlock) -> None:
        for other in list(self._chains.get(block.chain, ())):
            is_covered = not block.is_states and other.geometry == block.geometry
            is_covered = is_covered and not other.is_states and _covers(block, other.tokens, other.starts)
            if is_covered and other.path != block.path:
                self._delete(other)
        siblings = self._chains.setdefault(block.chain, [])
        if block.path not in self._order:  # the same bytes may be there already
            siblings.append(block)
            self.nbytes += block.nbytes
        self._order.pop(block.path, None)
        self._order[block.path] = block

    def _enforce_limit(self) -> None:
        while self.nbytes + self._queue.nbytes > self.max_bytes and self._order:
            self._delete(next(iter(self._order.values())))

    def _delete(self, block: SpilledBlock) -> None:
        self._forget(block.path)
        self.folder.delete(block)

    def _forget(self, path: Path) -> None:
        block = self._order.pop(path, None)
        if block is None:
            return
        self.nbytes -= block.nbytes
        rest = [other for other in self._chains[block.chain] if other.path != path]
        if rest:
            self._chains[block.chain] = rest
        else:
            del self._chains[block.chain]


def _geometries_of(pool: BlockPool) -> tuple[BlockGeometry, ...]:
    return tuple(block_geometry_of(group.geometry) for group in pool.groups)


def _is_like(a: Sequence[BlockGeometry], b: Sequence[BlockGeometry]) -> bool:
    """Return whether two geometries are the same as far as both are known."""
    return len(a) == len(b) and all(
        mine is None or theirs is None or mine == theirs for mine, theirs in zip(a, b, strict=True)
    )


def _root(identity: str, pool: BlockPool) -> str:
    """Return the chain of a pool's first blocks under an identity."""
    specs = [group.spec for group in pool.groups]
    # The 0 stands where earlier versions had pinned tokens, so that their files are found.
    groups = [(spec.layers, spec.window if spec.stride == 1 else spec.sees, 0) for spec in specs]
    pages = "" if pool.page_format is None else f" {tuple(pool.page_format)}"
    return hashlib.sha256(f"{FORMAT} {pool.block_size}{pages} {groups} {identity}".encode()).hexdigest()[:32]


def _next_chain(chain: str, tokens: tuple[int, ...]) -> str:
    return hashlib.sha256(f"{chain} {tokens}".encode()).hexdigest()[:32]


def _chains(root: str, block_size: int, tokens: tuple[int, ...]) -> list[str]:
    """Return the chain of each block of ``tokens``, which are whole blocks, and that of the block after them."""
    chains = [root]
    for low in range(0, len(tokens), block_size):
        chains.append(_next_chain(chains[-1], tokens[low : low + block_size]))
    return chains


def _agreement(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _covers(block: SpilledBlock, tokens: tuple[int, ...], starts: tuple[int, ...]) -> bool:
    """Return whether the block holds all that one with these tokens and starts holds."""
    if block.tokens[: len(tokens)] != tokens:
        return False
    return all(mine <= other or other >= len(tokens) for mine, other in zip(block.starts, starts, strict=True))


def _until(blocks: Sequence[SpilledBlock], base: int, end: int) -> list[SpilledBlock]:
    """Return the blocks, which begin at position ``base``, cut to the tokens before ``end``."""
    found: list[SpilledBlock] = []
    for block in blocks:
        if base >= end:
            break
        found.append(block._replace(tokens=block.tokens[: end - base]))
        base += len(block.tokens)
    return found


def _servable_end(blocks: Sequence[SpilledBlock], base: int, length: int, windows: Sequence[Window | None]) -> int:
    """Return the length of the longest prefix that can be served with the blocks, which begin at position ``base``, and
    the ``length`` tokens that every group can serve already."""
    best, position = length, base
    run_starts = [0] * len(windows)  # all that any window needs before `length` is held
    for block in blocks:
        for group, start in enumerate(block.starts):
            if position + start > max(length, position):
                run_starts[group] = position + start
        position += len(block.tokens)
        needed = [0 if window is None else window.first_seen(position) for window in windows]
        if position > best and all(run <= need for run, need in zip(run_starts, needed, strict=True)):
            best = position
    return best
