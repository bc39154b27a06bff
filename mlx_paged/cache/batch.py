"""Batch: the new tokens of some sequences in one model call, and the layers that have written them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from ..errors import BlockStateError, without_frames
from ..kv.geometry import Window
from ..kv.new_tokens import NewTokens, lengths_of
from ..kv.pool import BlockPool
from .sequence import KnownMasks, SequenceTables

# Reason of a NotPackableError.
OWN_MASK = "the model's attention makes a mask of its own"


class NotPackableError(Exception):
    """The model uses its caches in a way that packs do not support. Its requests are then computed one by one."""


class NotCompilable(Exception):
    """The model does something in a decode step that a compiled step does not support."""


class NoBlocksError(Exception):
    """No block could be allocated for the new tokens of a sequence in a call. Nothing was computed.

    Args:
        row: index of the sequence.
        error: why, without its traceback.
    """

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(str(error))
        self.row, self.error = row, error


class Batch:
    """The T new tokens of B sequences in a model call; to the model they are a batch of T rows of one token. Shared by
    the caches of all layers; its sequences never change.

    In a decode step each sequence has one token, and the same object serves step after step. In a pack some have
    several: for the model's own code each token is a row at its own position, and only attention knows which tokens it
    sees, in the pack and before it. So nothing is padded.

    Args:
        pool: the pool of all sequences.
        sequences: each at the end of its table in all layers.
        counts: new tokens of each sequence, at least one; None: one each.
        as_rows: attend with the decode kernel: few tokens after long contexts.

    Attributes:
        tokens: the new tokens in each group; after :meth:`begin_layer`, :meth:`tokens_of` or :meth:`begin_all`.
        behind: layers that have not written the reserved tokens.
        attended: layers that have attended to what they have written, in a pack.
        positions: what :meth:`offsets` has made, by whether the layer is behind.
        unwritten: keys and values of layers that the first attention writes, while a step is traced.

    Raises:
        BlockStateError: a sequence is in the middle of a step, or of another pool.
    """

    is_traced = False
    """Whether a step is being traced: there are no values."""

    def __init__(
        self,
        pool: BlockPool,
        sequences: Sequence[SequenceTables],
        counts: Sequence[int] | None = None,
        *,
        as_rows: bool = False,
    ) -> None:
        for sequence in sequences:
            if sequence.pool is not pool:
                raise BlockStateError("all sequences of a batch must be of one pool")
            if not sequence.is_level():
                raise BlockStateError("a sequence whose layers are at different offsets cannot join a batch")
        self.pool = pool
        self.sequences = tuple(sequences)
        self.counts = (1,) * len(sequences) if counts is None else tuple(counts)
        self.num_tokens = sum(self.counts)
        self.is_pack = self.num_tokens > len(self.sequences)  # some sequence has several new tokens
        self.as_rows = as_rows
        self.tables = [sequence.table for sequence in sequences]
        self.tokens = [NewTokens(self.tables, self.counts, group) for group in range(len(pool.groups))]
        self.masks = KnownMasks()
        self.is_reserved = False
        self.behind: set[int] = set()
        self.attended: set[int] = set()
        self.positions: dict[bool, mx.array] = {}
        self.unwritten: dict[int, tuple[mx.array, mx.array]] = {}
        self._narrow_masks: dict[int, mx.array] = {}

    def __len__(self) -> int:
        """Return the number of rows that the model sees, one per token."""
        return self.num_tokens

    def tokens_of(self, layer: int) -> NewTokens:
        """Return the new tokens in the layer's group, begun and checked once for all its layers."""
        index = self.pool.places[layer][0]
        tokens, group = self.tokens[index], self.pool.groups[index]
        if tokens.epoch != group.epoch:
            self.pool.begin(group, tokens)
        return tokens

    def begin_layer(self, layer: int, *, attends: bool = True) -> NewTokens:
        """Return :meth:`tokens_of` a layer, which writes them now.

        Args:
            layer: index of the layer in the model.
            attends: whether it attends to them, too; only :meth:`commit` of a pack checks this.

        Raises:
            BlockStateError: none are reserved; NotPackableError in a pack.
        """
        if layer not in self.behind:
            if self.is_pack:
                raise NotPackableError(f"layer {layer} writes twice in a step")
            raise BlockStateError(f"layer {layer} writes without reserved positions")
        index = self.pool.places[layer][0]
        tokens, group = self.tokens[index], self.pool.groups[index]
        if tokens.epoch != group.epoch:
            self.pool.begin(group, tokens)
        self.behind.remove(layer)
        if self.is_pack and attends:
            self.attended.add(layer)
        return tokens

    def begin_all(self) -> list[NewTokens]:
        """Return the new tokens of each group, which every layer writes and attends to now.

        Raises:
            BlockStateError: a layer has written them already.
        """
        if len(self.behind) < len(self.pool.places):
            raise BlockStateError("a layer writes without reserved positions")
        self.behind.clear()
        self.attended.update(self.pool.places)
        for group, tokens in zip(self.pool.groups, self.tokens, strict=True):
            self.pool.begin(group, tokens)
        return self.tokens

    def undo_begin(self) -> None:
        """Undo :meth:`begin_all`. The positions stay reserved, and the layers can write them again."""
        self.behind = set(self.pool.places)
        self.attended.clear()

    # Reserving ------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserve the new tokens of every sequence.

        Raises:
            NoBlocksError: for a sequence a block was missing. Nothing has been reserved.
            BlockStateError: a layer has not written its last reserved tokens.
        """
        if self.behind:
            raise BlockStateError("a layer has not written the tokens of the previous step")
        self.attended.clear()
        self.positions.clear()
        others: Sequence[int] = range(len(self.tables)) if self.is_pack else self.pool.append_token(self.tables)
        for place, index in enumerate(others):
            try:
                self.pool.append_tokens(self.tables[index], self.counts[index])
            except Exception as error:
                self._trim(set(range(len(self.tables))).difference(others[place:]))
                raise NoBlocksError(index, without_frames(error)) from None
        self.behind.update(self.pool.places)
        self.is_reserved = True

    def _trim(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.pool.trim(self.tables[index], self.counts[index])
            self.pool.appended_tokens -= self.counts[index]  # they will be appended again

    def undo_reserve(self) -> None:
        """Undo the latest :meth:`reserve`; what layers have written for it is dropped."""
        if self.is_reserved:
            self._trim(range(len(self.tables)))
        self.is_reserved = False
        self.positions.clear()
        self.behind.clear()

    def commit(self) -> None:
        """Check, after the call of a pack, that every layer has written its tokens and attended to them.

        Raises:
            NotPackableError: one has not.
        """
        for layer in self.pool.places:
            if layer in self.behind or (self.is_pack and layer not in self.attended):
                raise NotPackableError(f"layer {layer} does not write its tokens, or does not attend to them")

    # What layers see ------------------------------------------------------------------------------------------

    def offsets(self, layer: int) -> mx.array:
        """Return the position of each token, int32 ``[T]``; of the next token once the layer has written it. All layers
        share the array."""
        behind = layer in self.behind
        known = self.positions.get(behind)
        if known is None:
            if not self.is_pack:
                known = mx.array(lengths_of(self.tables) - behind)
            else:
                known = self.tokens_of(layer).offsets()
                known = known if behind else known + 1
            self.positions[behind] = known
        return known

    def narrow_mask(self, window: int) -> mx.array:
        """Return the placeholder mask of a pack for a window narrower than the layer's; :attr:`masks` recognises it."""
        made = self._narrow_masks.get(window)
        if made is None:
            made = self._narrow_masks[window] = mx.ones((len(self), 1, 1, 1), mx.bool_)
            self.masks.add(("narrow", window), made, Window(window))
        return made
