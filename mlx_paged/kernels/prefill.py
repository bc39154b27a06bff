"""Prefill attention over block tables: one launch for all chunks of a pack.

Sequences may have any lengths: a launch takes a list of tiles, each some tokens of one sequence, and nothing is
prepared or compiled per length. Keys and values of prefixes and new tokens are read in place. The kernels use CUDA's
tensor cores; on Metal, prompts take MLX's attention (docs/adr/0063).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from . import ops
from .availability import backend, cuda_limits
from .build import Constants, Launch, NoKernelError, build_kernel, prepared
from .decode_spec import params_of
from .launch_shape import MAX_TENSOR_HEAD_DIM, Variant, unsupported
from .quantized import PageShape

BODIES = BODY, QUANTIZED_BODY = "paged_prefill_tensor", "quantized_prefill_tensor"
# No window: more than any position.
_NO_WINDOW = 1 << 30
_PADDING = 8  # extra elements of a row in shared memory


class PrefillShape(NamedTuple):
    """Launch shape of the kernels. A row is one query head of one token.

    Attributes:
        simdgroups: simdgroups of a thread group.
        row_tiles: tiles of 16 rows that a simdgroup takes.
        keys: tokens read at a time, a power of two of at least 16.
        buffers: 1: keys are read while values are used; 2: both are read one iteration ahead.
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
        """Rows of a tile."""
        return 16 * self.simdgroups * self.row_tiles

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Return the shared memory of a thread group, in bytes."""
        stage = self.keys * (head_dim + value_dim + 2 * _PADDING)
        return 2 * (self.buffers * stage + self.query_shared * self.rows * (head_dim + _PADDING))


# By widest head: over pages that are not quantised, and over codes, which are staged in shared memory, so that values
# have one buffer.
_SHAPES = {
    64: (PrefillShape(4, 2, 64, 2, False, 2), PrefillShape(4, 2, 64, 1, False, 2)),
    128: (PrefillShape(4, 2, 64, 1, True, 2), PrefillShape(4, 2, 64, 1, True, 2)),
    256: (PrefillShape(4, 1, 32, 1, False, 2), PrefillShape(4, 1, 32, 1, True, 2)),
}


def shape_of(variant: Variant) -> PrefillShape:
    """Return the launch shape of a variant."""
    widest = max(variant.head_dim, variant.value_dim)
    return next(shapes[variant.pages is not None] for most, shapes in _SHAPES.items() if widest <= most)


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
    """Return the variants for a geometry; empty without CUDA, or if the GPU has too little shared memory.

    Raises:
        ValueError: no kernel supports the geometry.
    """
    gqa, rest = divmod(n_q_heads, n_kv_heads)
    why = unsupported_prefill(dtype, head_dim, value_dim, gqa, block_size)
    if rest or why:
        raise ValueError(why or f"{n_q_heads} query heads are not a multiple of {n_kv_heads} KV heads")
    body = BODY if pages is None else QUANTIZED_BODY
    variant = Variant(body, "cuda", dtype, head_dim, value_dim, gqa, block_size, softcap, sinks, pages)
    shared = shape_of(variant).shared_bytes(head_dim, value_dim)
    return (variant,) if backend() == "cuda" and cuda_limits().groups_together(shared) else ()


def unsupported_prefill(dtype: mx.Dtype, head_dim: int, value_dim: int, gqa: int, block_size: int) -> str | None:
    """Return why the kernel cannot serve this geometry, or None if it can."""
    if dtype.size != 2:
        return f"dtype {dtype} is not one of float16, bfloat16"
    if max(head_dim, value_dim) > MAX_TENSOR_HEAD_DIM:
        return f"head_dim {head_dim}/{value_dim} is more than {MAX_TENSOR_HEAD_DIM}"
    return unsupported(dtype, head_dim, value_dim, gqa, block_size)


def prefill_constants_of(variant: Variant, launch_shape: PrefillShape) -> Constants:
    """Return the constants of the body."""
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
        # A bound of more groups than shared memory allows together would only cost registers.
        ("GROUPS", max(1, min(launch_shape.groups, cuda_limits().groups_together(shared)))),
        *(() if variant.pages is None else variant.pages.constants),
    )


def tiles_of(counts: Sequence[int], lengths: Sequence[int], tokens: int, window: int | None) -> list[list[int]]:
    """Return [sequence, first row in the pack, its position, number of tokens (up to ``tokens``)] of each tile of a
    pack. Tiles that see the most come first, so that no long tile runs last, alone."""
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

    launch: Launch
    tables: mx.array
    tiles: mx.array
    params: mx.array

    def __call__(
        self, q: mx.array, k_pool: mx.array, v_pool: mx.array, fence: mx.array, sinks: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Attend for the pack's tokens, whose keys and values are in the pool already. Checks nothing.

        Args:
            q: ``[T, n_q_heads, 1, head_dim]``; T is the sum of the counts, sequence after sequence.
            fence: the latest fence of these pools.
            sinks: one logit per query head, ``[n_q_heads]``.

        Returns:
            ``[T, n_q_heads, 1, value_dim]``, and the next fence. A token's bits depend on no other sequence.
        """
        logits = self.params if sinks is None else sinks.astype(mx.float32)
        out, fence = self.launch([q, k_pool, v_pool, fence, self.tables, self.tiles, self.params, logits])
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
    """Prepare the launch for the new tokens of B sequences over pools of this geometry.

    Token i of sequence s has position ``p = lengths[s] - counts[s] + i``. It sees the positions from ``p - window + 1``
    to ``p``, starting with the first multiple of ``stride`` among them. Table entries that no token sees are not
    followed.

    Args:
        tables: block ids by absolute position, int32 ``[B, max_blocks]``.
        counts: new tokens of each sequence, 1 or more.
        lengths: tokens of each sequence, the new ones included.
        variant, launch_shape: override the choice, for checks and timings.
        pages: form of pools of quantised pages.

    Raises:
        ValueError: the geometry is not supported.
        NoKernelError: no GPU, or the variant is off.
    """
    dtype, n_kv_heads, block_size, head_dim, value_dim = ops.geometry_of(k_pool, v_pool, pages)
    choices = prefill_variants_of(
        dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size, softcap is not None, sinks, pages
    )
    if variant is None:
        variant = choices[0] if choices else None
        if variant is None:
            raise NoKernelError("no prefill kernel supports these pages on this GPU")
        if variant in ops.switched_off:
            raise NoKernelError(ops.switched_off[variant])
    own = launch_shape or shape_of(variant)
    constants = prefill_constants_of(variant, own)
    tiles = tiles_of(counts, lengths, own.rows // variant.gqa, window)
    seen = _NO_WINDOW if window is None or window >= max(lengths) else window
    threads = 32 * own.simdgroups
    options = {
        "grid": (len(tiles) * k_pool.shape[1] * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(sum(counts), n_q_heads, 1, value_dim), (1,)],
        "output_dtypes": [dtype, mx.uint32],
    }
    params = params_of(scale, softcap or 1.0, seen, stride if seen == window else 1)
    launch = prepared(build_kernel(variant.body, constants), options)
    return PrefillLaunch(launch, tables, mx.array(tiles, mx.int32), params)
