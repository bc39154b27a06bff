"""CompiledStep: one decode step of a whole model as a compiled function over in-place blocks."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ...attention import dispatch
from ...cache.composites import leaves, with_leaves
from ...kernels.products.inference import Inference
from ...kernels.quantized.pages import PageShape
from ...kv.block_table import BlockTable
from ...kv.pool import BlockPool
from ...kv.step import rounded_up, table_width
from ...kv.storage.base import Storage
from ...kv.storage.in_place import InPlaceStorage, TracedBlocks
from .model_state import ModelState, StateNotKnown, substituted
from .narrow_layers import narrow_layers
from .step_layer import NotCompilable, StepLayer
from .step_rows import GroupArrays, PackRows, StepRows, rows_of

# From the model, tokens [B, 1] and, by its name, the `cache` of the layers to logits [B, 1, vocab].
Forward = Callable[..., mx.array]


MOST_FAILURES = 3
# Steps of the same shapes that run uncompiled first, in a row or not: a trace takes as long as some steps save, and
# while prompts join or requests finish, many shapes come that are not seen again.
PATIENCE = 4
PATIENCE_PADDED = 32  # where a step of larger shapes serves meanwhile
ANY_ROWS = 32  # a step may be padded to so many rows, or to twice as many as it has
MOST_TRACES = 256  # kept, the latest used ones
MOST_COUNTED = 4096  # shapes whose steps are counted; then all counts are forgotten
compile_function: Callable[[Any], Any] = mx.compile


class StepShapes(NamedTuple):
    """What a trace of a step is made for.

    Attributes:
        num_rows: of the batch.
        widths: of each group's block tables.
        sizes: blocks of each group.
        is_pack: several rows may be tokens of one sequence.
    """

    num_rows: int
    widths: tuple[int, ...]
    sizes: tuple[int, ...]
    is_pack: bool = False

    @classmethod
    def of(
        cls, num_rows: int, pool: BlockPool, tables: Sequence[Sequence[BlockTable]], *, is_pack: bool = False
    ) -> StepShapes:
        """The smallest for so many rows with these tables, one list for each group."""
        sizes = tuple(group.allocator.num_blocks for group in pool.groups)
        return cls(padded_rows(num_rows), tuple(map(table_width, tables)), sizes, is_pack)

    def can_hold(self, other: StepShapes) -> bool:
        """Whether a step of the other's shapes can be padded to these. One sequence alone never is."""
        return (
            1 < other.num_rows <= self.num_rows <= max(ANY_ROWS, 2 * other.num_rows)
            and (self.sizes, self.is_pack) == (other.sizes, other.is_pack)
            and all(mine >= theirs for mine, theirs in zip(self.widths, other.widths, strict=True))
        )


def padded_rows(num_rows: int) -> int:
    """Rows of the compiled step for so many: some more, which see nothing and write nothing, so that a batch that gains
    and loses rows comes back to few shapes."""
    return num_rows if num_rows <= 2 else rounded_up(num_rows, 4)


class CompiledStep:
    """Runs decode steps of one model over one pool as a compiled function.

    In a decode step the host, not the GPU, is what takes time at small batches: building the graph of the same few
    hundred operations anew for each token. Compiled, it is built once per shape of the batch and of its block tables.

    Batches are padded to a few sizes. A step is taken only if every layer's cache is paged, in place, and its last step
    ran in the kernel. Weights are inputs of the function, so replaced or updated ones are seen. All else that a trace
    reads of the model is compared before every step (:class:`ModelState`); once it is not what it was, the traces are
    dropped, and that step runs uncompiled.

    Args:
        pool: of the caches.
        forward: the model's own step.

    Attributes:
        forward: as given.
        failure: why no step is compiled any more.
    """

    def __init__(self, pool: BlockPool, forward: Forward) -> None:
        self.failure: str | None = None
        self.forward = forward
        self._windows = [pool.layer(layer).sees for layer in self._layers_of(pool)]
        self._groups = [pool.group_of(layer) for layer in self._layers_of(pool)]
        self._pages: list[tuple[PageShape | None, bool]] = []  # of each layer, and whether what they hold is rotated
        self._model: Any = None
        self._caches: Sequence[Any] = ()  # how the model expects them composed
        self._state: ModelState | None = None  # what all traces have read
        self._failures = 0  # in a row
        # By the shapes of a step, latest used last. One function each: MLX compares a call with every trace of its own.
        self._functions: OrderedDict[StepShapes, Callable[..., Any]] = OrderedDict()
        self._uncompiled: Counter[StepShapes] = Counter()

    @staticmethod
    def _layers_of(pool: BlockPool) -> list[int]:
        return sorted(layer for group in pool.groups for layer in group.spec.layers)

    def __call__(self, model: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array | None:
        """Take the step, compiled or, while its shapes are new, not: positions are reserved, keys and values written.

        Args:
            model: the same at every call.
            tokens: ``[B, 1]``.
            caches: as the model expects them, of one sequence or of one batch.

        Returns:
            Logits ``[B, 1, vocab]``; None if this step is not one for it, and nothing has been done.

        Raises:
            PoolExhaustedError: as the step itself would.
        """
        parts = leaves(caches)
        rows = rows_of(parts)
        if self.failure is not None or rows is None or len(rows) != tokens.shape[0]:
            return None
        pool = rows.pool
        storages = [pool.layer(cache.layer).storage for cache in parts] if pool.groups[0].storages else []
        if not storages or not all(storage.decoded_by_kernel for storage in storages):
            return None
        logits = self._compiled(rows, storages, model, tokens, caches, parts)
        if logits is None and self.failure is None:
            # With the products of a compiled step: which steps are compiled does not show in what they give.
            with narrow_layers(model, tokens.shape[0]):
                logits = self.forward(model, tokens, cache=caches)
        return logits

    def _compiled(
        self,
        rows: StepRows,
        storages: Sequence[Storage],
        model: Any,
        tokens: mx.array,
        caches: Sequence[Any],
        parts: Sequence[Any],
    ) -> mx.array | None:
        """The step, compiled; None if it is not, and nothing has been done. ``parts``: the caches' leaves."""
        pool = rows.pool
        arrays = []
        tables = rows.take(parts)
        try:
            shapes = self._shapes_for(StepShapes.of(len(rows), pool, tables, is_pack=isinstance(rows, PackRows)))
            if shapes is None:
                rows.untake()
                return None
            weights = self._weights_of(model)
            if weights is None:
                rows.untake()
                return None
            for group, own, width in zip(pool.groups, tables, shapes.widths, strict=True):
                arrays.append(rows.arrays(pool.layer(group.spec.layers[0]), own, (shapes.num_rows, width)))
            missing = shapes.num_rows - len(rows)
            if missing:
                tokens = mx.concatenate([tokens, mx.zeros((missing, 1), tokens.dtype)])
            self._model, self._caches = model, caches
            own_storages = cast(list[InPlaceStorage], storages)
            self._pages = [(storage.pages, storage.rotates) for storage in own_storages]
            function = self._functions[shapes]
            logits = InPlaceStorage.run(function, own_storages, weights, tokens, arrays, appended=len(rows))
        except Exception as error:
            # The step runs uncompiled now. Whatever went wrong may be of this step alone: a model that fails there too
            # says so itself.
            rows.untake()
            self._failures += 1
            if isinstance(error, NotCompilable | StateNotKnown) or self._failures == MOST_FAILURES:
                said = str(error).splitlines() or [""]  # MLX goes on with all forms of its functions
                self.failure = f"{type(error).__name__}: {said[0]}"
            return None
        finally:
            self._model, self._caches = None, ()
        self._failures = 0
        dispatch.record_compiled(len(parts))
        return logits[: len(rows)] if missing else logits

    def _weights_of(self, model: Any) -> list[mx.array] | None:
        """The model's arrays; None if it is not what it was when it was traced, and no trace is left.

        Raises:
            StateNotKnown: that cannot be told of this model.
        """
        if self._state is None:
            self._state = ModelState(model)
        weights = self._state.arrays_of(model)
        if weights is None:
            self._state = None
            self._functions.clear()
            self._uncompiled.clear()
        return weights

    def _shapes_for(self, own: StepShapes) -> StepShapes | None:
        """Of the compiled step to take: of these shapes, or larger ones; None as long as there is none."""
        if own in self._functions:
            self._functions.move_to_end(own)
            return own
        larger = min((shapes for shapes in self._functions if shapes.can_hold(own)), default=None)
        if len(self._uncompiled) >= MOST_COUNTED:
            self._uncompiled.clear()
        self._uncompiled[own] += 1
        if self._uncompiled[own] <= (PATIENCE if larger is None else PATIENCE_PADDED):
            if larger is not None:
                self._functions.move_to_end(larger)
            return larger
        if len(self._functions) == MOST_TRACES:
            self._functions.popitem(last=False)
        trace = weakref.WeakMethod(self._trace)  # what is compiled is kept here, and must not keep this in turn
        self._functions[own] = compile_function(lambda *inputs: cast(Any, trace())(*inputs))
        return own

    def _trace(
        self, tensors: Sequence[Any], weights: Sequence[mx.array], tokens: mx.array, arrays: Sequence[Sequence[Any]]
    ) -> tuple[mx.array, list[mx.array]]:
        groups = [GroupArrays(tuple(visible), offsets, tuple(slots)) for visible, offsets, slots in arrays]
        blocks = [TracedBlocks(tuple(own), *pages) for own, pages in zip(tensors, self._pages, strict=True)]
        layers = [
            StepLayer(own, groups[group], window)
            for own, group, window in zip(blocks, self._groups, self._windows, strict=True)
        ]
        # What is dequantised in a trace would all be alive in a step.
        with (
            substituted(self._model, weights),
            narrow_layers(self._model, tokens.shape[0]),
            Inference(dequantizes=False),
        ):
            logits = self.forward(self._model, tokens, cache=with_leaves(self._caches, layers))
        for layer in layers:
            layer.settle()
        if self._state is None or self._state.arrays_of(self._model) is None:
            raise NotCompilable("the model changes its own attributes in a step")
        return logits, [own.fence() for own in blocks]
