"""Builds and launches the kernels that read and write the pool in place, on Metal and CUDA.

Pool tensors are [num_blocks, n_kv_heads, block_size, head_dim], K and V apart, and are only ever *inputs*: MLX neither
donates nor copies them. A one-element uint32 fence orders their uses: every function here that touches a pool takes the
layer's latest fence and returns the next one, so MLX sees each read and write as a link of one chain.
No stock MLX op may read or write such a pool.

Nothing is compiled on import, and nothing at all where MLX has no GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

import mlx.core as mx

from .kernel_plan import MAX_QUERY_LENGTH, Plan, Variant, plan_decode, unsupported

_POOL = ["k_pool", "v_pool", "fence"]
# body -> (inputs, outputs, inputs may be strided)
_SIGNATURES: dict[str, tuple[list[str], list[str], bool]] = {
    "paged_decode": (["q", *_POOL, "tables", "ends", "starts", "params", "sinks"], ["out", "stats", "fence_out"], False),
    "merge_partitions": (["partial", "stats", "ends", "starts", "sinks"], ["out"], False),
    "write_slots": ([*_POOL, "k", "v", "slots"], ["fence_out"], True),
    "gather_blocks": ([*_POOL, "blocks", "span"], ["k_out", "v_out", "fence_out"], False),
    "copy_blocks": ([*_POOL, "pairs"], ["fence_out"], False),
}


class KernelUnavailable(RuntimeError):
    """There is no GPU, or every variant for a geometry is switched off."""


@lru_cache(maxsize=1)
def backend() -> str | None:
    """"metal", "cuda", or None where MLX has no GPU that runs kernels."""
    if mx.metal.is_available():
        return "metal"
    if mx.cuda.is_available():
        return "cuda"
    return None


@lru_cache(maxsize=32)
def kernel_text(body: str, dialect: str) -> tuple[str, str]:
    """(header, source) of a kernel in one dialect, "metal" or "cuda"."""
    folder = resources.files(__package__) / "kernels"
    prelude = "prelude.metal" if dialect == "metal" else "prelude.cuh"
    return (folder / prelude).read_text(), (folder / f"{body}.metal").read_text()


@lru_cache(maxsize=32)
def _kernel(body: str) -> Callable[..., list[mx.array]]:
    dialect = backend()
    if dialect is None:
        raise KernelUnavailable("the paged kernels need a GPU that MLX can use")
    header, source = kernel_text(body, dialect)
    inputs, outputs, strided = _SIGNATURES[body]
    # MLX keeps compiled CUDA kernels on disk under their name alone, so the name has to follow the text.
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    make: Any = mx.fast.metal_kernel if dialect == "metal" else mx.fast.cuda_kernel
    return make(
        name=f"{body}_{digest}",
        input_names=inputs,
        output_names=outputs,
        source=source,
        header=header,
        ensure_row_contiguous=not strided,
    )


@lru_cache(maxsize=64)
def _constants(*values: float) -> mx.array:
    array = mx.array(values, mx.float32)
    mx.eval(array)
    return array


def new_fence() -> mx.array:
    """The first fence of a pool's chain: uint32 [1]."""
    return mx.zeros((1,), mx.uint32)


def _geometry(k_pool: mx.array, v_pool: mx.array) -> tuple[int, int, int, int]:
    """(n_kv_heads, block_size, head_dim, value_dim)"""
    _, n_kv_heads, block_size, head_dim = k_pool.shape
    return n_kv_heads, block_size, head_dim, v_pool.shape[3]


def decode_variants(
    k_pool: mx.array, v_pool: mx.array, n_q_heads: int, *, softcap: bool = False, sinks: bool = False
) -> tuple[Variant, ...]:
    """The kernel instances that can attend over this pool, fastest first; empty where there is no GPU.

    Raises ValueError for a geometry that the kernels do not cover.
    """
    n_kv_heads, block_size, head_dim, value_dim = _geometry(k_pool, v_pool)
    return _variants(k_pool.dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size, softcap, sinks)


@lru_cache(maxsize=256)
def _variants(
    dtype: mx.Dtype,
    head_dim: int,
    value_dim: int,
    n_q_heads: int,
    n_kv_heads: int,
    block_size: int,
    softcap: bool,
    sinks: bool,
) -> tuple[Variant, ...]:
    gqa, rest = divmod(n_q_heads, n_kv_heads)
    why = unsupported(dtype, head_dim, value_dim, gqa, block_size)
    if rest or why:
        raise ValueError(why or f"{n_q_heads} query heads do not divide into {n_kv_heads} kv heads")
    dialect = backend()
    if dialect is None:
        return ()
    return (Variant("paged_decode", dialect, dtype, head_dim, value_dim, gqa, block_size, softcap, sinks),)


_switched_off: dict[Variant, str] = {}


def switch_off(variant: Variant, reason: str) -> None:
    """Never use this variant again in this process."""
    _switched_off[variant] = reason


def switched_off() -> dict[Variant, str]:
    """Variants that are off, with the reason of each."""
    return dict(_switched_off)


def paged_decode(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    start_positions: mx.array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    variant: Variant | None = None,
    plan: Plan | None = None,
) -> tuple[mx.array, mx.array]:
    """Attention of a few query positions per sequence over scattered blocks.

    q [B, n_q_heads, q_len, head_dim], q_len 1..8, dtype of the pool; block_tables int32 [B, max_blocks], block ids by
    absolute position; context_lens and start_positions int32 [B, q_len]: a query sees start <= position < context_len,
    and entries of the table outside that range are never followed. sinks: one logit per query head, [n_q_heads].
    Returns (out [B, n_q_heads, q_len, value_dim], fence). A query that sees nothing gets zeros.

    A row's bits do not depend on the other rows. `variant` and `plan` override the choice, for checks and timings.
    Raises ValueError for an unsupported shape, KernelUnavailable without a GPU or with every variant switched off.
    """
    batch, n_q_heads, q_len, head_dim = q.shape
    n_kv_heads, block_size, pool_dim, value_dim = _geometry(k_pool, v_pool)
    if not 1 <= q_len <= MAX_QUERY_LENGTH:
        raise ValueError(f"q_len {q_len} is not in 1..{MAX_QUERY_LENGTH}")
    if head_dim != pool_dim or q.dtype != k_pool.dtype:
        raise ValueError(f"queries {q.dtype} x {head_dim} do not fit a pool of {k_pool.dtype} x {pool_dim}")
    if context_lens.shape != (batch, q_len) or start_positions.shape != (batch, q_len):
        raise ValueError("context_lens and start_positions must be [B, q_len]")
    if variant is None:
        choices = _variants(
            q.dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size, softcap is not None, sinks is not None
        )
        variant = next((v for v in choices if v not in _switched_off), None)
        if variant is None:
            raise KernelUnavailable("no decode kernel is available for this geometry")
    plan = plan or plan_decode(variant)
    n_partitions = max(1, -(-block_tables.shape[1] * block_size // plan.partition))
    single = n_partitions == 1
    params = _constants(scale, softcap or 1.0)
    lines = batch * n_q_heads * q_len
    out_shape = (batch, n_q_heads, q_len, value_dim)
    out, stats, fence = _kernel(variant.body)(
        inputs=[
            q,
            k_pool,
            v_pool,
            fence,
            block_tables,
            context_lens,
            start_positions,
            params,
            params if sinks is None else sinks.astype(mx.float32),
        ],
        template=[*decode_template(variant, plan), ("SINGLE", single), ("O", q.dtype if single else mx.float32)],
        grid=(n_kv_heads * plan.simdgroups * 32, batch * q_len, n_partitions),
        threadgroup=(plan.simdgroups * 32, 1, 1),
        output_shapes=[out_shape if single else (lines, n_partitions, value_dim), (lines, n_partitions, 2), (1,)],
        output_dtypes=[q.dtype if single else mx.float32, mx.float32, mx.uint32],
    )
    if single:
        return out, fence
    simdgroups = 2 if value_dim <= 64 else 4
    (out,) = _kernel("merge_partitions")(
        inputs=[out, stats, context_lens, start_positions, params if sinks is None else sinks.astype(mx.float32)],
        template=[
            ("T", q.dtype),
            ("DV", value_dim),
            ("HEADS", n_q_heads),
            ("PART", plan.partition),
            ("SG", simdgroups),
            ("SINKS", sinks is not None),
        ],
        grid=(lines * simdgroups * 32, 1, 1),
        threadgroup=(simdgroups * 32, 1, 1),
        output_shapes=[out_shape],
        output_dtypes=[q.dtype],
    )
    return out, fence


@lru_cache(maxsize=256)
def decode_template(variant: Variant, plan: Plan) -> tuple[tuple[str, Any], ...]:
    """Template arguments of the decode body that depend on the variant and its plan."""
    return (
        ("T", variant.dtype),
        ("D", variant.head_dim),
        ("DV", variant.value_dim),
        ("BS", variant.block_size),
        ("G", variant.gqa),
        ("HS", plan.head_split),
        ("HR", plan.head_round),
        ("SG", plan.simdgroups),
        ("LPT", plan.lanes),
        ("VEC", plan.vec),
        ("U", plan.unroll),
        ("PART", plan.partition),
        ("SOFTCAP", variant.softcap),
        ("SINKS", variant.sinks),
    )


def _pool_template(k_pool: mx.array, v_pool: mx.array) -> list[tuple[str, Any]]:
    _, block_size, head_dim, value_dim = _geometry(k_pool, v_pool)
    why = unsupported(k_pool.dtype, head_dim, value_dim, 1, block_size)
    if why:
        raise ValueError(why)
    return [("T", k_pool.dtype), ("D", head_dim), ("DV", value_dim), ("BS", block_size)]


def write_slots(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, k: mx.array, v: mx.array, slots: mx.array
) -> mx.array:
    """Scatter key and value rows into the pool, in place. Returns the next fence.

    k and v: [N, n_kv_heads, head_dim] or [B, n_kv_heads, length, head_dim] with N = B * length, in any strides and of
    the pool's dtype; slots int32 or int64 [N]: block * block_size + offset of each row, row b * length + i for
    position i of sequence b; a negative slot is skipped. Two rows must not share a slot of a block that anyone reads.
    Raises ValueError for other shapes or dtypes.
    """
    if k.ndim == 3:
        k, v = k[:, :, None], v[:, :, None]
    n_kv_heads = k_pool.shape[1]
    batch, heads, length, _ = k.shape
    if heads != n_kv_heads or k.shape[3] != k_pool.shape[3] or v.shape[3] != v_pool.shape[3]:
        raise ValueError(f"rows {k.shape} / {v.shape} do not fit pools {k_pool.shape} / {v_pool.shape}")
    if k.shape[:3] != v.shape[:3] or slots.shape != (batch * length,):
        raise ValueError(f"rows {k.shape} / {v.shape} and slots {slots.shape} do not agree")
    if k.dtype != k_pool.dtype or v.dtype != k_pool.dtype or slots.dtype not in (mx.int32, mx.int64):
        raise ValueError(f"rows {k.dtype} / {v.dtype}, slots {slots.dtype} do not fit a pool of {k_pool.dtype}")
    group = next(n for n in (8, 4, 2, 1) if heads % n == 0)
    (fence,) = _kernel("write_slots")(
        inputs=[k_pool, v_pool, fence, k, v, slots],
        template=[*_pool_template(k_pool, v_pool), ("S", slots.dtype)],
        grid=(heads * 32, batch * length, 1),
        threadgroup=(group * 32, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )
    return fence


def gather_blocks(
    k_pool: mx.array, v_pool: mx.array, fence: mx.array, block_ids: mx.array | Sequence[int], start: int, length: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Copy positions [start, start + length) of one block table out of the pool.

    block_ids int32 [n], by absolute position. Returns (k [1, n_kv_heads, length, head_dim], v, fence).
    Raises ValueError if the range is empty or passes the table.
    """
    ids = block_ids if isinstance(block_ids, mx.array) else mx.array(block_ids, mx.int32)
    n_kv_heads, block_size, head_dim, value_dim = _geometry(k_pool, v_pool)
    if start < 0 or length < 1 or start + length > ids.size * block_size:
        raise ValueError(f"positions {start}..{start + length} are not in a table of {ids.size} blocks of {block_size}")
    threads = _round_up(length * (max(head_dim, value_dim) // 4), 256)
    k, v, fence = _kernel("gather_blocks")(
        inputs=[k_pool, v_pool, fence, ids, mx.array([start, length], mx.int32)],
        template=_pool_template(k_pool, v_pool),
        grid=(threads, n_kv_heads, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1, n_kv_heads, length, head_dim), (1, n_kv_heads, length, value_dim), (1,)],
        output_dtypes=[k_pool.dtype, k_pool.dtype, mx.uint32],
    )
    return k, v, fence


def copy_blocks(
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    source: Sequence[int] | mx.array,
    target: Sequence[int] | mx.array,
) -> mx.array:
    """Copy whole blocks onto others, in place (a fork). Returns the next fence.

    source and target: block ids, int32 [n] each; no block may be in both, and none twice in target.
    Raises ValueError if their lengths differ or are 0.
    """
    src = source if isinstance(source, mx.array) else mx.array(source, mx.int32)
    dst = target if isinstance(target, mx.array) else mx.array(target, mx.int32)
    if src.shape != dst.shape or src.ndim != 1 or src.size == 0:
        raise ValueError(f"cannot pair blocks of shapes {src.shape} and {dst.shape}")
    n_kv_heads, block_size, head_dim, value_dim = _geometry(k_pool, v_pool)
    packets = n_kv_heads * block_size * max(head_dim, value_dim) // 4
    (fence,) = _kernel("copy_blocks")(
        inputs=[k_pool, v_pool, fence, mx.stack([src, dst])],
        template=_pool_template(k_pool, v_pool),
        grid=(_round_up(packets, 256), src.size, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )
    return fence


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
