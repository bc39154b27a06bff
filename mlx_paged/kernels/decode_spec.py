"""Launches of decode steps: texts, grids and outputs, by the shapes of a call."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .availability import cuda_limits
from .build import KernelText, Output
from .launch_shape import (
    FUSED_BODIES,
    LATENT_BODIES,
    SHARED_BODIES,
    LaunchShape,
    Variant,
    constants_of,
    latent_run,
    run_length,
)

FENCE: Output = (1,), mx.uint32
_ALL_TOKENS = 1 << 30  # more than a row has


class DecodeSpec(NamedTuple):
    """The launches of one call shape, computed once.

    Attributes:
        launches: arguments of :func:`.build.prepare`: of the kernel, and of the one that merges partitions after it, if
            there are several and it does not merge them itself.
        counters: number of counters that the kernel needs to merge partitions itself.
        run: partitions per thread group; for latent_decode_tensor, tokens.
    """

    launches: list[tuple[KernelText, tuple[int, int, int], int, list[Output]]]
    counters: int = 0
    run: int = 1

    @property
    def texts(self) -> list[KernelText]:
        """Texts of the kernels."""
        return [text for text, *_ in self.launches]


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
    dtype, value_dim = variant.dtype, variant.value_dim
    rows = batch * q_len
    lines = rows * n_q_heads
    tiles = -(-n_q_heads // variant.gqa)  # of query heads
    threads = 32 * launch_shape.simdgroups
    cores = cuda_limits().multiprocessors
    constants = constants_of(variant, launch_shape)
    out: Output = (batch, n_q_heads, q_len, value_dim), dtype
    if variant.body in FUSED_BODIES:
        run = launch_shape.run or run_length(rows * tiles * n_partitions, cores, launch_shape.groups)
        n_runs = -(-n_partitions // run)
        runs: Output = (lines * n_runs * (value_dim + 2) if n_runs > 1 else 1,), mx.float32
        grid = tiles * threads, rows, n_runs
        return DecodeSpec([((variant.body, constants), grid, threads, [out, runs, FENCE])], rows * tiles, run)
    run, cut = 1, launch_shape
    if variant.body == LATENT_BODIES[1]:
        run = launch_shape.run or latent_run(rows * tiles, n_partitions, cores)
        n_partitions, run = -(-n_partitions // run), run * launch_shape.partition
        cut = launch_shape._replace(partition=run, span=_ALL_TOKENS // run)
    is_shared = variant.body in SHARED_BODIES
    n_partitions = max(n_partitions, 1 + is_shared)
    grid = tiles * threads, n_items or rows, 1 if is_shared else n_partitions
    stats = (lines, n_partitions, 2), mx.float32
    single = n_partitions == 1
    partial = out if single else ((batch, n_q_heads, q_len, n_partitions * value_dim), mx.float32)
    if not is_shared:
        constants = (*constants, ("SINGLE", single), ("O", partial[1]))
    decode = (variant.body, constants), grid, threads, [partial, stats, FENCE]
    if single:
        return DecodeSpec([decode], run=run)
    body, simdgroups = "merge_partitions", 2 if value_dim <= 64 else 4
    if is_shared:
        body, simdgroups = "join_partitions", -(-value_dim // 128)  # a thread merges four values
    own = ("T", dtype), ("DV", value_dim), ("SG", simdgroups), ("SINKS", variant.sinks)
    merge = (body, (*own, *cut.partitions)), (lines * simdgroups * 32, 1, 1), simdgroups * 32, [out]
    return DecodeSpec([decode, merge], run=run)


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
