"""DeviceBlocks: one layer's K and V blocks on a GPU, written and read by kernels only, ordered by a chain of fences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels import ops as kernels
from ..kernels import quantized
from ..kernels.build import NoKernelError
from ..kernels.check import checked
from ..kernels.launch_shape import MAX_QUERY_LENGTH, unsupported
from ..kernels.prefill import prepare_prefill
from ..kernels.quantized import PageShape, new_blocks, rotate
from ..kernels.shared_runs import SharedCut, cut_of
from ..kernels.shared_trial import is_faster
from .attention_params import AttentionParams, QueryHeads, Window
from .block_table import BlockTable
from .geometry import Geometry
from .step import Step, padded_gathered_slots


def shared_cut_of(geometry: Geometry, block_size: int, heads: QueryHeads) -> SharedCut | None:
    """Return the cut of the kernel for common blocks, or None if there is no kernel for these."""
    num_kv_heads, k_dim, v_dim, dtype, _ = geometry
    gqa, rest = divmod(heads.num_q_heads, num_kv_heads)
    if rest or unsupported(dtype, k_dim, v_dim, gqa, block_size):
        return None
    variants = kernels.variants_of(
        dtype, k_dim, v_dim, heads.num_q_heads, num_kv_heads, block_size, heads.softcap, heads.sinks, pages_of(geometry)
    )
    shared = kernels.shared_variant_of(variants[0]) if variants else None
    return None if shared is None else cut_of(shared, num_kv_heads)


def is_usable(cut: SharedCut) -> bool:
    """Return whether the kernel for common blocks passes its self-check and, on Metal, is faster than reading each row
    by itself."""
    return checked(cut.variant).ok and (cut.variant.backend == "cuda" or is_faster(cut))


def split_queries(q: mx.array) -> mx.array:
    """Split ``[B, n_q_heads, q_len, head_dim]`` into ``[B * parts, n_q_heads, 8, head_dim]``, padded with zeros."""
    batch, heads, q_len, dim = q.shape
    parts = -(-q_len // MAX_QUERY_LENGTH)
    q = _padded(q, 2)
    return (
        q.reshape(batch, heads, parts, MAX_QUERY_LENGTH, dim).swapaxes(1, 2).reshape(-1, heads, MAX_QUERY_LENGTH, dim)
    )


def join_queries(out: mx.array, q_len: int) -> mx.array:
    """Join the kernel's result for :func:`split_queries` to ``[B, n_q_heads, q_len, v_head_dim]``."""
    parts = -(-q_len // MAX_QUERY_LENGTH)
    _, heads, _, dim = out.shape
    out = out.reshape(-1, parts, heads, MAX_QUERY_LENGTH, dim).swapaxes(1, 2)
    return out.reshape(-1, heads, parts * MAX_QUERY_LENGTH, dim)[:, :, :q_len]


def split_visible(visible: tuple[mx.array, mx.array, mx.array]) -> tuple[mx.array, mx.array, mx.array]:
    """Split what :meth:`.step.Step.visible` returned like :func:`split_queries`; padding sees nothing."""
    tables, ends, starts = visible
    parts = -(-ends.shape[1] // MAX_QUERY_LENGTH)
    ends, starts = (_padded(x, 1).reshape(-1, MAX_QUERY_LENGTH) for x in (ends, starts))
    return mx.repeat(tables, parts, axis=0), ends, starts


def _padded(x: mx.array, axis: int) -> mx.array:
    missing = -x.shape[axis] % MAX_QUERY_LENGTH
    return mx.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def pages_of(geometry: Geometry) -> PageShape | None:
    """Return the shape of a geometry's quantised pages, or None if keys and values are not quantised."""
    return None if geometry.rows is None else PageShape(*geometry.rows)


class DeviceBlocks:
    """K ``[num_blocks, n_kv_heads, block_size, k_head_dim]`` and V (with ``v_head_dim``) of one layer, or quantised
    pages (:class:`PageShape`) if the geometry has a page format.

    The kernels take these tensors as inputs and write through them. MLX does not see such a write, so each kernel also
    takes the fence of the kernel before and returns the next one: reads after writes, writes after reads and writes
    after writes are all ordered by data MLX can see. An MLX op on the tensors would not be; therefore they never leave
    this class: it hands out copies made by kernels, and :meth:`decode`. Only :meth:`resize` gives them to MLX, when all
    kernels have finished.
    """

    in_place = True

    def __init__(
        self, geometry: Geometry, block_size: int, num_blocks: int, pending: list[mx.array] | None = None
    ) -> None:
        self.geometry = geometry
        self.block_size = block_size
        self.pages = pages_of(geometry)
        self.rotates = geometry.rotates
        self.num_quantized = 0
        # The fence before the latest write, and the number of tokens that the write quantised.
        self._last_write: tuple[mx.array | None, int] = (None, 0)
        self.__keys, self.__values = self._new_blocks(num_blocks)
        self.__fence = kernels.new_fence()
        self.counters = kernels.Counters()
        self.decoded_by_kernel = False
        # Cuts of the kernel for common blocks: by query heads, of the latest decode, and those known to serve.
        self._shared_cuts: dict[QueryHeads, SharedCut | None] = {}
        self._shared_cut: SharedCut | None = None
        self._usable_cuts: set[SharedCut] = set()

    def _new_blocks(self, num_blocks: int) -> tuple[mx.array, mx.array]:
        heads, k_dim, v_dim, dtype, _ = self.geometry
        keys, values = new_blocks(num_blocks, heads, self.block_size, (k_dim, v_dim), dtype, self.pages)
        mx.eval(keys, values)  # a buffer of their own, from the start
        return keys, values

    @property
    def num_blocks(self) -> int:
        """Blocks that the tensors hold."""
        return int(self.__keys.shape[0])

    def write(
        self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array, *, stored: bool = False
    ) -> None:
        """Write the step's tokens; see :meth:`Blocks.write`."""
        if stored and self.pages is not None:
            self.__fence = quantized.write_rows(
                self.__keys, self.__values, self.__fence, k, v, step.slots(tables), self.pages
            )
            return
        launch = step.write_launch
        if launch is None:
            launch = step.write_launch = kernels.prepare_write(
                self.__keys, self.__values, step.slots(tables), self.pages
            )
        self._count(k.shape[0] * k.shape[2])
        if self.rotates:
            k, v = rotate(k), rotate(v)
        self.__fence = launch(self.__keys, self.__values, self.__fence, k, v)

    def _count(self, num_tokens: int) -> None:
        """Count the tokens of the write that follows."""
        if self.pages is not None:
            self.num_quantized += num_tokens
            self._last_write = self.__fence, num_tokens

    def prepare_decode(
        self, q: mx.array, tables: Sequence[BlockTable], step: Step, params: AttentionParams, *, appends: bool
    ) -> kernels.DecodeLaunch:
        """Prepare the launches of a decode step, for :meth:`decode` of this layer and of all with the same parameters.

        Args:
            q: queries of the step's positions, ``[B, n_q_heads, q_len, head_dim]``; or ``[T, n_q_heads, 1, head_dim]``,
                if the positions are written.
            tables, step: the tables of the B sequences, and their step.
            params: causality and the window decide what queries see; the mask is not used.
            appends: whether the same kernel writes the step's positions first (q_len 1).

        Raises:
            NoKernelError: no kernel works for these shapes, or blocks of this form. Nothing has been launched, and
                :meth:`write` and :meth:`read_visible` still work.
        """
        q_len, (scale, _, window, softcap, sinks, latent) = q.shape[2], params
        visible = step.visible(tables, window, q.shape[0])
        shared: dict[str, Any] = {}
        if q_len == 1 and not latent:
            heads = params.heads(q.shape[1])
            if heads not in self._shared_cuts:
                self._shared_cuts[heads] = shared_cut_of(self.geometry, self.block_size, heads)
            self._shared_cut = self._shared_cuts[heads]
            items = self.items(tables, step, window)
            shared = {} if items is None else {"items": items}
        self.decoded_by_kernel = False  # until a kernel has run
        return kernels.prepare_decode(
            self.__keys, self.__values, visible if q_len <= MAX_QUERY_LENGTH else split_visible(visible),
            n_q_heads=q.shape[1], scale=scale, softcap=softcap, sinks=sinks is not None,
            max_visible=_size_of(window), append=appends, pages=self.pages, latent=latent, **shared,
        )  # fmt: skip

    def decode(
        self,
        launch: kernels.DecodeLaunch,
        q: mx.array,
        sinks: mx.array | None = None,
        append: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """Run the decode kernel over this layer's blocks, and return its output ``[B, n_q_heads, q_len, v_head_dim]``.

        Args:
            launch: from :meth:`prepare_decode`, for queries of this shape.
            q: queries.
            sinks: given if the launch was prepared for sinks.
            append: keys and values of the step's positions, if the launch writes them.

        Raises:
            NoKernelError: as :meth:`prepare_decode`.
        """
        q_len = q.shape[2]
        if append is not None and self.pages is not None:
            self._count(q.shape[0])
        if self.rotates:
            q, append = rotate(q), append and (rotate(append[0]), rotate(append[1]))
        if q_len > MAX_QUERY_LENGTH:
            q = split_queries(q)
        k_new, v_new = append or (None, None)
        out, self.__fence = launch(q, self.__keys, self.__values, self.__fence, sinks, k_new, v_new, self.counters)
        self.decoded_by_kernel = True
        if q_len > MAX_QUERY_LENGTH:
            out = join_queries(out, q_len)
        return rotate(out) if self.rotates else out

    def items(
        self, tables: Sequence[BlockTable], step: Step, window: Window | None, shape: tuple[int, int] | None = None
    ) -> mx.array | None:
        """Return the items of the kernel for common blocks (:meth:`.step.Step.items`), for queries like those of the
        latest decode step, or None. Checks the kernel the first time that there are items."""
        cut, items = self._shared_cut, step.items(tables, self._shared_cut, window, shape)
        if cut is None or items is None or cut in self._usable_cuts:
            return items
        if is_usable(cut):
            self._usable_cuts.add(cut)
            return items
        self._shared_cut = None
        self._shared_cuts = {heads: None if own == cut else own for heads, own in self._shared_cuts.items()}
        return None

    def prefill(self, q: mx.array, tables: Sequence[BlockTable], step: Step, params: AttentionParams) -> mx.array:
        """Run the prefill kernel over this layer's blocks, for the tokens of a step, which are written.

        Args:
            q: ``[T, n_q_heads, 1, head_dim]``.
            tables, step: the tables of the B sequences, and their step.
            params: as for :meth:`prepare_decode`.

        Returns:
            ``[T, n_q_heads, 1, v_head_dim]``.

        Raises:
            NoKernelError: as :meth:`decode`.
        """
        scale, _, window, softcap, sinks, _ = params
        key = (q.shape[1], scale, window, softcap, sinks is not None)
        launch = step.prefill_launches.get(key)
        if launch is None:
            try:
                launch = step.prefill_launches[key] = prepare_prefill(
                    self.__keys, self.__values, step.block_tables(tables), step.counts,
                    [table.length for table in tables], n_q_heads=q.shape[1],
                    scale=scale, softcap=softcap, sinks=sinks is not None, window=_size_of(window),
                    stride=window.stride if window else 1, pages=self.pages,
                )  # fmt: skip
            except ValueError as error:
                raise NoKernelError(f"the kernel does not support this shape: {error}") from error
        if self.rotates:
            q = rotate(q)
        out, self.__fence = launch(q, self.__keys, self.__values, self.__fence, sinks)
        return rotate(out) if self.rotates else out

    @staticmethod
    def run(
        function: Callable[..., tuple[Any, list[mx.array]]],
        layers: Sequence[DeviceBlocks],
        *inputs: Any,
        appended: int = 0,
    ) -> Any:
        """Call a (compiled) function over the blocks of these layers, and store the fences that it returns.

        Args:
            function: takes a list of (keys, values, fence), which it may only pass to :class:`TracedBlocks`, and
                ``inputs``; returns a result and the next fence of each layer.
            layers: each layer's blocks, in order.
            inputs: passed on.
            appended: tokens that the function writes to each layer.

        Returns:
            The function's result.
        """
        tensors = [(own.__keys, own.__values, own.__fence) for own in layers]
        result, fences = function(tensors, *inputs)
        for own, fence in zip(layers, fences, strict=True):
            own._count(appended)
            own.__fence = fence
        return result

    def gather(self, table: BlockTable, *, stored: bool = False) -> tuple[mx.array, mx.array]:
        """Return copies of the visible positions, lazily; see :meth:`Blocks.gather`."""
        if stored and self.pages is not None:
            k, v, self.__fence = quantized.gather_rows(
                self.__keys, self.__values, self.__fence, *self._range_of(table), self.pages
            )
            return k, v
        # Prepared once for all layers; only the latest is kept, as the range changes with each step.
        span, known = (table.logical_start, table.length), table.indices.get("gather")
        if known is None or known[0] != span:
            launch = kernels.prepare_gather(self.__keys, self.__values, *self._range_of(table), self.pages)
            known = table.indices["gather"] = span, launch
        return self._gathered(known[1])

    @staticmethod
    def _range_of(table: BlockTable) -> tuple[mx.array, int, int]:
        """Return the ids of the visible tokens' blocks, the tokens' start within these, and their number."""
        size = table.block_size
        first, last = table.logical_start // size, -(-table.length // size)
        key = "ids", first, last
        ids = table.indices.get(key)
        if ids is None:
            ids = table.indices[key] = mx.array(table.block_ids[first:last], mx.int32)
        return ids, table.logical_start - first * size, table.length - table.logical_start

    def fetch(self, tables: Sequence[BlockTable], step: Step) -> tuple[mx.array, mx.array]:
        """Return the keys ``[B, n_kv_heads, n, k_head_dim]`` and values that rows of one new token each see, padded on
        the left to the longest as by :func:`.step.padded_slots` (lazy copies)."""
        k, v = self.read_packed(tables, step)
        if step.fetch_index is None or step.fetch_index[0] != self.num_blocks:
            heads = np.arange(self.geometry.num_kv_heads)[:, None] * k.shape[2]
            index = padded_gathered_slots(tables)[:, None] + heads
            step.fetch_index = self.num_blocks, mx.array(index.astype(np.int32))
        k, v = (mx.take(x.reshape(-1, x.shape[-1]), step.fetch_index[1], 0) for x in (k, v))
        return k, v

    def _gathered(self, launch: Callable[..., tuple[mx.array, mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
        k, v, self.__fence = launch(self.__keys, self.__values, self.__fence)
        return (rotate(k), rotate(v)) if self.rotates else (k, v)

    def read_packed(self, tables: Sequence[BlockTable], step: Step) -> tuple[mx.array, mx.array]:
        """Return all blocks of a step's tables, table by table, in the order of :meth:`Step.gathered_tables`: K
        ``[1, n_kv_heads, slots, k_head_dim]`` and V (lazy copies). Slots without a token have arbitrary contents."""
        ids, num_slots = step.all_blocks(tables), step.num_slots(tables)
        return self._gathered(kernels.prepare_gather(self.__keys, self.__values, ids, 0, num_slots, self.pages))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others; see :meth:`Blocks.copy`."""
        self.__fence = kernels.copy_blocks(self.__keys, self.__values, self.__fence, sources, targets)

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks; see :meth:`Blocks.resize`."""
        mx.eval(self.__fence)  # until no kernel uses the blocks any more
        self.__keys = _resized(self.__keys, num_blocks)
        self.__values = _resized(self.__values, num_blocks)
        self.__fence = kernels.new_fence()

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        """Return the arrays, ready only when every write so far is."""
        return mx.depends(list(arrays), [self.__fence])

    def fence(self) -> mx.array:
        """Return the latest fence, which is ready when every kernel launched so far has run."""
        return self.__fence

    def ready(self) -> list[mx.array]:
        """Return the fence; see :meth:`Blocks.ready`."""
        return [self.__fence]

    def forget_failed_writes(self) -> None:
        """Drop the writes that failed when :meth:`latest` was computed."""
        self.__fence = kernels.new_fence()  # kernels that were not computed have not written

    def rewind(self, to: mx.array, latest: mx.array) -> bool:
        """Forget the kernels launched since the fence was ``to``. Their results must not be used, and what they wrote
        must be written again. Returns False, and forgets nothing, unless ``latest`` is the present fence."""
        if self.__fence is not latest:
            return False
        self.__fence = to
        before, num_tokens = self._last_write
        if to is before:  # they will be quantised again
            self.num_quantized -= num_tokens
            self._last_write = None, 0
        return True


def _size_of(window: Window | None) -> int | None:
    return None if window is None else window.size


def _resized(blocks: mx.array, num_blocks: int) -> mx.array:
    """Return a copy with blocks of zeros appended, or with only the first blocks."""
    missing = num_blocks - blocks.shape[0]
    if missing == 0:  # an earlier resize failed between keys and values
        return blocks
    if missing > 0:
        copy = mx.concatenate([blocks, mx.zeros((missing, *blocks.shape[1:]), blocks.dtype)])
    else:
        copy = mx.contiguous(blocks[:num_blocks])
    mx.eval(copy)
    return copy


class TracedBlocks:
    """One layer's blocks inside a function that :meth:`DeviceBlocks.run` calls. The tensors are private, as in
    DeviceBlocks.

    Args:
        tensors: keys, values and fence.
        geometry: the storage's.
        counters: the storage's.
    """

    def __init__(
        self, tensors: tuple[mx.array, mx.array, mx.array], geometry: Geometry, counters: kernels.Counters
    ) -> None:
        self.__keys, self.__values, self.__fence = tensors
        self._pages, self._rotates = pages_of(geometry), geometry.rotates
        self._counters = counters

    def fence(self) -> mx.array:
        """Return the latest fence, which is ready when every kernel launched so far has run."""
        return self.__fence

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of keys and values."""
        return self.__keys.dtype if self._pages is None else self._pages.dtype

    def decode(
        self,
        q: mx.array,
        visible: tuple[mx.array, mx.array, mx.array],
        append: tuple[mx.array, mx.array] | None,
        params: AttentionParams,
        slots: mx.array | None = None,
        items: mx.array | None = None,
    ) -> mx.array:
        """Run the decode kernel, as :meth:`DeviceBlocks.decode`, for one token per row. With ``slots`` the tokens are
        written there first, so that rows of one sequence see those before them; without ``append`` they are written
        already. With ``items`` thread groups read common blocks together (:meth:`.step.Step.items`)."""
        shared: dict[str, Any] = {} if items is None else {"items": items}
        scale, _, window, softcap, sinks, latent = params
        launch = kernels.prepare_decode(
            self.__keys, self.__values, visible, n_q_heads=q.shape[1], scale=scale, softcap=softcap,
            sinks=sinks is not None, max_visible=_size_of(window), append=append is not None and slots is None,
            pages=self._pages, latent=latent, **shared,
        )  # fmt: skip
        if self._rotates:
            q, append = rotate(q), append and (rotate(append[0]), rotate(append[1]))
        if append is not None and slots is not None:
            write = kernels.prepare_write(self.__keys, self.__values, slots, self._pages)
            self.__fence = write(self.__keys, self.__values, self.__fence, *append)
            append = None
        k_new, v_new = append or (None, None)
        out, self.__fence = launch(q, self.__keys, self.__values, self.__fence, sinks, k_new, v_new, self._counters)
        return rotate(out) if self._rotates else out
