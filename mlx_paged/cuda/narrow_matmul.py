"""Products of a few rows with weight matrices on CUDA. One kernel launch computes up to three products, or two and the
activation after them.

A decode step of a small batch is bound by the host, where MLX's path to cuBLAS takes several times as long as a kernel
launch (docs/adr/0011). Results are as precise as MLX's: 16-bit factors, sums in float32. Matrices may be quantised, all
matrices of a launch in the same way (docs/adr/0011).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..kernels.availability import backend
from ..kernels.build import KernelText, compile_ahead, prepare
from ..kernels.check import CheckResult, check_and_warn, outcome_of, worst_rms
from ..kernels.quantized import BITS, GROUP_SIZES


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
# Values of a matrix. Larger ones take the GPU longer than a call takes the host, so MLX multiplies with them.
MAX_SIZE = 1 << 26
MAX_PACKED_SIZE = 1 << 30  # for quantised ones, which MLX reads again for every few rows
MAX_MATRICES = 3
DTYPES = (mx.bfloat16, mx.float16)
PLAIN, BIASED, GATED, GROUPED = BODIES = (
    "narrow_matmul",
    "narrow_matmul_bias",
    "narrow_matmul_gate",
    "narrow_matmul_group",
)
TILES = SMALL, MEDIUM, LARGE = 8, 16, 32  # rows of the part of the result that a thread group computes
_SIMDGROUPS = 8
_VECTOR = 8  # values per load

Matrix = mx.array | PackedWeight  # [width, depth]


def is_available() -> bool:
    """Return whether MLX's default device is a GPU with CUDA."""
    return backend() == "cuda" and mx.default_device() == mx.Device(mx.gpu)


def covers(x: mx.array, weights: Sequence[Matrix], bias: mx.array | None = None, *, gated: bool = False) -> bool:
    """Return whether :func:`products` can multiply these: it supports shapes, dtypes and device, and the kernel works.

    The first call for a dtype, a tile and a body compiles and checks the kernel.
    """
    width, depth = weights[0].shape[0], x.shape[-1]
    bits = _bits_of(weights)
    if bias is not None and (len(weights) != 1 or bias.shape != (width,) or bias.dtype != x.dtype):
        return False
    return (
        0 < x.size // max(1, depth) <= (MAX_PACKED_ROWS if bits else MAX_ROWS)
        and depth % _VECTOR == 0
        and len(weights) <= MAX_MATRICES
        and all(len(w.shape) == 2 and w.shape[1] == depth and w.dtype == x.dtype for w in weights)
        and len({_form_of(w) for w in weights}) == 1
        and all(w.shape[0] * depth <= (MAX_PACKED_SIZE if bits else MAX_SIZE) for w in weights)
        and not (gated and weights[1].shape[0] != width)
        and passes_check(_body_of(weights, bias, gated), x.dtype, _tile_of(x), bits)
    )


def products(
    x: mx.array,
    weights: Sequence[Matrix],
    bias: mx.array | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    *,
    gated: bool = False,
) -> list[mx.array]:
    """Return ``x @ w.T`` for few rows and each matrix, computed in one launch; requires :func:`covers`.

    Args:
        x: ``[..., depth]``, 1 to 32 rows in all, or up to 256 for quantised matrices; bfloat16 or float16.
        weights: 1 to 3 matrices ``[width, depth]``, of the same dtype and quantised in the same way; depth a multiple
            of 8.
        bias: ``[width]``, added to the product, or None; with one matrix only.
        shapes: shapes of the results, instead of ``[..., width]``.
        gated: return ``silu(x @ gate.T) * (x @ up.T)`` of two matrices alone, rounded after each operation as MLX does.

    Returns:
        ``[..., width]`` for each matrix. A row's bits depend neither on the other rows nor on their number.
    """
    shapes = shapes or [(*x.shape[:-1], w.shape[0]) for w in weights[: 1 if gated else MAX_MATRICES]]
    return launch(_body_of(weights, bias, gated), x, weights, bias, _tile_of(x), shapes)


def _form_of(weight: Matrix) -> tuple[int, int]:
    """Return how a matrix is quantised: (bits, groups per row); (0, 0) if it is not."""
    return (weight.bits, weight.scales.shape[1]) if isinstance(weight, PackedWeight) else (0, 0)


def _bits_of(weights: Sequence[Matrix]) -> int:
    return _form_of(weights[0])[0]


def _tile_of(x: mx.array) -> int:
    num_rows = x.size // x.shape[-1]
    return next((tile for tile in TILES if num_rows <= tile), LARGE)


def _columns_of(body: str, tile: int, bits: int) -> int:
    """Return how many columns of a result a thread group computes: with more it loads rows fewer times, with fewer
    there are more thread groups (docs/adr/0011). 16 of two matrices are 32."""
    return 32 if bits and tile > SMALL and body != GATED else 16


def _body_of(weights: Sequence[Matrix], bias: mx.array | None, gated: bool) -> str:
    return GATED if gated else GROUPED if len(weights) > 1 else PLAIN if bias is None else BIASED


def kernel_key(body: str, dtype: mx.Dtype, tile: int, bits: int = 0) -> KernelText:
    """Return the key of the kernel for matrices of ``bits`` per value (0: not quantised)."""
    matrices = 2 if body == GATED else 1  # matrices that a column is computed from
    columns = _columns_of(body, tile, bits)
    sixteens = columns * matrices // 16
    constants = (
        ("T", dtype),
        ("MT", tile // 8),
        ("COLUMNS", columns),
        ("MATRICES", matrices),
        ("R", sixteens),
        # Loads in flight: of 32 values of each row; of quantised matrices, of 128.
        ("U", max(1, 8 // (bits * sixteens)) if bits else 4 // sixteens),
        ("SG", _SIMDGROUPS),
        # Thread groups for which a multiprocessor has registers.
        ("GROUPS", 3 if bits and tile == SMALL and matrices == 1 else 2),
    )
    if not bits:
        return body, constants
    return body.replace("matmul", "quantized"), (*constants, ("BITS", bits))


def launch(
    body: str,
    x: mx.array,
    weights: Sequence[Matrix],
    bias: mx.array | None,
    tile: int,
    shapes: Sequence[tuple[int, ...]],
) -> list[mx.array]:
    """Launch a kernel. Returns an array of each of ``shapes``."""
    bits = _bits_of(weights)
    key = kernel_key(body, x.dtype, tile, bits)
    threads = 32 * _SIMDGROUPS
    columns = _columns_of(body, tile, bits)
    tiles = sum(-(-w.shape[0] // columns) for w in weights[: len(shapes)])
    outputs = list(shapes)
    if body == GROUPED and len(weights) < MAX_MATRICES:  # a placeholder: the grid ends before the third
        weights = [*weights, weights[-1]]
        outputs.append((1,))
    inputs = [x]
    for w in weights:
        inputs += w[:3] if isinstance(w, PackedWeight) else [w]
    if bias is not None:
        inputs.append(bias)
    grid = tiles * threads, -(-x.size // (weights[0].shape[1] * tile)), 1
    return prepare(key, grid, threads, [(shape, x.dtype) for shape in outputs])(inputs)[: len(shapes)]


@lru_cache(maxsize=256)
def passes_check(body: str, dtype: mx.Dtype, tile: int, bits: int) -> bool:
    """Return whether the kernel can be used on this machine for matrices of ``bits``. Warns once if the kernel fails
    its self-check or does not compile."""
    if dtype not in DTYPES or not is_available():
        return False
    # Those likely to follow, too: rows that join, and drafts of a few rows, use larger tiles; a model that needs one
    # body mostly needs all.
    likely = [(each, tile) for each in BODIES] + [(body, own) for own in TILES if own > tile]
    compile_ahead(kernel_key(each, dtype, own, bits) for each, own in likely)
    kernel = f"{kernel_key(body, dtype, tile, bits)[0]} ({dtype}, {tile} rows)"
    return check_and_warn(kernel, lambda: self_check(body, dtype, tile, bits))


def self_check(body: str, dtype: mx.Dtype, tile: int, bits: int = 0) -> CheckResult:
    """Compare the kernel with float32 products of the same factors, with edges in every dimension.

    Fails on a compile error or an RMS difference of at least 5e-3 (results are about 1). Never raises for a failing
    kernel.
    """
    return outcome_of(lambda: _difference(body, dtype, tile, bits))


def _difference(body: str, dtype: mx.Dtype, tile: int, bits: int) -> float:
    """Return the RMS of the kernel's error."""
    num_rows, width, depth = tile + 5, 200, 2176 if bits else 2200
    # Keys are not split and indexed: MLX would have to compile kernels for that on CUDA.
    keys = [mx.random.key(i) for i in range(2 + MAX_MATRICES)]
    x = mx.random.normal((num_rows, 1, depth), key=keys[0]).astype(dtype)
    bias = mx.random.normal((width,), key=keys[1]).astype(dtype) if body == BIASED else None
    weights: list[Matrix] = []
    expected = []
    for number in range({GROUPED: 3, GATED: 2}.get(body, 1)):
        wide = width + (0 if body == GATED else 9 * number)
        w = (mx.random.normal((wide, depth), key=keys[2 + number]) * depth**-0.5).astype(dtype)
        packed = PackedWeight(*mx.quantize(w, GROUP_SIZES[1], bits), bits) if bits else None
        weights.append(packed or w)
        w = w if packed is None else packed.values().astype(dtype)
        # Sums, as products of matrices may use TF32.
        expected.append((x.astype(mx.float32) * w.astype(mx.float32)).sum(-1)[:, None])
    if body == GATED:
        gate, up = (y.astype(dtype).astype(mx.float32) for y in expected)
        expected = [gate * mx.sigmoid(gate) * up]
    elif bias is not None:
        expected = [expected[0] + bias]
    results = launch(body, x, weights, bias, tile, [want.shape for want in expected])
    pairs = zip(results, expected, strict=True)
    return worst_rms([mx.square(got.astype(mx.float32) - want).mean() for got, want in pairs])
