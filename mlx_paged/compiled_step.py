"""CompiledStep: one decode step of a whole model as a compiled function over in-place blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from .attention import dispatch
from .batch_cache import PagedBatchKVCache
from .batch_tables import BatchTables
from .cache import PagedKVCache, SequenceTables
from .kv.block_table import BlockTable
from .kv.in_place import InPlaceStorage, TracedBlocks
from .kv.pool import BlockPool
from .kv.step import table_width
from .narrow_layers import narrow_layers

# From the model, tokens [B, 1] and the layers' caches to logits [B, 1, vocab].
Forward = Callable[[Any, mx.array, Sequence[Any]], mx.array]


MOST_FAILURES = 3
# Steps of the same shapes that run uncompiled first, in a row or not: a trace takes as long as some steps save, and
# while prompts join or requests finish, many shapes come that are not seen again.
PATIENCE = 4
MOST_TRACES = 256  # kept, the latest used ones
MOST_COUNTED = 4096  # shapes whose steps are counted; then all counts are forgotten
compile_function: Callable[[Any], Any] = mx.compile


class NotCompilable(Exception):
    """The model does something in a decode step that the compiled step has no answer to."""


class GroupArrays(NamedTuple):
    """What the layers of a group share in a step.

    Attributes:
        visible: block tables, ends and starts, of :meth:`Step.visible`.
        offsets: position of each row's new token, int32 ``[B]``.
    """

    visible: tuple[mx.array, mx.array, mx.array]
    offsets: mx.array


class StepLayer:
    """What an attention layer sees of its cache while a decode step is traced."""

    def __init__(self, blocks: TracedBlocks, arrays: GroupArrays, window: int | None) -> None:
        self.blocks = blocks
        self.offset = arrays.offsets
        self.window = window
        self._visible = arrays.visible
        self.attended = 0

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """None: rows are masked by their own lengths and the layer's window."""
        if N != 1 or return_array or (window_size is not None and (self.window is None or window_size < self.window)):
            raise NotCompilable("the model asks for a mask of its own")

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As :meth:`PagedKVCache.attend`, for one new token per row, in the kernel."""
        if mask is not None or queries.shape[2] != 1:
            raise NotCompilable("the model's attention takes more than one token, or a mask")
        self.attended += 1
        return self.blocks.decode(
            queries, self._visible, (keys, values), scale=scale, window=self.window, softcap=softcap, sinks=sinks
        )


class CompiledStep:
    """Runs decode steps of one model over one pool as a compiled function.

    In a decode step the host, not the GPU, is what takes time at small batches: building the graph of the same few
    hundred operations anew for each token. Compiled, it is built once per shape of the batch and of its block tables.

    Batches are padded to a few sizes. A step is taken only if every layer's cache is paged, in place, and its last step
    ran in the kernel. Weights are inputs of the function, so replaced or updated ones are seen.

    Args:
        pool: of the caches.
        forward: the model's own step.
    """

    def __init__(self, pool: BlockPool, forward: Forward) -> None:
        self.failure: str | None = None  # why no step is compiled any more
        self._forward = forward
        self._windows = [pool.groups[pool.group_of(layer)].spec.window for layer in self._layers_of(pool)]
        self._groups = [pool.group_of(layer) for layer in self._layers_of(pool)]
        self._model: Any = None
        self._failures = 0  # in a row
        # By the shapes of a step, latest used last. One function each: MLX compares a call with every trace of its own.
        self._functions: OrderedDict[tuple[int, ...], Callable[..., Any]] = OrderedDict()
        self._uncompiled: Counter[tuple[int, ...]] = Counter()

    @staticmethod
    def _layers_of(pool: BlockPool) -> list[int]:
        return sorted(layer for group in pool.groups for layer in group.spec.layers)

    def __call__(self, model: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array | None:
        """Take the step: positions are reserved, keys and values written.

        Args:
            model: the same at every call.
            tokens: ``[B, 1]``.
            caches: one per layer, of one sequence or of one batch.

        Returns:
            Logits ``[B, 1, vocab]``; None if this step is not one for it, and nothing has been done.

        Raises:
            PoolExhaustedError: as the step itself would.
        """
        rows = _rows_of(caches)
        if self.failure is not None or rows is None or len(rows) != tokens.shape[0]:
            return None
        pool = rows.pool
        storages = [pool.storage(cache.layer) for cache in caches] if pool.groups[0].storages else []
        if not storages or not all(isinstance(s, InPlaceStorage) and s.decoded_by_kernel for s in storages):
            return None
        num_rows = padded_rows(len(rows))
        arrays = []
        tables = rows.take(caches)
        try:
            function = self._function_for(num_rows, pool, tables)
            if function is None:
                rows.untake()
                return None
            for group, own in zip(pool.groups, tables, strict=True):
                step = pool.step(group.spec.layers[0], own, 1)
                visible = step.visible(own, group.spec.window, num_rows)
                arrays.append(GroupArrays(visible, step.offsets(num_rows)))
            if num_rows > len(rows):
                tokens = mx.concatenate([tokens, mx.zeros((num_rows - len(rows), 1), tokens.dtype)])
            self._model = model
            logits = InPlaceStorage.run(function, storages, model, tokens, arrays)  # type: ignore[arg-type]
        except Exception as error:
            # The step runs uncompiled now. Whatever went wrong may be of this step alone: a model that fails there too
            # says so itself.
            rows.untake()
            self._failures += 1
            if isinstance(error, NotCompilable) or self._failures == MOST_FAILURES:
                self.failure = f"{type(error).__name__}: {error}"
            return None
        finally:
            self._model = None
        self._failures = 0
        dispatch.record_compiled(len(caches))
        return logits if num_rows == len(rows) else logits[: len(rows)]

    def _function_for(
        self, num_rows: int, pool: BlockPool, tables: Sequence[Sequence[BlockTable]]
    ) -> Callable[..., Any] | None:
        """The compiled step of these shapes; None as long as there have been too few of them."""
        sizes = (group.allocator.num_blocks for group in pool.groups)
        shapes = (num_rows, *sizes, *map(table_width, tables))
        function = self._functions.get(shapes)
        if function is not None:
            self._functions.move_to_end(shapes)
            return function
        if self._uncompiled[shapes] < PATIENCE:
            if len(self._uncompiled) == MOST_COUNTED:
                self._uncompiled.clear()
            self._uncompiled[shapes] += 1
            return None
        if len(self._functions) == MOST_TRACES:
            self._functions.popitem(last=False)
        function = self._functions[shapes] = compile_function(self._trace)
        return function

    def _trace(
        self, tensors: Sequence[Any], weights: Any, tokens: mx.array, arrays: Sequence[Sequence[Any]]
    ) -> tuple[mx.array, list[mx.array]]:
        groups = [GroupArrays(tuple(visible), offsets) for visible, offsets in arrays]
        with substituted(self._model, weights), narrow_layers(self._model, tokens.shape[0]) as siblings:
            while True:
                blocks = [TracedBlocks(tuple(own)) for own in tensors]
                layers = [
                    StepLayer(own, groups[group], window)
                    for own, group, window in zip(blocks, self._groups, self._windows, strict=True)
                ]
                logits = self._forward(self._model, tokens, layers)
                if all([own.settle() for own in siblings]):
                    break
        if any(layer.attended != 1 for layer in layers):
            raise NotCompilable("not every layer attends once")
        return logits, [own.fence() for own in blocks]


def padded_rows(num_rows: int) -> int:
    """Rows of the compiled step for so many: some more, which see nothing and write nothing, so that a batch that gains
    and loses rows comes back to few shapes."""
    unit = 1 if num_rows <= 2 else max(4, 1 << max(0, (num_rows - 1).bit_length() - 3))
    return -(-num_rows // unit) * unit


class _Sequence:
    """The caches of one sequence's layers, as a batch of one."""

    def __init__(self, sequence: SequenceTables) -> None:
        self.sequence = sequence
        self.pool = sequence.pool

    def __len__(self) -> int:
        return 1

    def take(self, caches: Sequence[Any]) -> list[list[BlockTable]]:
        for cache in caches:
            self.sequence.reserve(cache.layer, 1)
        return [[table] for table in self.sequence.tables]

    def untake(self) -> None:
        for layer in self.sequence.offsets:
            self.sequence.offsets[layer] -= 1  # the position stays reserved, for the layers to take again


class _Batch:
    """The caches of a batch's layers."""

    def __init__(self, batch: BatchTables) -> None:
        self.batch = batch
        self.pool = batch.pool

    def __len__(self) -> int:
        return len(self.batch)

    def take(self, caches: Sequence[Any]) -> list[list[BlockTable]]:
        for cache in caches:
            self.batch.take(cache.layer)
        return self.batch.tables

    def untake(self) -> None:
        self.batch.untake()


def _rows_of(caches: Sequence[Any]) -> _Sequence | _Batch | None:
    """The rows these caches belong to, if they are all paged, of the same rows, and cover the pool's layers."""
    first = caches[0] if caches else None
    if isinstance(first, PagedKVCache):
        sequence = first.sequence
        layers = len(sequence.offsets)
        if len(caches) == layers and all(isinstance(c, PagedKVCache) and c.sequence is sequence for c in caches):
            return _Sequence(sequence)
    elif isinstance(first, PagedBatchKVCache):
        batch = first.batch
        if len(caches) == batch.num_layers and all(
            isinstance(c, PagedBatchKVCache) and c.batch is batch and not c.is_padded for c in caches
        ):
            return _Batch(batch)
    return None


@contextmanager
def substituted(module: Any, values: Any) -> Iterator[None]:
    """Put other arrays of the same tree into a module (a tree of dicts and lists) for the time of a ``with`` block."""
    replaced: list[tuple[Any, Any, mx.array]] = []

    def put(target: Any, source: Any) -> None:
        items = source.items() if isinstance(source, dict) else enumerate(source)
        for key, value in items:
            if isinstance(value, mx.array):
                replaced.append((target, key, target[key]))
                dict.__setitem__(target, key, value) if isinstance(target, dict) else target.__setitem__(key, value)
            elif isinstance(value, dict | list):
                put(target[key], value)

    try:
        put(module, values)
        yield
    finally:
        for target, key, value in replaced:
            dict.__setitem__(target, key, value) if isinstance(target, dict) else target.__setitem__(key, value)
