"""PrefixStore: where a batch finds the blocks of prefixes computed before, and leaves its own. The hook for a prefix
cache; without one nothing is found and nothing kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .kv.block_table import BlockTable


class PrefixStore(Protocol):
    """What a batch asks of a prefix cache. Its blocks are given up by the pool itself (see BlockHolder)."""

    def adopt(self, tokens: Sequence[int], *, whole_blocks: bool = False) -> tuple[int, list[BlockTable]]:
        """Called when a request starts: how many of its tokens are held (never all), and tables over their blocks,
        one for each group, which are the request's own from then on. With ``whole_blocks`` they end where a block
        does, so that none has to be copied."""
        ...

    def held(self, tokens: Sequence[int]) -> int:
        """How many tokens :meth:`adopt` would give at present."""
        ...

    def donate(self, tokens: Sequence[int], tables: Sequence[BlockTable]) -> None:
        """Called between steps: the first tokens of a request, and the tables that hold them. The tables stay the
        caller's, who may go on with them."""
        ...


class NoPrefixStore:
    """Holds nothing: for models without blocks, whose prefixes the batch keeps itself."""

    def adopt(self, tokens: Sequence[int], *, whole_blocks: bool = False) -> tuple[int, list[BlockTable]]:
        return 0, []

    def held(self, tokens: Sequence[int]) -> int:
        return 0

    def donate(self, tokens: Sequence[int], tables: Sequence[BlockTable]) -> None:
        return None
