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
from .build import KernelText, Launch, NoKernelError, padded_for_metal, prepare
from .decode_spec import FENCE, Counters, params_of, spec_of
from .launch_shape import (
    DECODE_BODIES,
    DTYPES,
    FUSED_BODIES,
    LATENT_BODIES,
    LATENT_TENSOR_HEADS,
    MATRIX_BODIES,
    MAX_TENSOR_HEAD_DIM,
    PREFILL_BODIES,
    SHARED_BODIES,
    STATIC_SHARED,
    LaunchShape,
    Use,
    Variant,
    count_partitions,
    fits_matrices,
    groups_of,
    shape_for,
    unsupported,
)
from .quantized import PageShape
from .shared_runs import FEWEST_ROWS

_MOST_TOGETHER = 16  # most query heads per thread group of the portable body over latents
_TENSOR_RANKS = (256, 512)
_TENSOR_ROPE = 64


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
    softcap: bool = False,
    sinks: bool = False,
    pages: PageShape | None = None,
    use: Use = "decode",
) -> tuple[Variant, ...]:
    """Return the variants that can attend over a pool of this geometry, fastest first; empty without a GPU, and for
    prompts without CUDA.

    Over latents, the pool of keys holds a token's latent, and the pool of values elements rotated by its position. Its
    key is both, concatenated, and its value is the latent: a variant's head_dim is the length of both, its value_dim
    that of the latent, and its gqa is the number of query heads per thread group.

    Raises:
        ValueError: no kernel supports the geometry.
    """
    why = unsupported(use, dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size)
    if use == "latents" and (n_kv_heads != 1 or softcap or sinks or pages is not None):
        why = "latent pages must have one KV head, must not be quantised, and support neither soft cap nor sinks"
    if why:
        raise ValueError(why)
    dialect, is_quantized = backend(), pages is not None
    if dialect is None:
        return ()
    if use == "latents":
        body, dims = LATENT_BODIES[0], (head_dim + value_dim, head_dim)
        gqa = next(n for n in range(_MOST_TOGETHER, 0, -1) if n_q_heads % n == 0)
        groups = groups_of(n_q_heads // gqa, dialect)
    else:
        body, dims = DECODE_BODIES[is_quantized], (head_dim, value_dim)
        gqa = n_q_heads // n_kv_heads
        groups = groups_of(n_kv_heads, dialect)
    portable = Variant(body, dialect, dtype, *dims, gqa, block_size, softcap, sinks, pages, groups)
    has_tensor_cores = dialect == "cuda" and dtype.size == 2
    variants = [portable]
    if use == "prefill":
        variants = [portable._replace(body=PREFILL_BODIES[is_quantized])] if has_tensor_cores else []
    elif use == "latents":
        if has_tensor_cores and head_dim in _TENSOR_RANKS and value_dim == _TENSOR_ROPE:
            variants.insert(0, portable._replace(body=LATENT_BODIES[1], gqa=LATENT_TENSOR_HEADS))
    elif has_tensor_cores and portable.widest <= MAX_TENSOR_HEAD_DIM:
        variants.insert(0, portable._replace(body=FUSED_BODIES[is_quantized]))
    elif dialect == "metal" and fits_matrices(portable):
        variants.insert(0, portable._replace(body=MATRIX_BODIES[is_quantized]))
    # Checked here: MLX notices only when it instantiates the CUDA graph, and then keeps a broken one.
    return tuple(v for v in variants if dialect == "metal" or cuda_limits().groups_together(shape_for(v).shared))


def shared_variant_of(variant: Variant) -> Variant | None:
    """Return the variant for rows with common blocks whose bits equal this variant's; None if there is none."""
    if variant.body not in FUSED_BODIES:
        return None
    shared = variant._replace(body=SHARED_BODIES[variant.pages is not None])
    shape = shape_for(shared)
    fits = shape.rows >= FEWEST_ROWS and cuda_limits().groups_together(shape.shared + STATIC_SHARED)
    return shared if fits else None


switched_off: dict[Variant, str] = {}  # variants that this process must not use again, and why


def first_working(variants: Sequence[Variant]) -> Variant:
    """Return the first variant that is not switched off. Raises NoKernelError if there is none."""
    for variant in variants:
        if variant not in switched_off:
            return variant
    raise NoKernelError("; ".join(map(switched_off.__getitem__, variants)) or "no kernel serves this geometry here")


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
    if variant is None:
        shape = dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size
        found = variants_of(*shape, softcap is not None, sinks, pages, "latents" if latent else "decode")
        shared = shared_variant_of(found[0]) if found and items is not None else None
        variant = first_working(found if shared is None else (shared, *found))
    own = launch_shape or shape_for(variant, gpu_cores())
    reach = visible[0].shape[1] * block_size
    if max_visible is not None:
        reach = min(reach, max_visible + own.alignment - 1)
    n_partitions = count_partitions(reach, own)
    if variant.body not in SHARED_BODIES:
        items = None
    rows = len(visible[0]), n_q_heads, visible[1].shape[1]
    spec = spec_of(variant, own, *rows, n_partitions, 0 if items is None else len(items))
    decode, *merge = (prepare(*launch, init_value=init_value) for launch in spec.launches)
    params = params_of(scale, softcap or 1.0, float(append), float(spec.run.bit_length() - 1), float(n_partitions))
    return DecodeLaunch(decode, merge[0] if merge else None, visible, params, spec.counters, items)


@lru_cache(maxsize=256)
def pool_texts(
    dtype: mx.Dtype, head_dim: int, value_dim: int, block_size: int, pages: PageShape | None = None
) -> dict[str, KernelText]:
    """Return the kernels that "write" and "gather" blocks of any head size, in packets of 4 elements; and for quantised
    pages those that "write stored" and "gather stored" rows unchanged.

    Raises:
        ValueError: no kernel supports this geometry.
    """
    if dtype not in DTYPES or head_dim % 4 or value_dim % 4:
        raise ValueError(f"no kernel writes and gathers {dtype} of head size {head_dim}/{value_dim}")
    pool = ("T", dtype), ("D", head_dim), ("DV", value_dim), ("BS", block_size)
    if pages is None:
        return {"write": ("write_slots", pool), "gather": ("gather_blocks", pool)}
    words = ("D", pages.k.num_words), ("DV", pages.v.num_words), ("KC", pages.k.code_words), ("VC", pages.v.code_words)
    values, rows = (*pool, *pages.constants), (("T", mx.uint32), *words, ("BS", block_size))
    texts = {"write": ("quantized_write", values), "gather": ("quantized_gather", values)}
    return {**texts, "write stored": ("write_rows", rows), "gather stored": ("gather_rows", rows)}


def _pool_text(name: str, k_pool: mx.array, v_pool: mx.array, pages: PageShape | None, stored: bool) -> KernelText:
    dtype, _, block_size, *dims = geometry_of(k_pool, v_pool, pages)
    return pool_texts(dtype, *dims, block_size, pages)[f"{name} stored" if stored else name]


# Takes pools of keys and of values, their fence, and rows of keys and values ``[B, n_kv_heads, length, head_dim]`` in
# any strides. Returns the next fence.
WriteLaunch = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array], mx.array]


def prepare_write(
    k_pool: mx.array, v_pool: mx.array, slots: mx.array, pages: PageShape | None = None, *, stored: bool = False
) -> WriteLaunch:
    """Prepare a launch that scatters rows of keys and values into pools of this geometry, in place.

    Args:
        slots: int32 ``[B * length]``: block * block_size + offset of each row, row b * length + i for
            position i of sequence b; a negative slot is skipped. Two rows must not share a slot of a block that anyone
            reads.
        pages: form of a pool of quantised pages; rows are quantised as MLX does on this device.
        stored: the rows are quantised, uint32 ``[B, n_kv_heads, length, num_words]``, and written unchanged.
    """
    heads = k_pool.shape[1]
    simdgroups = slots.size * heads * (1 if pages is None else 2)  # of pages, keys and values have their own
    threads = next(n for n in (8, 4, 2, 1) if heads % n == 0) * 32
    launch = prepare(_pool_text("write", k_pool, v_pool, pages, stored), (simdgroups * 32, 1, 1), threads, [FENCE])
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
    span = mx.array([start, length], mx.int32)
    heads = k_pool.shape[1]
    text = _pool_text("gather", k_pool, v_pool, pages, stored)
    known = dict(text[1])
    threads = length * (max(known["D"], known["DV"]) // (1 if stored else 4))  # each copies a word, or 4 elements
    grid = -(-threads // 256) * 256, heads, 1 if pages is None else 2
    outputs = [((1, heads, length, known[size]), known["T"]) for size in ("D", "DV")]
    launch = prepare(text, grid, 256, [*outputs, FENCE])
    return lambda k_pool, v_pool, fence: tuple(launch([k_pool, v_pool, fence, ids, span]))  # type: ignore[return-value]


def copy_blocks(
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    source: Sequence[int],
    target: Sequence[int],
    pages: PageShape | None = None,
) -> mx.array:
    """Copy whole blocks onto others (a fork), by a gather and a write. Returns the next fence.

    source and target: block ids, as many of each; no block may be in both, and none twice in target.
    """
    block_size, stored = k_pool.shape[2], pages is not None
    slots = (np.array(target, np.int32)[:, None] * block_size + np.arange(block_size, dtype=np.int32)).reshape(-1)
    gather = prepare_gather(k_pool, v_pool, source, 0, len(source) * block_size, pages, stored=stored)
    k, v, fence = gather(k_pool, v_pool, fence)
    return prepare_write(k_pool, v_pool, mx.array(slots), pages, stored=stored)(k_pool, v_pool, fence, k, v)
