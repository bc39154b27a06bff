"""SharedPrefixes: where a batch finds the blocks and states of prefixes computed before, and leaves its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from .radix import RadixTree


class Salted(NamedTuple):
    """A salt of a radix tree for requests that have one of their own."""

    base: Hashable
    salt: Hashable


def salted(base: Hashable, salt: Hashable) -> Hashable:
    """Return ``base`` for requests without a salt, and a salt of the tree for each other one."""
    return base if salt is None else Salted(base, salt)


Restore = Callable[[Sequence[int], Hashable], None]


class SharedPrefixes:
    """A RadixTree as the prefix cache of a batch.

    Prefixes of different salts are apart: what was donated under one is not found under another.

    Args:
        tree: of the batch's pool.
        salt: see :meth:`RadixTree.insert`.
        restore: called before tokens are looked up, with them and their salt, to bring back what is kept elsewhere.
        restore_checkpoint: likewise, before checkpoints are looked up.
    """

    def __init__(
        self,
        tree: RadixTree,
        salt: Hashable = None,
        restore: Restore | None = None,
        restore_checkpoint: Restore | None = None,
    ) -> None:
        self.tree = tree
        self.salt = salt
        self.restore, self.restore_checkpoint = restore, restore_checkpoint

    @property
    def pool(self) -> BlockPool:
        """Return the pool that prefixes count in; one without blocks if no layer is paged."""
        return self.tree.pool

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable]]:
        """Return how many of the tokens are held (never all), and tables over their blocks, one per group, which are
        the caller's from then on."""
        if self.restore is not None:
            self.restore(tokens, salt)
        return self.tree.adopt(tokens, salted(self.salt, salt))

    def held(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many tokens :meth:`adopt` would give at present."""
        return self.tree.match(tokens, salted(self.salt, salt)).length

    def held_alone(self, tokens: Sequence[int], salt: Hashable = None) -> Sequence[int]:
        """Return per group how many of the blocks that :meth:`adopt` would give only the tree holds."""
        return self.tree.held_alone(tokens, salted(self.salt, salt))

    def donate(self, tokens: Sequence[int], tables: Sequence[BlockTable], salt: Hashable = None, keep: int = 0) -> None:
        """Keep the first tokens of a request by reference; the tables stay the caller's. For use between steps.
        ``keep``: see :meth:`RadixTree.insert`."""
        length = min(len(tokens), *(table.length for table in tables))
        if length:
            self.tree.insert(tokens[:length], tables, salted(self.salt, salt), label="assistant", keep=keep)

    # Where layers keep states that cannot be cut ---------------------------------------------------------------

    def adopt_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable], Any]:
        """Like :meth:`adopt`, with the states at the end, which the caller copies."""
        if self.restore_checkpoint is not None:
            self.restore_checkpoint(tokens, salt)
        return self.tree.adopt_checkpoint(tokens, salted(self.salt, salt))

    def held_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, Sequence[int]]:
        """Return how many tokens :meth:`adopt_checkpoint` would give at present, and per group how many of their blocks
        only the tree holds."""
        return self.tree.held_checkpoint(tokens, salted(self.salt, salt))

    def known_length(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many of the tokens agree with some prefix, whether it can be served or not."""
        return self.tree.known_length(tokens, salted(self.salt, salt))

    def donate_checkpoint(
        self,
        tokens: Sequence[int],
        tables: Sequence[BlockTable],
        states: Callable[[], tuple[int, Any]],
        salt: Hashable = None,
        keep: int = 0,
    ) -> bool:
        """Like :meth:`donate`, with the states at the end of ``tokens``, asked for if they are not there yet. Returns
        whether they are kept."""
        return self.tree.insert_checkpoint(
            tokens, tables, states, salted(self.salt, salt), label="assistant", keep=keep
        )
