"""SpillStore: blocks of prefixes on disk, one file each, that come back after a restart."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Hashable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ..errors import GeometryError
from .block_table import BlockTable
from .pool import BlockPool
from .prefix_cache import table_over
from .radix import RadixTree
from .radix_node import RadixNode

FORMAT = "mlx_paged prefix block 1"
MAX_HEADER_BYTES = 1 << 20
STALE_SECONDS = 3600


class SpillWarning(UserWarning):
    """A prefix could not be written to disk, or a file there was not used; results are the same."""


class SpilledBlock(NamedTuple):
    """A file: the keys and values of one block of a prefix, in every layer.

    Attributes:
        path: ``<chain>-<first hex digits of the file's own SHA-256>.safetensors``.
        tokens: those of the block, at most ``block_size``.
        starts: per group, the first position in the block whose keys are there; ``len(tokens)`` if none.
        nbytes: size of the file.
    """

    path: Path
    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int


class SpillStore:
    """A folder of prefix blocks, each found by what was before it.

    A block's place is its *chain*: a hash of the identity it was saved under (the weights', and what else the keys
    depend on), the block size and all tokens before it. So the same tokens behind another prefix are another block,
    equal beginnings are stored once, and a file of another model is never looked at. The tokens of the block itself
    are in the file and are compared one by one.

    A file is written under another name and renamed, and its name carries a hash of its bytes: whatever is truncated,
    altered or not ours is ignored, with one warning. So nothing is synced to the disk, which would hold up the
    allocation that evicts: what a power cut tears is not served.

    Args:
        folder: made if it is not there.
        max_bytes: size of all files; past it the files used least recently go.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: Path | str, *, max_bytes: int = 1 << 63) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self._chains: dict[str, list[SpilledBlock]] = {}
        self._order: dict[Path, SpilledBlock] = {}  # least recently used first
        self._serial = count()
        self._warned = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self._scan()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in list(self._order.values()))  # other threads may ask

    # Saving ---------------------------------------------------------------------------------------------------

    def save(self, pool: BlockPool, node: RadixNode, identity: str) -> int:
        """Write the node's blocks that are not on disk yet. Never raises for want of space: it warns once.

        Args:
            pool: the blocks' pool.
            node: of a tree over the pool; its blocks must still be held.
            identity: of the weights and whatever else the keys depend on; never changes meaning.

        Returns:
            Blocks written.
        """
        size, prefix = pool.block_size, node.prefix()
        if min(prefix) < 0:
            return 0  # an image, named by its address, which may show another one by then
        first = node.start // size
        chains = _chains(identity, size, prefix[: (node.end - 1) // size * size])
        starts, wanted = {}, []
        for index in range(first, -(-node.end // size)):
            low, high = index * size, min(node.end, (index + 1) * size)
            starts[index] = tuple(min(max(v - low, 0), high - low) for v in node.valid_from)
            if not any(
                _covers(known, prefix[low:high], starts[index]) for known in self._chains.get(chains[index], ())
            ):
                wanted.append(index)
        if not wanted:
            return 0
        layers = self._read(pool, node)
        written = 0
        try:
            for index in wanted:
                low, high = index * size, min(node.end, (index + 1) * size)
                arrays = {}
                for name, (x, begin) in layers.items():
                    if max(begin, low) < high:
                        arrays[name] = mx.contiguous(x[:, :, max(begin, low) - begin : high - begin])
                self._write(chains[index], prefix[low:high], starts[index], arrays)
                written += 1
        except (OSError, RuntimeError) as error:
            self._warn(f"a prefix was not written to {self.folder}: {error}")
        self._keep_limit()
        return written

    def _read(self, pool: BlockPool, node: RadixNode) -> dict[str, tuple[mx.array, int]]:
        """Keys and values of every layer the node holds, with the position they begin at."""
        layers: dict[str, tuple[mx.array, int]] = {}
        first = node.start // pool.block_size
        for group, (blocks, valid_from) in enumerate(zip(node.blocks, node.valid_from, strict=True)):
            if valid_from >= node.end:
                continue
            table = table_over(pool, group, [0] * first + blocks, node.end)
            table.logical_start = begin = max(valid_from, first * pool.block_size)
            table.ring_origin = 0
            for layer in pool.groups[group].spec.layers:
                for name, x in zip("kv", pool.gather_visible(table, layer), strict=True):
                    layers[f"{name}{layer}"] = x, begin
                mx.eval([x for x, _ in layers.values()])
            pool.release_table(table)
        return layers

    def _write(self, chain: str, tokens: tuple[int, ...], starts: tuple[int, ...], arrays: dict[str, mx.array]) -> None:
        temporary = self.folder / f".{os.getpid()}-{next(self._serial)}.safetensors"
        metadata = {"format": FORMAT, "chain": chain, "tokens": json.dumps(tokens), "starts": json.dumps(starts)}
        try:
            mx.save_safetensors(str(temporary), arrays, metadata)
            with temporary.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            path = self.folder / f"{chain}-{digest[:32]}.safetensors"
            nbytes = temporary.stat().st_size
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        self._know(chain, SpilledBlock(path, tokens, starts, nbytes))

    # Coming back ----------------------------------------------------------------------------------------------

    def restore(self, tree: RadixTree, tokens: Sequence[int], salt: Hashable, identity: str) -> int:
        """Bring what is on disk of a prefix of ``tokens`` back into the tree, if it is longer than what is there.

        Returns:
            Tokens brought back; the tree's next match says what can be served.

        Raises:
            PoolExhaustedError: the pool cannot hold them; the tree is as it was, but for what was evicted.
        """
        size = tree.block_size
        match = tree.match(tokens, salt)
        base = match.length // size
        while True:
            blocks = self._find(tuple(tokens[:-1]), base, identity, size)
            end = _servable_end(blocks, base * size, match.length, tree.windows)
            if end <= match.length:
                return 0
            blocks = blocks[: -(-end // size) - base]
            loaded = [arrays for block in blocks if (arrays := self._load(block)) is not None]
            if len(loaded) == len(blocks):
                break  # otherwise the bad ones are forgotten by now, and there may be less to bring back
        tree.lock(match.node)
        try:
            tables = self._write_back(tree, tokens, salt, match.length, end, base * size, blocks, loaded)
            tree.insert(tuple(tokens[:end]), tables, salt)
            for table in tables:
                tree.pool.release_table(table)
        except (GeometryError, KeyError) as error:
            for block in blocks:
                self._forget(block.path)
            self._warn(f"files in {self.folder} do not fit the model they are for: {error}")
            return 0
        finally:
            tree.unlock(match.node)
        for block in blocks:
            if block.path in self._order:
                self._order[block.path] = self._order.pop(block.path)
        return end - match.length

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
    ) -> list[BlockTable]:
        """Tables that go on from the tree's first ``length`` tokens to ``end`` with what was loaded."""
        pool = tree.pool
        hits = tree.hit_tokens
        _, tables = tree.adopt(tokens[: length + 1], salt)
        tree.hit_tokens = hits  # nobody was served yet
        for group, window in enumerate(tree.windows):
            start = length
            if window is not None and end - window + 1 > length:
                pool.release_table(tables[group])
                start = end - window + 1
                tables[group] = pool.new_table(group, start=start)
            if start == end:
                continue  # a window of one token needs nothing from before
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
                pool.write_prefill(tables[group], layer, k, v)
                mx.eval(pool.fence(layer))
        return tables

    def _find(self, tokens: tuple[int, ...], base: int, identity: str, size: int) -> list[SpilledBlock]:
        """Files of consecutive blocks from block ``base`` on whose tokens agree, the last one perhaps in part."""
        found: list[SpilledBlock] = []
        chain = _chains(identity, size, tokens[: base * size])[-1]
        for low in range(base * size, len(tokens), size):
            here = tokens[low : low + size]
            best = max(
                self._chains.get(chain, ()),
                key=lambda block: (_agreement(block.tokens, here), -sum(block.starts)),
                default=None,
            )
            agreed = 0 if best is None else _agreement(best.tokens, here)
            if best is None or not agreed:
                break
            found.append(best._replace(tokens=here[:agreed]))
            if agreed < size:
                break
            chain = _next_chain(chain, here)
        return found

    def _load(self, block: SpilledBlock) -> dict[str, mx.array] | None:
        """The file's arrays, or None if it is not what was written."""
        try:
            digest = hashlib.sha256(block.path.read_bytes()).hexdigest()
            if not block.path.stem.endswith("-" + digest[:32]):
                raise ValueError("its bytes have changed")
            arrays = mx.load(str(block.path))
            assert isinstance(arrays, dict)
            mx.eval(list(arrays.values()))
            return arrays
        except (OSError, ValueError, RuntimeError) as error:
            self._forget(block.path)
            self._warn(f"{block.path} was ignored: {error}")
            return None

    # Files ----------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        files = sorted(self.folder.glob("*.safetensors"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        for path in files:
            if path.name.startswith("."):  # another process is writing it, or was when it ended
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink(missing_ok=True)
                continue
            try:
                with path.open("rb") as file:
                    header = json.loads(file.read(min(MAX_HEADER_BYTES, int.from_bytes(file.read(8), "little"))))
                metadata = header["__metadata__"]
                tokens = tuple(int(token) for token in json.loads(metadata["tokens"]))
                starts = tuple(int(start) for start in json.loads(metadata["starts"]))
                if metadata["format"] != FORMAT or not tokens or not path.name.startswith(metadata["chain"] + "-"):
                    raise ValueError("not a prefix block of this version")
                block = SpilledBlock(path, tokens, starts, path.stat().st_size)
                self._chains.setdefault(metadata["chain"], []).append(block)
                self._order[path] = block
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._warn(f"{path} was ignored: {type(error).__name__}: {error}")
        self._keep_limit()

    def _know(self, chain: str, block: SpilledBlock) -> None:
        siblings = self._chains.setdefault(chain, [])
        for other in list(siblings):
            if _covers(block, other.tokens, other.starts) and other.path != block.path:
                self._delete(other)
        siblings = self._chains.setdefault(chain, [])
        if block.path not in self._order:  # the same bytes may be there already
            siblings.append(block)
        self._order.pop(block.path, None)
        self._order[block.path] = block

    def _keep_limit(self) -> None:
        total = self.nbytes
        while total > self.max_bytes and self._order:
            oldest = next(iter(self._order.values()))
            total -= oldest.nbytes
            self._delete(oldest)

    def _delete(self, block: SpilledBlock) -> None:
        self._forget(block.path)
        try:
            block.path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"{block.path} could not be deleted: {error}")

    def _forget(self, path: Path) -> None:
        self._order.pop(path, None)
        chain = path.stem.rpartition("-")[0]
        rest = [block for block in self._chains.get(chain, ()) if block.path != path]
        if rest:
            self._chains[chain] = rest
        else:
            self._chains.pop(chain, None)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"mlx_paged: {text}", SpillWarning, stacklevel=3)


def _next_chain(chain: str, tokens: tuple[int, ...]) -> str:
    return hashlib.sha256(f"{chain} {tokens}".encode()).hexdigest()[:32]


def _chains(identity: str, block_size: int, tokens: tuple[int, ...]) -> list[str]:
    """The places of the blocks that ``tokens``, whole blocks, lead to: one more than there are blocks."""
    chains = [hashlib.sha256(f"{FORMAT} {block_size} {identity}".encode()).hexdigest()[:32]]
    for low in range(0, len(tokens), block_size):
        chains.append(_next_chain(chains[-1], tokens[low : low + block_size]))
    return chains


def _agreement(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _covers(block: SpilledBlock, tokens: tuple[int, ...], starts: tuple[int, ...]) -> bool:
    """Whether the block holds all that another one, with these tokens and starts, does."""
    if block.tokens[: len(tokens)] != tokens:
        return False
    return all(mine <= other or other >= len(tokens) for mine, other in zip(block.starts, starts, strict=True))


def _servable_end(blocks: Sequence[SpilledBlock], base: int, length: int, windows: Sequence[int | None]) -> int:
    """The longest prefix that the blocks, from position ``base`` on, make servable together with the ``length``
    tokens that every group can serve already."""
    best, position = length, base
    run_starts = [0] * len(windows)  # what is before `length` is there as far as any window needs it
    for block in blocks:
        for group, start in enumerate(block.starts):
            if position + start > max(length, position):
                run_starts[group] = position + start
        position += len(block.tokens)
        needed = [0 if window is None else max(0, position - window + 1) for window in windows]
        if position > best and all(run <= need for run, need in zip(run_starts, needed, strict=True)):
            best = position
    return best
