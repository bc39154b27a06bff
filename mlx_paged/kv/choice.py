"""The choice of a group's blocks, on the host or on a device, and its reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import mlx.core as mx

from ..errors import BlocksUnavailableError, KernelUnavailableError, check_device
from ..kernels import availability
from ..kernels import ops as kernels
from ..kernels.check import checked
from ..kernels.launch_shape import Variant
from ..kernels.prefill import prefill_variants_of
from ..kernels.quantized import rotate
from .attention_params import QueryHeads
from .block_table import BlockTable
from .blocks import BlocksChoice, ChooseBlocks
from .device_blocks import DeviceBlocks, pages_of
from .geometry import Geometry
from .host_blocks import HostBlocks
from .new_tokens import NewTokens


def kernel_unsupported_reason(geometry: Geometry, block_size: int, heads: QueryHeads) -> str | None:
    """Return why the decode kernel cannot serve these blocks and queries, or None. The first call self-checks it."""
    variants_of = kernels.latent_variants_of if heads.latent else kernels.variants_of
    return _variant_unsupported_reason(geometry, block_size, heads, variants_of)


def prefill_unsupported_reason(geometry: Geometry, block_size: int, heads: QueryHeads) -> str | None:
    """Return why the prefill kernel cannot serve these blocks and queries, or None. The first call self-checks it."""
    if availability.on_metal():
        return "on Metal prompts take MLX's attention"
    return _variant_unsupported_reason(geometry, block_size, heads, prefill_variants_of)


def _variant_unsupported_reason(
    geometry: Geometry, block_size: int, heads: QueryHeads, variants_of: Callable[..., Sequence[Variant]]
) -> str | None:
    """Return why no variant of a kernel serves these, or None. Checks variants, fastest first, until one passes."""
    num_kv_heads, k_dim, v_dim, dtype, _ = geometry
    pages = pages_of(geometry)
    why = availability.device_unsupported_reason()
    if why is not None:
        return why
    try:
        variants = variants_of(
            dtype, k_dim, v_dim, heads.num_q_heads, num_kv_heads, block_size, heads.softcap, heads.sinks, pages
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
    try:
        fails = _fault_of_pool_kernels(geometry, block_size)
    except Exception as error:
        check_device(error)
        fails = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if fails is not None:
        raise BlocksUnavailableError(f"the kernels that write and gather blocks do not work here: {fails}")
    return BlocksChoice(DeviceBlocks, why)


@functools.cache
def _fault_of_pool_kernels(geometry: Geometry, block_size: int) -> str | None:
    """Write, copy and gather random tokens by kernels. Return what is wrong with the result, or None."""
    heads, k_dim, v_dim, dtype, _ = geometry
    blocks, tables = DeviceBlocks(geometry, block_size, 5), [BlockTable(1, block_size) for _ in range(2)]
    count = 2 * block_size - 1
    k, v = (mx.random.normal((1, heads, count, dim), key=mx.random.key(dim)).astype(dtype) for dim in (k_dim, v_dim))
    for table, ids in zip(tables, ([3, 1], [2, 4]), strict=True):
        table.block_ids[0][:], table.length = ids, count
    tokens = NewTokens(tables[:1], (count,))
    tokens.begin(0, 5)
    blocks.write(tokens, k, v)
    blocks.copy([3, 1], [2, 4])
    for table in tables:
        for got, wrote, form in zip(blocks.gather(table, 0), (k, v), geometry.rows or (None, None), strict=True):
            if form is not None:
                wrote = form.dequantize(form.quantize(rotate(wrote) if geometry.rotates else wrote))
                wrote = rotate(wrote) if geometry.rotates else wrote
            if not mx.array_equal(got, wrote).item():
                return "they return other values than were written"
    return None
