"""SharedPrefixes: gives a batch the blocks and states of cached prefixes, and takes those it has computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ..kv.block_table import BlockTable
from ..kv.pool import BlockPool
from .radix import RadixTree


class Salted(NamedTuple):
    """The radix tree's salt for requests that have a salt of their own."""

    base: Hashable
    salt: Hashable


def salted(base: Hashable, salt: Hashable) -> Hashable:
    """Return the tree's salt for a request: ``base`` if the request has none, else both together."""
    return base if salt is None else Salted(base, salt)


Restore = Callable[[Sequence[int], Hashable], None]


class SharedPrefixes:
    """A RadixTree used as the prefix cache of a batch.

    A prefix that was donated under one salt is not found under another.

    Args:
        tree: tree of the batch's pool.
        salt: see :meth:`RadixTree.insert`.
        restore: called with tokens and their salt before they are looked up, to load prefixes from disk.
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
        """Pool of the prefixes; it has no blocks if no layer is paged."""
        return self.tree.pool

    def adopt(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable]]:
        """Return the length of the longest cached prefix (never all tokens), and tables over its blocks, one per group,
        which the caller owns."""
        if self.restore is not None:
            self.restore(tokens, salt)
        return self.tree.adopt(tokens, salted(self.salt, salt))

    def held(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many tokens :meth:`adopt` would find in the tree now."""
        return self.tree.match(tokens, salted(self.salt, salt)).length

    def held_alone(self, tokens: Sequence[int], salt: Hashable = None) -> Sequence[int]:
        """Return, per group, how many of the blocks that :meth:`adopt` would find only the tree holds."""
        return self.tree.held_alone(tokens, salted(self.salt, salt))

    def donate(self, tokens: Sequence[int], tables: Sequence[BlockTable], salt: Hashable = None, keep: int = 0) -> None:
        """Insert the tokens that all tables hold into the tree, by reference; the caller keeps the tables. Call it
        between steps. ``keep``: see :meth:`RadixTree.insert`."""
        length = min(len(tokens), *(table.length for table in tables))
        if length:
            self.tree.insert(tokens[:length], tables, salted(self.salt, salt), label="assistant", keep=keep)

    # Models with states: checkpoints --------------------------------------------------------------------------

    def adopt_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, list[BlockTable], Any]:
        """Like :meth:`adopt`, also returning the states at the prefix's end, which the caller must copy."""
        if self.restore_checkpoint is not None:
            self.restore_checkpoint(tokens, salt)
        return self.tree.adopt_checkpoint(tokens, salted(self.salt, salt))

    def held_checkpoint(self, tokens: Sequence[int], salt: Hashable = None) -> tuple[int, Sequence[int]]:
        """Return how many tokens :meth:`adopt_checkpoint` would find in the tree now, and per group how many of their
        blocks only the tree holds."""
        return self.tree.held_checkpoint(tokens, salted(self.salt, salt))

    def known_length(self, tokens: Sequence[int], salt: Hashable = None) -> int:
        """Return how many leading tokens match a prefix in the tree, whether it can be served or not."""
        return self.tree.known_length(tokens, salted(self.salt, salt))

    def donate_checkpoint(
        self,
        tokens: Sequence[int],
        tables: Sequence[BlockTable],
        states: Callable[[], tuple[int, Any]],
        salt: Hashable = None,
        keep: int = 0,
    ) -> bool:
        """Like :meth:`donate`, with the states at the end of ``tokens``; ``states`` is called only if the tree has
        none there. Returns whether the tree has them now."""
        return self.tree.insert_checkpoint(
            tokens, tables, states, salted(self.salt, salt), label="assistant", keep=keep
        )
