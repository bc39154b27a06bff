"""Entry: a block of a prefix, its key and its checkpoint; whether a run of entries can be served."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from ..kv.geometry import Window


class SavedName(NamedTuple):
    """First part of the salt of prefixes that may go to disk.

    Attributes:
        identity: the model's identity there, see :func:`.identity.model_identity`.
        number: which of its caches.
    """

    identity: str
    number: int


def is_saved(salt: Hashable) -> bool:
    """Return whether prefixes with this salt may go to disk: its meaning never changes."""
    return isinstance(salt, tuple) and bool(salt) and isinstance(salt[0], SavedName)


@dataclass(eq=False, slots=True)
class Entry:
    """One block of a prefix.

    Attributes:
        before: key of all that comes before the entry.
        key: hash of all tokens up to the entry's end, and of what else its keys and values depend on.
        parent: the entry before it; None for a prefix's first block.
        tokens: tokens of the block. A tail has fewer than a block: it ends at a checkpoint, and has no children.
        end: number of tokens of the prefix that ends here.
        blocks: per group, the block that holds the tokens' keys and values; the null block if it is not held, because
            it was behind the group's window.
        num_children: entries whose parent this is.
        used_at: time of the last use.
        checkpoint: states of layers without blocks at the entry's end, or None.
        stays_in_memory: never written to disk: a token stands for an image, or the salt has no meaning there.
    """

    before: bytes
    key: bytes
    parent: Entry | None
    tokens: tuple[int, ...]
    blocks: list[int]
    stays_in_memory: bool
    num_children: int = 0
    used_at: float = 0.0
    checkpoint: Checkpoint | None = None
    end: int = field(init=False)

    def __post_init__(self) -> None:
        parent = self.parent
        self.end = len(self.tokens) + (0 if parent is None else parent.end)
        # An image's id is a negative hash of its URL: the URL may show another image after a restart.
        self.stays_in_memory |= min(self.tokens) < 0 or (parent is not None and parent.stays_in_memory)

    def path(self) -> list[Entry]:
        """Return the entries of the prefix that ends here, this one last."""
        found: list[Entry] = []
        entry: Entry | None = self
        while entry is not None:
            found.append(entry)
            entry = entry.parent
        return found[::-1]


class Match(NamedTuple):
    """A prefix that every group can serve.

    Attributes:
        length: number of its tokens.
        path: its entries.
        blocks: per group, its blocks by position; the null block before the group's window.
    """

    length: int
    path: list[Entry]
    blocks: tuple[list[int], ...]


def next_key(key: bytes, tokens: tuple[int, ...]) -> bytes:
    """Return the key of the block with these tokens after the one with ``key``."""
    try:
        raw = array("q", tokens).tobytes()
    except OverflowError:  # ids of images
        raw = repr(tokens).encode()
    return hashlib.sha256(key + raw).digest()[:16]


def serves(windows: Sequence[Window | None], block_size: int, length: int, is_held: Callable[[int, int], bool]) -> bool:
    """Return whether a prefix of ``length`` tokens can be served: the next token's window is held in every group.

    Args:
        windows: of the groups.
        block_size: tokens per block.
        length: tokens of the prefix.
        is_held: whether the block of an index is held in a group.
    """
    num_blocks = -(-length // block_size)
    for group, window in enumerate(windows):
        needed = 0 if window is None else window.first_seen(length)
        if window is None and num_blocks and not is_held(num_blocks - 1, group):
            return False  # all blocks before the last one are held if it is
        blocks = range(needed // block_size, num_blocks) if window is not None and needed < length else ()
        if not all(is_held(index, group) for index in blocks):
            return False
    return True


class Checkpoint(NamedTuple):
    """States of layers without blocks (convolution tails, recurrent states) at the end of a prefix, in the form of a
    file. They become caches when a sequence adopts them.

    Attributes:
        text: JSON list of each cache's class and state, with names in place of arrays.
        arrays: the arrays by name.
    """

    text: str
    arrays: dict[str, mx.array]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> Checkpoint:
        """Return a copy of the states of caches that have mlx-lm's attribute ``state``.

        Raises:
            ValueError: a state has something other than arrays, numbers, texts, lists and tuples.
        """
        arrays: dict[str, mx.array] = {}
        described = [[type(cache).__name__, _described(cache.state, arrays)] for cache in caches]
        mx.eval(arrays)
        return cls(json.dumps(described), arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def fill(self, caches: Sequence[Any]) -> list[Any]:
        """Give the states to ``caches``, fresh ones of the same classes, and return them.

        Raises:
            ValueError: the caches are of other classes, or the text is not JSON.
        """
        described = json.loads(self.text)
        if [name for name, _ in described] != [type(cache).__name__ for cache in caches]:
            raise ValueError("the states belong to other layers")
        for cache, (_, state) in zip(caches, described, strict=True):
            cache.state = _value(state, self.arrays)
        return list(caches)


def _described(value: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(value, mx.array):
        name = f"s{len(arrays)}"
        arrays[name] = mx.contiguous(value)  # a view would keep the larger array alive
        return {"array": name}
    if isinstance(value, list | tuple):
        return [_described(each, arrays) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"a state with {type(value).__name__} cannot be kept")


def _value(described: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(described, dict):
        return mx.array(arrays[described["array"]])  # a copy: caches write into their arrays
    if isinstance(described, list):
        return [_value(each, arrays) for each in described]
    return described
