"""Storage: how one layer's K and V blocks are kept, written and read. Two forms: functional and in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..block_table import BlockTable
from ..packed_step import PackedStep
from ..step import Step
from .scoring import Scoring


class Geometry(NamedTuple):
    """Shape of one layer's keys and values in a group; all layers of a group share it."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, k: mx.array, v: mx.array) -> Geometry:
        """Geometry of k ``[B, n_kv_heads, n, k_head_dim]`` and v ``[B, n_kv_heads, n, v_head_dim]``."""
        return cls(k.shape[1], k.shape[3], v.shape[3], k.dtype)

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * self.dtype.size


class Storage(Protocol):
    """One layer's blocks. A pool asks for its form once per group, at the first keys and values, and keeps it."""

    geometry: Geometry
    in_place: bool
    """Whether blocks are written in place, ordered by a fence; only kernels may read them."""
    decoded_by_kernel: bool
    """Whether :meth:`decode` served the layer last."""

    @property
    def num_blocks(self) -> int: ...

    def write(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        """Write k, v ``[B, n_kv_heads, n, head_dim]``: the last n reserved tokens of B tables."""

    def write_packed(self, tables: Sequence[BlockTable], step: PackedStep, k: mx.array, v: mx.array) -> None:
        """Write k, v ``[T, n_kv_heads, 1, head_dim]``: the tokens of a packed step, table by table."""

    def read_visible(self, table: BlockTable, *, rotation: int, copy: bool) -> tuple[mx.array, mx.array]:
        """K ``[1, n_kv_heads, n, k_head_dim]`` and V of positions ``logical_start .. length - 1``, after those of
        pinned tokens (lazy).

        ``rotation``: start the order at this visible token, pinned ones not counted, and wrap around; ``copy``: never a
        view of the blocks.
        """

    def read_rows(self, block_ids: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """K ``[B, n_kv_heads, n, k_head_dim]`` and V of positions int32 ``[B, n]`` in B tables (lazy copies).

        ``block_ids``: int32 ``[B, max_blocks]``, by absolute position; every position must lie in them.
        """

    def decode(
        self,
        q: mx.array,
        tables: Sequence[BlockTable],
        step: Step,
        scoring: Scoring,
        *,
        append: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """The fused kernel over this layer's blocks.

        Args:
            q: ``[B, n_q_heads, q_len, head_dim]``: the step's positions.
            tables, step: of the B sequences.
            scoring: no query sees more tokens than its window; there is no mask.
            append: keys and values of the step's positions (q_len 1), for the same kernel to write first.

        Returns:
            ``[B, n_q_heads, q_len, v_head_dim]``.

        Raises:
            KernelUnavailable: no kernel works for these shapes, or blocks of this form. Nothing has been launched, and
                :meth:`write` and :meth:`read_visible` go on from here.
        """

    def prefill(self, q: mx.array, tables: Sequence[BlockTable], step: PackedStep, scoring: Scoring) -> mx.array:
        """The fused kernel over this layer's blocks, for the tokens of a packed step, which are written.

        Args:
            q: ``[T, n_q_heads, 1, head_dim]``.
            tables, step: of the B sequences.
            scoring: no query sees more tokens than its window; there is no mask.

        Returns:
            ``[T, n_q_heads, 1, v_head_dim]``.

        Raises:
            KernelUnavailable: as :meth:`decode`.
        """

    def rewind(self, to: mx.array, latest: mx.array) -> bool:
        """Forget the kernels called since the fence was ``to``, whose results are not going to be used or, of a write,
        are going to be written again. False, and nothing is forgotten, unless ``latest`` is the fence now."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others; none is in both, and none twice in ``targets``."""

    def resize(self, num_blocks: int) -> None:
        """Have so many blocks: zeros behind the present ones, or only the first ones. The extra peak is one tensor. If
        it fails, the blocks that were there and are to be there hold what they held."""

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        """The arrays, ready only when every write so far is."""

    def fence(self) -> mx.array:
        """A small array that is ready when every write so far is; does not keep the blocks' buffers."""

    def latest(self) -> list[mx.array]:
        """Arrays to compute for every write so far to be done; not to be kept."""

    def forget_failed_writes(self) -> None:
        """After :meth:`latest` could not be computed: go on without the writes since it could."""
