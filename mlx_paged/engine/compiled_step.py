"""CompiledStep: a decode step of a whole model, traced once and run again; its layers, rows and shapes."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import mlx.core as mx

from ..attention import dispatch
from ..by_model import ByModel
from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.lazy_kv import LazyKV, hand_out
from ..cache.packed_states import with_arrays
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.rows import Rows, SequenceTables
from ..errors import check_device
from ..kernels.build import backend
from ..kernels.decode_spec import Counters
from ..kernels.inference import Inference
from ..kernels.nvidia import narrow_layers
from ..kv.attention_params import AttentionParams, Window
from ..kv.block_table import BlockTable
from ..kv.blocks import Blocks
from ..kv.device_blocks import DeviceBlocks, TracedBlocks
from ..kv.geometry import Geometry
from ..kv.layer import PoolLayer
from ..kv.pool import BlockPool
from ..kv.step import rounded_up, table_width
from .model_state import ModelState


class GroupArrays(NamedTuple):
    """Arrays that the layers of a group share in a step.

    Attributes:
        visible: block tables, ends and starts; see :meth:`Step.visible`.
        offsets: position of each row's new token, int32 ``[B]``.
        slots: slots of a pack's tokens, ``[B]``, which are all written before attention; else empty.
        items: work items of thread groups that read common blocks, see :meth:`Step.items`; else empty.
    """

    visible: tuple[mx.array, mx.array, mx.array]
    offsets: mx.array
    slots: tuple[mx.array, ...] = ()
    items: tuple[mx.array, ...] = ()


class StepRows:
    """The rows of a step: those of a decode step or a pack, or a single sequence."""

    def __init__(self, rows: Rows | SequenceTables) -> None:
        self.rows = rows
        self.pool = rows.pool
        self.counts: Sequence[int] = rows.counts if isinstance(rows, Rows) else (1,)
        self.num_tokens = sum(self.counts)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def is_pack(self) -> bool:
        """Return whether several rows may be tokens of one sequence."""
        return self.num_tokens > len(self.counts)

    def take_positions(self) -> list[list[BlockTable]]:
        """Have every layer take its next tokens, and return the tables of each group."""
        return self.rows.take_all()

    def undo_take(self) -> None:
        """Undo :meth:`take_positions`; the positions stay reserved."""
        self.rows.undo_takes()

    def items(
        self, layer: PoolLayer, tables: Sequence[BlockTable], blocks: Blocks, shape: tuple[int, int]
    ) -> tuple[mx.array, ...]:
        """Return :attr:`GroupArrays.items` of a group for block tables padded to ``shape``."""
        if not isinstance(blocks, DeviceBlocks):
            return ()
        items = blocks.items(tables, layer.step(tables, self.counts), layer.sees, shape)
        return () if items is None else (items,)

    def arrays(self, layer: PoolLayer, tables: Sequence[BlockTable], shape: tuple[int, int]) -> GroupArrays:
        """Return the arrays of a group for block tables padded to ``shape``, without ``items``."""
        step = layer.step(tables, self.counts)
        slots = (step.slots(tables, shape[0]),) if self.is_pack else ()
        return GroupArrays(step.visible(tables, layer.sees, None, shape), step.offsets(shape[0]), slots)


def parts_of(caches: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Return a model's paged caches, and those that hold states. None if one cannot be an input of a compiled step: a
    state is missing or padded, or a cache is of another kind."""
    paged: list[Any] = []
    states: list[Any] = []
    for cache in leaves(caches):
        if _rows_behind(cache) is not None:
            paged.append(cache)
            continue
        arrays = getattr(cache, "cache", None)
        if not isinstance(arrays, list) or any(x is None for x in arrays):
            return None
        if cache.left_padding is not None or cache.lengths is not None:
            return None
        states.append(cache)
    return paged, states


def rows_of(caches: Sequence[Any]) -> Rows | SequenceTables | None:
    """Return the rows of these paged caches; None unless all have the same rows and they cover the pool's layers."""
    rows = _rows_behind(caches[0]) if caches else None
    if rows is None or len(caches) != rows.num_layers or any(_rows_behind(cache) is not rows for cache in caches):
        return None
    return rows


def _rows_behind(cache: Any) -> Rows | SequenceTables | None:
    if isinstance(cache, PagedBatchKVCache):
        return cache.rows
    return cache.sequence if isinstance(cache, PagedKVCache) else None


class NotCompilable(Exception):
    """The model does something in a decode step that a compiled step does not support."""


class StepLayer:
    """An attention layer's cache while a decode step is traced.

    An adapter calls :meth:`attend`. Any other attention calls :meth:`update_and_fetch` and passes the placeholders to
    the attention function that replaces mlx-lm's; they support nothing else.
    """

    def __init__(self, blocks: TracedBlocks, arrays: GroupArrays, window: Window | None) -> None:
        self.blocks = blocks
        self.offset = arrays.offsets
        self._sees = window
        self._visible = arrays.visible
        self._slots = arrays.slots[0] if arrays.slots else None
        self._items = arrays.items[0] if arrays.items else None
        self._new: tuple[mx.array, mx.array] | None = None  # keys and values
        self._attended = False
        self._misuses: list[str] = []

    @property
    def window(self) -> int | None:
        """Most tokens that a query sees, its own included; None: all."""
        return None if self._sees is None else self._sees.size

    def check_attended(self) -> None:
        """Raise NotCompilable, at the end of the trace, if the layer's new tokens were not attended to, which is what
        writes them, or if a placeholder was misused, even if the model caught the error."""
        if self._misuses:
            raise NotCompilable(self._misuses[0])
        if not self._attended:
            raise NotCompilable("a layer did not attend to its new tokens")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return None, since rows are masked by their own lengths and the layer's window; a :class:`NarrowMask` for a
        narrower window."""
        if N != 1:
            raise NotCompilable(f"the model asks for a mask of {N} tokens, not 1")
        return None if window_size is None or self._has(window_size) else NarrowMask(self._misuses, window_size)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        params: AttentionParams,
    ) -> mx.array:
        """Attend in the kernel for one new token per row; see :meth:`PagedKVCache.attend`."""
        self._take(keys, values)
        return self.attend_fetched(queries, params)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take the new keys and values ``[B, n_kv_heads, 1, head_dim]``. Returns placeholders for all keys and values
        that the rows see: only the attention function accepts them, they have neither shape nor values."""
        self._take(keys, values)
        self.offset = self.offset + 1  # for a model that reads the offset after the update
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return placeholders for this layer's keys and values, which another layer may attend to as well."""
        if self._new is None:
            raise NotCompilable("a layer attends before update_and_fetch")
        keys, values = (FetchedKV(self._misuses, array.dtype) for array in self._new)
        hand_out(keys, values, StepKV(self))
        return keys, values

    def _take(self, keys: mx.array, values: mx.array) -> None:
        if self._new is not None:
            raise NotCompilable("one layer's cache was updated twice in a step")
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != 1:
            raise NotCompilable(f"keys {keys.shape} and values {values.shape} must be [B, heads, 1, dim]")
        self._new = keys, values

    def attend_fetched(self, queries: mx.array, params: AttentionParams) -> mx.array:
        """Attend with ``[B, n_q_heads, 1, head_dim]`` to what the rows see. The first call writes the new tokens."""
        assert self._new is not None
        keys, values = self._new
        if queries.ndim != 4 or queries.shape[2] != 1 or len(queries) != len(keys):
            raise NotCompilable(f"queries {queries.shape} must be [{len(keys)}, heads, 1, dim]")
        if not keys.dtype == values.dtype == queries.dtype == self.blocks.dtype:
            dtypes = f"{queries.dtype}, {keys.dtype} and {values.dtype}"
            raise NotCompilable(f"queries, keys and values are {dtypes}; all must be {self.blocks.dtype}")
        append, slots = (None, None) if self._attended else (self._new, self._slots)
        self._attended = True
        window, visible = self._seen_under(params.mask)
        items = self._items if window is self._sees and append is not None else None
        return self.blocks.decode(queries, visible, append, params._replace(mask=None, window=window), slots, items)

    def _seen_under(self, mask: Any) -> tuple[Window | None, tuple[mx.array, mx.array, mx.array]]:
        """Return the window, and the visible positions, of a mask that the model passes to attention."""
        # Causality hides nothing from a row's newest token.
        if mask is None or isinstance(mask, str) or (isinstance(mask, NarrowMask) and self._has(mask.window_size)):
            return self._sees, self._visible
        if not isinstance(mask, NarrowMask) or self._sees is not None:
            raise NotCompilable("the model's attention has a mask of its own")
        tables, ends, starts = self._visible
        return Window(mask.window_size), (tables, ends, mx.maximum(starts, ends - mask.window_size))

    def _has(self, window_size: int) -> bool:
        """Return whether a window of this size hides nothing that the layer's own window does not hide."""
        return self.window is not None and window_size >= self.window


class StandIn:
    """Placeholder for an array while a step is traced. It can only be recognised: computing with it, asking for its
    shape or comparing it raises, and the step is not compiled.

    Args:
        misuses: list that each attempt is added to, because MLX may swallow the error: with an object that is no array
            it raises another one, or compares as unequal.
    """

    __slots__ = ("__weakref__", "_misuses")
    __hash__ = object.__hash__

    def __init__(self, misuses: list[str]) -> None:
        self._misuses = misuses

    def _refuse(self, what: str) -> NoReturn:
        self._misuses.append(f"the model's attention {what} a placeholder ({type(self).__name__})")
        raise NotCompilable(self._misuses[-1])

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"reads {name} of")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compares")

    def __bool__(self) -> NoReturn:
        self._refuse("branches on")


class FetchedKV(StandIn):
    """Placeholder for keys, or values, that a layer has fetched."""

    __slots__ = ("dtype",)

    def __init__(self, misuses: list[str], dtype: mx.Dtype) -> None:
        super().__init__(misuses)
        self.dtype = dtype


class NarrowMask(StandIn):
    """Placeholder for a mask whose window is narrower than the layer's."""

    __slots__ = ("window_size",)

    def __init__(self, misuses: list[str], window_size: int) -> None:
        super().__init__(misuses)
        self.window_size = window_size


class StepKV(LazyKV):
    """How to attend for a pair of :class:`FetchedKV`. Weak: the registry of pairs would keep the layer alive."""

    def __init__(self, layer: StepLayer) -> None:
        self._step_layer = weakref.ref(layer)

    def can_attend(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        """Return True: there are no arrays to fall back on, so :meth:`attend` raises where it cannot serve."""
        return True

    def attend(self, queries: mx.array, keys: Any, values: Any, params: AttentionParams) -> mx.array:
        """Attend to what the layer has been given; see :meth:`StepLayer.attend_fetched`.

        Raises:
            NotCompilable: the mask is the model's own, queries are of several tokens, or the trace is over.
        """
        layer = self._step_layer()
        if layer is None:
            raise NotCompilable("the model uses keys and values of an earlier step")
        return layer.attend_fetched(queries, params)


# Takes the model, tokens [B, 1] and, as keyword, the `cache` of its layers; returns logits [B, 1, vocab].
Forward = Callable[..., mx.array]


MOST_FAILURES = 3
# Steps of a shape that run uncompiled before it is traced: a trace costs what several compiled steps save, and many
# shapes occur only once while prompts join or requests finish. Packs (verifications of drafts) are traced at once:
# their time decides whether drafts pay.
PATIENCE = 4
PATIENCE_PADDED = 32  # the same while steps of a shape can be padded to a larger trace
ANY_ROWS = 32  # a step may be padded to this many rows, or to twice its own if that is more
MOST_TRACES = 256  # kept, least recently used ones dropped; counts of uncompiled shapes restart at as many shapes
compile_function: Callable[[Any], Any] = mx.compile


class StepShapes(NamedTuple):
    """Shapes that a trace of a step is made for.

    Attributes:
        num_rows: rows of the batch, padding included.
        widths: width of each group's block tables, in blocks.
        is_pack: several rows may be tokens of one sequence.
        items: number of work items of each group whose rows read common blocks together; empty if there are none.
    """

    num_rows: int
    widths: tuple[int, ...]
    is_pack: bool = False
    items: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        num_rows: int,
        tables: Sequence[Sequence[BlockTable]],
        *,
        is_pack: bool = False,
        has_states: bool = False,
    ) -> StepShapes:
        """Return the smallest shapes for ``num_rows`` rows with these tables, a list per group. Rows with states are
        not padded, because that would copy the states."""
        padded = padded_pack if is_pack else padded_rows
        return cls(num_rows if has_states else padded(num_rows), tuple(map(table_width, tables)), is_pack)

    def can_hold(self, other: StepShapes) -> bool:
        """Return whether a step of the other's shapes can be padded to these. A single row never is, nor a step whose
        rows read common blocks together."""
        return (
            1 < other.num_rows <= self.num_rows <= max(ANY_ROWS, 2 * other.num_rows)
            and self.is_pack == other.is_pack
            and not (self.items or other.items)
            and all(mine >= theirs for mine, theirs in zip(self.widths, other.widths, strict=True))
        )


def padded_rows(num_rows: int) -> int:
    """Return the number of rows of a compiled step for ``num_rows`` rows. The added ones see and write nothing; with
    them a batch that gains and loses rows has few shapes."""
    return num_rows if num_rows <= 2 else rounded_up(num_rows, 4)


def padded_pack(num_tokens: int) -> int:
    """Return the number of rows of a compiled step for a pack of ``num_tokens`` tokens. CUDA kernels multiply 16 rows
    in the time of one, and compiling a shape costs several steps; so verifications of one row share a shape."""
    return rounded_up(num_tokens, 16) if backend() == "cuda" else padded_rows(num_tokens)


class CompiledStep:
    """Runs decode steps of one model over one pool as a compiled function.

    At small batches the host, not the GPU, limits a decode step: for each token it builds the same graph of a few
    hundred operations. Compiled, the graph is built once per shape of the batch and of its block tables.

    Batches are padded to a few sizes. A step qualifies only if every layer's cache holds a state, or is paged in place
    and ran in the kernel in its last step. States are inputs and outputs of the function. Weights are its constants: as
    inputs, the host would handle each of them in each step. Weights and structure of the model are compared before
    every step (:class:`ModelState`); if something has changed, all traces are dropped and that step runs uncompiled. A
    trace holds megabytes and serves only the size of the pool it was made for, so all are dropped, too, when the size
    changes.

    Args:
        pool: pool of the caches.
        forward: the model's own step.

    Attributes:
        forward: as given.
        failure: why steps are no longer compiled; None while they are.
    """

    def __init__(self, pool: BlockPool, forward: Forward) -> None:
        self.failure: str | None = None
        self.forward = forward
        self._windows = [pool.layer(layer).sees for layer in self._layers_of(pool)]
        self._groups = [pool.group_of(layer) for layer in self._layers_of(pool)]
        self._blocks: list[tuple[Geometry, Counters]] = []  # of each layer
        self._paged: list[weakref.ref[Any]] = []  # caches of the last step, if all are paged
        self._model: Any = None
        self._caches: Sequence[Any] = ()  # as the model expects them, composites included
        self._state: ModelState | None = None  # what all traces have read
        self._failures = 0  # in a row
        self._traces = 0  # made so far
        # By shapes, most recently used last. One function each: MLX compares a call with all traces of a function.
        self._functions: OrderedDict[StepShapes, Callable[..., Any]] = OrderedDict()
        self._sizes: list[int] = []  # number of blocks of each group, which all functions are for
        self._uncompiled: Counter[StepShapes] = Counter()

    @staticmethod
    def _layers_of(pool: BlockPool) -> list[int]:
        return sorted(layer for group in pool.groups for layer in group.spec.layers)

    def __call__(self, model: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array | None:
        """Take the step, compiled, or uncompiled while its shapes are new. Keys and values are written.

        Args:
            model: the same at every call.
            tokens: ``[B, 1]``.
            caches: as the model expects them, of one sequence or of one batch.

        Returns:
            Logits ``[B, 1, vocab]``; None, with nothing done, if the step does not qualify or cannot be compiled.

        Raises:
            PoolExhaustedError: as an uncompiled step would.
        """
        parts = self._parts_of(caches)
        if self.failure is not None or parts is None:
            return None
        rows = StepRows(cast(Any, _rows_behind(parts[0][0])))
        if len(rows) != tokens.shape[0]:
            return None
        pool = rows.pool
        layers = [pool.layer(cache.layer) for cache in parts[0]] if pool.groups[0].blocks else []
        if not layers or not all(layer.in_place and layer.device.decoded_by_kernel for layer in layers):
            return None
        pool.lock.held_arrays.compute()
        logits = self._compiled(rows, [layer.device for layer in layers], model, tokens, caches, *parts)
        if logits is None and self.failure is None:
            # With a compiled step's matrix products, so that results do not depend on which steps are compiled.
            with narrow_layers(model, tokens.shape[0]):
                logits = self.forward(model, tokens, cache=caches)
        return logits

    def _parts_of(self, caches: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """Return :func:`parts_of` the caches; None if the paged ones do not share rows that cover the pool's layers.

        A cache never changes its rows, so the last step's caches are not checked again if all are paged.
        """
        if [cache() for cache in self._paged] == caches:
            return caches, ()
        parts = parts_of(caches)
        if parts is None or rows_of(parts[0]) is None:
            return None
        if parts[0] == list(caches):  # none is composite
            self._paged = list(map(weakref.ref, caches))
        return parts

    def _compiled(
        self,
        rows: StepRows,
        blocks: Sequence[DeviceBlocks],
        model: Any,
        tokens: mx.array,
        caches: Sequence[Any],
        paged: Sequence[Any],
        states: Sequence[Any],
    ) -> mx.array | None:
        """Run the compiled step and return its logits; None if there is none or it fails. Nothing has been done then.
        The leaves of ``caches`` are in ``paged`` or ``states``."""
        pool = rows.pool
        arrays = []
        tables = rows.take_positions()
        try:
            shapes = StepShapes.of(len(rows), tables, is_pack=rows.is_pack, has_states=bool(states))
            items = [
                rows.items(pool.layer(group.spec.layers[0]), own, group.blocks[0], (shapes.num_rows, width))
                for group, own, width in zip(pool.groups, tables, shapes.widths, strict=True)
            ]
            if any(items):
                shapes = shapes._replace(items=tuple(len(own[0]) if own else 0 for own in items))
            self._drop_outgrown(pool)
            found = self._shapes_for(shapes, may_pad=not states)
            if found is None or not self._knows(model):
                rows.undo_take()
                return None
            shapes, function = found, self._functions[found]
            for group, own, width, read in zip(pool.groups, tables, shapes.widths, items, strict=True):
                of_group = rows.arrays(pool.layer(group.spec.layers[0]), own, (shapes.num_rows, width))
                arrays.append(of_group._replace(items=read))
            missing = shapes.num_rows - len(rows)
            if missing:
                tokens = mx.concatenate([tokens, mx.zeros((missing, 1), tokens.dtype)])
            self._model, self._caches = model, caches
            traces = self._traces
            self._blocks = [(own.geometry, own.counters) for own in blocks]
            before = [cache.cache for cache in states]
            logits, after = DeviceBlocks.run(function, blocks, tokens, arrays, before, appended=len(rows))
            pool.traces += self._traces - traces
            for cache, own in zip(states, after, strict=True):
                cache.cache = list(own)
        except Exception as error:
            # The step runs uncompiled now. The failure may concern this step only; a model that fails there, too,
            # raises its own error.
            check_device(error)
            rows.undo_take()
            self._failures += 1
            if isinstance(error, NotCompilable) or self._failures == MOST_FAILURES:
                said = str(error).splitlines() or [""]  # MLX appends all overloads of its functions
                self.failure = f"{type(error).__name__}: {said[0]}"
            return None
        finally:
            self._model, self._caches = None, ()
        self._failures = 0
        dispatch.record_compiled(len(paged))
        return logits[: len(rows)] if missing else logits

    def _knows(self, model: Any) -> bool:
        """Return whether the model is what it was when it was first traced; if not, drop all traces."""
        if self._state is None:
            self._state = ModelState(model)
            mx.eval(self._state.arrays)  # what is not computed would be computed in each step
        if self._state.is_of(model):
            return True
        self.retrace()
        return False

    def retrace(self) -> None:
        """Drop all traces, and the arrays in them; steps are traced again."""
        self._state = None
        self._drop_traces()

    def _drop_outgrown(self, pool: BlockPool) -> None:
        """Drop all traces if the pool's size has changed."""
        sizes = [group.allocator.num_blocks for group in pool.groups]
        if sizes != self._sizes:
            self._drop_traces()
            self._sizes = sizes

    def _drop_traces(self) -> None:
        self._functions.clear()
        self._uncompiled.clear()

    def _shapes_for(self, own: StepShapes, *, may_pad: bool) -> StepShapes | None:
        """Return the shapes of the compiled step to take: these, or larger ones if the step may be padded; None if it
        has to run uncompiled. Adds a function for shapes that have come often enough."""
        if own in self._functions:
            self._functions.move_to_end(own)
            return own
        larger = min((shapes for shapes in self._functions if shapes.can_hold(own)), default=None) if may_pad else None
        if len(self._uncompiled) >= MOST_TRACES and own not in self._uncompiled:
            self._uncompiled.clear()
        self._uncompiled[own] += 1
        patience = PATIENCE_PADDED if larger is not None else 0 if own.is_pack else PATIENCE
        if self._uncompiled[own] <= patience:
            if larger is not None:
                self._functions.move_to_end(larger)
            return larger
        if len(self._functions) == MOST_TRACES:
            self._functions.popitem(last=False)
        trace = weakref.WeakMethod(self._trace)  # weak, as this keeps the compiled function: no cycle
        self._functions[own] = compile_function(lambda *inputs: cast(Any, trace())(*inputs))
        return own

    def _trace(
        self,
        tensors: Sequence[Any],
        tokens: mx.array,
        arrays: Sequence[Sequence[Any]],
        states: Sequence[Sequence[mx.array]],
    ) -> tuple[tuple[mx.array, list[list[mx.array]]], list[mx.array]]:
        self._traces += 1
        groups = [GroupArrays(tuple(visible), offsets, *map(tuple, others)) for visible, offsets, *others in arrays]
        blocks = [TracedBlocks(tuple(own), *other) for own, other in zip(tensors, self._blocks, strict=True)]
        layers = [
            StepLayer(own, groups[group], window)
            for own, group, window in zip(blocks, self._groups, self._windows, strict=True)
        ]
        own_states = []
        parts: list[Any] = []
        of_layers, of_states = iter(layers), iter(states)
        for cache in leaves(self._caches):
            if _rows_behind(cache) is not None:
                parts.append(next(of_layers))
                continue
            parts.append(with_arrays(cache, next(of_states)))
            own_states.append(parts[-1])
        # Weights dequantised in a trace would all be alive at once in a step.
        assert self._state is not None
        try:
            with narrow_layers(self._model, tokens.shape[0]), Inference(dequantizes=False):
                logits = self.forward(self._model, tokens, cache=with_leaves(self._caches, parts))
        finally:
            self._state.put_back()
        for layer in layers:
            layer.check_attended()
        if not self._state.is_of(self._model):
            raise NotCompilable("the model changes its own modules in a step")
        return (logits, [state.cache for state in own_states]), [own.fence() for own in blocks]


compiled_steps: ByModel[CompiledStep] = ByModel("compiled step")  # keyed by pool
