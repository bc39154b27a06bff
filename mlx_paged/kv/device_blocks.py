"""DeviceBlocks: one layer's K and V blocks on a GPU, written and read by kernels only, ordered by a chain of fences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels import ops as kernels
from ..kernels.build import NoKernelError
from ..kernels.check import checked
from ..kernels.launch_shape import MAX_QUERY_LENGTH
from ..kernels.prefill import prepare_prefill
from ..kernels.quantized import PageShape, new_blocks, rotate
from ..kernels.shared_runs import SharedCut, cut_of
from .block_table import BlockTable
from .geometry import AttentionParams, Geometry, QueryHeads, Window
from .new_tokens import NewTokens

NO_BLOCKS = mx.array(np.zeros((0,), np.float32))
# A prompt chunk is submitted to the GPU after as many layers as have PACED_TOKENS tokens together. A submission takes
# the host 0.1 ms; the arrays of what is built and not computed, at most three such parts, are alive.
PACED_TOKENS = 2048


def shared_cut_of(geometry: Geometry, block_size: int, heads: QueryHeads) -> SharedCut | None:
    """Return the cut of the kernel for common blocks, or None if there is no kernel for these."""
    num_kv_heads, k_dim, v_dim, dtype, _ = geometry
    variants = kernels.variants_of(
        dtype, k_dim, v_dim, heads.num_q_heads, num_kv_heads, block_size, heads.softcap, heads.sinks, pages_of(geometry)
    )
    shared = kernels.shared_variant_of(variants[0]) if variants else None
    return None if shared is None else cut_of(shared, num_kv_heads)


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
    """Split what :meth:`.new_tokens.NewTokens.visible` returned like :func:`split_queries`; padding sees nothing."""
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

    def __init__(self, geometry: Geometry, block_size: int, num_blocks: int) -> None:
        self.geometry = geometry
        self.block_size = block_size
        self.pages = pages_of(geometry)
        self.rotates = geometry.rotates
        mx.async_eval(self._make(num_blocks))  # a buffer of their own from the start
        self.__fence = kernels.new_fence()
        self.counters = kernels.Counters()
        self.decoded_by_kernel = False
        # Cuts of the kernel for common blocks, by query heads, and that of the latest decode.
        self._shared_cuts: dict[QueryHeads, SharedCut | None] = {}
        self._shared_cut: SharedCut | None = None

    def _make(self, num_blocks: int) -> list[mx.array]:
        """Make new tensors, and return them: they are still to be computed."""
        heads, k_dim, v_dim, dtype, _ = self.geometry
        new = new_blocks(num_blocks, heads, self.block_size, (k_dim, v_dim), dtype, self.pages)
        self.__keys, self.__values = new
        return list(new)

    @property
    def num_blocks(self) -> int:
        """Blocks that the tensors hold; 0 after :meth:`drop`."""
        return int(self.__keys.shape[0])

    def write(self, tokens: NewTokens, k: mx.array, v: mx.array, *, stored: bool = False) -> None:
        """Write new tokens; see :meth:`Blocks.write`."""
        is_stored = stored and self.pages is not None
        key = "write", is_stored
        launch = tokens.made.get(key)
        if launch is None:
            slots = tokens.slots()
            launch = kernels.prepare_write(self.__keys, self.__values, slots, self.pages, stored=is_stored)
            tokens.made[key] = launch
        if self.rotates and not is_stored:
            k, v = rotate(k), rotate(v)
        self.__fence = launch(self.__keys, self.__values, self.__fence, k, v)
        if tokens.is_pack and tokens.can_compute and not is_stored:
            self._pace(tokens)

    def _pace(self, tokens: NewTokens) -> None:
        """Start computing up to this layer's write of a prompt chunk if enough layers have been built since the last
        start (:data:`PACED_TOKENS`), and wait for the start before the last one."""
        fences = tokens.made.setdefault("fences", [])
        fences.append(self.__fence)
        layers = max(1, PACED_TOKENS // tokens.num_tokens)
        if len(fences) % layers == 0:
            mx.async_eval(fences[-layers:])
            if len(fences) > 2 * layers:
                mx.eval(fences[-1 - 2 * layers])

    def prepare_decode(
        self, q: mx.array, tokens: NewTokens, params: AttentionParams, *, appends: bool
    ) -> kernels.DecodeLaunch:
        """Prepare the launches of a decode step, for :meth:`decode` of this layer and of all with the same parameters.

        Args:
            q: queries of the new tokens, ``[B, n_q_heads, q_len, head_dim]``; or ``[T, n_q_heads, 1, head_dim]``, if
                they are written.
            tokens: the new tokens of the B sequences.
            params: causality and the window decide what queries see; the mask is not used.
            appends: whether the same kernel writes the new tokens first (q_len 1).

        Raises:
            NoKernelError: no kernel works for these shapes, or blocks of this form. Nothing has been launched, and
                :meth:`write` and :meth:`gather` still work.
        """
        q_len, (scale, _, window, softcap, sinks, latent) = q.shape[2], params
        visible = tokens.visible(window, q.shape[0])
        shared: dict[str, Any] = {}
        if q_len == 1 and not latent:
            heads = params.heads(q.shape[1])
            if heads not in self._shared_cuts:
                self._shared_cuts[heads] = shared_cut_of(self.geometry, self.block_size, heads)
            self._shared_cut = self._shared_cuts[heads]
            items = self.items(tokens, window)
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
            append: keys and values of the new tokens, if the launch writes them.

        Raises:
            NoKernelError: as :meth:`prepare_decode`.
        """
        q_len = q.shape[2]
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

    def items(self, tokens: NewTokens, window: Window | None, shape: tuple[int, int] | None = None) -> mx.array | None:
        """Return the items of the kernel for common blocks (:meth:`.new_tokens.NewTokens.items`), for queries
        like those of the latest decode step, or None. Checks the kernel the first time that there are items."""
        cut, items = self._shared_cut, tokens.items(self._shared_cut, window, shape)
        return items if cut is None or items is None or checked(cut.variant).ok else None

    def prefill(self, q: mx.array, tokens: NewTokens, params: AttentionParams) -> mx.array:
        """Run the prefill kernel over this layer's blocks, for new tokens, which are written.

        Args:
            q: ``[T, n_q_heads, 1, head_dim]``.
            tokens: the new tokens of the B sequences.
            params: as for :meth:`prepare_decode`.

        Returns:
            ``[T, n_q_heads, 1, v_head_dim]``.

        Raises:
            NoKernelError: as :meth:`decode`.
        """
        scale, _, window, softcap, sinks, _ = params
        key = "prefill", q.shape[1], scale, window, softcap, sinks is not None
        launch = tokens.made.get(key)
        if launch is None:
            try:
                launch = tokens.made[key] = prepare_prefill(
                    self.__keys, self.__values, tokens.block_tables(), tokens.counts,
                    [table.length for table in tokens.tables], n_q_heads=q.shape[1],
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
    ) -> Any:
        """Call a (compiled) function over the blocks of these layers, and store the fences that it returns.

        Args:
            function: takes a list of (keys, values, fence), which it may only pass to :meth:`traced`, and ``inputs``;
                returns a result and the next fence of each layer.
            layers: each layer's blocks, in order.
            inputs: passed on.

        Returns:
            The function's result.
        """
        tensors = [(own.__keys, own.__values, own.__fence) for own in layers]
        result, fences = function(tensors, *inputs)
        for own, fence in zip(layers, fences, strict=True):
            own.__fence = fence
        return result

    @staticmethod
    @contextmanager
    def traced(layers: Sequence[DeviceBlocks], tensors: Sequence[Sequence[mx.array]]) -> Iterator[None]:
        """Within a ``with`` block in a function that :meth:`run` calls, let the layers work on its tensors. Read the
        fences before the block ends: the layers then are as they were."""
        before = [(own.__keys, own.__values, own.__fence) for own in layers]
        try:
            for own, (keys, values, fence) in zip(layers, tensors, strict=True):
                own.__keys, own.__values, own.__fence = keys, values, fence
            yield
        finally:
            for own, (keys, values, fence) in zip(layers, before, strict=True):
                own.__keys, own.__values, own.__fence = keys, values, fence

    def gather(self, table: BlockTable, group: int, *, stored: bool = False) -> tuple[mx.array, mx.array]:
        """Return copies of the visible positions, lazily; see :meth:`Blocks.gather`."""
        if stored and self.pages is not None:
            own = self._range_of(table, group)
            launch = kernels.prepare_gather(self.__keys, self.__values, *own, self.pages, stored=True)
            k, v, self.__fence = launch(self.__keys, self.__values, self.__fence)
            return k, v
        # Prepared once for all layers; only the latest is kept, as the range changes with each step.
        span, known = (table.starts[group], table.length), table.indices[group].get("gather")
        if known is None or known[0] != span:
            launch = kernels.prepare_gather(self.__keys, self.__values, *self._range_of(table, group), self.pages)
            known = table.indices[group]["gather"] = span, launch
        return self._gathered(known[1])

    @staticmethod
    def _range_of(table: BlockTable, group: int) -> tuple[list[int], int, int]:
        """Return the ids of the visible tokens' blocks, the tokens' start within these, and their number."""
        size, start = table.block_size, table.starts[group]
        first, last = start // size, -(-table.length // size)
        return table.block_ids[group][first:last], start - first * size, table.length - start

    def fetch(self, tokens: NewTokens) -> tuple[mx.array, mx.array]:
        """Return the keys ``[B, n_kv_heads, n, k_head_dim]`` and values that rows of one new token each see, padded on
        the left as by :meth:`.NewTokens.padded_slots` (lazy copies)."""
        known = tokens.made.get("fetch")
        if known is None:
            ids = [block_id for table in tokens.tables for block_id in table.block_ids[tokens.group]]
            num_slots = len(ids) * self.block_size
            heads = np.arange(self.geometry.num_kv_heads)[:, None] * num_slots
            slots = tokens.padded_slots(among_own=True)[:, None] + heads
            launch = kernels.prepare_gather(self.__keys, self.__values, ids, 0, num_slots, self.pages)
            known = tokens.made["fetch"] = launch, mx.array(slots.astype(np.int32))
        launch, index = known
        k, v = (mx.take(x.reshape(-1, x.shape[-1]), index, 0) for x in self._gathered(launch))
        return k, v

    def _gathered(self, launch: Callable[..., tuple[mx.array, mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
        k, v, self.__fence = launch(self.__keys, self.__values, self.__fence)
        return (rotate(k), rotate(v)) if self.rotates else (k, v)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others; see :meth:`Blocks.copy`."""
        self.__fence = kernels.copy_blocks(self.__keys, self.__values, self.__fence, sources, targets, self.pages)

    def resize(self, num_blocks: int) -> list[mx.array]:
        """Change the number of blocks; see :meth:`Blocks.resize`."""
        if not self.num_blocks:
            return self._make(num_blocks)
        mx.eval(self.__fence)  # until no kernel uses the blocks any more
        self.__keys = _resized(self.__keys, num_blocks)
        self.__values = _resized(self.__values, num_blocks)
        self.__fence = kernels.new_fence()
        return []

    def drop(self) -> None:
        """Drop the tensors; see :meth:`Blocks.drop`. Kernels under way keep their buffers."""
        self.__keys = self.__values = NO_BLOCKS

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        """Return the arrays, ready only when every write so far is."""
        return mx.depends(list(arrays), [self.__fence])

    @property
    def fence(self) -> mx.array:
        """The latest fence, which is ready when every kernel launched so far has run."""
        return self.__fence

    @property
    def pending(self) -> list[mx.array]:
        """The fence; see :attr:`Blocks.pending`."""
        return [self.__fence]

    def forget_failed_work(self) -> None:
        """Drop the writes that failed when :meth:`latest` was computed."""
        self.__fence = kernels.new_fence()  # kernels that were not computed have not written

    def rewind(self, to: mx.array, latest: mx.array) -> bool:
        """Forget the kernels launched since the fence was ``to``, which have written nothing and whose results must not
        be used. Returns False, and forgets nothing, unless ``latest`` is the present fence."""
        if self.__fence is not latest:
            return False
        self.__fence = to
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
