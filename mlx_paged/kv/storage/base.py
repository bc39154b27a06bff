"""Storage: how one layer's K and V blocks are kept, written and read. Three forms: functional, functional of quantised
rows, and in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ...errors import ConfigError
from ...kernels.ops import DecodeLaunch
from ...kernels.quantized import BITS, GROUP_SIZES, QuantizedRows
from ..block_table import BlockTable
from ..step import Columns, Step
from .attention_params import AttentionParams, QueryHeads

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
PAIRS = ((8, 8), (4, 4), (8, 4))
DEFAULT_GROUP_SIZE = 64


class PageFormat(NamedTuple):
    """How keys and values are quantised when they are written to pages (see :class:`QuantizedRows`).

    Attributes:
        k_bits: bits of a key's codes.
        v_bits: bits of a value's codes.
        group_size: number of values of a head's vector that share a scale and a bias.
        rotate: keys (after RoPE) and values are rotated before they are quantised, and back when they are read.
    """

    k_bits: int
    v_bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    rotate: bool = False

    @classmethod
    def of(cls, bits: int | tuple[int, int], group_size: int = DEFAULT_GROUP_SIZE, rotate: bool = False) -> PageFormat:
        """Return the format of 8 or 4 bits, or of (8, 4) for keys and values. Raises ConfigError for any other."""
        pair = bits if isinstance(bits, tuple) else (bits, bits)
        if pair not in PAIRS:
            raise ConfigError(f"kv_bits must be {BITS[0]}, {BITS[1]} or (8, 4), got {bits!r}")
        if group_size not in GROUP_SIZES:
            raise ConfigError(f"kv_group_size must be one of {GROUP_SIZES}, got {group_size}")
        return cls(*pair, group_size, rotate)

    def unsupported_reason(self, k_head_dim: int, v_head_dim: int, dtype: mx.Dtype) -> str | None:
        """Return why keys and values of these sizes and this dtype cannot be quantised, or None."""
        if dtype not in DTYPES:
            return f"keys of {dtype} cannot be quantised"
        for dim in (k_head_dim, v_head_dim):
            if dim % self.group_size:
                return f"head size {dim} is not a multiple of kv_group_size {self.group_size}"
        return None

    @property
    def nameable(self) -> PageFormat:
        """The part of the format that mlx-lm's options can express: bits and group size."""
        return PageFormat(self.k_bits, self.v_bits, self.group_size)

    @property
    def stock_bits(self) -> int | None:
        """Bits of mlx-lm's quantised cache that holds the same bytes, or None if it has no such form."""
        return self.k_bits if self.k_bits == self.v_bits and self == self.nameable else None

    def __str__(self) -> str:
        bits = f"{self.k_bits}" if self.k_bits == self.v_bits else f"{self.k_bits}/{self.v_bits}"
        return f"{bits} bits in groups of {self.group_size}{', rotated' if self.rotate else ''}"


class Geometry(NamedTuple):
    """Shape of one layer's keys and values in a group, and the format of its pages; all layers of a group share it.

    Attributes:
        num_kv_heads, k_head_dim, v_head_dim, dtype: of keys and values as the model makes them.
        format: format of the pages; None: keys and values are not quantised.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    format: PageFormat | None = None

    @classmethod
    def of(cls, k: mx.array, v: mx.array) -> Geometry:
        """Return the geometry of k ``[B, n_kv_heads, n, k_head_dim]`` and v ``[B, n_kv_heads, n, v_head_dim]``."""
        return cls(k.shape[1], k.shape[3], v.shape[3], k.dtype)

    def in_format(self, wanted: PageFormat | None, why: str | None) -> tuple[Geometry, str | None]:
        """Return the geometry with the format that its pages get, and the reason if that is not the one wanted.

        Args:
            wanted: the format asked for; None: keys and values are not quantised.
            why: a reason not to quantise them, if one is known already.
        """
        if wanted is None:
            return self._replace(format=None), None
        why = why or wanted.unsupported_reason(self.k_head_dim, self.v_head_dim, self.dtype)
        return self._replace(format=wanted if why is None else None), why

    @property
    def rows(self) -> tuple[QuantizedRows, QuantizedRows] | None:
        """The forms of a key's and a value's row in quantised pages; None if these are not quantised."""
        if self.format is None:
            return None
        group_size = self.format.group_size
        return (
            QuantizedRows(self.k_head_dim, self.format.k_bits, group_size, self.dtype),
            QuantizedRows(self.v_head_dim, self.format.v_bits, group_size, self.dtype),
        )

    @property
    def rotates(self) -> bool:
        """Whether pages hold rotated keys and values; queries and results of attention are rotated to match."""
        return self.format is not None and self.format.rotate

    @property
    def stored(self) -> Geometry:
        """Shape of what the pages hold: quantised rows as vectors of words, else keys and values."""
        if self.rows is None:
            return self
        k, v = self.rows
        return Geometry(self.num_kv_heads, k.num_words, v.num_words, mx.uint32)

    def bytes_per_token(self) -> int:
        """Return the bytes of K and V of one token in one layer."""
        if self.format is not None:
            return self.stored.bytes_per_token()
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype.size


def first_keys(geometry: Geometry) -> tuple[mx.array, mx.array]:
    """Return zeros as one token's keys and values, for :meth:`PoolLayer.set_geometry` ahead of the first write."""
    heads, k_dim, v_dim, dtype, _ = geometry
    return mx.zeros((1, heads, 1, k_dim), dtype), mx.zeros((1, heads, 1, v_dim), dtype)


class Storage(Protocol):
    """One layer's blocks. A pool chooses its form once per group, at the first keys and values, and keeps it."""

    geometry: Geometry
    in_place: bool
    """Whether blocks are written in place, ordered by a fence; only kernels may read them."""
    decoded_by_kernel: bool
    """Whether :meth:`decode` served the layer last."""
    num_quantized: int
    """Tokens quantised here so far, each when it was written; 0 where the pages hold keys and values as they are."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the tensors hold."""

    def write(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        """Write the step's tokens: k, v ``[B, n_kv_heads, n, head_dim]``, or ``[T, n_kv_heads, 1, head_dim]``, table by
        table."""

    def write_stored(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        """Write what :meth:`read_stored` returned, here or in another storage of the same geometry."""

    def read_stored(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        """Return the positions of :meth:`read_visible` as the blocks store them (lazy copies): rows
        ``[1, n_kv_heads, n, num_words]`` (uint32) of quantised pages, else keys and values."""

    def read_visible(self, table: BlockTable, *, copy: bool = True) -> tuple[mx.array, mx.array]:
        """Return K ``[1, n_kv_heads, n, k_head_dim]`` and V of positions ``logical_start .. length - 1`` (lazy), with
        ``copy`` never as a view of the blocks."""

    def read_rows(self, columns: Columns) -> tuple[mx.array, mx.array]:
        """Return K ``[B, n_kv_heads, n, k_head_dim]`` and V of the columns' positions (lazy copies). All positions must
        have been written: a stale NaN times a weight of zero is NaN, so a mask would not hide it."""

    def prepare_decode(
        self, q: mx.array, tables: Sequence[BlockTable], step: Step, params: AttentionParams, *, appends: bool
    ) -> DecodeLaunch:
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

    def decode(
        self,
        launch: DecodeLaunch,
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

    def read_packed(self, tables: Sequence[BlockTable], step: Step) -> tuple[mx.array, mx.array]:
        """Return all blocks of a step's tables, table by table, in the order of :meth:`Step.gathered_tables`: K
        ``[1, n_kv_heads, slots, k_head_dim]`` and V (lazy copies). Slots without a token have arbitrary contents. Only
        for in-place storage."""

    def rewind(self, to: mx.array, latest: mx.array) -> bool:
        """Forget the kernels launched since the fence was ``to``. Their results must not be used, and what they wrote
        must be written again. Returns False, and forgets nothing, unless ``latest`` is the present fence."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others. No block may be in both lists, or twice in ``targets``."""

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks: append blocks of zeros, or keep only the first ones. Peak memory rises by one
        tensor. If it fails, blocks that exist before and after keep their contents."""

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        """Return the arrays, ready only when every write so far is."""

    def fence(self) -> mx.array:
        """Return a small array that is ready when every write so far is, and does not keep the blocks' buffers."""

    def latest(self) -> list[mx.array]:
        """Return the arrays to evaluate to complete every write so far. Do not keep them."""

    def forget_failed_writes(self) -> None:
        """Drop the writes that failed when :meth:`latest` was computed."""

    def snapshot(self) -> Any:
        """Return the state for :meth:`restore`. Drop it before anything is computed: it keeps buffers alive."""

    def restore(self, snapshot: Any) -> None:
        """Forget what was built since the snapshot; none of it may have been computed. Does nothing if the number of
        blocks has changed."""


class StorageChoice(NamedTuple):
    """The form of a group's storage, and the reason."""

    form: Callable[[Geometry, int, int], Storage]
    reason: str


# Chooses the form of a group's storage by geometry, block size and, if known, the queries that will attend over it. May
# raise KernelUnavailableError.
ChooseStorage = Callable[[Geometry, int, QueryHeads | None], StorageChoice]
