"""Launch shapes of decode kernels by geometry: lanes, loads, simdgroups, partitions. Plain arithmetic, no arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from .quantized import PageShape

VEC = 4  # elements of a load
PACKED_VEC = 8  # elements of a load of codes


# Lanes, unroll and head_split (see LaunchShape) of paged_decode and quantized_decode on Metal: the fewest instructions
# that fit 108 of the 128 registers of 32 bits that M1 and M2 give a thread at full occupancy (docs/adr/0018). By widest
# head; then by query heads per KV head: 1, 2, up to 4, up to 8, up to 16.
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

# Lanes of the same bodies on CUDA, and elements of a load of 16 bits (of 32 bits: 4; of codes: 8), by widest head.
_CUDA_LANES = {64: (8, 8), 80: (4, 4), 96: (8, 4), 112: (16, 8), 128: (16, 8), 192: (16, 4), 256: (32, 8), 512: (32, 8)}


def _metal_lanes(variant: Variant, widest: int) -> tuple[int, int, int]:
    """Return lanes, unroll and head_split of a variant on Metal; ``widest``: elements of keys or values, whichever are
    more."""
    if variant.pages is not None:
        table = _LANES_OF_8_BIT_PAGES if variant.pages.itemsize == 1 else _LANES_OF_4_BIT_PAGES
    else:
        table = _LANES_OF_16_BITS if variant.dtype.size == 2 else _LANES_OF_32_BITS
    row = next(row for most, row in table.items() if widest <= most)
    return row[sum(variant.gqa > most for most in (1, 2, 4, 8))]


HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
BLOCK_SIZES = (8, 16, 32, 64, 128)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
MAX_GQA = 16
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
# Bodies for tensor cores that merge their partial results themselves.
FUSED_BODIES = ("paged_decode_tensor", "quantized_decode_tensor")
# Bodies with Metal's 8 x 8 matrices, for at least this many query heads per KV head: with fewer, rows of padding cost
# more instructions than matrices save (docs/adr/0018).
MATRIX_BODIES = ("matrix_decode", "quantized_matrix_decode")
LEAST_MATRIX_GQA = 5
LEAST_MATRIX_GQA_OF_PAGES = 7  # for quantised pages, whose dequantised values pass through threadgroup memory
# Bodies for rows with common blocks, by the bodies for a single row, whose bits they reproduce (SHARED_BODY_OF), and
# the inverse (SINGLE_ROW_BODY_OF). Query heads per thread group on tensor cores: SHARED_HEADS for values up to 128 and
# up to 256; SHARED_HEADS_OF_CODES, for quantised pages, for heads up to 64, 128 and 256.
SHARED_BODY, SHARED_CODES_BODY = "shared_decode_tensor", "shared_quantized_decode_tensor"
SHARED_BODY_OF = {
    "paged_decode_tensor": SHARED_BODY,
    "quantized_decode_tensor": SHARED_CODES_BODY,
}
SHARED_BODIES = tuple(SHARED_BODY_OF.values())
SINGLE_ROW_BODY_OF = {shared: own for own, shared in SHARED_BODY_OF.items()}
SHARED_HEADS = (64, 32)
SHARED_HEADS_OF_CODES = (32, 16, 8)
# Bodies over latents (MLA), whose one head all query heads attend to: portable, and for tensor cores.
LATENT_BODIES = ("latent_decode", "latent_decode_tensor")
LATENT_TENSOR_HEADS = 64  # query heads per thread group of the latter
LATENT_PARTITION = 256  # tokens of its smallest partition
_LATENT_KEYS = 64  # tokens that it takes at a time
_ONE_TIER = 1 << 20  # a span without limit: all partitions have the smallest size
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
    def constants(self) -> tuple[tuple[str, Any], ...]:
        """Constants of every attention kernel: dtype, head sizes, block size, query heads per KV head."""
        return (
            ("T", self.dtype),
            ("D", self.head_dim),
            ("DV", self.value_dim),
            ("BS", self.block_size),
            ("G", self.gqa),
        )

    def __str__(self) -> str:
        extras = ("+softcap" if self.softcap else "") + ("+sinks" if self.sinks else "")
        extras += "" if self.pages is None else f" {self.pages}"
        dtype = str(self.dtype).split(".")[-1]
        dims = str(self.head_dim) if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.body}[{self.backend} {dtype} d{dims} g{self.gqa} b{self.block_size}{extras}]"


class LaunchShape(NamedTuple):
    """Parameters of a decode kernel's launch, most of them constants of its text."""

    vec: int  # elements per load
    lanes: int  # lanes that hold one token
    unroll: int  # steps of 32 / lanes tokens in flight
    head_split: int  # simdgroups that share the query heads
    head_round: int  # heads combined at a time through threadgroup memory
    simdgroups: int
    partition: int = PARTITION  # tokens of the smallest partition
    span: int = SPAN  # how many of them a row may have
    groups: int = 0  # thread groups that must fit a core together (paged_decode_tensor)
    run: int | None = None  # partitions per thread group; None: chosen for each launch (bodies for tensor cores)
    keys: int = 0  # tokens at a time (shared_decode_tensor, latent_decode_tensor, and the matrix bodies)
    first: int = 0  # a row of at most this many tokens has one partition
    rows: int = 1  # most rows per thread group (the bodies for common blocks)
    stages: int = 0  # chunks of `keys` tokens in shared memory (shared_decode_tensor)

    @property
    def alignment(self) -> int:
        """Alignment in tokens of a row's first partition, which begins fewer than this before the first visible one."""
        return min(ALIGNMENT, self.partition)

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Return the shared memory, in bytes, that a group of shared_decode_tensor needs for tokens of common blocks; 0
        for other bodies. Rows are padded so that lanes load from different banks."""
        if not self.stages:
            return 0
        keys, values = (head_dim // 8 + 3) // 8 * 64 + 32, value_dim + 8
        return max(2 * self.stages * self.keys * (keys + values), _LEAST_SHARED)

    def latent_bytes(self, head_dim: int) -> int:
        """Return the shared memory, in bytes, of a group of latent_decode_tensor: queries, keys twice, maxima and sums,
        flags."""
        heads = LATENT_TENSOR_HEADS
        return 2 * (heads * head_dim + 2 * self.keys * head_dim) + 16 * heads + 11 * 8


def groups_of(count: int, dialect: str) -> int:
    """Return a variant's ``groups`` for ``count`` thread groups per row and partition."""
    return MOST_GROUPS if dialect == "cuda" else next(least for least in _METAL_PARTITIONS if count >= least)


def partition_for(variant: Variant, cores: int | None) -> tuple[int, int]:
    """Return the tokens of a variant's smallest partition, and those of a row's only partition (0: rows of any length
    may have several), on a GPU with ``cores`` (None: unknown)."""
    if variant.backend == "cuda":
        return PARTITION, 0
    by_cores, first = _METAL_PARTITIONS[variant.groups]
    return by_cores[0 if cores is None else (cores > 20) + (cores > 32)], first


@lru_cache(maxsize=256)
def shape_for(variant: Variant, cores: int | None = None) -> LaunchShape:
    """Return the launch shape of a variant on a GPU with ``cores`` (see partition_for)."""
    widest = max(variant.head_dim, variant.value_dim)
    if variant.body == SHARED_CODES_BODY:
        heads = SHARED_HEADS_OF_CODES[(widest > 64) + (widest > 128)]
        rows = heads // variant.gqa
        floats = min(_COMBINE_FLOATS, _TENSOR_FLOATS - rows * variant.gqa * variant.value_dim)
        head_round = max(1, min(heads, floats // (4 * variant.value_dim)))
        return LaunchShape(8, 4, _tensor_unroll(variant, widest), 1, head_round, 4, groups=2, rows=rows)
    if variant.body == SHARED_BODY:
        head_round = max(1, min(4, variant.gqa, _COMBINE_FLOATS // (8 * variant.value_dim)))
        groups, keys = (3 if widest <= 64 else 2), (32 if widest <= 128 else 16)
        unroll, rows = _tensor_unroll(variant, widest), SHARED_HEADS[variant.value_dim > 128] // variant.gqa
        return LaunchShape(8, 4, unroll, 1, head_round, 4, groups=groups, keys=keys, rows=rows, stages=3)
    if variant.body in FUSED_BODIES:
        floats = min(_COMBINE_FLOATS, _TENSOR_FLOATS - 2 * variant.gqa * variant.value_dim)
        head_round = max(1, min(variant.gqa, floats // (4 * variant.value_dim)))
        groups = (4 if widest <= 64 else 3 if widest <= 128 else 2) - (variant.gqa > 8)
        unroll = _tensor_unroll(variant, widest)
        if 64 < widest <= 128 and variant.pages is not None and variant.pages.k.bits == 8:
            groups = _groups_of_codes(variant, unroll)
        return LaunchShape(8, 4, unroll, 1, head_round, 4, groups=groups)
    if variant.body in LATENT_BODIES:
        return _latent_shape(variant, cores)
    if variant.body in MATRIX_BODIES:
        keys, (partition, first) = matrix_keys(variant), partition_for(variant, cores)
        return LaunchShape(8, 4, 1, 1, 1, 4, max(partition, 4 * keys), keys=keys, first=first)
    if variant.backend == "metal":
        vec = VEC if variant.pages is None else PACKED_VEC
        lanes, unroll, head_split = _metal_lanes(variant, widest)
        heads = -(-variant.gqa // head_split)
    else:
        lanes, vec = _CUDA_LANES[widest]
        if variant.pages is not None:
            vec, lanes = PACKED_VEC, lanes if vec == PACKED_VEC else lanes // 2
        elif variant.dtype.size == 4:
            vec = VEC
        per_lane = -(-widest // (vec * lanes)) * vec
        head_split = next((n for n in (1, 2) if -(-variant.gqa // n) * per_lane <= _MAX_LANE_FLOATS), 4)
        heads = -(-variant.gqa // head_split)
        unroll = 4 if heads * per_lane <= 32 else 2
    simdgroups = max(4, head_split)
    head_round = max(1, min(heads, _COMBINE_FLOATS // (simdgroups * variant.value_dim)))
    partition, first = partition_for(variant, cores)
    return LaunchShape(vec, lanes, unroll, head_split, head_round, simdgroups, partition, first=first)


def matrix_keys(variant: Variant) -> int:
    """Return the tokens that a simdgroup of a matrix body takes at a time: fewer if it dequantises wide heads into
    threadgroup memory."""
    return 8 if variant.pages is not None and max(variant.head_dim, variant.value_dim) > 128 else 16


def unsupported_matrix(variant: Variant) -> str | None:
    """Return why the matrix body cannot serve a variant's geometry, or None if it can."""
    if variant.dtype.size != 2:
        return f"dtype {variant.dtype} is not one of float16, bfloat16"
    least = LEAST_MATRIX_GQA if variant.pages is None else LEAST_MATRIX_GQA_OF_PAGES
    if variant.gqa < least:
        return f"{variant.gqa} query heads per kv head are fewer than {least}"
    # For 8 heads and 8 elements of the values, the sums take two floats of each lane.
    most = MAX_TENSOR_HEAD_DIM if variant.gqa <= 8 else MAX_TENSOR_HEAD_DIM // 2
    if max(variant.head_dim, variant.value_dim) > most:
        return f"head_dim {variant.head_dim}/{variant.value_dim} is more than {most}"
    return None


def _latent_shape(variant: Variant, cores: int | None) -> LaunchShape:
    """Return the launch shape over latents. The portable body has two query heads per simdgroup: more queries and
    outputs do not fit the registers of an Apple GPU."""
    if variant.body == LATENT_BODIES[1]:
        return LaunchShape(8, 32, 1, 1, 1, 12, LATENT_PARTITION, _ONE_TIER, groups=1, keys=_LATENT_KEYS)
    head_split = -(-variant.gqa // 2)
    unroll = 4 if variant.backend == "cuda" else 2 if variant.dtype.size == 2 else 1
    simdgroups = head_split * max(1, 4 // head_split)
    partition, first = partition_for(variant, cores)
    return LaunchShape(4, 32, unroll, head_split, 1, simdgroups, partition, first=first)


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


def _tensor_unroll(variant: Variant, widest: int) -> int:
    """Return how many times 16 tokens a simdgroup takes at a time: as many loads as its registers can hold."""
    if widest <= 64:
        return 2
    pages = variant.pages
    has_room = pages is not None and pages.k.group_size >= 64 and widest <= 128 and variant.gqa <= 8
    return 2 if has_room and not _is_short(variant) else 1


def _is_short(variant: Variant) -> bool:
    """Return whether more thread groups with shorter chunks are faster: with 8-bit codes and few heads, products have
    no unused columns."""
    pages = variant.pages
    return pages is not None and pages.k.bits == pages.v.bits == 8 and variant.gqa <= 4


def _groups_of_codes(variant: Variant, unroll: int) -> int:
    """Return the thread groups per core for 8-bit keys in heads of 96 to 128, which need more registers: measured on an
    NVIDIA H200 (docs/adr/0026)."""
    if unroll == 2:
        return 3 if variant.gqa <= 4 else 2
    return (4 if _is_short(variant) else 3) - (variant.gqa > 8)


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


def unsupported(dtype: mx.Dtype, head_dim: int, value_dim: int, gqa: int, block_size: int) -> str | None:
    """Return why the kernels cannot serve this geometry, or None if they can."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of float32, float16, bfloat16"
    if head_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}/{value_dim} is not one of {HEAD_DIMS}"
    if not 1 <= gqa <= MAX_GQA:
        return f"{gqa} query heads per kv head is not in 1..{MAX_GQA}"
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not one of {BLOCK_SIZES}"
    return None
