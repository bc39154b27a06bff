"""Blocks: how one layer's K and V blocks are kept, written and read; the choice of HostBlocks or DeviceBlocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from ..errors import BlocksUnavailableError, KernelUnavailableError, check_device
from ..kernels import availability
from ..kernels import ops as kernels
from ..kernels.check import check_pool, checked
from ..kernels.launch_shape import DECODE_BODIES, Use, Variant
from .block_table import BlockTable
from .device_blocks import DeviceBlocks, pages_of
from .geometry import Geometry, QueryHeads
from .host_blocks import HostBlocks
from .new_tokens import NewTokens


class Blocks(Protocol):
    """One layer's blocks. A pool chooses their kind once per group, at the first keys and values, and keeps it."""

    geometry: Geometry
    in_place: bool
    """Whether kernels write and read the blocks, ordered by a fence; no MLX operation may read them."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the tensors hold."""

    @property
    def pending(self) -> list[mx.array]:
        """Small arrays that are ready when every write so far is, and, on the host, lazy reads, which are computed
        before the next write; they do not keep the blocks' buffers."""

    def write(self, tokens: NewTokens, k: mx.array, v: mx.array, *, stored: bool = False) -> None:
        """Write new tokens: k, v ``[B, n_kv_heads, n, head_dim]``, or ``[T, n_kv_heads, 1, head_dim]``, table by
        table. ``stored``: they are what :meth:`gather` returned as stored, here or from blocks of the same geometry."""

    def gather(self, table: BlockTable, group: int, *, stored: bool = False) -> tuple[mx.array, mx.array]:
        """Return copies of K ``[1, n_kv_heads, n, k_head_dim]`` and V of the visible positions in the blocks' group.
        ``stored``: as the blocks hold them, rows ``[1, n_kv_heads, n, num_words]`` (uint32) of quantised pages."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks onto others. No block may be in both lists, or twice in ``targets``."""

    def resize(self, num_blocks: int) -> list[mx.array]:
        """Change the number of blocks: append blocks of zeros; or, after a growth that failed half way, keep only the
        first ones. Peak memory rises by one layer's tensors. If it fails, blocks that exist before and after keep their
        contents. Returns new tensors that the caller has to compute, all layers' together."""

    def drop(self) -> None:
        """Drop the tensors; :meth:`resize` makes new ones. Any thread may call it: it computes nothing."""

    def forget_failed_work(self) -> None:
        """Forget what could not be computed, after an exception of the device or of a thread's stream."""


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


def kernel_unsupported_reason(geometry: Geometry, block_size: int, heads: QueryHeads) -> str | None:
    """Return why the decode kernel cannot serve these blocks and queries, or None. The first call self-checks it."""
    return _variant_unsupported_reason(geometry, block_size, heads, "latents" if heads.latent else "decode")


def prefill_unsupported_reason(geometry: Geometry, block_size: int, heads: QueryHeads) -> str | None:
    """Return why the prefill kernel cannot serve these blocks and queries, or None. The first call self-checks it."""
    if availability.on_metal():
        return "on Metal prompts take MLX's attention"
    return _variant_unsupported_reason(geometry, block_size, heads, "prefill")


def _variant_unsupported_reason(geometry: Geometry, block_size: int, heads: QueryHeads, use: Use) -> str | None:
    """Return why no variant of a kernel serves these, or None. Checks variants, fastest first, until one passes."""
    num_kv_heads, k_dim, v_dim, dtype, _ = geometry
    pages = pages_of(geometry)
    why = availability.device_unsupported_reason()
    if why is not None:
        return why
    try:
        variants = kernels.variants_of(
            dtype, k_dim, v_dim, heads.num_q_heads, num_kv_heads, block_size, heads.softcap, heads.sinks, pages, use
        )
    except ValueError as error:
        return str(error)
    reasons = []
    for variant in variants:
        result = checked(variant)
        if result.ok:
            return None
        reasons.append(result.reason)
    if not reasons:
        return f"no kernel for head size {k_dim} (pages: {pages or 'not quantised'}) fits this GPU"
    return f"the kernel failed its self-check: {'; '.join(reasons)}"


def host_blocks(geometry: Geometry, block_size: int, heads: QueryHeads | None) -> BlocksChoice:
    """Choose blocks in host memory, which serve MLX's default device if that is a CPU."""
    return BlocksChoice(HostBlocks, "the pool was made without kernels")


def blocks_choice(use_kernel: bool | None) -> ChooseBlocks:
    """Return a pool's function that chooses blocks: the host's on a CPU, a device's on a GPU.

    Args:
        use_kernel: whether a kernel attends over the blocks: True demands it, False forbids it, None uses it where it
            works. Otherwise blocks are gathered, for MLX's attention.
    """

    def choose(geometry: Geometry, block_size: int, heads: QueryHeads | None) -> BlocksChoice:
        if use_kernel is False:
            return without_kernel(geometry, block_size, "kernel=off")
        why = kernel_unsupported_reason(geometry, block_size, heads or QueryHeads(geometry.num_kv_heads))
        if why is None:
            return BlocksChoice(DeviceBlocks, "the fused kernel works here", has_kernel=True)
        if use_kernel:
            raise KernelUnavailableError(f"kernel=on, but {why}; use auto or off (gather-then-SDPA)")
        return without_kernel(geometry, block_size, why)

    return choose


def without_kernel(geometry: Geometry, block_size: int, why: str) -> BlocksChoice:
    """Return the choice of blocks where no kernel attends over them, for the reason ``why``.

    Raises:
        BlocksUnavailableError: the blocks of a GPU cannot be written and gathered either.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return BlocksChoice(HostBlocks, why)
    _, k_dim, v_dim, dtype, _ = geometry
    pages = pages_of(geometry)
    body = DECODE_BODIES[pages is not None]
    try:
        check_pool(Variant(body, availability.backend() or "", dtype, k_dim, v_dim, 1, block_size, pages=pages))
    except RuntimeError as error:
        check_device(error)
        raise BlocksUnavailableError(f"the kernels that write and gather blocks do not work here: {error}") from error
    return BlocksChoice(DeviceBlocks, why)
