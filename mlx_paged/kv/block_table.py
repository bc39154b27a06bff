"""BlockTable: which blocks hold the tokens of one sequence."""

from __future__ import annotations

from typing import Any

from .allocator import NULL_BLOCK


class BlockTable:
    """One sequence's block ids in each group of layers, and its length. Made, grown and released by :class:`BlockPool`
    only.

    Attributes:
        block_ids: of each group, by absolute position: token ``p`` is in ``block_ids[group][p // block_size]`` at
            ``p % block_size``. Blocks behind a sliding window are the null block. The lists are mutated, never
            replaced.
        starts: of each group, the first position that is still visible.
        length: tokens reserved so far in all groups (positions ``0 .. length - 1``).
        released: the table has given its blocks back and must not be used.
        owner: object that identifies the pool that made the table; None for a table that no pool manages.
        versions: of each group; rises whenever its ``block_ids`` change.
        indices: of each group, what layers' blocks have derived from ``block_ids``, shared by all layers of a step.
    """

    __slots__ = (
        "__weakref__",
        "block_ids",
        "block_size",
        "indices",
        "length",
        "owner",
        "released",
        "starts",
        "versions",
    )

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        self.starts = [0] * num_groups
        self.length = 0
        self.released = False
        self.owner: object | None = None
        self.versions = [0] * num_groups
        self.indices: list[dict[Any, Any]] = [{} for _ in range(num_groups)]

    def num_blocks(self, group: int) -> int:
        """Return the number of blocks held in a group, not counting null blocks."""
        return len(self.block_ids[group]) - self.block_ids[group].count(NULL_BLOCK)

    def num_visible(self, group: int) -> int:
        """Return the number of tokens that can be read in a group: those from its start on."""
        return self.length - self.starts[group]

    def blocks_for(self, group: int, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` more tokens need in a group beyond those the table has."""
        return max(0, -(-(self.length + num_tokens) // self.block_size) - len(self.block_ids[group]))

    def behind(self, group: int, start: int) -> slice:
        """Return which entries of a group's ``block_ids`` are released when its start becomes ``start``."""
        first = self.starts[group] // self.block_size
        return slice(first, max(first, start // self.block_size))

    def place(self, group: int) -> tuple[int, int] | None:
        """Return the start and end of a group's visible tokens among the slots of all its blocks, or None if their
        blocks are not consecutive."""
        size, ids, start = self.block_size, self.block_ids[group], self.starts[group]
        first, last = start // size, -(-self.length // size)
        known = self.indices[group].get("run")  # the latest blocks that were looked at, and whether they are one
        if known is None or known[:2] != (first, last):
            is_run = all(ids[i + 1] == ids[i] + 1 for i in range(first, last - 1))
            known = self.indices[group]["run"] = first, last, is_run
        if not known[2]:
            return None
        before = (ids[first] - first) * size
        return before + start, before + self.length

    def forget_indices(self, group: int) -> None:
        """Drop everything derived from a group's ``block_ids``; called whenever these change."""
        self.versions[group] += 1
        self.indices[group].clear()

    def __repr__(self) -> str:
        blocks = [self.num_blocks(group) for group in range(len(self.block_ids))]
        return (
            f"BlockTable(length={self.length}, starts={self.starts}, blocks={blocks}"
            f"{', released' if self.released else ''})"
        )
