"""BlockTable: which blocks hold the tokens of one sequence."""

from __future__ import annotations

from itertools import count
from typing import Any

from .allocator import NULL_BLOCK

_uids = count()


class BlockTable:
    """One sequence's block ids for one group of layers. Made, grown and released by :class:`BlockPool` only.

    Attributes:
        group: index of the group of layers.
        block_ids: by absolute position: token ``p`` is in ``block_ids[p // block_size]`` at ``p % block_size``.
            Blocks behind a sliding window are the null block. The list is mutated, never replaced.
        length: tokens reserved so far (positions ``0 .. length - 1``).
        logical_start: first position that is still visible.
        released: the table has given its blocks back and must not be used.
        uid: unique in the process.
        owner: object that identifies the pool that made the table; None for a table that no pool manages.
        version: rises whenever ``block_ids`` changes.
        indices: what layers' blocks have derived from ``block_ids``, shared by all layers of a step.
    """

    __slots__ = (
        "__weakref__",
        "_consecutive",
        "block_ids",
        "block_size",
        "group",
        "indices",
        "length",
        "logical_start",
        "owner",
        "released",
        "uid",
        "version",
    )

    def __init__(self, group: int, block_size: int) -> None:
        self.group = group
        self.block_size = block_size
        self.block_ids: list[int] = []
        self.length = 0
        self.logical_start = 0
        self.released = False
        self.uid = next(_uids)
        self.owner: object | None = None
        self.version = 0
        self.indices: dict[Any, Any] = {}
        self._consecutive = 0, 0, False  # the latest blocks that were looked at, and whether their ids are consecutive

    @property
    def num_blocks(self) -> int:
        """Blocks held, not counting null blocks."""
        return len(self.block_ids) - self.block_ids.count(NULL_BLOCK)

    @property
    def num_visible(self) -> int:
        """Tokens that can be read: those from ``logical_start`` on."""
        return self.length - self.logical_start

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` more tokens need beyond those the table has."""
        return max(0, -(-(self.length + num_tokens) // self.block_size) - len(self.block_ids))

    def behind(self, start: int) -> slice:
        """Return which entries of ``block_ids`` are released when ``logical_start`` becomes ``start``."""
        first = self.logical_start // self.block_size
        return slice(first, max(first, start // self.block_size))

    def place(self) -> tuple[int, int] | None:
        """Return the start and end of the visible tokens among the slots of all blocks, or None if their blocks are not
        consecutive."""
        size, ids = self.block_size, self.block_ids
        first, last = self.logical_start // size, -(-self.length // size)
        known = self._consecutive
        if known[:2] != (first, last):
            known = self._consecutive = first, last, all(ids[i + 1] == ids[i] + 1 for i in range(first, last - 1))
        if not known[2]:
            return None
        before = (ids[first] - first) * size
        return before + self.logical_start, before + self.length

    def forget_indices(self) -> None:
        """Drop everything derived from ``block_ids``; called whenever ``block_ids`` changes."""
        self.version += 1
        self.indices.clear()
        self._consecutive = 0, 0, False

    def __repr__(self) -> str:
        return (
            f"BlockTable(group={self.group}, length={self.length}, logical_start={self.logical_start}, "
            f"blocks={self.num_blocks}{', released' if self.released else ''})"
        )
