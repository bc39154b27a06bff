"""PlaceholderBatch: the batch of a decode step that is being traced, whose arrays are the function's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import mlx.core as mx

from ..kv.block_table import BlockTable
from ..kv.geometry import Window
from ..kv.new_tokens import NewTokens, ThreeArrays
from ..kv.pool import BlockPool
from .batch import Batch, NotCompilable

# Of one group: what each token sees (:meth:`NewTokens.visible`), positions, slots of a pack's tokens, which are all
# written before attention, and work items of thread groups that read common blocks; the last two may be absent.
Inputs = tuple[ThreeArrays, mx.array, tuple[mx.array, ...], tuple[mx.array, ...]]


class Placeholder:
    """Stands for the keys, or values, that a layer has fetched while a step is traced. It can only be recognised:
    computing with it, asking for its shape or comparing it raises, and the step is not compiled.

    Args:
        misuses: list that each attempt is added to, because MLX may swallow the error: with an object that is no array
            it raises another one, or compares as unequal.
        dtype: of the keys.
    """

    __slots__ = ("__weakref__", "_misuses", "dtype")
    __hash__ = object.__hash__

    def __init__(self, misuses: list[str], dtype: mx.Dtype) -> None:
        self._misuses = misuses
        self.dtype = dtype

    def _refuse(self, what: str) -> NoReturn:
        self._misuses.append(f"the model's attention {what} a placeholder")
        raise NotCompilable(self._misuses[-1])

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"reads {name} of")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compares")

    def __bool__(self) -> NoReturn:
        self._refuse("branches on")


class NoTables(Sequence[BlockTable]):
    """The block tables of a step that is being traced: a trace serves other tables, so none may be read."""

    def __len__(self) -> NoReturn:
        raise NotCompilable("attention does not run in the decode kernel")

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotCompilable("attention does not run in the decode kernel")


class PlaceholderTokens(NewTokens):
    """The new tokens of a group while a step is traced; to attention one for each row, padding included.

    Args:
        inputs: from :meth:`inputs_of`, as inputs of the traced function.
        window: the group's window.
        epoch: the group's epoch.
    """

    can_compute = False

    def __init__(self, inputs: Inputs, window: Window | None, epoch: int) -> None:
        visible, self._positions_given, slots, items = inputs
        super().__init__(NoTables(), (1,) * self._positions_given.shape[0])
        self.is_pack, self.epoch = bool(slots), epoch
        self._visible: ThreeArrays = (visible[0], visible[1], visible[2])
        self._slots, self._items_given = slots, items
        self._window = window

    @staticmethod
    def inputs_of(tokens: NewTokens, window: Window | None, items: mx.array | None, shape: tuple[int, int]) -> Inputs:
        """Return the arrays of a step's tokens, for block tables padded to ``shape``."""
        slots = (tokens.slots(shape[0]),) if tokens.is_pack else ()
        return (
            tokens.visible(window, None, shape),
            tokens.offsets(shape[0]),
            slots,
            () if items is None else (items,),
        )

    def slots(self, num_rows: int | None = None) -> mx.array:
        """Return the slots of a pack's tokens; see :meth:`NewTokens.slots`."""
        if not self._slots:
            raise NotCompilable("a layer writes without attending in the decode kernel")
        return self._slots[0]

    def offsets(self, num_rows: int | None = None) -> mx.array:
        """Return the position of each token, int32 ``[T]``."""
        return self._positions_given

    def visible(
        self, window: Window | None, num_rows: int | None = None, shape: tuple[int, int] | None = None
    ) -> ThreeArrays:
        """Return what each token sees; see :meth:`NewTokens.visible`."""
        if window == self._window:
            return self._visible
        if window is None or window.stride > 1 or (self._window is not None and self._window.stride > 1):
            raise NotCompilable(f"the window of the model's attention, {window}, is not in that of the layer")
        tables, ends, starts = self._visible
        return tables, ends, mx.maximum(starts, ends - window.size)

    def items(self, cut: Any, window: Window | None = None, shape: tuple[int, int] | None = None) -> mx.array | None:
        """Return the items of the kernel for common blocks, which hold for the group's own window only."""
        return self._items_given[0] if self._items_given and window == self._window else None


class PlaceholderBatch(Batch):
    """The batch of a decode step that is being traced. Like a pack's, its rows are masked by what each sees, and only
    the attention function may use what a layer has fetched. The first attention of a layer writes its new tokens.

    Args:
        pool: the pool of the sequences.
        tokens: of each group.
    """

    is_traced = True

    def __init__(self, pool: BlockPool, tokens: Sequence[PlaceholderTokens]) -> None:
        super().__init__(pool, (), (), as_rows=True)
        self.tokens = list(tokens)
        self.counts = tuple(tokens[0].counts)
        self.num_tokens, self.is_pack = len(self.counts), True
        self.behind = set(pool.places)
        self.positions[True] = tokens[0].offsets()
        self.misuses: list[str] = []

    def commit(self) -> None:
        """Check, at the end of the trace, that every layer has attended to its new tokens, and that no placeholder was
        misused, even if the model caught the error.

        Raises:
            NotCompilable, NotPackableError: otherwise.
        """
        if self.misuses:
            raise NotCompilable(self.misuses[0])
        super().commit()
