"""CompiledStep: a decode step of a whole model, traced once and run again. ModelState: what its traces have read."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import call, is_
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from ..attention import dispatch
from ..by_model import ByModel
from ..cache.batch import Batch, NotCompilable, NotPackableError
from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.layer_cache import LayerCache
from ..cache.packed_states import with_arrays
from ..cache.placeholders import PlaceholderBatch, PlaceholderTokens
from ..cache.sequence import SequenceTables
from ..errors import GeometryError, check_device
from ..kernels.availability import backend
from ..kernels.inference import Inference
from ..kernels.nvidia import narrow_layers
from ..kv.block_table import BlockTable
from ..kv.device_blocks import DeviceBlocks
from ..kv.new_tokens import rounded_up, table_width
from ..kv.pool import BlockPool

# Takes the model, tokens [B, 1] and, as keyword, the `cache` of its layers; returns logits [B, 1, vocab].
Forward = Callable[..., mx.array]


MOST_FAILURES = 3
# Steps of a shape that run uncompiled before it is traced: a trace costs what several compiled steps save, and many
# shapes occur only once while prompts join or requests finish. Packs (verifications of drafts) are traced at once:
# their time decides whether drafts pay.
PATIENCE = 4
MOST_TRACES = 64  # kept, least recently used ones dropped; counts of uncompiled shapes restart at as many shapes
compile_function: Callable[[Any], Any] = mx.compile


class ModelState:
    """What a trace has of a model: its modules, dicts and lists, and the arrays in them.

    It is compared with the model before every decode step, by identity, in a few flat passes that run in C. A replaced
    array, module, layer or class is noticed; a changed plain attribute of a module (a factor, a flag) is not: see
    :func:`mlx_paged.retrace`. Arrays that the model itself assigns in a step are not compared (Gemma 3n clips some
    weights in each). It keeps the arrays alive, and no module.

    Args:
        model: a tree of modules, dicts and lists.
    """

    def __init__(self, model: nn.Module) -> None:
        containers: list[Any] = [model]
        places: dict[int, tuple[Any, Any]] = {id(model): (None, None)}  # holder and key of each container
        for holder in containers:  # grows meanwhile
            for key, value in _items(holder):
                if isinstance(value, dict | list) and id(value) not in places:
                    places[id(value)] = holder, key
                    containers.append(value)
        # Modules are referenced weakly. Other dicts and lists cannot be: they are looked up in their holders.
        modules = [each for each in containers if isinstance(each, nn.Module)]
        plain = [each for each in containers if not isinstance(each, nn.Module)]
        containers = modules + plain
        numbers = {id(each): number for number, each in enumerate(containers)}
        self._modules = list(map(weakref.ref, modules))
        self._plain = [(numbers[id(holder)], key) for holder, key in (places[id(each)] for each in plain)]
        self._types = list(map(type, containers))
        self._lengths = list(map(len, containers))
        self._readers = [dict.values if isinstance(each, dict) else iter for each in containers]
        values = self._values(containers)
        self._are_inner = [isinstance(value, dict | list) for value in values]
        self._inner = [numbers[id(value)] for value in compress(values, self._are_inner)]
        self._are_arrays = [isinstance(value, mx.array) for value in values]
        self.arrays: list[mx.array] = list(compress(values, self._are_arrays))
        self._assigned: list[int] = []  # numbers of arrays that the model itself assigns

    def is_of(self, model: nn.Module) -> bool:
        """Return whether this is what the model is made of at present."""
        try:
            containers = self._containers()
        except (LookupError, TypeError):  # something is gone
            return False
        is_alike = containers[0] is model and list(map(type, containers)) == self._types
        if not is_alike or list(map(len, containers)) != self._lengths:
            return False
        values = self._values(containers)
        arrays = list(compress(values, self._are_arrays))
        for number in self._assigned:
            arrays[number] = self.arrays[number]
        inner = map(containers.__getitem__, self._inner)
        return all(map(is_, arrays, self.arrays)) and all(map(is_, compress(values, self._are_inner), inner))

    def put_back(self) -> None:
        """Put back the arrays that the model has assigned while a step was traced, and compare them no more."""
        places = [(holder, key, value) for holder in self._containers() for key, value in _items(holder)]
        for number, (holder, key, value) in enumerate(compress(places, self._are_arrays)):
            if value is not self.arrays[number]:
                (dict if isinstance(holder, dict) else list).__setitem__(holder, key, self.arrays[number])
                self._assigned.append(number)

    def _containers(self) -> list[Any]:
        """Return the present modules, dicts and lists. Raises LookupError or TypeError if one is gone."""
        containers: list[Any] = [module() for module in self._modules]
        for holder, key in self._plain:
            containers.append(containers[holder][key])
        return containers

    def _values(self, containers: Iterable[Any]) -> list[Any]:
        """Return the values in the modules, dicts and lists, one after the other."""
        return list(chain.from_iterable(map(call, self._readers, containers)))


def _items(holder: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a module, dict or list."""
    return holder.items() if isinstance(holder, dict) else enumerate(holder)


class StepShapes(NamedTuple):
    """Shapes that a trace of a step is made for.

    Attributes:
        num_rows: rows of the batch, padding included.
        widths: width of each group's block tables, in blocks.
        is_pack: several rows may be tokens of one sequence.
        items: number of work items of each group whose rows read common blocks together; empty if there are none.
        num_blocks: number of each group's blocks.
    """

    num_rows: int
    widths: tuple[int, ...]
    is_pack: bool = False
    items: tuple[int, ...] = ()
    num_blocks: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        num_rows: int,
        tables: Sequence[BlockTable],
        *,
        is_pack: bool = False,
        has_states: bool = False,
    ) -> StepShapes:
        """Return the smallest shapes for ``num_rows`` rows of sequences with these tables. Rows with states are
        not padded, because that would copy the states."""
        padded = padded_pack if is_pack else padded_rows
        widths = tuple([table_width(tables, group) for group in range(len(tables[0].block_ids))])
        return cls(num_rows if has_states else padded(num_rows), widths, is_pack)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows of a compiled step for ``num_rows`` rows: 1, 2, 4, 8, 12, 16, 24, 32, .... The added
    ones see and write nothing; with them a batch that gains and loses rows has few shapes."""
    if num_rows <= 2:
        return num_rows
    step = 1 << max(2, (num_rows - 1).bit_length() - 2)
    return -(-num_rows // step) * step


def padded_pack(num_tokens: int) -> int:
    """Return the number of rows of a compiled step for a pack of ``num_tokens`` tokens. On CUDA 16 rows take little
    longer than fewer, and compiling a shape costs several steps; so verifications of one row share a shape."""
    return rounded_up(num_tokens, 16) if backend() == "cuda" else padded_rows(num_tokens)


class CompiledStep:
    """Runs decode steps of one model over one pool as a compiled function.

    At small batches the host, not the GPU, limits a decode step: for each token it builds the same graph of a few
    hundred operations. Compiled, the graph is built once per shape of the batch and of its block tables.

    Batches are padded to a few sizes. A step qualifies only if every layer's cache holds a state, or is paged in place
    and ran in the kernel in its last step. States are inputs and outputs of the function. Weights are its constants: as
    inputs, the host would handle each of them in each step. Weights and structure of the model are compared before
    every step (:class:`ModelState`); if something has changed, all traces are dropped and that step runs uncompiled. A
    trace holds megabytes; the latest :data:`MOST_TRACES` are kept.

    Args:
        forward: the model's own step.

    Attributes:
        forward: as given.
        failure: why steps are no longer compiled; None while they are.
    """

    def __init__(self, forward: Forward) -> None:
        self.failure: str | None = None
        self.forward = forward
        self._pool: BlockPool | None = None  # in a step only, as the next ones
        self._blocks: Sequence[DeviceBlocks] = ()  # of each layer
        self._paged: list[weakref.ref[Any]] = []  # caches of the last step, if all are paged
        self._model: Any = None
        self._caches: Sequence[Any] = ()  # as the model expects them, composites included
        self._state: ModelState | None = None  # what all traces have read
        self._failures = 0  # in a row
        self._traces = 0  # made so far
        # By shapes, most recently used last. One function each: MLX compares a call with all traces of a function.
        self._functions: OrderedDict[StepShapes, Callable[..., Any]] = OrderedDict()
        self._uncompiled: Counter[StepShapes] = Counter()

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
        rows: Batch | SequenceTables = parts[0][0].rows
        if (len(rows) if isinstance(rows, Batch) else 1) != tokens.shape[0]:
            return None
        pool = rows.pool
        if not all(group.in_place and group.blocks for group in pool.groups):
            return None
        blocks = [cache.group.device(cache.position) for cache in parts[0]]
        if not all(own.decoded_by_kernel for own in blocks):
            return None
        pool.lock.use()
        logits = self._compiled(rows, blocks, model, tokens, caches, *parts)
        if logits is None and self.failure is None:
            # With a compiled step's matrix products, so that results do not depend on which steps are compiled.
            with narrow_layers(model, tokens.shape[0]):
                logits = self.forward(model, tokens, cache=caches)
        return logits

    def _parts_of(self, caches: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """Return a model's paged caches, and those that hold states. None if one cannot be an input of a compiled step
        (a state is missing or padded, or a cache is of another kind), or if the paged ones do not share rows that cover
        the pool's layers.

        A cache never changes its rows, so the last step's caches are not checked again if all are paged.
        """
        if [cache() for cache in self._paged] == caches:
            return caches, ()
        states = []
        paged = []
        for cache in leaves(caches):
            if isinstance(cache, LayerCache):
                paged.append(cache)
                continue
            arrays = getattr(cache, "cache", None)
            if not isinstance(arrays, list) or any(x is None for x in arrays):
                return None
            if cache.left_padding is not None or cache.lengths is not None:
                return None
            states.append(cache)
        rows = paged[0].rows if paged else None
        if rows is None or len(paged) != len(rows.pool.places) or any(cache.rows is not rows for cache in paged):
            return None
        if paged == list(caches):  # none is composite
            self._paged = list(map(weakref.ref, caches))
        return paged, states

    def _compiled(
        self,
        rows: Batch | SequenceTables,
        blocks: Sequence[DeviceBlocks],
        model: Any,
        tokens: mx.array,
        caches: Sequence[Any],
        paged: Sequence[Any],
        states: Sequence[Any],
    ) -> mx.array | None:
        """Run the compiled step and return its logits; None if there is none or it fails. Nothing has been done then.
        The leaves of ``caches`` are in ``paged`` or ``states``."""
        pool, num_rows = rows.pool, tokens.shape[0]
        arrays = []
        of_groups = rows.begin_all()
        try:
            shapes = StepShapes.of(num_rows, of_groups[0].tables, is_pack=of_groups[0].is_pack, has_states=bool(states))
            items = [
                group.device(0).items(own, group.sees, (shapes.num_rows, width))
                for group, own, width in zip(pool.groups, of_groups, shapes.widths, strict=True)
            ]
            if any(own is not None for own in items):
                shapes = shapes._replace(items=tuple(0 if own is None else len(own) for own in items))
            shapes = shapes._replace(num_blocks=tuple([group.allocator.num_blocks for group in pool.groups]))
            function = self._function_for(shapes)
            if function is None or not self._knows(model):
                rows.undo_begin()
                return None
            for group, own, width, read in zip(pool.groups, of_groups, shapes.widths, items, strict=True):
                arrays.append(PlaceholderTokens.inputs_of(own, group.sees, read, (shapes.num_rows, width)))
            missing = shapes.num_rows - num_rows
            if missing:
                tokens = mx.concatenate([tokens, mx.zeros((missing, 1), tokens.dtype)])
            self._model, self._caches, self._pool, self._blocks = model, caches, pool, blocks
            traces = self._traces
            before = [cache.cache for cache in states]
            logits, after = DeviceBlocks.run(function, blocks, tokens, arrays, before)
            pool.traces += self._traces - traces
            for cache, own in zip(states, after, strict=True):
                cache.cache = list(own)
        except Exception as error:
            # The step runs uncompiled now. The failure may concern this step only; a model that fails there, too,
            # raises its own error.
            check_device(error)
            rows.undo_begin()
            self._failures += 1
            is_final = isinstance(error, NotCompilable | NotPackableError | GeometryError)
            if is_final or self._failures == MOST_FAILURES:
                said = str(error).splitlines() or [""]  # MLX appends all overloads of its functions
                self.failure = f"{type(error).__name__}: {said[0]}"
            return None
        finally:
            self._model, self._caches, self._pool, self._blocks = None, (), None, ()
        self._failures = 0
        dispatch.record_compiled(len(paged))
        return logits[:num_rows] if missing else logits

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
        self._functions.clear()
        self._uncompiled.clear()

    def _function_for(self, shapes: StepShapes) -> Callable[..., Any] | None:
        """Return the compiled function of these shapes; None if the step has to run uncompiled, as they have not come
        often enough."""
        found = self._functions.get(shapes)
        if found is not None:
            self._functions.move_to_end(shapes)
            return found
        known = shapes._replace(num_blocks=())  # a pool that has grown needs no patience again
        if len(self._uncompiled) >= MOST_TRACES and known not in self._uncompiled:
            self._uncompiled.clear()
        self._uncompiled[known] += 1
        if self._uncompiled[known] <= (0 if shapes.is_pack else PATIENCE):
            return None
        if len(self._functions) == MOST_TRACES:
            self._functions.popitem(last=False)
        trace = weakref.WeakMethod(self._trace)  # weak, as this keeps the compiled function: no cycle
        found = self._functions[shapes] = compile_function(lambda *inputs: cast(Any, trace())(*inputs))
        return found

    def _trace(
        self,
        tensors: Sequence[Any],
        tokens: mx.array,
        arrays: Sequence[Sequence[Any]],
        states: Sequence[Sequence[mx.array]],
    ) -> tuple[tuple[mx.array, list[list[mx.array]]], list[mx.array]]:
        self._traces += 1
        pool = self._pool
        assert pool is not None and self._state is not None
        batch = PlaceholderBatch(
            pool,
            [
                PlaceholderTokens((tuple(visible), positions, *map(tuple, others)), group.sees, group.epoch)
                for group, (visible, positions, *others) in zip(pool.groups, arrays, strict=True)
            ],
        )
        parts: list[Any] = []
        own_states = []
        of_states = iter(states)
        for cache in leaves(self._caches):
            if isinstance(cache, LayerCache):
                parts.append(PagedBatchKVCache(batch, cache.layer))
                continue
            parts.append(with_arrays(cache, next(of_states)))
            own_states.append(parts[-1])
        with dispatch.uncounted(), DeviceBlocks.traced(self._blocks, tensors):
            try:
                # Weights dequantised in a trace would all be alive at once in a step.
                with narrow_layers(self._model, tokens.shape[0]), Inference(allowed=False):
                    logits = self.forward(self._model, tokens, cache=with_leaves(self._caches, parts))
            finally:
                self._state.put_back()
            fences = [own.fence for own in self._blocks]
        batch.commit()
        if not self._state.is_of(self._model):
            raise NotCompilable("the model changes its own modules in a step")
        return (logits, [state.cache for state in own_states]), fences


compiled_steps: ByModel[CompiledStep] = ByModel("compiled step")  # keyed by pool
