"""BlockHolder: who holds blocks of a pool without being a sequence, and can give some of them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class BlockHolder(Protocol):
    """What a pool asks of a cache over its blocks (see BlockPool.add_holder). Called under the pool's lock.

    Attributes:
        evictions: blocks this holder has freed so far, to make room, by age or by a limit.
        hit_tokens: tokens that sequences took from it instead of computing them.
    """

    evictions: int
    hit_tokens: int

    def held(self, group: int) -> Iterable[Sequence[int]]:
        """The group's blocks it holds, each as often as it holds a reference to it."""
        ...

    def reclaimable(self, group: int) -> int:
        """Blocks of the group that :meth:`reclaim` could free now."""
        ...

    def reclaim(self, group: int, num_blocks: int) -> int:
        """Give references up so that ``num_blocks`` blocks of the group become free. Returns how many did."""
        ...

    def renumber(self, group: int, moves: Mapping[int, int]) -> None:
        """Blocks of the group have other ids now; the references to them stay the same."""
        ...
