"""Builds and launches the kernels that read and write the pool in place, on Metal and CUDA.

Pool tensors are [num_blocks, n_kv_heads, block_size, head_dim], K and V apart, and are only ever *inputs*: MLX neither
donates nor copies them. A one-element uint32 fence orders their uses: every function here that touches a pool takes the
layer's latest fence and returns the next one, so MLX sees each read and write as a link of one chain.
No stock MLX op may read or write such a pool.

Pools of quantised pages (``pages`` gives their form) are uint32 and have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .availability import backend, cuda_limits, gpu_cores
from .build import Constants, Launch, NoKernelError, build_kernel, padded_for_metal, prepared
from .decode_spec import Counters, params_of, pool_constants_of, spec_of
from .launch_shape import (
    LATENT_BODIES,
    LATENT_TENSOR_HEADS,
    MATRIX_BODIES,
    MAX_TENSOR_HEAD_DIM,
    SHARED_BODIES,
    SHARED_BODY_OF,
    STATIC_SHARED,
    LaunchShape,
    Variant,
    count_partitions,
    groups_of,
    shape_for,
    unsupported,
    unsupported_matrix,
)
from .quantized import PageShape, page_constants, row_constants
from .shared_runs import FEWEST_ROWS

MAX_LATENT_HEADS = 256
_MOST_TOGETHER = 16  # most query heads per thread group of the portable body over latents
_TENSOR_RANKS = (256, 512)
_TENSOR_ROPE = 64


def unsupported_latent(dtype: mx.Dtype, rank: int, rope: int, n_q_heads: int, block_size: int) -> str | None:
    """Return why the kernels cannot attend over latents of this geometry, or None if they can."""
    if not 1 <= n_q_heads <= MAX_LATENT_HEADS:
        return f"{n_q_heads} query heads over one latent are not in 1..{MAX_LATENT_HEADS}"
    return unsupported(dtype, rank, rope, 1, block_size)


@lru_cache(maxsize=256)
def latent_variants_of(
    dtype: mx.Dtype,
    rank: int,
    rope: int,
    n_q_heads: int,
    n_kv_heads: int,
    block_size: int,
    softcap: bool = False,
    sinks: bool = False,
    pages: PageShape | None = None,
) -> tuple[Variant, ...]:
    """Return the variants for latents, fastest first; empty if MLX has no GPU.

    A token has one head: a latent of ``rank`` elements in the pool of keys, and ``rope`` elements rotated by its
    position in the pool of values. Its key is both, concatenated, and its value is the latent: a variant's head_dim is
    rank + rope, its value_dim is rank, and its gqa is the number of query heads per thread group.

    Raises:
        ValueError: no kernel supports the geometry.
    """
    why = unsupported_latent(dtype, rank, rope, n_q_heads, block_size)
    if n_kv_heads != 1 or softcap or sinks or pages is not None:
        why = "latent pages must have one KV head, must not be quantised, and support neither soft cap nor sinks"
    if why:
        raise ValueError(why)
    dialect = backend()
    if dialect is None:
        return ()
    portable, tensor = LATENT_BODIES
    together = next(n for n in range(_MOST_TOGETHER, 0, -1) if n_q_heads % n == 0)
    groups = groups_of(n_q_heads // together, dialect)
    variants = [Variant(portable, dialect, dtype, rank + rope, rank, together, block_size, groups=groups)]
    if dialect == "cuda" and dtype.size == 2 and rank in _TENSOR_RANKS and rope == _TENSOR_ROPE:
        wide = variants[0]._replace(body=tensor, gqa=LATENT_TENSOR_HEADS)
        # Checked here: MLX notices only when it instantiates the CUDA graph, and then keeps a broken one.
        if cuda_limits().groups_together(shape_for(wide).latent_bytes(wide.head_dim)):
            variants.insert(0, wide)
    return tuple(variants)


def new_fence() -> mx.array:
    """Return the first fence of a pool's chain: uint32 [1]."""
    return mx.zeros((1,), mx.uint32)


def geometry_of(
    k_pool: mx.array, v_pool: mx.array, pages: PageShape | None = None
) -> tuple[mx.Dtype, int, int, int, int]:
    """Return (dtype, n_kv_heads, block_size, head_dim, value_dim) of a pool."""
    _, n_kv_heads, block_size, head_dim = k_pool.shape
    if pages is not None:
        return pages.dtype, n_kv_heads, block_size, pages.k.dim, pages.v.dim
    return k_pool.dtype, n_kv_heads, block_size, head_dim, v_pool.shape[3]


@lru_cache(maxsize=256)
def variants_of(
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
    """Return the variants that can attend over a pool of this geometry, fastest first; empty without a GPU.

    Raises:
        ValueError: no kernel supports the geometry.
    """
    gqa, rest = divmod(n_q_heads, n_kv_heads)
    why = unsupported(dtype, head_dim, value_dim, gqa, block_size)
    if rest or why:
        raise ValueError(why or f"{n_q_heads} query heads are not a multiple of {n_kv_heads} KV heads")
    dialect = backend()
    if dialect is None:
        return ()
    bodies = ["paged_decode" if pages is None else "quantized_decode"]
    if dialect == "cuda" and dtype.size == 2 and max(head_dim, value_dim) <= MAX_TENSOR_HEAD_DIM:
        bodies.insert(0, "paged_decode_tensor" if pages is None else "quantized_decode_tensor")
    groups = groups_of(n_kv_heads, dialect)
    geometry = (dialect, dtype, head_dim, value_dim, gqa, block_size, softcap, sinks, pages, groups)
    matrix = Variant(MATRIX_BODIES[pages is not None], *geometry)
    if dialect == "metal" and unsupported_matrix(matrix) is None:
        bodies.insert(0, matrix.body)
    return tuple(Variant(body, *geometry) for body in bodies)


def shared_variant_of(variant: Variant) -> Variant | None:
    """Return the variant for rows with common blocks whose bits equal this variant's; None if there is none."""
    if variant.body not in SHARED_BODY_OF:
        return None
    shared = variant._replace(body=SHARED_BODY_OF[variant.body])
    shape = shape_for(shared)
    needed = shape.shared_bytes(variant.head_dim, variant.value_dim) + STATIC_SHARED
    return shared if shape.rows >= FEWEST_ROWS and cuda_limits().groups_together(needed) else None


switched_off: dict[Variant, str] = {}  # variants that this process must not use again, and why


class DecodeLaunch(NamedTuple):
    """The launches of one decode step, prepared once and called for each layer."""

    decode: Launch
    merge: Launch | None
    visible: tuple[mx.array, mx.array, mx.array]
    params: mx.array
    counters: int = 0  # number of counters that the kernel needs to merge partitions itself
    items: mx.array | None = None  # rows that read blocks together, if the kernel is for common blocks

    def __call__(
        self,
        q: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        fence: mx.array,
        sinks: mx.array | None = None,
        k_new: mx.array | None = None,
        v_new: mx.array | None = None,
        counters: Counters | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Attend for a few query positions per sequence over scattered blocks. Checks nothing.

        Args:
            q: ``[B, n_q_heads, q_len, head_dim]``, q_len 1 to 8, in the pool's dtype.
            k_pool, v_pool, fence: the pools, and their latest fence.
            sinks: one logit per query head, ``[n_q_heads]``.
            k_new, v_new: ``[B, n_kv_heads, 1, head_dim]``, the tokens to append, if the launch was prepared for them.
            counters: those of the pools' layer, to make none for this launch alone.

        Returns:
            ``[B, n_q_heads, q_len, value_dim]``, zeros for a query that sees nothing; and the next fence. A row's bits
            do not depend on the other rows.
        """
        logits = self.params if sinks is None else sinks.astype(mx.float32)
        tables, ends, starts = self.visible
        k_new = q if k_new is None else k_new  # a placeholder, never read
        v_new = q if v_new is None else v_new
        inputs = [q, k_pool, v_pool, fence, k_new, v_new, tables, ends, starts, self.params, logits]
        if self.counters:
            inputs.append((counters or Counters()).at_least(self.counters))
        if self.items is not None:
            inputs.append(self.items)
        out, stats, fence = self.decode(inputs)
        if self.merge is not None:
            (out,) = self.merge([out, stats, ends, starts, logits])
        return out, fence


def prepare_decode(
    k_pool: mx.array,
    v_pool: mx.array,
    visible: tuple[mx.array, mx.array, mx.array],
    *,
    n_q_heads: int,
    scale: float,
    softcap: float | None = None,
    sinks: bool = False,
    max_visible: int | None = None,
    append: bool = False,
    variant: Variant | None = None,
    launch_shape: LaunchShape | None = None,
    pages: PageShape | None = None,
    latent: bool = False,
    init_value: float | None = None,
    items: mx.array | None = None,
) -> DecodeLaunch:
    """Prepare the launches of a decode step over pools of this geometry.

    Args:
        visible: block tables int32 ``[B, max_blocks]``, ids by absolute position; ends and starts int32 ``[B, q_len]``,
            on Metal padded (:func:`.build.padded_for_metal`). A query sees start <= position < end, and entries of the
            table outside that range are never followed.
        sinks: whether the launches are given sinks.
        max_visible: no query sees more tokens than this (a window), which saves empty partitions.
        append: the launches are given the tokens at ``ends - 1`` (q_len 1), which are not in the pool yet: they write
            them to their slots, quantised if the pages are, and attend to them.
        variant, launch_shape: override the choice, for checks and timings.
        pages: form of a pool of quantised pages.
        latent: pools hold latents and rotated parts; queries are as long as both.
        init_value: what outputs hold before the launches (Metal), for checks.
        items: which rows read blocks together (:mod:`.shared_runs`), for q_len 1.

    Raises:
        NoKernelError: no GPU, or every variant is off.
    """
    dtype, n_kv_heads, block_size, head_dim, value_dim = geometry_of(k_pool, v_pool, pages)
    choices: tuple[Variant, ...] = (variant,) if variant is not None else ()
    if variant is None:
        choices = (latent_variants_of if latent else variants_of)(
            dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size, softcap is not None, sinks, pages
        )
        shared = shared_variant_of(choices[0]) if choices and items is not None else None
        if shared is not None:
            choices = (shared, *choices)
    reach = visible[0].shape[1] * block_size
    batch, q_len = len(visible[0]), visible[1].shape[1]
    reasons = []
    for choice in choices:
        if choice in switched_off and variant is None:
            reasons.append(switched_off[choice])
            continue
        own = launch_shape or shape_for(choice, gpu_cores())
        seen = reach if max_visible is None else min(reach, max_visible + own.alignment - 1)
        own_items = items if choice.body in SHARED_BODIES else None
        n_items = 0 if own_items is None else len(own_items)
        n_partitions = count_partitions(seen, own)
        spec = spec_of(choice, own, batch, n_q_heads, q_len, n_partitions, n_items)
        filled, merge = {} if init_value is None else {"init_value": init_value}, None
        decode = prepared(build_kernel(choice.body, spec.decode_constants), {**spec.decode, **filled})
        if spec.merge:
            merge = prepared(build_kernel(spec.merge_body, spec.merge_constants), {**spec.merge, **filled})
        run_shift = spec.run.bit_length() - 1
        params = params_of(scale, softcap or 1.0, float(append), float(run_shift), float(n_partitions))
        return DecodeLaunch(decode, merge, visible, params, spec.counters, own_items)
    raise NoKernelError("; ".join(reasons) or "no decode kernel is available for this geometry")


# Kernels that write and gather: of a pool that is not quantised, of quantised pages, and of their rows as they are.
_WRITES = ("write_slots", "quantized_write", "write_rows")
_GATHERS = ("gather_blocks", "quantized_gather", "gather_rows")


def _pool_text(
    bodies: tuple[str, str, str], k_pool: mx.array, v_pool: mx.array, pages: PageShape | None, stored: bool
) -> tuple[str, Constants]:
    """Return the body and the constants of a kernel that writes or gathers."""
    block_size = k_pool.shape[2]
    if pages is None:
        return bodies[0], pool_constants_of(k_pool.dtype, k_pool.shape[3], v_pool.shape[3], block_size)
    if stored:
        return bodies[2], row_constants(pages, block_size)
    return bodies[1], page_constants(pages, block_size)


# Takes pools of keys and of values, their fence, and rows of keys and values ``[B, n_kv_heads, length, head_dim]`` in
# any strides. Returns the next fence.
WriteLaunch = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array], mx.array]


def prepare_write(
    k_pool: mx.array, v_pool: mx.array, slots: mx.array, pages: PageShape | None = None, *, stored: bool = False
) -> WriteLaunch:
    """Prepare a launch that scatters rows of keys and values into pools of this geometry, in place.

    Args:
        slots: int32 or int64 ``[B * length]``: block * block_size + offset of each row, row b * length + i for
            position i of sequence b; a negative slot is skipped. Two rows must not share a slot of a block that anyone
            reads.
        pages: form of a pool of quantised pages; rows are quantised as MLX does on this device.
        stored: the rows are quantised, uint32 ``[B, n_kv_heads, length, num_words]``, and written unchanged.
    """
    body, constants = _pool_text(_WRITES, k_pool, v_pool, pages, stored)
    heads = k_pool.shape[1]
    simdgroups = slots.size * heads * (1 if pages is None else 2)  # of pages, keys and values have their own
    options = {
        "grid": (simdgroups * 32, 1, 1),
        "threadgroup": (next(n for n in (8, 4, 2, 1) if heads % n == 0) * 32, 1, 1),
        "output_shapes": [(1,)],
        "output_dtypes": [mx.uint32],
    }
    launch = prepared(build_kernel(body, (*constants, ("S", slots.dtype))), options)
    return lambda k_pool, v_pool, fence, k, v: launch([k_pool, v_pool, fence, k, v, slots])[0]


# Takes pools of keys and of values, and their fence. Returns keys, values, and the next fence.
GatherLaunch = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]


def prepare_gather(
    k_pool: mx.array,
    v_pool: mx.array,
    block_ids: Sequence[int],
    start: int,
    length: int,
    pages: PageShape | None = None,
    *,
    stored: bool = False,
) -> GatherLaunch:
    """Prepare a launch that copies positions ``start .. start + length - 1`` of one block table out of the pool.

    Args:
        block_ids: ids by absolute position.
        pages: form of a pool of quantised pages, which are dequantised as ``mx.dequantize`` does on this device.
        stored: they are not dequantised: rows are uint32 ``[1, n_kv_heads, length, num_words]``.

    Returns:
        A function of (k_pool, v_pool, fence) that returns k ``[1, n_kv_heads, length, head_dim]``, v, and the next
        fence.
    """
    ids = mx.array(padded_for_metal(np.array(block_ids, np.int32)))
    heads = k_pool.shape[1]
    body, constants = _pool_text(_GATHERS, k_pool, v_pool, pages, stored)
    known = dict(constants)
    sizes, dtype = (known["D"], known["DV"]), known["T"]
    threads = length * (max(sizes) // (1 if stored else 4))  # a thread copies a word, or a packet of 4 elements
    options = {
        "grid": (_round_up(threads, 256), heads, 1 if pages is None else 2),
        "threadgroup": (256, 1, 1),
        "output_shapes": [*((1, heads, length, size) for size in sizes), (1,)],
        "output_dtypes": [dtype, dtype, mx.uint32],
    }
    launch, span = prepared(build_kernel(body, constants), options), mx.array([start, length], mx.int32)
    return lambda k_pool, v_pool, fence: tuple(launch([k_pool, v_pool, fence, ids, span]))  # type: ignore[return-value]


def copy_blocks(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, source: Sequence[int], target: Sequence[int]
) -> mx.array:
    """Copy whole blocks onto others, in place (a fork). Returns the next fence.

    source and target: block ids, as many of each; no block may be in both, and none twice in target.
    """
    dtype, n_kv_heads, block_size, head_dim, value_dim = geometry_of(k_pool, v_pool)
    packets = n_kv_heads * block_size * max(head_dim, value_dim) // 4
    pairs = padded_for_metal(np.array([source, target], np.int32).T).T
    (fence,) = build_kernel("copy_blocks", pool_constants_of(dtype, head_dim, value_dim, block_size))(
        inputs=[k_pool, v_pool, fence, mx.array(np.ascontiguousarray(pairs))],
        grid=(_round_up(packets, 256), len(source), 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )
    return fence


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
