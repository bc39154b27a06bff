"""PrefixStore: where a batch finds the blocks of prefixes computed before, and leaves its own. The hook for a prefix
cache; without one nothing is found and nothing kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from ..kv.block_table import BlockTable


class Salted(NamedTuple):
    """A salt of a radix tree for requests that have one of their own."""

    base: Hashable
    salt: Hashable


def salted(base: Hashable, salt: Hashable) -> Hashable:
    """``base`` for requests without a salt, and a salt of the tree for each other one."""
    return base if salt is None else Salted(base, salt)


class PrefixStore(Protocol):
    """What a batch asks of a prefix cache. The pool itself asks it to evict blocks (see BlockHolder).

    Prefixes of different salts are apart: what was donated under one is not found under another.
    """

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable]]:
        """Called when a request starts: how many of its tokens are held (never all), and tables over their blocks,
        one for each group, which are the request's own from then on."""
        ...

    def held(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many tokens :meth:`adopt` would give at present."""
        ...

    def held_alone(self, tokens: Sequence[int], salt: Hashable = None) -> Sequence[int]:
        """Return how many of the blocks that :meth:`adopt` would give nobody else holds, for each group."""
        ...

    def donate(self, tokens: Sequence[int], tables: Sequence[BlockTable], salt: Hashable = None) -> None:
        """Called between steps: the first tokens of a request, and the tables that hold them. The tables stay the
        caller's, who may go on with them."""
        ...


class NoPrefixStore:
    """Holds nothing: for models without blocks, whose prefixes the batch keeps itself."""

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable]]:
        return 0, []

    def held(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        return 0

    def held_alone(self, tokens: Sequence[int], salt: Hashable = None) -> Sequence[int]:
        return ()

    def donate(self, tokens: Sequence[int], tables: Sequence[BlockTable], salt: Hashable = None) -> None:
        return None
