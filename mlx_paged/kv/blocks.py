"""Blocks: how one layer's K and V blocks are kept, written and read. HostBlocks serve a CPU, DeviceBlocks a GPU.
HeldArrays: arrays read from them whose computation nothing orders before the next write."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from .attention_params import QueryHeads
from .block_table import BlockTable
from .geometry import Geometry
from .new_tokens import NewTokens


class Blocks(Protocol):
    """One layer's blocks. A pool chooses their kind once per group, at the first keys and values, and keeps it."""

    geometry: Geometry
    in_place: bool
    """Whether kernels write and read the blocks, ordered by a fence; no MLX operation may read them."""
    pending: list[mx.array]
    """Lazy reads and writes that a host's blocks have to compute before the next write; empty on a device."""
    num_quantized: int
    """Tokens quantised here so far, each when it was written; 0 where the pages hold keys and values as they are."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the tensors hold."""

    def write(self, tokens: NewTokens, k: mx.array, v: mx.array, *, stored: bool = False) -> None:
        """Write new tokens: k, v ``[B, n_kv_heads, n, head_dim]``, or ``[T, n_kv_heads, 1, head_dim]``, table by
        table. ``stored``: they are what :meth:`gather` returned as stored, here or from blocks of the same geometry."""

    def gather(self, table: BlockTable, group: int, *, stored: bool = False) -> tuple[mx.array, mx.array]:
        """Return copies of K ``[1, n_kv_heads, n, k_head_dim]`` and V of the visible positions in the blocks' group.
        ``stored``: as the blocks hold them, rows ``[1, n_kv_heads, n, num_words]`` (uint32) of quantised pages."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others. No block may be in both lists, or twice in ``targets``."""

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks: append blocks of zeros; or, after a growth that failed half way, keep only the
        first ones. Peak memory rises by one layer's tensors. If it fails, blocks that exist before and after keep their
        contents."""

    def drop(self) -> None:
        """Drop the tensors; :meth:`resize` makes new ones. Any thread may call it: it computes nothing."""

    def ready(self) -> list[mx.array]:
        """Return small arrays that are ready when every write so far is, and every read that a host's blocks still
        have to compute; they do not keep the blocks' buffers."""

    def forget_failed_work(self) -> None:
        """Forget what could not be computed, after an exception of the device or of a thread's stream."""


class HeldArrays:
    """Pairs of keys and values that attention has not used, because it read the blocks instead. They are mostly dropped
    at once; pairs that a caller still holds are computed before the next write to the pool, and before the thread that
    has built them releases the pool's lock.

    Attributes:
        pairs: weak references to them.
        local: ``has_written`` if the thread has written to the pool before.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[weakref.ref[mx.array], weakref.ref[mx.array]]] = []
        self.local = threading.local()

    def add(self, keys: mx.array, values: mx.array) -> None:
        """Note a pair."""
        self.pairs.append((weakref.ref(keys), weakref.ref(values)))

    def compute(self) -> None:
        """Compute the pairs that are still held."""
        if self.pairs:
            pairs, self.pairs = self.pairs, []
            mx.eval([array for pair in pairs for ref in pair if (array := ref()) is not None])


# Makes the blocks of one layer from geometry, block size and number of blocks.
BlocksForm = Callable[[Geometry, int, int], Blocks]


class BlocksChoice(NamedTuple):
    """The kind of a group's blocks, and the reason.

    Attributes:
        form: makes the blocks of a layer.
        reason: why they are of this kind, or why attention has no kernel over them.
        has_kernel: whether kernels may attend over them.
    """

    form: BlocksForm
    reason: str
    has_kernel: bool = False


# Chooses the kind of a group's blocks by geometry, block size and, if known, the queries that will attend over them.
# May raise KernelUnavailableError.
ChooseBlocks = Callable[[Geometry, int, QueryHeads | None], BlocksChoice]
