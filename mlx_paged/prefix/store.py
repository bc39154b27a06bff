"""PrefixStore: where a batch finds the blocks of prefixes computed before, and leaves its own. The hook for a prefix
cache; without one nothing is found and nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool


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


@runtime_checkable
class CheckpointStore(PrefixStore, Protocol):
    """What a batch of a model asks of a prefix cache whose layers keep states that cannot be cut: prefixes are found
    where such states were kept."""

    @property
    def pool(self) -> BlockPool:
        """Return the pool that checkpoints count in; one without blocks if no layer is paged."""
        ...

    def adopt_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable], Any]:
        """Like :meth:`adopt`, with the states at the end, which the caller copies."""
        ...

    def held_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, Sequence[int]]:
        """Return how many tokens :meth:`adopt_checkpoint` would give at present, and how many of their blocks nobody
        else holds, for each group."""
        ...

    def known_length(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many of the tokens agree with some prefix, whether it can be served or not."""
        ...

    def donate_checkpoint(
        self,
        tokens: Sequence[int],
        tables: Sequence[BlockTable],
        states: Callable[[], tuple[int, Any]],
        salt: Hashable = None,
    ) -> bool:
        """Like :meth:`donate`, with the states at the end of ``tokens``, asked for if they are not there yet. Returns
        whether they are kept."""
        ...
