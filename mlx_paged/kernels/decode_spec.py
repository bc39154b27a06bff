"""Launches of decode steps: constants of kernels and arguments of launches, by the shapes of a call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from .availability import cuda_limits
from .build import Constants
from .launch_shape import (
    DTYPES,
    FUSED_BODIES,
    LATENT_BODIES,
    MATRIX_BODIES,
    SHARED_BODIES,
    LaunchShape,
    Variant,
    latent_run,
    run_length,
)

_ALL_TOKENS = 1 << 30  # more than a row has


class DecodeSpec(NamedTuple):
    """Constants and keyword arguments of the launches of one call shape, computed once.

    Attributes:
        counters: number of counters that the kernel needs to merge partitions itself.
        run: partitions per thread group; for latent_decode_tensor, tokens.
    """

    decode_constants: Constants
    decode: dict[str, Any]
    merge_constants: Constants = ()
    merge: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    merge_body: str = "merge_partitions"
    counters: int = 0
    run: int = 1

    def texts(self, variant: Variant) -> list[tuple[str, Constants]]:
        """Return (body, constants) of the kernels launched."""
        texts = [(variant.body, self.decode_constants)]
        return [*texts, (self.merge_body, self.merge_constants)] if self.merge else texts


@lru_cache(maxsize=1024)
def spec_of(
    variant: Variant,
    launch_shape: LaunchShape,
    batch: int,
    n_q_heads: int,
    q_len: int,
    n_partitions: int,
    n_items: int = 0,
) -> DecodeSpec:
    """Return the spec of a call. ``n_items``: number of thread groups per KV head, for a kernel for common blocks."""
    rows = batch * q_len
    cores = cuda_limits().multiprocessors
    if variant.body in FUSED_BODIES:
        counters = rows * (n_q_heads // variant.gqa)
        run = launch_shape.run or run_length(counters * n_partitions, cores, launch_shape.groups)
        spec = _fused_spec(variant, launch_shape, batch, n_q_heads, q_len, -(-n_partitions // run))
        spec = spec._replace(counters=counters, run=run)
    elif variant.body in SHARED_BODIES:
        spec = _decode_spec(variant, launch_shape, batch, n_q_heads, q_len, max(n_partitions, 2))
        spec = _shared_spec(spec, variant, launch_shape, n_items)
    elif variant.body == LATENT_BODIES[1]:
        run = launch_shape.run or latent_run(rows * -(-n_q_heads // variant.gqa), n_partitions, cores)
        n_partitions, size = -(-n_partitions // run), run * launch_shape.partition
        own = launch_shape._replace(partition=size, span=_ALL_TOKENS // size)
        spec = _decode_spec(variant, own, batch, n_q_heads, q_len, n_partitions)._replace(run=size)
    else:
        spec = _decode_spec(variant, launch_shape, batch, n_q_heads, q_len, n_partitions)
    return spec


def _decode_spec(
    variant: Variant, launch_shape: LaunchShape, batch: int, n_q_heads: int, q_len: int, n_partitions: int
) -> DecodeSpec:
    single = n_partitions == 1
    value_dim = variant.value_dim
    lines = batch * n_q_heads * q_len
    out_shape = (batch, n_q_heads, q_len, value_dim)
    out_dtype = variant.dtype if single else mx.float32
    decode_constants = (*decode_constants_of(variant, launch_shape), ("SINGLE", single), ("O", out_dtype))
    decode = {
        "grid": (-(-n_q_heads // variant.gqa) * launch_shape.simdgroups * 32, batch * q_len, n_partitions),
        "threadgroup": (launch_shape.simdgroups * 32, 1, 1),
        "output_shapes": [
            out_shape if single else (batch, n_q_heads, q_len, n_partitions * value_dim),
            (lines, n_partitions, 2),
            (1,),
        ],
        "output_dtypes": [out_dtype, mx.float32, mx.uint32],
    }
    if single:
        return DecodeSpec(decode_constants, decode)
    simdgroups = 2 if value_dim <= 64 else 4
    merge_constants = (
        ("T", variant.dtype),
        ("DV", value_dim),
        ("SG", simdgroups),
        ("SINKS", variant.sinks),
        *_partition_constants(launch_shape),
    )
    merge = {
        "grid": (lines * simdgroups * 32, 1, 1),
        "threadgroup": (simdgroups * 32, 1, 1),
        "output_shapes": [out_shape],
        "output_dtypes": [variant.dtype],
    }
    return DecodeSpec(decode_constants, decode, merge_constants, merge)


def _fused_spec(
    variant: Variant, launch_shape: LaunchShape, batch: int, n_q_heads: int, q_len: int, n_runs: int
) -> DecodeSpec:
    """Return the spec of a kernel that merges its partial results itself."""
    lines = batch * n_q_heads * q_len
    partial = lines * n_runs * (variant.value_dim + 2) if n_runs > 1 else 1
    decode = {
        "grid": (n_q_heads // variant.gqa * launch_shape.simdgroups * 32, batch * q_len, n_runs),
        "threadgroup": (launch_shape.simdgroups * 32, 1, 1),
        "output_shapes": [(batch, n_q_heads, q_len, variant.value_dim), (partial,), (1,)],
        "output_dtypes": [variant.dtype, mx.float32, mx.uint32],
    }
    return DecodeSpec((*decode_constants_of(variant, launch_shape), ("GROUPS", launch_shape.groups)), decode)


def _shared_spec(spec: DecodeSpec, variant: Variant, launch_shape: LaunchShape, n_items: int) -> DecodeSpec:
    """Return the spec of a kernel for common blocks: one thread group per item and KV head, and the merge after it."""
    decode = {**spec.decode, "grid": (spec.decode["grid"][0], n_items, 1)}
    cut = (
        *(("ROWS", launch_shape.rows), ("KEYS", launch_shape.keys), ("STAGES", launch_shape.stages)),
        ("GROUPS", launch_shape.groups),
        ("SHARED", launch_shape.shared_bytes(variant.head_dim, variant.value_dim)),
    )
    # A thread merges four values.
    simdgroups = -(-variant.value_dim // 128)
    lines = spec.decode["output_shapes"][1][0]
    merge_constants = tuple((name, simdgroups if name == "SG" else value) for name, value in spec.merge_constants)
    merge = {**spec.merge, "grid": (lines * simdgroups * 32, 1, 1), "threadgroup": (simdgroups * 32, 1, 1)}
    constants = (*spec.decode_constants, *cut)
    return DecodeSpec(constants, decode, merge_constants, merge, "join_partitions")


def _partition_constants(launch_shape: LaunchShape) -> Constants:
    return (("PART", launch_shape.partition), ("SPAN", launch_shape.span), ("FIRST", launch_shape.first))


def decode_constants_of(variant: Variant, launch_shape: LaunchShape) -> Constants:
    """Return the constants of the decode body that depend on the variant and its launch shape."""
    simdgroups, keys = ("SG", launch_shape.simdgroups), ("KEYS", launch_shape.keys)
    if variant.body == LATENT_BODIES[1]:
        shared = ("SHARED", launch_shape.latent_bytes(variant.head_dim))
        return (*variant.constants, simdgroups, keys, ("SINKS", variant.sinks), shared, ("GROUPS", launch_shape.groups))
    own: Constants = (simdgroups, keys)
    if variant.body not in MATRIX_BODIES:
        own = (
            *(("HS", launch_shape.head_split), ("HR", launch_shape.head_round), simdgroups),
            *(("LPT", launch_shape.lanes), ("VEC", launch_shape.vec), ("U", launch_shape.unroll)),
        )
    return (
        *variant.constants,
        *own,
        ("SOFTCAP", variant.softcap),
        ("SINKS", variant.sinks),
        *_partition_constants(launch_shape),
        *(() if variant.pages is None else variant.pages.constants),
    )


def pool_constants_of(dtype: mx.Dtype, head_dim: int, value_dim: int, block_size: int) -> Constants:
    """Return the constants of the kernels that write, gather and copy blocks: of any head size, in packets of 4.

    Raises:
        ValueError: they do not support this geometry.
    """
    is_packed = dtype == mx.uint32  # words of quantised pages
    if not is_packed and (dtype not in DTYPES or head_dim % 4 or value_dim % 4):
        raise ValueError(f"no kernel writes and gathers {dtype} of head size {head_dim}/{value_dim}")
    return (("T", dtype), ("D", head_dim), ("DV", value_dim), ("BS", block_size))


@lru_cache(maxsize=64)
def params_of(*values: float) -> mx.array:
    """Return a cached float32 array of the values."""
    array = mx.array(values, mx.float32)
    mx.eval(array)
    return array


class Counters:
    """Zeros that all launches over one layer's blocks share to count arrivals. The fence lets one launch at a time use
    them, and each launch resets them to zero."""

    def __init__(self) -> None:
        self._zeros: mx.array | None = None

    def at_least(self, number: int) -> mx.array:
        """Return an array of at least ``number`` zeros."""
        if self._zeros is None or self._zeros.size < number:
            self._zeros = mx.zeros((max(1024, 2 * number),), mx.uint32)
            mx.eval(self._zeros)
        return self._zeros
