"""Prefill attention over keys and values expanded from latents, on CUDA: one launch for all chunks of a pack.

For many tokens, expanding the latents to keys and values of heads once costs less than attending to the latents: 640
operations per score and weighted value instead of 2,176, at DeepSeek's sizes. The expanded keys and values are separate
arrays, in the blocks' order; the rotated part of a key is read from a third, as all heads share it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..cuda.device import cuda_limits
from . import ops
from .build import Constants, NoKernelError, backend, build_kernel
from .launch_shape import Variant
from .prefill import PrefillShape, check_pack, prefill_constants_of, tiles_of, unsupported_prefill
from .trial import KernelKey, failure_of

BODY = "latent_prefill_tensor"
ROPE = 64  # values of a key that are rotated
_NO_WINDOW = 1 << 30


@lru_cache(maxsize=64)
def prompt_shape_for(head_dim: int, value_dim: int) -> PrefillShape:
    """Return the launch shape for keys and values of these sizes, rotated part included."""
    # The fastest of six shapes each, measured for 192/128 and 256/256 on an NVIDIA H200 (docs/adr/0033).
    return PrefillShape(4, 2 if head_dim <= 192 and value_dim <= 128 else 1, 32, 1, True, 2)


def unsupported_prompts(dtype: mx.Dtype, head_dim: int, value_dim: int, rope: int, block_size: int) -> str | None:
    """Return why the kernel cannot serve this geometry, or None if it can."""
    if rope != ROPE:
        return f"keys must have {ROPE} rotated values, got {rope}"
    return unsupported_prefill(dtype, head_dim, value_dim, 1, block_size)


@lru_cache(maxsize=64)
def prompt_variant_of(dtype: mx.Dtype, head_dim: int, value_dim: int, rope: int, block_size: int) -> Variant | None:
    """Return the variant for a geometry; None without CUDA, or if the GPU has too little shared memory.

    Raises:
        ValueError: no kernel supports the geometry.
    """
    why = unsupported_prompts(dtype, head_dim, value_dim, rope, block_size)
    if why:
        raise ValueError(why)
    shared = prompt_shape_for(head_dim, value_dim).shared_bytes(head_dim, value_dim)
    if backend() != "cuda" or not cuda_limits().groups_together(shared):
        return None
    return Variant(BODY, "cuda", dtype, head_dim, value_dim, 1, block_size)


def prompt_constants_of(variant: Variant, launch_shape: PrefillShape) -> Constants:
    """Return the constants of the body."""
    return (*prefill_constants_of(variant, launch_shape, tiles_first=True), ("DR", ROPE))


class PromptLaunch(NamedTuple):
    """The launch of one step's attention, prepared once and called for each layer and slice of its heads."""

    kernel: Callable[..., list[mx.array]]
    tables: mx.array
    tiles: mx.array
    params: mx.array
    threads: int

    def __call__(self, q: mx.array, keys: mx.array, values: mx.array, rotated: mx.array) -> mx.array:
        """Attend for the pack's tokens with some of the heads. Checks nothing.

        Args:
            q: ``[T, n_heads, 1, head_dim]``, the rotated part last; T is the sum of the counts, sequence after
                sequence.
            keys: ``[1, n_heads, slots, head_dim - 64]``.
            values: ``[1, n_heads, slots, value_dim]``.
            rotated: ``[1, 1, slots, 64]``.

        Returns:
            ``[T, n_heads, 1, value_dim]``. A token's bits depend on no other sequence.
        """
        num_tokens, heads = q.shape[:2]
        out, _ = self.kernel(
            inputs=[q, keys, values, rotated, ops.new_fence(), self.tables, self.tiles, self.params, self.params],
            grid=(self.tiles.shape[0] * heads * self.threads, 1, 1),
            threadgroup=(self.threads, 1, 1),
            output_shapes=[(num_tokens, heads, 1, values.shape[3]), (1,)],
            output_dtypes=[q.dtype, mx.uint32],
        )
        return out


def prepare_prompts(
    tables: mx.array,
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    variant: Variant,
    scale: float,
    launch_shape: PrefillShape | None = None,
) -> PromptLaunch:
    """Prepare the launch for the new tokens of B sequences. Token i of sequence s has position ``lengths[s] -
    counts[s] + i`` and sees the positions up to its own.

    Args:
        tables: blocks of slots by absolute position, int32 ``[B, max_blocks]``.
        counts: new tokens of each sequence, 1 or more.
        lengths: tokens of each sequence, the new ones included.
        variant: from :func:`prompt_variant_of`.
        launch_shape: overrides the choice, for checks and timings.

    Raises:
        ValueError: shapes do not agree, or the scale is not positive.
        NoKernelError: the variant is off. A text's first use in this process begins with a trial; if that fails,
            the variant is switched off with a warning.
    """
    check_pack(tables, counts, lengths, variant.block_size, scale)
    if (reason := ops.why_off(variant)) is not None:
        raise NoKernelError(reason)
    own = launch_shape or prompt_shape_for(variant.head_dim, variant.value_dim)
    constants = prompt_constants_of(variant, own)
    if (failure := failure_of(KernelKey(variant.body, constants), build_kernel)) is not None:
        ops.switch_off(variant, failure)
        warnings.warn(f"mlx_paged: {variant} is off: {failure}", stacklevel=2)
        raise NoKernelError(failure)
    tiles: Any = tiles_of(counts, lengths, own.rows, None)
    params = mx.array([scale, 1.0, _NO_WINDOW, 1], mx.float32)
    kernel = build_kernel(variant.body, constants)
    return PromptLaunch(kernel, tables, mx.array(tiles, mx.int32), params, 32 * own.simdgroups)
