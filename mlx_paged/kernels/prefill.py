"""Causal attention of prompts' new tokens over block tables, on CUDA: one launch for the chunks of a whole pack.

Sequences may have any lengths: what is launched is a list of tiles, each some tokens of one sequence, and nothing is
prepared or compiled for a length. Keys and values are read where they lie, those of a prefix and of the new tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from . import ops
from .build import Constants, KernelUnavailable, backend, build_kernel
from .cuda.device import cuda_limits
from .launch_shape import MAX_TENSOR_HEAD_DIM, Variant, unsupported
from .quantized.pages import PageShape
from .trial import Text, failure_of

BODY = "paged_prefill_tensor"
QUANTIZED_BODY = "quantized_prefill_tensor"
# Stands for no window: positions are far below.
_NO_WINDOW = 1 << 30
_PADDING = 8  # elements that a row in shared memory has more


class PrefillShape(NamedTuple):
    """How the prefill kernel is cut. A row is one query head of one token.

    Attributes:
        simdgroups: of a thread group.
        row_tiles: of 16 rows that a simdgroup takes.
        keys: tokens read at a time, a power of two of at least 16.
        buffers: 1, and keys are read while values are used, or 2, and both are read a step ahead.
        query_shared: whether queries are kept in shared memory, not in registers.
        groups: thread groups that must fit a core together.
    """

    simdgroups: int
    row_tiles: int
    keys: int
    buffers: int
    query_shared: bool
    groups: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.simdgroups * self.row_tiles

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory of a thread group."""
        stage = self.keys * (head_dim + value_dim + 2 * _PADDING)
        return 2 * (self.buffers * stage + self.query_shared * self.rows * (head_dim + _PADDING))


# Of heads up to 64, 128 and more.
_QUANTIZED_SHAPES = (
    PrefillShape(4, 2, 64, 1, False, 2),
    PrefillShape(4, 2, 64, 1, True, 2),
    PrefillShape(4, 1, 32, 1, True, 2),
)


@lru_cache(maxsize=64)
def prefill_shape_for(head_dim: int, value_dim: int, pages: PageShape | None = None) -> PrefillShape:
    """The cut for heads of these sizes."""
    widest = max(head_dim, value_dim)
    if pages is not None:  # codes wait in shared memory, so values have one buffer
        return _QUANTIZED_SHAPES[0 if widest <= 64 else 1 if widest <= 128 else 2]
    if widest <= 64:
        return PrefillShape(4, 2, 64, 2, False, 2)
    if widest <= 128:
        return PrefillShape(4, 2, 64, 1, True, 2)
    return PrefillShape(4, 1, 32, 1, False, 2)


@lru_cache(maxsize=256)
def prefill_variants_of(
    dtype: mx.Dtype,
    head_dim: int,
    value_dim: int,
    n_q_heads: int,
    n_kv_heads: int,
    block_size: int,
    softcap: bool,
    sinks: bool,
    pages: PageShape | None = None,
) -> tuple[Variant, ...]:
    """The kernel instances for a geometry; empty where MLX has no CUDA, or the GPU too little shared memory.

    Raises:
        ValueError: no kernel covers it.
    """
    gqa, rest = divmod(n_q_heads, n_kv_heads)
    why = unsupported_prefill(dtype, head_dim, value_dim, gqa, block_size)
    if rest or why:
        raise ValueError(why or f"{n_q_heads} query heads do not divide into {n_kv_heads} kv heads")
    shared = prefill_shape_for(head_dim, value_dim, pages).shared_bytes(head_dim, value_dim)
    if backend() != "cuda" or not cuda_limits().groups_together(shared):
        return ()
    body = BODY if pages is None else QUANTIZED_BODY
    return (Variant(body, "cuda", dtype, head_dim, value_dim, gqa, block_size, softcap, sinks, pages),)


def prefill_variants(
    k_pool: mx.array,
    v_pool: mx.array,
    n_q_heads: int,
    *,
    softcap: bool = False,
    sinks: bool = False,
    pages: PageShape | None = None,
) -> tuple[Variant, ...]:
    """As :func:`prefill_variants_of`, for queries over this pool."""
    dtype, n_kv_heads, block_size, head_dim, value_dim = ops.geometry_of(k_pool, v_pool, pages)
    return prefill_variants_of(dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size, softcap, sinks, pages)


def unsupported_prefill(dtype: mx.Dtype, head_dim: int, value_dim: int, gqa: int, block_size: int) -> str | None:
    """Why the kernel cannot serve this geometry, or None if it can."""
    if dtype.size != 2:
        return f"dtype {dtype} is not one of float16, bfloat16"
    if max(head_dim, value_dim) > MAX_TENSOR_HEAD_DIM:
        return f"head_dim {head_dim}/{value_dim} is more than {MAX_TENSOR_HEAD_DIM}"
    return unsupported(dtype, head_dim, value_dim, gqa, block_size)


def prefill_constants_of(variant: Variant, launch_shape: PrefillShape, *, tiles_first: bool = False) -> Constants:
    """Constants of the body. ``tiles_first``: thread groups take all tiles of a head, then the next head."""
    shared = launch_shape.shared_bytes(variant.head_dim, variant.value_dim)
    return (
        *variant.constants,
        ("SG", launch_shape.simdgroups),
        ("RT", launch_shape.row_tiles),
        ("KEYS", launch_shape.keys),
        ("BUFFERS", launch_shape.buffers),
        ("QS", launch_shape.query_shared),
        ("SOFTCAP", variant.softcap),
        ("SINKS", variant.sinks),
        ("SHARED", shared),
        # Bounds for more groups than shared memory lets run together would only take registers away.
        ("GROUPS", max(1, min(launch_shape.groups, cuda_limits().groups_together(shared)))),
        ("TILES_FIRST", tiles_first),
        *(() if variant.pages is None else variant.pages.constants),
    )


def tiles_of(counts: Sequence[int], lengths: Sequence[int], tokens: int, window: int | None) -> list[list[int]]:
    """Sequence, first row of the pack, its position, and number of tokens (up to ``tokens``) of each tile of a pack;
    those that see most come first, so that a long one is not what all the others have ended before."""
    tiles, row = [], 0
    for sequence, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for first in range(0, count, tokens):
            tiles.append([sequence, row + first, length - count + first, min(tokens, count - first)])
        row += count
    reach = window or max(lengths)
    tiles.sort(key=lambda tile: -min(tile[2] + tile[3], reach + tile[3]))
    return tiles


class PrefillLaunch(NamedTuple):
    """The launch of one step's attention, prepared once and called for each layer."""

    kernel: Callable[..., list[mx.array]]
    options: dict[str, Any]
    tables: mx.array
    tiles: mx.array
    params: mx.array

    def __call__(
        self, q: mx.array, k_pool: mx.array, v_pool: mx.array, fence: mx.array, sinks: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Attention of the pack's tokens; their keys and values are in the pool already. Checks nothing.

        Args:
            q: ``[T, n_q_heads, 1, head_dim]``, T the sum of the counts, one sequence's tokens after the other's.
            fence: the latest of these pools.
            sinks: one logit per query head, ``[n_q_heads]``.

        Returns:
            ``[T, n_q_heads, 1, value_dim]``, and the next fence. A token's bits depend on no other sequence.
        """
        logits = self.params if sinks is None else sinks.astype(mx.float32)
        out, fence = self.kernel(
            inputs=[q, k_pool, v_pool, fence, self.tables, self.tiles, self.params, logits], **self.options
        )
        return out, fence


def prepare_prefill(
    k_pool: mx.array,
    v_pool: mx.array,
    tables: mx.array,
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    n_q_heads: int,
    scale: float,
    softcap: float | None = None,
    sinks: bool = False,
    window: int | None = None,
    stride: int = 1,
    variant: Variant | None = None,
    launch_shape: PrefillShape | None = None,
    pages: PageShape | None = None,
) -> PrefillLaunch:
    """What attends for the new tokens of B sequences over pools of this geometry.

    Token i of sequence s has position ``lengths[s] - counts[s] + i`` and sees the positions up to its own that are
    greater than its own less the window, from the first multiple of ``stride`` among them on. Entries of the table that
    no token sees are not followed.

    Args:
        tables: block ids by absolute position, int32 ``[B, max_blocks]``.
        counts: new tokens of each sequence, 1 or more.
        lengths: of the sequences, the new tokens included.
        variant, launch_shape: override the choice, for checks and timings.
        pages: of pools of quantised pages.

    Raises:
        ValueError: shapes that the kernel does not cover, or that do not agree.
        KernelUnavailable: no CUDA, or the variant is off. A text that is needed for the first time in this process is
            tried first, alone; if that fails, its variant is off, with a warning.
    """
    dtype, _, block_size, _, value_dim = ops.geometry_of(k_pool, v_pool, pages)
    choices = prefill_variants(k_pool, v_pool, n_q_heads, softcap=softcap is not None, sinks=sinks, pages=pages)
    batch = len(counts)
    if tables.ndim != 2 or tables.shape[0] != batch or tables.dtype != mx.int32 or len(lengths) != batch:
        raise ValueError(
            f"tables {tables.dtype} {tables.shape}, {batch} counts and {len(lengths)} lengths do not agree"
        )
    reach = tables.shape[1] * block_size
    for count, length in zip(counts, lengths, strict=True):
        if not 1 <= count <= length <= reach:
            raise ValueError(f"{count} new tokens of a sequence of {length} do not fit a table of {reach} tokens")
    if not batch or scale <= 0 or (window is not None and window < 1) or stride < 1:
        raise ValueError(f"cannot attend for {batch} sequences with scale {scale}, window {window} and stride {stride}")
    if variant is None:
        variant = choices[0] if choices else None
        if variant is None:
            raise KernelUnavailable("the prefill kernel needs a GPU with CUDA and enough shared memory")
        if (reason := ops.why_off(variant)) is not None:
            raise KernelUnavailable(reason)
    own = launch_shape or prefill_shape_for(variant.head_dim, variant.value_dim, variant.pages)
    constants = prefill_constants_of(variant, own)
    if (failure := failure_of(Text(variant.body, constants), build_kernel)) is not None:
        ops.switch_off(variant, failure)
        warnings.warn(f"mlx_paged: {variant} is off: {failure}", stacklevel=2)
        raise KernelUnavailable(failure)
    tiles = tiles_of(counts, lengths, own.rows // variant.gqa, window)
    seen = _NO_WINDOW if window is None or window >= max(lengths) else window
    threads = 32 * own.simdgroups
    options = {
        "grid": (len(tiles) * k_pool.shape[1] * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(sum(counts), n_q_heads, 1, value_dim), (1,)],
        "output_dtypes": [dtype, mx.uint32],
    }
    params = mx.array([scale, softcap or 1.0, seen, stride if seen == window else 1], mx.float32)
    return PrefillLaunch(build_kernel(variant.body, constants), options, tables, mx.array(tiles, mx.int32), params)
