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
        k_bits: of a key's codes.
        v_bits: of a value's codes.
        group_size: values of a head's vector that share a scale and a bias.
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
            raise ConfigError(f"pages are of {BITS[0]} or {BITS[1]} bits, or of (8, 4) for keys and values, not {bits}")
        if group_size not in GROUP_SIZES:
            raise ConfigError(f"keys and values are quantised in groups of {GROUP_SIZES}, not of {group_size}")
        return cls(*pair, group_size, rotate)

    def why_not(self, k_head_dim: int, v_head_dim: int, dtype: mx.Dtype) -> str | None:
        """Why keys and values of these sizes and this dtype are kept as they are, or None."""
        if dtype not in DTYPES:
            return f"keys are {dtype}"
        for dim in (k_head_dim, v_head_dim):
            if dim % self.group_size:
                return f"a head of {dim} is not made of groups of {self.group_size} (kv_group_size)"
        return None

    @property
    def nameable(self) -> PageFormat:
        """Return the format as far as mlx-lm's options name it: by bits and a group size alone."""
        return PageFormat(self.k_bits, self.v_bits, self.group_size)

    @property
    def stock_bits(self) -> int | None:
        """Bits with which mlx-lm's quantised cache holds the same bytes; None: it has no such form."""
        return self.k_bits if self.k_bits == self.v_bits and self == self.nameable else None

    def __str__(self) -> str:
        bits = f"{self.k_bits}" if self.k_bits == self.v_bits else f"{self.k_bits}/{self.v_bits}"
        return f"{bits} bits in groups of {self.group_size}{', rotated' if self.rotate else ''}"


class Geometry(NamedTuple):
    """Shape of one layer's keys and values in a group, and how its pages hold them; all layers of a group share it.

    Attributes:
        num_kv_heads, k_head_dim, v_head_dim, dtype: of keys and values as the model makes them.
        format: of the pages; None: keys and values as they are.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype
    format: PageFormat | None = None

    @classmethod
    def of(cls, k: mx.array, v: mx.array) -> Geometry:
        """Geometry of k ``[B, n_kv_heads, n, k_head_dim]`` and v ``[B, n_kv_heads, n, v_head_dim]``."""
        return cls(k.shape[1], k.shape[3], v.shape[3], k.dtype)

    def in_format(self, wanted: PageFormat | None, why: str | None) -> tuple[Geometry, str | None]:
        """Return it with the format that pages hold such keys and values in; and where that is not the one wanted, why.

        Args:
            wanted: format; None: keys and values as they are.
            why: they are kept as they are all the same, if that is known already.
        """
        if wanted is None:
            return self._replace(format=None), None
        why = why or wanted.why_not(self.k_head_dim, self.v_head_dim, self.dtype)
        return self._replace(format=wanted if why is None else None), why

    @property
    def rows(self) -> tuple[QuantizedRows, QuantizedRows] | None:
        """The form of a key's and a value's row in quantised pages; None: keys and values are kept as they are."""
        if self.format is None:
            return None
        group_size = self.format.group_size
        return (
            QuantizedRows(self.k_head_dim, self.format.k_bits, group_size, self.dtype),
            QuantizedRows(self.v_head_dim, self.format.v_bits, group_size, self.dtype),
        )

    @property
    def rotates(self) -> bool:
        """Whether pages hold keys and values rotated; queries and results of attention are rotated to match."""
        return self.format is not None and self.format.rotate

    @property
    def stored(self) -> Geometry:
        """Shape of what the pages hold: quantised rows as vectors of words, else keys and values."""
        if self.rows is None:
            return self
        k, v = self.rows
        return Geometry(self.num_kv_heads, k.num_words, v.num_words, mx.uint32)

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer."""
        if self.format is not None:
            return self.stored.bytes_per_token()
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype.size


def first_keys(geometry: Geometry) -> tuple[mx.array, mx.array]:
    """Keys and values of one token in this geometry, for what is made by their shapes."""
    heads, k_dim, v_dim, dtype, _ = geometry
    return mx.zeros((1, heads, 1, k_dim), dtype), mx.zeros((1, heads, 1, v_dim), dtype)


class Storage(Protocol):
    """One layer's blocks. A pool asks for its form once per group, at the first keys and values, and keeps it."""

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
        """:meth:`write` of what :meth:`read_stored` gave, here or in another storage of the same geometry."""

    def read_stored(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        """Return what the blocks hold of the positions of :meth:`read_visible`, by position, as they hold it (lazy
        copies): of quantised pages rows ``[1, n_kv_heads, n, num_words]`` (uint32), else keys and values."""

    def read_visible(self, table: BlockTable, *, copy: bool = True) -> tuple[mx.array, mx.array]:
        """K ``[1, n_kv_heads, n, k_head_dim]`` and V of positions ``logical_start .. length - 1`` (lazy);
        ``copy``: never a view of the blocks."""

    def read_rows(self, columns: Columns) -> tuple[mx.array, mx.array]:
        """K ``[B, n_kv_heads, n, k_head_dim]`` and V of the columns' positions (lazy copies), zeros where a row has
        nothing: not merely masked later, as a stale NaN times a weight of zero is NaN."""

    def prepare_decode(
        self, q: mx.array, tables: Sequence[BlockTable], step: Step, params: AttentionParams, *, appends: bool
    ) -> DecodeLaunch:
        """Return the launches of a decode step, for :meth:`decode` of this layer and of all that attend like it.

        Args:
            q: ``[B, n_q_heads, q_len, head_dim]``: the step's positions; or ``[T, n_q_heads, 1, head_dim]``, if they
                are written.
            tables, step: of the B sequences.
            params: no query sees more tokens than its window; there is no mask.
            appends: the same kernel is to write the step's positions first (q_len 1).

        Raises:
            KernelUnavailable: no kernel works for these shapes, or blocks of this form. Nothing has been launched, and
                :meth:`write` and :meth:`read_visible` go on from here.
        """

    def decode(
        self,
        launch: DecodeLaunch,
        q: mx.array,
        sinks: mx.array | None = None,
        append: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """Return the fused kernel over this layer's blocks: ``[B, n_q_heads, q_len, v_head_dim]``.

        Args:
            launch: of :meth:`prepare_decode`, for queries of this shape.
            q: queries.
            sinks: as the launch was prepared for.
            append: keys and values of the step's positions, if it writes them.

        Raises:
            KernelUnavailable: as :meth:`prepare_decode`.
        """

    def prefill(self, q: mx.array, tables: Sequence[BlockTable], step: Step, params: AttentionParams) -> mx.array:
        """Return the fused kernel over this layer's blocks, for the tokens of a step, which are written.

        Args:
            q: ``[T, n_q_heads, 1, head_dim]``.
            tables, step: of the B sequences.
            params: no query sees more tokens than its window; there is no mask.

        Returns:
            ``[T, n_q_heads, 1, v_head_dim]``.

        Raises:
            KernelUnavailable: as :meth:`decode`.
        """

    def read_packed(self, tables: Sequence[BlockTable], step: Step) -> tuple[mx.array, mx.array]:
        """Return all blocks of a step's tables, one table's after the other's, as
        :meth:`Step.gathered_tables` counts them: K ``[1, n_kv_heads, slots, k_head_dim]`` and V (lazy copies).
        Slots that hold no token hold anything. Only of blocks in place."""

    def rewind(self, to: mx.array, latest: mx.array) -> bool:
        """Forget the kernels called since the fence was ``to``, whose results are not going to be used or, of a write,
        are going to be written again. False, and nothing is forgotten, unless ``latest`` is the fence now."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others; none is in both, and none twice in ``targets``."""

    def resize(self, num_blocks: int) -> None:
        """Have so many blocks: zeros behind the present ones, or only the first ones. The extra peak is one tensor. If
        it fails, the blocks that were there and are to be there hold what they held."""

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        """Return the arrays, ready only when every write so far is."""

    def fence(self) -> mx.array:
        """Return a small array that is ready when every write so far is; does not keep the blocks' buffers."""

    def latest(self) -> list[mx.array]:
        """Arrays to compute for every write so far to be done; not to be kept."""

    def forget_failed_writes(self) -> None:
        """After :meth:`latest` could not be computed: go on without the writes since it could."""

    def checkpoint(self) -> Any:
        """Return what :meth:`go_back` takes. Not to be kept while anything is computed: it keeps buffers."""

    def go_back(self, checkpoint: Any) -> None:
        """Forget what was built since the checkpoint, none of which has been computed. Does nothing if there are more
        or fewer blocks now."""


class StorageChoice(NamedTuple):
    """Form of a group's storage, and why."""

    form: Callable[[Geometry, int, int], Storage]
    reason: str


# From a group's geometry, block size and (if known) the queries that will attend over it to the form of its storage.
# May raise KernelUnavailableError.
ChooseStorage = Callable[[Geometry, int, QueryHeads | None], StorageChoice]
