"""Launch shapes of the kernels that attend, by geometry: lanes, loads, simdgroups, partitions. Plain arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import mlx.core as mx

from .build import Constants
from .quantized import PageShape

VEC = 4  # elements of a load
PACKED_VEC = 8  # elements of a load of codes


# LPT, U and HS (decode.metal: lanes of a token, steps of a chunk, simdgroups that split the heads) on Metal: the fewest
# instructions that fit 108 of the 128 registers of 32 bits that M1 and M2 give a thread at full occupancy
# (docs/adr/0018). By widest head; then by query heads per KV head: 1, 2, up to 4, up to 8, up to 16.
_LANES_OF_16_BITS = {
    64: ((8, 4, 1), (8, 4, 1), (8, 2, 1), (16, 2, 1), (16, 2, 2)),
    96: ((8, 4, 1), (8, 4, 1), (8, 4, 2), (8, 4, 4), (8, 4, 8)),
    128: ((8, 4, 1), (8, 2, 1), (16, 2, 1), (32, 2, 1), (32, 2, 2)),
    192: ((16, 4, 1), (16, 4, 1), (16, 4, 2), (16, 4, 4), (16, 4, 8)),
    256: ((16, 4, 1), (16, 2, 1), (32, 2, 1), (32, 2, 2), (32, 2, 4)),
    512: ((32, 4, 1), (32, 2, 1), (32, 2, 2), (32, 2, 4), (32, 2, 8)),
}
_LANES_OF_32_BITS = {
    64: ((8, 4, 1), (8, 4, 1), (8, 2, 1), (16, 2, 1), (16, 2, 2)),
    96: ((8, 2, 1), (8, 2, 1), (16, 2, 1), (32, 2, 1), (32, 2, 2)),
    128: ((8, 2, 1), (16, 4, 1), (16, 2, 1), (32, 2, 1), (32, 2, 2)),
    192: ((16, 2, 1), (16, 2, 1), (32, 2, 1), (32, 2, 2), (32, 2, 4)),
    256: ((16, 2, 1), (32, 4, 1), (32, 2, 1), (32, 2, 2), (32, 2, 4)),
    512: ((32, 2, 1), (32, 1, 1), (32, 1, 2), (32, 1, 4), (32, 1, 8)),
}
_LANES_OF_8_BIT_PAGES = {
    64: ((8, 4, 1), (8, 4, 1), (8, 2, 1), (8, 2, 2), (8, 2, 4)),
    128: ((8, 4, 1), (16, 4, 1), (16, 2, 1), (16, 2, 2), (16, 2, 4)),
    256: ((16, 4, 1), (32, 4, 1), (32, 2, 1), (32, 2, 2), (32, 2, 4)),
    512: ((32, 4, 1), (32, 1, 1), (32, 1, 2), (32, 1, 4), (32, 1, 8)),
}
_LANES_OF_4_BIT_PAGES = {
    64: ((8, 4, 1), (8, 4, 1), (8, 2, 1), (8, 2, 2), (8, 2, 4)),
    128: ((8, 4, 1), (8, 2, 1), (16, 2, 1), (16, 2, 2), (16, 2, 4)),
    256: ((16, 4, 1), (16, 2, 1), (32, 2, 1), (32, 2, 2), (32, 2, 4)),
    512: ((32, 4, 1), (32, 2, 1), (32, 2, 2), (32, 2, 4), (32, 2, 8)),
}

# LPT of the same bodies on CUDA, and elements of a load of 16 bits (of 32 bits: 4; of codes: 8), by widest head.
_CUDA_LANES = {64: (8, 8), 80: (4, 4), 96: (8, 4), 112: (16, 8), 128: (16, 8), 192: (16, 4), 256: (32, 8), 512: (32, 8)}


def _metal_lanes(variant: Variant) -> tuple[int, int, int]:
    """Return LPT, U and HS of a variant on Metal."""
    if variant.pages is not None:
        table = _LANES_OF_8_BIT_PAGES if variant.pages.k.bits == variant.pages.v.bits == 8 else _LANES_OF_4_BIT_PAGES
    else:
        table = _LANES_OF_16_BITS if variant.dtype.size == 2 else _LANES_OF_32_BITS
    row = next(row for most, row in table.items() if variant.widest <= most)
    return row[sum(variant.gqa > most for most in (1, 2, 4, 8))]


Use = Literal["decode", "latents", "prefill"]  # a decode step, one over latents, and prompts
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
MAX_GQA = 16
MAX_LATENT_HEADS = 256
MAX_QUERY_LENGTH = 8
# Tokens of the smallest partition. A row has up to SPAN of them; if it sees more tokens, up to 2 * SPAN partitions of
# twice the length, and so on. Only what the row sees decides this, so its bits do not depend on the rest of its batch.
PARTITION = 128
SPAN = 16
# On Metal, tokens of the smallest partition by KV heads of the model (at least), on GPUs of up to 20 cores, up to 32,
# and more; and the most tokens of a row with only one partition, counted from the start of its first. A context of 512
# tokens is to give each core work; merging several partitions takes another launch in each layer (docs/adr/0018).
_METAL_PARTITIONS = {8: ((128, 64, 32), 256), 4: ((64, 32, 32), 256), 1: ((32, 32, 32), 64)}
MOST_GROUPS = 8
# A row's first partition begins at a multiple of this, or of the smallest partition if that is shorter. Every chunk
# size divides both.
ALIGNMENT = 64
# A wider head does not fit the registers of the tensor-core body.
MAX_TENSOR_HEAD_DIM = 256
# Bodies, for pages that are not quantised and for quantised ones: portable; with Metal's 8 x 8 matrices; for tensor
# cores, a row by itself, merging their partial results; rows with common blocks, with the bits of these; and prompts.
DECODE_BODIES = ("paged_decode", "quantized_decode")
MATRIX_BODIES = ("matrix_decode", "quantized_matrix_decode")
FUSED_BODIES = ("paged_decode_tensor", "quantized_decode_tensor")
SHARED_BODIES = ("shared_decode_tensor", "shared_quantized_decode_tensor")
PREFILL_BODIES = ("paged_prefill_tensor", "quantized_prefill_tensor")
# Bodies over latents (MLA), whose one head all query heads attend to: portable, and for tensor cores.
LATENT_BODIES = ("latent_decode", "latent_decode_tensor")
# Least query heads per KV head of the matrix bodies: with fewer, rows of padding cost more instructions than matrices
# save (docs/adr/0018). Dequantised values of quantised pages pass through threadgroup memory.
LEAST_MATRIX_GQA = 5
LEAST_MATRIX_GQA_OF_PAGES = 7
# Query heads per thread group of the bodies for common blocks: for values up to 128 and up to 256; for quantised pages,
# for heads up to 64, 128 and 256.
SHARED_HEADS = (64, 32)
SHARED_HEADS_OF_CODES = (32, 16, 8)
SHARED_STAGES = 3  # chunks of common tokens in shared memory
LATENT_TENSOR_HEADS = 64  # query heads per thread group of latent_decode_tensor
LATENT_PARTITION = 256  # tokens of its smallest partition
_LATENT_KEYS = 64  # tokens that it takes at a time
_ONE_TIER = 1 << 20  # a span without limit: all partitions have the smallest size
# RT, KEYS, BUFFERS and QS (tensor_prefill.cuh), by widest head: over pages that are not quantised, and over codes,
# which are staged in shared memory, so that values have one buffer.
_PROMPTS = {
    64: ((2, 64, 2, False), (2, 64, 1, False)),
    128: ((2, 64, 1, True), (2, 64, 1, True)),
    256: ((1, 32, 1, False), (1, 32, 1, True)),
}
_SIMDGROUPS = 4
_PADDING = 8  # elements between rows of keys, values or queries in shared memory
# Floats of one query or one accumulator that a lane may hold before heads are split over simdgroups.
_MAX_LANE_FLOATS = 64
_COMBINE_FLOATS = 4096
# MLX allows a kernel more than 48 KB of shared memory, including what its text declares, only if a launch asks for more
# than that.
_LEAST_SHARED = 49_408
# Shared memory that a text for tensor cores may declare, in bytes; and the floats of it left beside smaller arrays.
STATIC_SHARED = 48 * 1024
_TENSOR_FLOATS = 11264


class Variant(NamedTuple):
    """One kernel instance. The self-check passes or switches off exactly this."""

    body: str
    backend: str
    dtype: mx.Dtype
    head_dim: int
    value_dim: int
    gqa: int
    block_size: int
    softcap: bool = False
    sinks: bool = False
    pages: PageShape | None = None  # None: not quantised
    groups: int = MOST_GROUPS  # thread groups per row and partition on Metal, at least: 8, 4 or 1

    @property
    def widest(self) -> int:
        """Elements of a key or a value, whichever are more."""
        return max(self.head_dim, self.value_dim)

    def __str__(self) -> str:
        extras = ("+softcap" if self.softcap else "") + ("+sinks" if self.sinks else "")
        extras += "" if self.pages is None else f" {self.pages}"
        dtype = str(self.dtype).split(".")[-1]
        dims = str(self.head_dim) if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.body}[{self.backend} {dtype} d{dims} g{self.gqa} b{self.block_size}{extras}]"


class LaunchShape(NamedTuple):
    """How a kernel that attends is launched.

    Attributes:
        simdgroups: simdgroups of a thread group.
        constants: those of the text that depend on the launch; its file explains them.
        partition: tokens of the smallest partition.
        span: how many of them a row may have.
        first: a row of at most this many tokens has one partition.
        rows: most rows per thread group, of the bodies for common blocks and for prompts.
        groups: thread groups that must fit a core together; 0: any number.
        shared: bytes of shared memory that a thread group asks for, besides those that the text declares.
        run: partitions per thread group; None: chosen for each launch (bodies for tensor cores).
    """

    simdgroups: int
    constants: Constants
    partition: int = PARTITION
    span: int = SPAN
    first: int = 0
    rows: int = 1
    groups: int = 0
    shared: int = 0
    run: int | None = None

    @property
    def alignment(self) -> int:
        """Alignment in tokens of a row's first partition, which begins fewer than this before the first visible one."""
        return min(ALIGNMENT, self.partition)

    @property
    def partitions(self) -> Constants:
        """Constants by which a text cuts what a row sees into partitions."""
        return (("PART", self.partition), ("SPAN", self.span), ("FIRST", self.first))


def constants_of(variant: Variant, launch_shape: LaunchShape) -> Constants:
    """Return the constants of a text that attends."""
    return (
        *(("T", variant.dtype), ("D", variant.head_dim), ("DV", variant.value_dim)),
        *(("BS", variant.block_size), ("G", variant.gqa), ("SG", launch_shape.simdgroups)),
        *launch_shape.constants,
        *(("SOFTCAP", variant.softcap), ("SINKS", variant.sinks)),
        *launch_shape.partitions,
        *(() if variant.pages is None else variant.pages.constants),
        *((("GROUPS", launch_shape.groups),) if launch_shape.groups else ()),
        *((("SHARED", launch_shape.shared),) if launch_shape.shared else ()),
    )


def groups_of(count: int, dialect: str) -> int:
    """Return a variant's ``groups`` for ``count`` thread groups per row and partition."""
    return MOST_GROUPS if dialect == "cuda" else next(least for least in _METAL_PARTITIONS if count >= least)


@lru_cache(maxsize=256)
def shape_for(variant: Variant, cores: int | None = None) -> LaunchShape:
    """Return the launch shape of a variant on a GPU with ``cores`` (None: unknown, or not Apple's)."""
    if variant.body in PREFILL_BODIES:
        return _prefill_shape(variant)
    if variant.body in (*FUSED_BODIES, *SHARED_BODIES):
        return _tensor_shape(variant)
    if variant.body == LATENT_BODIES[1]:
        heads = LATENT_TENSOR_HEADS
        # Queries, keys twice, maxima and sums, flags.
        shared = 2 * (heads * variant.head_dim + 2 * _LATENT_KEYS * variant.head_dim) + 16 * heads + 11 * 8
        return LaunchShape(12, (("KEYS", _LATENT_KEYS),), LATENT_PARTITION, _ONE_TIER, groups=1, shared=shared)
    partition, first = PARTITION, 0
    if variant.backend == "metal":
        by_cores, first = _METAL_PARTITIONS[variant.groups]
        partition = by_cores[0 if cores is None else (cores > 20) + (cores > 32)]
    if variant.body in MATRIX_BODIES:
        # Fewer tokens at a time if wide heads are dequantised into threadgroup memory.
        keys = 8 if variant.pages is not None and variant.widest > 128 else 16
        return LaunchShape(_SIMDGROUPS, (("KEYS", keys),), max(partition, 4 * keys), first=first)
    lanes, vec = 32, VEC if variant.pages is None else PACKED_VEC
    if variant.body == LATENT_BODIES[0]:
        # Two query heads per simdgroup: more queries and outputs do not fit the registers of an Apple GPU.
        head_split = -(-variant.gqa // 2)
        unroll = 4 if variant.backend == "cuda" else 2 if variant.dtype.size == 2 else 1
    elif variant.backend == "metal":
        lanes, unroll, head_split = _metal_lanes(variant)
    else:
        lanes, vec = _CUDA_LANES[variant.widest]
        if variant.pages is not None:
            vec, lanes = PACKED_VEC, lanes if vec == PACKED_VEC else lanes // 2
        elif variant.dtype.size == 4:
            vec = VEC
        per_lane = -(-variant.widest // (vec * lanes)) * vec
        head_split = next((n for n in (1, 2) if -(-variant.gqa // n) * per_lane <= _MAX_LANE_FLOATS), 4)
        unroll = 4 if -(-variant.gqa // head_split) * per_lane <= 32 else 2
    simdgroups = head_split * max(1, _SIMDGROUPS // head_split)
    head_round = max(1, min(-(-variant.gqa // head_split), _COMBINE_FLOATS // (simdgroups * variant.value_dim)))
    if variant.body == LATENT_BODIES[0]:
        head_round = 1
    constants = (("HS", head_split), ("HR", head_round), ("LPT", lanes), ("VEC", vec), ("U", unroll))
    return LaunchShape(simdgroups, constants, partition, first=first)


def _tensor_shape(variant: Variant) -> LaunchShape:
    """Return the launch shape of a decode body for tensor cores: measured on an NVIDIA H200 (docs/adr/0026)."""
    heads, dim, widest, pages = variant.gqa, variant.value_dim, variant.widest, variant.pages
    # With 8-bit codes and few heads, products have no unused columns: more groups with shorter chunks are faster.
    is_short = pages is not None and pages.k.bits == pages.v.bits == 8 and heads <= 4
    has_room = pages is not None and pages.k.group_size >= 64 and widest <= 128 and heads <= 8
    # 16 tokens at a time, or twice as many if the registers can hold the loads.
    unroll = 2 if widest <= 64 or (has_room and not is_short) else 1
    if variant.body == SHARED_BODIES[0]:
        rows, keys = SHARED_HEADS[dim > 128] // heads, 32 if widest <= 128 else 16
        head_round = max(1, min(4, heads, _COMBINE_FLOATS // (8 * dim)))
        row = (variant.head_dim // 8 + 3) // 8 * 64 + 32 + dim + _PADDING  # keys are padded to lie in different banks
        shared = max(2 * SHARED_STAGES * keys * row, _LEAST_SHARED)
        own: Constants = ("HR", head_round), ("U", unroll), ("ROWS", rows), ("KEYS", keys), ("STAGES", SHARED_STAGES)
        return LaunchShape(_SIMDGROUPS, own, rows=rows, groups=3 if widest <= 64 else 2, shared=shared)
    rows, columns, waits = 1, heads, 2
    groups = (4 if widest <= 64 else 3 if widest <= 128 else 2) - (heads > 8)
    if variant.body == SHARED_BODIES[1]:
        columns = SHARED_HEADS_OF_CODES[(widest > 64) + (widest > 128)]
        rows, waits, groups = columns // heads, 1, 2
    elif 64 < widest <= 128 and pages is not None and pages.k.bits == 8:  # these need more registers
        groups = 3 if heads <= 4 else 2
        if unroll == 1:
            groups = (4 if is_short else 3) - (heads > 8)
    floats = min(_COMBINE_FLOATS, _TENSOR_FLOATS - waits * rows * heads * dim)
    head_round = max(1, min(columns, floats // (4 * dim)))
    constants = (("HR", head_round), ("U", unroll), ("ROWS", rows))
    return LaunchShape(_SIMDGROUPS, constants, rows=rows, groups=groups)


def _prefill_shape(variant: Variant) -> LaunchShape:
    """Return the launch shape of a body for prompts; a row is one query head of one token."""
    row_tiles, keys, buffers, query_shared = next(
        shapes[variant.pages is not None] for most, shapes in _PROMPTS.items() if variant.widest <= most
    )
    rows, stage = 16 * _SIMDGROUPS * row_tiles, keys * (variant.head_dim + variant.value_dim + 2 * _PADDING)
    shared = 2 * (buffers * stage + query_shared * rows * (variant.head_dim + _PADDING))
    constants = (("RT", row_tiles), ("KEYS", keys), ("BUFFERS", buffers), ("QS", query_shared))
    return LaunchShape(_SIMDGROUPS, constants, rows=rows, groups=2, shared=shared)


def fits_matrices(variant: Variant) -> bool:
    """Return whether the matrix body serves a variant's geometry."""
    least = LEAST_MATRIX_GQA if variant.pages is None else LEAST_MATRIX_GQA_OF_PAGES
    # For 8 heads and 8 elements of the values, the sums take two floats of each lane.
    most = MAX_TENSOR_HEAD_DIM if variant.gqa <= 8 else MAX_TENSOR_HEAD_DIM // 2
    return variant.dtype.size == 2 and variant.gqa >= least and variant.widest <= most


def latent_run(groups: int, n_partitions: int, cores: int) -> int:
    """Return how many of the smallest partitions each thread group of latent_decode_tensor takes, a power of two.

    A partition's results cost as much as about 500 tokens, so there are no more thread groups than multiprocessors.

    Args:
        groups: rows times tiles of heads.
        n_partitions: smallest partitions of the longest row.
        cores: multiprocessors of the GPU.
    """
    run = 1
    while groups * -(-n_partitions // run) > cores and run < n_partitions:
        run *= 2
    return run


@lru_cache(maxsize=4096)
def count_partitions(visible: int, launch_shape: LaunchShape) -> int:
    """Return the partitions that a launch needs if no row ends more than ``visible`` tokens after the start of its
    first partition."""
    if visible <= launch_shape.first:
        return 1
    most, size = 1, launch_shape.partition
    while True:
        limit = size // launch_shape.partition * size * launch_shape.span
        most = max(most, -(-min(visible, limit + launch_shape.alignment - 1) // size))
        if visible <= limit:
            return most
        size *= 2


def run_length(groups: int, cores: int, together: int) -> int:
    """Return how many partitions each thread group takes, given that one each makes ``groups`` thread groups.

    Longer runs cost less per partition, but a GPU needs about two groups per multiprocessor (``cores``), or as many as
    run at the same time (``together`` on each), or several times that: measured on an NVIDIA H200, which has 132
    multiprocessors (docs/adr/0003). The result's bits do not depend on the run.
    """
    for run in (4, 2):
        per_core = groups // run / cores
        if 192 / 132 <= per_core <= 2.2 or 0.9 * together <= per_core <= 1.1 * together:
            return run
    return next((run for run in (4, 2) if groups // run >= min(2 * together, 7.75) * cores), 1)


def unsupported(
    use: Use, dtype: mx.Dtype, head_dim: int, value_dim: int, n_q_heads: int, n_kv_heads: int, block_size: int
) -> str | None:
    """Return why the kernels cannot serve this geometry, or None if they can."""
    gqa, rest = divmod(n_q_heads, n_kv_heads)
    most = MAX_LATENT_HEADS if use == "latents" else MAX_GQA
    if rest:
        return f"{n_q_heads} query heads are not a multiple of {n_kv_heads} KV heads"
    if dtype not in DTYPES or (use == "prefill" and dtype.size != 2):
        return f"dtype {dtype} is not one of {'' if use == 'prefill' else 'float32, '}float16, bfloat16"
    if head_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}/{value_dim} is not one of {HEAD_DIMS}"
    if use == "prefill" and max(head_dim, value_dim) > MAX_TENSOR_HEAD_DIM:
        return f"head_dim {head_dim}/{value_dim} is more than {MAX_TENSOR_HEAD_DIM}"
    if not 1 <= gqa <= most:
        return f"{gqa} query heads per kv head are not in 1..{most}"
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not one of {BLOCK_SIZES}"
    return None
