"""Products of a few rows with weight matrices on CUDA. One kernel launch computes up to three products, or a product
and the operation after it.

A decode step of a small batch is bound by the host, where MLX's path to cuBLAS takes several times as long as a kernel
launch (docs/adr/0011). Results are as precise as MLX's: 16-bit factors, sums in float32. Matrices may be quantised, all
matrices of a launch in the same way (docs/adr/0011).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels.build import KernelText, backend, build_kernel, compile_ahead, warn_when_compiling
from ..kernels.cases import worst_rms
from ..kernels.check import outcome_of
from ..kernels.limits import cuda_limits
from ..kernels.nvidia import Rotation

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)


class PackedWeight(NamedTuple):
    """A matrix ``[width, depth]`` in affine quantisation, as MLX packs it.

    Attributes:
        words: ``[width, depth * bits / 32]``, uint32.
        scales, biases: ``[width, depth / group_size]``, in the dtype of the rows multiplied with it.
        bits: bits per value.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    @classmethod
    def of(cls, layer: Any) -> PackedWeight | None:
        """Return the weight of a ``QuantizedLinear`` or ``QuantizedEmbedding``; None if it is packed in another way."""
        words, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
        if layer.mode != "affine" or layer.bits not in BITS or layer.group_size not in GROUP_SIZES or biases is None:
            return None
        if words.dtype != mx.uint32 or words.ndim != 2 or biases.dtype != scales.dtype:
            return None
        packed = cls(words, scales, biases, layer.bits)
        return packed if packed.shape[1] == layer.group_size * scales.shape[1] else None

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """Words, scales and biases."""
        return self.words, self.scales, self.biases

    @property
    def shape(self) -> tuple[int, int]:
        """Width and depth."""
        return self.words.shape[0], self.words.shape[1] * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of its values."""
        return self.scales.dtype

    def values(self) -> mx.array:
        """Return the dequantised matrix ``[width, depth]`` in float32. In 16 bits, as dequantised weights of that dtype
        are computed, product and sum would each be rounded."""
        scales, biases = (x.astype(mx.float32) for x in (self.scales, self.biases))
        return mx.dequantize(self.words, scales, biases, self.shape[1] // scales.shape[1], self.bits)


MAX_ROWS = 32  # for more, cuBLAS is worth its call
MAX_PACKED_ROWS = 256  # with quantised matrices, which cuBLAS does not support
# Values of a matrix. Larger ones take the GPU longer than a call takes the host, and cuBLAS is faster for them.
MAX_SIZE = 1 << 26
MAX_PACKED_SIZE = 1 << 30  # for quantised ones, which MLX reads again for every few rows
MAX_MATRICES = 3
DTYPES = (mx.bfloat16, mx.float16)
PLAIN, BIASED, ADDED, GATED, GROUPED = BODIES = (
    "narrow_matmul",
    "narrow_matmul_bias",
    "narrow_matmul_add",
    "narrow_matmul_gate",
    "narrow_matmul_group",
)
_SIMDGROUPS = 8
_VECTOR = 8  # values per load
USUAL_DIMS = 3  # number of dimensions of x in most models

Matrix = mx.array | PackedWeight  # [width, depth]


class Tile(NamedTuple):
    """What a thread group computes, and how.

    Attributes:
        rows, columns: size of its part of the result.
        unroll: loads of 32 values of each row that are in flight.
        groups: thread groups that must fit a multiprocessor together.
    """

    rows: int
    columns: int
    unroll: int
    groups: int = 2


TILES = SMALL, LARGE = Tile(16, 16, 4), Tile(32, 16, 4)
FEW = Tile(8, 16, 4)  # with quantised matrices, whose values cost instructions: for up to 8 rows
# Tiles that replace others and give the same bits: TILES_IF_FEW, with more loads in flight, if there is at most one
# thread group per multiprocessor; TILES_IF_MANY, with fewer, if there are a few more than two, so that all run together
# (docs/adr/0011).
TILES_IF_FEW = {SMALL: SMALL._replace(unroll=8, groups=1), LARGE: LARGE._replace(unroll=8, groups=1)}
TILES_IF_MANY = {SMALL: SMALL._replace(unroll=2, groups=4), LARGE: LARGE._replace(unroll=2, groups=3)}
# The tile for more rows that corresponds to a tile.
LARGER = {SMALL: LARGE, **{tiles[SMALL]: tiles[LARGE] for tiles in (TILES_IF_FEW, TILES_IF_MANY)}}


class FusedRotation(NamedTuple):
    """What a text that rotates its results knows of a :class:`Rotation`; without ``half`` it does not rotate."""

    half: int = 0
    scale: float = 1.0
    base: float | None = None

    @classmethod
    def of(cls, rotation: Rotation | None) -> FusedRotation:
        """Return the constants of a rotation."""
        return NOT_FUSED if rotation is None else cls(rotation.half, rotation.scale, rotation.base)

    @property
    def suffix(self) -> str:
        """Suffix of the body's name."""
        return "_turn" if self.half else ""

    @property
    def constants(self) -> tuple[tuple[str, int | bool], ...]:
        """Constants of the text; a float is an integer of the same bits."""
        if not self.half:
            return ()
        log_base = 0 if self.base is None else _float_bits(float(np.log2(np.float32(self.base))))
        known: list[tuple[str, int | bool]] = [("HALF", self.half), ("BASED", self.base is not None)]
        return (*known, ("LOG_BASE", log_base), ("SCALE", _float_bits(self.scale)))


NOT_FUSED = FusedRotation()
# Llama's: heads of 64.
KERNELS = (*((body, NOT_FUSED) for body in BODIES), (GROUPED, FusedRotation(half=32, base=5e5)))


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


class TileCheck(NamedTuple):
    """Outcome of a self-check; rms is NaN if there was no result, seconds include compiling. ``bits`` is 0 if matrices
    are not quantised."""

    body: str
    dtype: mx.Dtype
    tile: Tile
    bits: int
    ok: bool
    rms: float
    seconds: float
    reason: str


def is_available() -> bool:
    """Return whether MLX's default device is a GPU with CUDA."""
    return backend() == "cuda" and mx.default_device() == mx.Device(mx.gpu)


def covers(
    x: mx.array,
    weights: Sequence[Matrix],
    bias: mx.array | None = None,
    rotation: Rotation | None = None,
) -> bool:
    """Return whether :func:`products` can multiply these: it supports shapes, dtypes and device, and the kernel works.

    The first call for a dtype, a tile and a body compiles and checks the kernel.
    """
    if bias is not None and (len(weights) != 1 or bias.shape != weights[0].shape[:1] or bias.dtype != x.dtype):
        return False
    body, num_rows = _body_of(weights, bias), _num_rows(x)
    if rotation is not None and not (
        body == GROUPED
        and rotation.offsets.shape == (num_rows,)
        and rotation.offsets.dtype == mx.int32
        and rotation.half % _VECTOR == 0
        and all(w.shape[0] % (2 * rotation.half) == 0 for w in weights[:2])
    ):
        return False
    return len(weights) <= MAX_MATRICES and _covers(body, x, num_rows, weights, rotation)


def products(
    x: mx.array,
    weights: Sequence[Matrix],
    bias: mx.array | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    rotation: Rotation | None = None,
) -> list[mx.array]:
    """Return ``x @ w.T`` for few rows and each matrix, computed in one launch; requires :func:`covers`.

    Args:
        x: ``[..., depth]``, 1 to 32 rows in all, or up to 256 for quantised matrices; bfloat16 or float16.
        weights: 1 to 3 matrices ``[width, depth]``, of the same dtype and quantised in the same way; depth a multiple
            of 8.
        bias: ``[width]``, added to the product, or None; with one matrix only.
        shapes: shapes of the results, instead of ``[..., width]``.
        rotation: applied to the first two results; with several matrices only.

    Returns:
        ``[..., width]`` for each matrix. A row's bits depend neither on the other rows nor on their number.
    """
    shapes = shapes or [(*x.shape[:-1], w.shape[0]) for w in weights]
    body = _body_of(weights, bias)
    return launch(body, x, weights, bias, _tile_of(body, _num_rows(x), weights), shapes, rotation)


def covers_sum(x: mx.array, weight: Matrix, residual: mx.array) -> bool:
    """Return whether :func:`product_sum` can compute this; see :func:`covers`."""
    fits = residual.shape[-1] == weight.shape[0] and residual.dtype == x.dtype
    return fits and _covers(ADDED, x, _num_rows(residual), [weight])


def product_sum(x: mx.array, weight: Matrix, residual: mx.array) -> mx.array:
    """Return ``residual + x @ weight.T``, computed in one launch, with the bits of :func:`products` and a sum by MLX.

    Args:
        x: as many rows of ``depth`` values as the residual has rows, in any shape, as ``[B, n_heads, 1, head_dim]``.
        weight: ``[width, depth]``.
        residual: ``[..., width]``.
    """
    tile = _tile_of(ADDED, _num_rows(residual), [weight])
    return launch(ADDED, x, [weight], residual, tile, [residual.shape])[0]


def covers_gated(x: mx.array, gate: Matrix, up: Matrix) -> bool:
    """Return whether :func:`gated_product` can compute this; see :func:`covers`."""
    return gate.shape == up.shape and _covers(GATED, x, _num_rows(x), [gate, up])


def gated_product(x: mx.array, gate: Matrix, up: Matrix) -> mx.array:
    """Return ``silu(x @ gate.T) * (x @ up.T)``, computed in one launch, rounded after each operation as MLX does.

    Args:
        x, gate, up: as in :func:`products`.
    """
    shape = (*x.shape[:-1], gate.shape[0])
    return launch(GATED, x, [gate, up], None, _tile_of(GATED, _num_rows(x), [gate, up]), [shape])[0]


def _covers(
    body: str,
    x: mx.array,
    num_rows: int,
    weights: Sequence[Matrix],
    rotation: Rotation | None = None,
) -> bool:
    depth, rest = divmod(x.size, max(1, num_rows))
    fused = FusedRotation.of(rotation)
    return (
        0 < num_rows <= (MAX_PACKED_ROWS if _bits_of(weights) else MAX_ROWS)
        and rest == 0
        and depth % _VECTOR == 0
        and all(len(w.shape) == 2 and w.shape[1] == depth and w.dtype == x.dtype for w in weights)
        and len({_form_of(w) for w in weights}) == 1
        and all(w.shape[0] * depth <= (MAX_PACKED_SIZE if isinstance(w, PackedWeight) else MAX_SIZE) for w in weights)
        and passes_check(body, x.dtype, _tile_of(body, num_rows, weights), x.ndim, _bits_of(weights), fused)
    )


def _form_of(weight: Matrix) -> tuple[int, int]:
    """Return how a matrix is quantised: (bits, groups per row); (0, 0) if it is not."""
    return (weight.bits, weight.scales.shape[1]) if isinstance(weight, PackedWeight) else (0, 0)


def _bits_of(weights: Sequence[Matrix]) -> int:
    return _form_of(weights[0])[0]


def _num_rows(x: mx.array) -> int:
    return x.size // x.shape[-1]


def _tile_of(body: str, num_rows: int, weights: Sequence[Matrix]) -> Tile:
    tile = SMALL if num_rows <= SMALL.rows else LARGE
    if _bits_of(weights):
        few = FEW if body == GATED else FEW._replace(groups=3)
        return few if num_rows <= FEW.rows else tile
    if body == GATED:
        return tile
    groups, cores = _num_tiles(weights, tile), cuda_limits().multiprocessors
    if groups <= cores:
        return TILES_IF_FEW[tile]
    many = TILES_IF_MANY[tile]
    return many if tile.groups * cores < groups <= many.groups * cores else tile


def _num_tiles(weights: Sequence[Matrix], tile: Tile) -> int:
    return sum(-(-w.shape[0] // tile.columns) for w in weights)


def _body_of(weights: Sequence[Matrix], bias: mx.array | None) -> str:
    return GROUPED if len(weights) > 1 else PLAIN if bias is None else BIASED


def kernel_key(
    body: str, dtype: mx.Dtype, tile: Tile, num_dims: int, bits: int = 0, fused: FusedRotation = NOT_FUSED
) -> KernelText:
    """Return the key of the kernel for an x of ``num_dims`` dimensions, matrices of ``bits`` per value (0: not
    quantised), and the operations around the product."""
    matrices = 2 if body == GATED else 1  # matrices that a column is computed from
    unroll = tile.unroll // matrices
    if bits:  # parts of 128 values in flight
        unroll = 8 // bits if tile.rows == FEW.rows else max(1, 8 // (bits * matrices))
    constants = (
        ("T", dtype),
        ("XD", num_dims),
        ("MT", tile.rows // 8),
        ("COLUMNS", tile.columns),
        ("MATRICES", matrices),
        ("R", tile.columns * matrices // 16),
        ("U", unroll),
        ("SG", _SIMDGROUPS),
        ("GROUPS", tile.groups),
        *fused.constants,
    )
    body += fused.suffix
    if not bits:
        return KernelText(body, constants)
    return KernelText(body.replace("matmul", "quantized"), (*constants, ("BITS", bits)))


def launch(
    body: str,
    x: mx.array,
    weights: Sequence[Matrix],
    addend: mx.array | None,
    tile: Tile,
    shapes: Sequence[tuple[int, ...]],
    rotation: Rotation | None = None,
) -> list[mx.array]:
    """Launch a kernel. Returns an array of each of ``shapes``."""
    key = kernel_key(body, x.dtype, tile, x.ndim, _bits_of(weights), FusedRotation.of(rotation))
    threads = 32 * _SIMDGROUPS
    tiles = _num_tiles(weights[: len(shapes)], tile)
    outputs = list(shapes)
    if body == GROUPED and len(weights) < MAX_MATRICES:  # a placeholder: the grid ends before the third
        weights = [*weights, weights[-1]]
        outputs.append((1,))
    inputs = [x]
    for w in weights:
        inputs += w.arrays if isinstance(w, PackedWeight) else [w]
    if addend is not None:
        inputs.append(addend)
    if rotation is not None:
        inputs += [rotation.offsets, _no_frequencies() if rotation.frequencies is None else rotation.frequencies]
    return build_kernel(key.body, key.constants)(
        inputs=inputs,
        grid=(tiles * threads, -(-x.size // (weights[0].shape[1] * tile.rows)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=outputs,
        output_dtypes=[x.dtype] * len(outputs),
    )[: len(shapes)]


@lru_cache(maxsize=1)
def _no_frequencies() -> mx.array:
    return mx.ones((8,), mx.float32)


def _keys_to_compile(
    body: str, dtype: mx.Dtype, tile: Tile, num_dims: int, bits: int, fused: FusedRotation
) -> list[KernelText]:
    """Return the keys of the kernels to compile at the first use of one: its own, and those likely to follow. Rows that
    join, and drafts of a few rows, use the larger tile."""
    forms = [(tile, fused)]
    if tile in LARGER:
        forms.append((LARGER[tile], fused))
    # The self-check compares a product with operations around it to the product alone.
    bodies = [(body, each, form) for each, own in forms for form in (own, NOT_FUSED)]
    if num_dims == USUAL_DIMS and tile in TILES and fused == NOT_FUSED:  # a model that needs one mostly needs all
        bodies += [(each, tile, NOT_FUSED) for each in BODIES]
        if not bits:
            bodies += [(ADDED, TILES_IF_FEW[tile], NOT_FUSED), (GROUPED, TILES_IF_MANY[tile], NOT_FUSED)]
    return [kernel_key(each, dtype, own, num_dims, bits, form) for each, own, form in bodies]


@lru_cache(maxsize=256)
def passes_check(
    body: str, dtype: mx.Dtype, tile: Tile, num_dims: int, bits: int, fused: FusedRotation = NOT_FUSED
) -> bool:
    """Return whether the kernel can be used on this machine for an x of ``num_dims`` dimensions and matrices of
    ``bits``; each pair is another text. Warns once if the kernel fails its self-check or does not compile."""
    if dtype not in DTYPES or not is_available():
        return False
    keys = _keys_to_compile(body, dtype, tile, num_dims, bits, fused)
    compile_ahead((key.body, key.constants) for key in keys)
    with warn_when_compiling():
        reason = self_check(body, dtype, tile, bits, fused, num_dims).reason
    if reason:
        name = kernel_key(body, dtype, tile, num_dims, bits, fused).body
        warnings.warn(f"mlx_paged: {name} ({dtype}, {tile}) is off, using MLX's operations: {reason}", stacklevel=2)
    return not reason


def self_check(
    body: str,
    dtype: mx.Dtype,
    tile: Tile,
    bits: int = 0,
    fused: FusedRotation = NOT_FUSED,
    num_dims: int = USUAL_DIMS,
) -> TileCheck:
    """Compare the kernel with float32 products of the same factors, with edges in every dimension, and the operations
    around the product with MLX's rotation, for an x of ``num_dims`` dimensions.

    Fails on a compile error or an RMS difference of at least 5e-3 (results are about 1). Never raises for a failing
    kernel.
    """
    if fused != NOT_FUSED:
        found = outcome_of(lambda: _rotated_difference(dtype, tile, bits, fused, num_dims))
        return TileCheck(body + fused.suffix, dtype, tile, bits, *found)
    sizes = (
        ((1, 40, 32), (tile.rows + 5, 200, 2176), (3, 40, 384)) if bits else ((1, 40, 8), (tile.rows + 5, 200, 2200))
    )
    # For quantised matrices, each size has another group size.
    checks = [(*size, bits, group_size, num_dims) for size, group_size in zip(sizes, GROUP_SIZES, strict=False)]
    return TileCheck(
        body, dtype, tile, bits, *outcome_of(lambda: max(_difference(body, dtype, tile, *check) for check in checks))
    )


def _packed(weight: mx.array, bits: int, group_size: int) -> Matrix:
    """Return the matrix, quantised if bits are given."""
    return PackedWeight(*mx.quantize(weight, group_size, bits), bits) if bits else weight


def _difference(
    body: str,
    dtype: mx.Dtype,
    tile: Tile,
    num_rows: int,
    width: int,
    depth: int,
    bits: int,
    group_size: int,
    num_dims: int,
) -> float:
    """Return the RMS of the kernel's error; results are about 1."""
    num_rows = num_rows if num_dims > 1 else 1
    # Keys are not split and indexed: MLX would have to compile kernels for that on CUDA.
    keys = [mx.random.key(num_rows + 1000 * i) for i in range(2 + MAX_MATRICES)]
    x = mx.random.normal((num_rows, 1, depth), key=keys[0]).astype(dtype)
    addends = {BIASED: (width,), ADDED: (num_rows, 1, width)}
    addend = mx.random.normal(addends[body], key=keys[1]).astype(dtype) if body in addends else None
    widths = [width + (0 if body == GATED else 9 * i) for i in range(MAX_MATRICES)]
    matrices = [
        (mx.random.normal((n, depth), key=key) * depth**-0.5).astype(dtype)
        for n, key in zip(widths, keys[2:], strict=True)
    ]
    packed = [_packed(w, bits, group_size) for w in matrices]
    if bits:
        matrices = [w.values().astype(dtype) for w in packed if isinstance(w, PackedWeight)]
    counts = {GROUPED: (3, 2), GATED: (2,)}.get(body, (1,))
    errors = []
    for count in counts:
        weights = packed[:count]
        # Sums, as products of matrices may use TF32.
        expected = [(x.astype(mx.float32) * w.astype(mx.float32)).sum(-1)[:, None] for w in matrices[:count]]
        if body == GATED:
            gate, up = (y.astype(dtype).astype(mx.float32) for y in expected)
            expected = [gate * mx.sigmoid(gate) * up]
        elif addend is not None:
            expected = [expected[0] + addend]
        shapes = [want.shape for want in expected]
        for got, want in zip(launch(body, _shaped(x, num_dims), weights, addend, tile, shapes), expected, strict=True):
            errors.append(mx.square(got.astype(mx.float32) - want).mean())
    return worst_rms(errors)


def _shaped(x: mx.array, num_dims: int) -> mx.array:
    """Return x ``[rows, 1, depth]`` with ``num_dims`` dimensions, the first of which are its rows."""
    return x.reshape(-1) if num_dims == 1 else x.reshape(len(x), *[1] * (num_dims - 2), -1)


def _rotated_difference(dtype: mx.Dtype, tile: Tile, bits: int, fused: FusedRotation, num_dims: int) -> float:
    """Compare rotated products with MLX's rotation of products, for 1 and 3 rows.

    Returns:
        The RMS of the error; results are about 1.
    """
    head = 2 * fused.half
    widths = [3 * head, head, 24]
    frequencies = None if fused.base is not None else mx.arange(1, fused.half + 1).astype(mx.float32)
    errors = []
    for num_rows, depth in ((1, 1024), (3 if num_dims > 1 else 1, 1536)):
        x = mx.random.normal((num_rows, 1, depth), key=mx.random.key(depth)).astype(dtype)
        matrices = [mx.random.normal((n, depth), key=mx.random.key(i)) * depth**-0.5 for i, n in enumerate(widths)]
        weights = [_packed(w.astype(dtype), bits, 64) for w in matrices]
        offsets = mx.array([100003, 0, 77][:num_rows], mx.int32)
        rotation = Rotation(fused.half, offsets, fused.scale, fused.base, frequencies)
        shapes = [(num_rows, 1, n) for n in widths]
        x = _shaped(x, num_dims)
        got = launch(GROUPED, x, weights, None, tile, shapes, rotation)
        expected = launch(GROUPED, x, weights, None, tile, shapes)
        expected[:2] = [
            mx.fast.rope(
                y.reshape(num_rows, -1, 1, head),
                head,
                traditional=False,
                base=fused.base,
                scale=fused.scale,
                offset=offsets,
                freqs=frequencies,
            ).reshape(y.shape)
            for y in expected[:2]
        ]
        for a, b in zip(got, expected, strict=True):
            errors.append(mx.square(a.astype(mx.float32) - b.astype(mx.float32)).mean())
    return worst_rms(errors)
