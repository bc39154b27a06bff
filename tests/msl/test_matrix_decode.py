"""What the decode bodies for matrices have of their own; test_decode.py compares them with float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.launch_shape import (
    BLOCK_SIZES,
    HEAD_DIMS,
    LEAST_MATRIX_GQA,
    MATRIX_BODIES,
    MAX_GQA,
    MAX_TENSOR_HEAD_DIM,
    Variant,
    fits_matrices,
    shape_for,
)
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.harness import MAX_THREADGROUP_BYTES, Case, decode_case, emulated, launch
from tests.support.msl.harness import check_decode as check


def case_of(contexts: list[int], bits: Any = None, **options: Any) -> Case:
    return decode_case(contexts, bits, "matrix", **options)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, (8, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("gqa", range(LEAST_MATRIX_GQA, MAX_GQA + 1))
@pytest.mark.parametrize("head_dim", [dim for dim in HEAD_DIMS if dim <= MAX_TENSOR_HEAD_DIM])
def test_sweep(head_dim: int, gqa: int, bits: tuple[int, int] | None) -> None:
    variant = Variant(MATRIX_BODIES[0], "metal", mx.bfloat16, head_dim, head_dim, gqa, 16)
    if not fits_matrices(variant) or (bits and head_dim % 32):
        pytest.skip("not a geometry of this body")
    for n, block_size in enumerate(BLOCK_SIZES):
        options = {"heads": (gqa, 1), "head_dim": head_dim, "block_size": block_size, "bits": bits}
        dtype = (mx.bfloat16, mx.float16)[n % 2]
        check(case_of([300, 70], starts=[n * 9, 33], sinks=n % 3 == 0, dtype=dtype, **options), "matrix", checked=False)


@pytest.mark.parametrize(
    ("contexts", "window", "merged"), [([256, 9], None, []), ([900, 870], 128, []), ([257], None, ["merge_partitions"])]
)
def test_single_partition_needs_no_merge(contexts: list[int], window: int | None, merged: list[str]) -> None:
    case = case_of(contexts, starts=[max(n - window, 0) for n in contexts] if window else None)
    for kind in ("matrix", "portable"):
        _, fake = launch(case, kind, cores=38, checked=False, orders=(0,), max_visible=window)
        assert [name for name, _ in fake.calls][1:] == merged


def bytes_of(variant: Variant) -> int:
    """Return the threadgroup memory, in bytes, of a matrix body: queries, scores, weights, diagonals, largest scores
    and sums; values at a block's edge, or dequantised values."""
    shape = shape_for(variant, 38)
    keys, tiles, size = dict(shape.constants)["KEYS"], -(-variant.gqa // 8), variant.dtype.size
    widest = max(variant.head_dim, variant.value_dim)
    staged = 64 if variant.pages is None else keys * widest
    simdgroup = 8 * tiles * keys * (4 + size) + 256 * tiles + 64 * tiles + size * staged
    return 8 * tiles * variant.head_dim * size + shape.simdgroups * simdgroup


@pytest.mark.slow
def test_threadgroup_memory_is_what_the_text_declares() -> None:
    for head_dim, gqa, bits in ((64, 5, None), (128, 16, (4, 4)), (256, 8, (8, 8)), (256, 8, None), (128, 8, (8, 4))):
        case = case_of([9], bits, head_dim=head_dim, heads=(gqa, 1))
        _, fake = launch(case, "matrix", cores=38, checked=False)
        with emulated():
            variant = case.variant()._replace(body=MATRIX_BODIES[bits is not None])
        assert fake.stats["tg_bytes"] == bytes_of(variant) <= MAX_THREADGROUP_BYTES


def test_no_geometry_exceeds_the_limit_of_threadgroup_memory() -> None:
    for dim in HEAD_DIMS:
        for gqa in range(LEAST_MATRIX_GQA, MAX_GQA + 1):
            for pages in (None, page_shape(dim, (8, 8), 32, mx.float16) if dim % 32 == 0 else None):
                variant = Variant(MATRIX_BODIES[pages is not None], "metal", mx.float16, dim, dim, gqa, 32, pages=pages)
                if fits_matrices(variant):
                    assert bytes_of(variant) <= MAX_THREADGROUP_BYTES


@pytest.mark.parametrize(
    "change",
    [{"dtype": mx.float32}, {"gqa": LEAST_MATRIX_GQA - 1}, {"head_dim": 512}, {"gqa": 9, "value_dim": 192}],
)
def test_other_geometries_take_no_matrices(change: dict[str, Any]) -> None:
    variant = Variant(MATRIX_BODIES[0], "metal", mx.bfloat16, 128, 128, 8, 32)
    assert fits_matrices(variant) and not fits_matrices(variant._replace(**change))


def test_matrix_body_comes_first_and_only_on_metal() -> None:
    with emulated("metal"):
        bodies = [v.body for v in kernels.variants_of(mx.bfloat16, 128, 128, 8, 1, 32, False, False)]
    assert bodies == ["matrix_decode", "paged_decode"]
    with emulated("cuda"):
        bodies = [v.body for v in kernels.variants_of(mx.bfloat16, 128, 128, 8, 1, 32, False, False)]
    assert "matrix_decode" not in bodies
