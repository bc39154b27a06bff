"""CompiledStep: a decode step traced once and run again; its layers and the rows it is for."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple, NoReturn, cast

import mlx.core as mx

from ..attention import dispatch
from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.lazy_kv import LazyKV, hand_out
from ..cache.packed_states import with_arrays
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.rows import Rows, SequenceTables
from ..kernels.build import backend
from ..kernels.products.inference import Inference
from ..kv.block_table import BlockTable
from ..kv.layer import PoolLayer
from ..kv.pool import BlockPool
from ..kv.step import rounded_up, table_width
from ..kv.storage.attention_params import AttentionParams, Window
from ..kv.storage.base import Geometry, Storage
from ..kv.storage.in_place import InPlaceStorage, TracedBlocks
from .model_state import ModelState, StateNotKnown, substituted
from .narrow_layers import narrow_layers


class GroupArrays(NamedTuple):
    """What the layers of a group share in a step.

    Attributes:
        visible: block tables, ends and starts, of :meth:`Step.visible`.
        offsets: position of each row's new token, int32 ``[B]``.
        slots: of a pack, where its tokens are written before any of them is attended to, ``[B]``; else nothing.
        items: what thread groups read together, of :meth:`Step.items`; else nothing.
    """

    visible: tuple[mx.array, mx.array, mx.array]
    offsets: mx.array
    slots: tuple[mx.array, ...] = ()
    items: tuple[mx.array, ...] = ()


class StepRows:
    """The rows that a step's caches belong to: of a decode step or a pack, or one sequence alone."""

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

    def take(self) -> list[list[BlockTable]]:
        """Return the tables of each group, every layer having taken its next tokens."""
        return self.rows.take_all()

    def give_up(self) -> None:
        """Have the layers take the positions again, which stay reserved."""
        self.rows.give_up()

    def items(
        self, layer: PoolLayer, tables: Sequence[BlockTable], storage: Storage, shape: tuple[int, int]
    ) -> tuple[mx.array, ...]:
        """Return what thread groups read together in the layers of a group, with block tables of the shape."""
        if not isinstance(storage, InPlaceStorage):
            return ()
        items = storage.items(tables, layer.step(tables, self.counts), layer.sees, shape)
        return () if items is None else (items,)

    def arrays(self, layer: PoolLayer, tables: Sequence[BlockTable], shape: tuple[int, int]) -> GroupArrays:
        """Return what the layers of a group share, with block tables of the shape."""
        step = layer.step(tables, self.counts)
        slots = (step.slots(tables, shape[0]),) if self.is_pack else ()
        return GroupArrays(step.visible(tables, layer.sees, None, shape), step.offsets(shape[0]), slots)


def parts_of(caches: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Return the paged ones of a model's caches and those that hold states; None if a state cannot be the input of a
    compiled step: it is missing or padded, or a cache is of another kind."""
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
    """Return the rows these paged caches belong to, if they are the same for all, and cover the pool's layers."""
    rows = _rows_behind(caches[0]) if caches else None
    if rows is None or len(caches) != rows.num_layers or any(_rows_behind(cache) is not rows for cache in caches):
        return None
    return rows


def _rows_behind(cache: Any) -> Rows | SequenceTables | None:
    if isinstance(cache, PagedBatchKVCache):
        return cache.rows
    return cache.sequence if isinstance(cache, PagedKVCache) else None


class NotCompilable(Exception):
    """The model does something in a decode step that the compiled step has no answer to."""


class StepLayer:
    """What an attention layer sees of its cache while a decode step is traced.

    An adapter calls :meth:`attend`. Any other attention calls :meth:`update_and_fetch` and hands what it gets, which is
    good for nothing else, to the attention function that replaces mlx-lm's.
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
        """Most tokens that one sees, itself included, or None."""
        return None if self._sees is None else self._sees.size

    def check_attended(self) -> None:
        """Check at the end of the trace. Raises NotCompilable unless the layer's new tokens have been attended to,
        which is what writes them, and nothing else has been tried, even if whoever tried it went on."""
        if self._misuses:
            raise NotCompilable(self._misuses[0])
        if not self._attended:
            raise NotCompilable("not every layer writes and attends")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """None: rows are masked by their own lengths and the layer's window, whatever kind of mask is asked for. For a
        window that is narrower, what stands for it."""
        if N != 1:
            raise NotCompilable("the model asks for a mask for several tokens")
        return None if window_size is None or self._has(window_size) else NarrowMask(self._misuses, window_size)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        params: AttentionParams,
    ) -> mx.array:
        """Like :meth:`PagedKVCache.attend`, for one new token per row, in the kernel."""
        self._take(keys, values)
        return self.attend_fetched(queries, params)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take the new keys and values ``[B, n_kv_heads, 1, head_dim]``. What is returned stands for all that the rows
        see, and is for the attention function only: it has no shape, and nobody can compute with it."""
        self._take(keys, values)
        self.offset = self.offset + 1  # where the model asks again
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return a placeholder for another layer that attends to what this one has been given."""
        if self._new is None:
            raise NotCompilable("a layer attends before there is anything to attend to")
        keys, values = (FetchedKV(self._misuses, array.dtype) for array in self._new)
        hand_out(keys, values, StepKV(self))
        return keys, values

    def _take(self, keys: mx.array, values: mx.array) -> None:
        if self._new is not None:
            raise NotCompilable("a layer takes two layers' keys")
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != 1:
            raise NotCompilable(f"keys of shape {keys.shape} and values of shape {values.shape}")
        self._new = keys, values

    def attend_fetched(self, queries: mx.array, params: AttentionParams) -> mx.array:
        """Attention of ``[B, n_q_heads, 1, head_dim]`` to what the rows see. The first one writes the new tokens."""
        assert self._new is not None
        keys, values = self._new
        if queries.ndim != 4 or queries.shape[2] != 1 or len(queries) != len(keys):
            raise NotCompilable(f"queries of shape {queries.shape} for {len(keys)} rows")
        if not keys.dtype == values.dtype == queries.dtype == self.blocks.dtype:
            raise NotCompilable("keys of another dtype than the blocks")
        append, slots = (None, None) if self._attended else (self._new, self._slots)
        self._attended = True
        window, visible = self._seen_under(params.mask)
        items = self._items if window is self._sees and append is not None else None
        return self.blocks.decode(queries, visible, append, params._replace(mask=None, window=window), slots, items)

    def _seen_under(self, mask: Any) -> tuple[Window | None, tuple[mx.array, mx.array, mx.array]]:
        """Return what rows see of their blocks under a mask that the model gives to attention."""
        # Causality hides nothing from a row's newest token.
        if mask is None or isinstance(mask, str) or (isinstance(mask, NarrowMask) and self._has(mask.window_size)):
            return self._sees, self._visible
        if not isinstance(mask, NarrowMask) or self._sees is not None:
            raise NotCompilable("the model's attention has a mask of its own")
        tables, ends, starts = self._visible
        return Window(mask.window_size), (tables, ends, mx.maximum(starts, ends - mask.window_size))

    def _has(self, window_size: int) -> bool:
        """Return whether the layer's own window hides as much as this one."""
        return self.window is not None and window_size >= self.window


class StandIn:
    """Stands for an array while a step is traced. To recognise it is all that anybody can do with it: whatever computes
    with it, asks for its shape or compares it raises, and the step is not compiled.

    Args:
        misuses: where it is noted if somebody tries: MLX goes on where an object is no array, to raise or to say that
            it equals none.
    """

    __slots__ = ("__weakref__", "_misuses")
    __hash__ = object.__hash__

    def __init__(self, misuses: list[str]) -> None:
        self._misuses = misuses

    def _refuse(self, what: str) -> NoReturn:
        self._misuses.append(f"the model's attention {what} {type(self).__name__} by itself")
        raise NotCompilable(self._misuses[-1])

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"takes {name} of")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compares")

    def __bool__(self) -> NoReturn:
        self._refuse("decides by")


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
    """What a pair of :class:`FetchedKV` stands for. Does not keep the layer: an entry of what was handed out would."""

    def __init__(self, layer: StepLayer) -> None:
        self._step_layer = weakref.ref(layer)
        self.thread = get_ident()

    def serves(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        """Return True; otherwise there are no arrays that could serve, and :meth:`attend` raises."""
        return True

    def attend(self, queries: mx.array, keys: Any, values: Any, params: AttentionParams) -> mx.array:
        """Like :meth:`StepLayer.attend`, for what the layer has been given.

        Raises:
            NotCompilable: with a mask, for several tokens, or after the trace.
        """
        layer = self._step_layer()
        if layer is None:
            raise NotCompilable("the model keeps the keys and values of a step")
        return layer.attend_fetched(queries, params)

    def is_of(self, pool: object, layer: int) -> bool:
        """Return False: there is nothing to compute before the layer's next tokens."""
        return False


# From the model, tokens [B, 1] and, by its name, the `cache` of the layers to logits [B, 1, vocab].
Forward = Callable[..., mx.array]


MOST_FAILURES = 3
# Steps of the same shapes that run uncompiled first, in a row or not: a trace takes as long as some steps save, and
# while prompts join or requests finish, many shapes come that are not seen again. Packs, which are verifications of
# drafts, do not: whether drafts pay is judged by what they take.
PATIENCE = 4
PATIENCE_PADDED = 32  # where a step of larger shapes serves meanwhile
ANY_ROWS = 32  # a step may be padded to so many rows, or to twice as many as it has
MOST_TRACES = 256  # kept, the latest used ones; of as many other shapes steps are counted, then counts begin anew
compile_function: Callable[[Any], Any] = mx.compile


class StepShapes(NamedTuple):
    """What a trace of a step is made for.

    Attributes:
        num_rows: of the batch.
        widths: of each group's block tables.
        sizes: blocks of each group.
        is_pack: several rows may be tokens of one sequence.
        items: of each group, how many parts of rows thread groups take where they read blocks together.
    """

    num_rows: int
    widths: tuple[int, ...]
    sizes: tuple[int, ...]
    is_pack: bool = False
    items: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        num_rows: int,
        pool: BlockPool,
        tables: Sequence[Sequence[BlockTable]],
        *,
        is_pack: bool = False,
        has_states: bool = False,
    ) -> StepShapes:
        """Return the smallest for so many rows with these tables, one list for each group. Rows with states are not
        padded: that would copy the states."""
        sizes = tuple(group.allocator.num_blocks for group in pool.groups)
        padded = padded_pack if is_pack else padded_rows
        return cls(num_rows if has_states else padded(num_rows), tuple(map(table_width, tables)), sizes, is_pack)

    def can_hold(self, other: StepShapes) -> bool:
        """Return whether a step of the other's shapes can be padded to these. One row alone never is, and no step whose
        rows read blocks together."""
        return (
            1 < other.num_rows <= self.num_rows <= max(ANY_ROWS, 2 * other.num_rows)
            and (self.sizes, self.is_pack) == (other.sizes, other.is_pack)
            and not (self.items or other.items)
            and all(mine >= theirs for mine, theirs in zip(self.widths, other.widths, strict=True))
        )


def padded_rows(num_rows: int) -> int:
    """Rows of the compiled step for so many: some more, which see nothing and write nothing, so that a batch that gains
    and loses rows comes back to few shapes."""
    return num_rows if num_rows <= 2 else rounded_up(num_rows, 4)


def padded_pack(num_tokens: int) -> int:
    """Return the same for the tokens of a pack. On CUDA kernels multiply 16 rows in the time of one, and a shape that
    is compiled takes as long as some steps: verifications of any number of drafts of a row have one."""
    return rounded_up(num_tokens, 16) if backend() == "cuda" else padded_rows(num_tokens)


class CompiledStep:
    """Runs decode steps of one model over one pool as a compiled function.

    In a decode step the host, not the GPU, is what takes time at small batches: building the graph of the same few
    hundred operations anew for each token. Compiled, it is built once per shape of the batch and of its block tables.

    Batches are padded to a few sizes. A step is taken only if every layer's cache is paged, in place, and its last step
    ran in the kernel, or holds a state, which is an input of the function and comes out of it. Weights are inputs, too,
    so replaced or updated ones are seen. All else that a trace reads of the model is compared before every step
    (:class:`ModelState`); once it is not what it was, the traces are dropped, and that step runs uncompiled.

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
        self._geometries: list[Geometry] = []  # of each layer
        self._paged: list[weakref.ref[Any]] = []  # caches of the last step, if all are paged
        self._model: Any = None
        self._caches: Sequence[Any] = ()  # how the model expects them composed
        self._state: ModelState | None = None  # what all traces have read
        self._failures = 0  # in a row
        self._traces = 0  # made
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
        parts = self._parts_of(caches)
        if self.failure is not None or parts is None:
            return None
        rows = StepRows(cast(Any, _rows_behind(parts[0][0])))
        if len(rows) != tokens.shape[0]:
            return None
        pool = rows.pool
        storages = [pool.layer(cache.layer).storage for cache in parts[0]] if pool.groups[0].storages else []
        if not storages or not all(storage.decoded_by_kernel for storage in storages):
            return None
        logits = self._compiled(rows, storages, model, tokens, caches, *parts)
        if logits is None and self.failure is None:
            # With the products of a compiled step: which steps are compiled does not show in what they give.
            with narrow_layers(model, tokens.shape[0]):
                logits = self.forward(model, tokens, cache=caches)
        return logits

    def _parts_of(self, caches: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """Return :func:`parts_of` the caches, if the paged ones are of the same rows and cover the pool's layers.

        A cache stays with its rows, so those of the last step need not be looked at again if all are paged.
        """
        if [cache() for cache in self._paged] == caches:
            return caches, ()
        parts = parts_of(caches)
        if parts is None or rows_of(parts[0]) is None:
            return None
        if parts[0] == list(caches):  # and not their parts
            self._paged = list(map(weakref.ref, caches))
        return parts

    def _compiled(
        self,
        rows: StepRows,
        storages: Sequence[Storage],
        model: Any,
        tokens: mx.array,
        caches: Sequence[Any],
        paged: Sequence[Any],
        states: Sequence[Any],
    ) -> mx.array | None:
        """Return the step, compiled; None if it is not, and nothing has been done. The caches' leaves are ``paged`` or
        ``states``."""
        pool = rows.pool
        arrays = []
        tables = rows.take()
        try:
            shapes = StepShapes.of(len(rows), pool, tables, is_pack=rows.is_pack, has_states=bool(states))
            items = [
                rows.items(pool.layer(group.spec.layers[0]), own, group.storages[0], (shapes.num_rows, width))
                for group, own, width in zip(pool.groups, tables, shapes.widths, strict=True)
            ]
            if any(items):
                shapes = shapes._replace(items=tuple(len(own[0]) if own else 0 for own in items))
            found = self._shapes_for(shapes, may_pad=not states)
            weights = None if found is None else self._weights_of(model)
            if found is None or weights is None:
                rows.give_up()
                return None
            shapes, function = found, self._functions[found]
            for group, own, width, read in zip(pool.groups, tables, shapes.widths, items, strict=True):
                of_group = rows.arrays(pool.layer(group.spec.layers[0]), own, (shapes.num_rows, width))
                arrays.append(of_group._replace(items=read))
            missing = shapes.num_rows - len(rows)
            if missing:
                tokens = mx.concatenate([tokens, mx.zeros((missing, 1), tokens.dtype)])
            self._model, self._caches = model, caches
            own_storages, traces = cast(list[InPlaceStorage], storages), self._traces
            self._geometries = [storage.geometry for storage in own_storages]
            before = [cache.cache for cache in states]
            logits, after = InPlaceStorage.run(
                function, own_storages, weights, tokens, arrays, before, appended=len(rows)
            )
            pool.traces += self._traces - traces
            for cache, own in zip(states, after, strict=True):
                cache.cache = list(own)
        except Exception as error:
            # The step runs uncompiled now. Whatever went wrong may be of this step alone: a model that fails there too
            # says so itself.
            rows.give_up()
            self._failures += 1
            if isinstance(error, NotCompilable | StateNotKnown) or self._failures == MOST_FAILURES:
                said = str(error).splitlines() or [""]  # MLX goes on with all forms of its functions
                self.failure = f"{type(error).__name__}: {said[0]}"
            return None
        finally:
            self._model, self._caches = None, ()
        self._failures = 0
        dispatch.record_compiled(len(paged))
        return logits[: len(rows)] if missing else logits

    def _weights_of(self, model: Any) -> list[mx.array] | None:
        """Return the model's arrays; None if it is not what it was when it was traced, and no trace is left.

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

    def _shapes_for(self, own: StepShapes, *, may_pad: bool) -> StepShapes | None:
        """Return the shapes of the compiled step to take: these, or larger ones if the step may be padded; None as long
        as there is none."""
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
        trace = weakref.WeakMethod(self._trace)  # what is compiled is kept here, and must not keep this in turn
        self._functions[own] = compile_function(lambda *inputs: cast(Any, trace())(*inputs))
        return own

    def _trace(
        self,
        tensors: Sequence[Any],
        weights: Sequence[mx.array],
        tokens: mx.array,
        arrays: Sequence[Sequence[Any]],
        states: Sequence[Sequence[mx.array]],
    ) -> tuple[tuple[mx.array, list[list[mx.array]]], list[mx.array]]:
        self._traces += 1
        groups = [GroupArrays(tuple(visible), offsets, *map(tuple, others)) for visible, offsets, *others in arrays]
        blocks = [TracedBlocks(tuple(own), geometry) for own, geometry in zip(tensors, self._geometries, strict=True)]
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
        # What is dequantised in a trace would all be alive in a step.
        with (
            substituted(self._model, weights),
            narrow_layers(self._model, tokens.shape[0]),
            Inference(dequantizes=False),
        ):
            logits = self.forward(self._model, tokens, cache=with_leaves(self._caches, parts))
        for layer in layers:
            layer.check_attended()
        if self._state is None or self._state.arrays_of(self._model) is None:
            raise NotCompilable("the model changes its own attributes in a step")
        return (logits, [state.cache for state in own_states]), [own.fence() for own in blocks]
