"""matrix_decode's texts, dense and quantised, on the emulator: against float64, and bit invariance."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.launch_shape import (
    BLOCK_SIZES,
    HEAD_DIMS,
    LEAST_MATRIX_GQA,
    MATRIX_BODIES,
    MAX_GQA,
    MAX_TENSOR_HEAD_DIM,
    MAX_THREADGROUP_BYTES,
    Variant,
    shape_for,
    unsupported_matrix,
)
from mlx_paged.kernels.quantized import PageShape
from tests.support.cases import crossed, quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.harness import Case, Emulated, emulated

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [1, 15, 16, 17, 150, 5, 6, 300, 33]
CORES = (8, 38)  # partitions of 128 tokens, and of the fewest

CLASSES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "f16 extras q_len 3": {"dtype": mx.float16, "q_len": 3, "softcap": 5.0, "sinks": True},
    "value_dim": {"head_dim": 96, "value_dim": 64},
    "gqa 16": {"heads": (16, 1), "head_dim": 128},
    "gqa 12, two kv heads": {"heads": (24, 2), "head_dim": 80, "dtype": mx.float16},
    "gqa 5, 256": {"heads": (5, 1), "head_dim": 256},
    "gqa 6, block 8": {"heads": (12, 2), "block_size": 8},
    "block 128": {"block_size": 128},
    "8/4 bits q_len 2": {"bits": (8, 4), "q_len": 2, "sinks": True},
    "4 bits gqa 16": {"bits": (4, 4), "heads": (16, 1), "head_dim": 128, "group_size": 64, "dtype": mx.float16},
    "8 bits gqa 7, 192, softcap": {"bits": (8, 8), "heads": (7, 1), "head_dim": 192, "softcap": 9.0},
    "4/8 bits value_dim": {"bits": (4, 8), "head_dim": 96, "value_dim": 64, "block_size": 8},
}


def case_of(contexts: list[int], bits: tuple[int, int] | None = None, group_size: int = 32, **options: Any) -> Case:
    options = {"heads": (8, 1), "dtype": mx.bfloat16, **options}
    dim, value_dim = options.get("head_dim", 64), options.get("value_dim") or 0
    pages = bits and page_shape(dim, bits, group_size, options["dtype"], value_dim)
    return Case(contexts, pages=pages, **options)


def variant_of(case: Case) -> Variant:
    with emulated():
        return case.variant()._replace(body=MATRIX_BODIES[case.pages is not None])


def run(case: Case, cores: int = 38, checked: bool = True, **options: Any) -> tuple[np.ndarray, Emulated]:
    variant = variant_of(case)
    with emulated(checked=checked, orders=(0, 2)) as fake:
        out, fence = case.run(variant=variant, launch_shape=shape_for(variant, cores), **options)
    assert int(np.asarray(fence)[0]) == 8
    return out, fake


def check(case: Case, **options: Any) -> None:
    out, _ = run(case, **options)
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    ("name", "cores"),
    quick(crossed(list(CLASSES), CORES), *((name, CORES[i // 4 % 2]) for i, name in enumerate(CLASSES) if i % 4 == 1)),
)
def test_matches_reference(name: str, cores: int) -> None:
    check(case_of(RAGGED, **CLASSES[name]), cores=cores)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, (8, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("gqa", range(LEAST_MATRIX_GQA, MAX_GQA + 1))
@pytest.mark.parametrize("head_dim", [dim for dim in HEAD_DIMS if dim <= MAX_TENSOR_HEAD_DIM])
def test_sweep(head_dim: int, gqa: int, bits: tuple[int, int] | None) -> None:
    variant = Variant(MATRIX_BODIES[0], "metal", mx.bfloat16, head_dim, head_dim, gqa, 16)
    if unsupported_matrix(variant) or (bits and head_dim % 32):
        pytest.skip("not a geometry of this body")
    for n, block_size in enumerate(BLOCK_SIZES):
        options = {"heads": (gqa, 1), "head_dim": head_dim, "block_size": block_size, "bits": bits}
        dtype = (mx.bfloat16, mx.float16)[n % 2]
        check(case_of([300, 70], starts=[n * 9, 33], sinks=n % 3 == 0, dtype=dtype, **options), checked=False)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, (8, 4)], ids=str)
@pytest.mark.parametrize("window", [64, 128, 256, 512])
def test_every_start_of_a_window(window: int, bits: tuple[int, int] | None) -> None:
    starts = list(range(64))
    for cores in (20, 32, 38):
        case = case_of([start + window for start in starts], bits, starts=starts, block_size=32)
        check(case, cores=cores, checked=False, max_visible=window)


@pytest.mark.parametrize("bits", quick([None, (8, 4)], (8, 4), single=True), ids=str)
def test_appended_tokens_give_the_same_bits(bits: tuple[int, int] | None) -> None:
    case = case_of([17, 300, 1, 256], bits, block_size=32)
    before, _ = run(case, checked=False)
    after, _ = run(case, append=case.take_out_newest())
    assert before.tobytes() == after.tobytes()


def test_bits_do_not_depend_on_the_batch() -> None:
    contexts, starts = [300, 17, 192, 130], [5, 0, 1, 70]
    together, _ = run(case_of(contexts, starts=starts, seed=3), checked=False)
    for b in range(len(contexts)):
        case = case_of(contexts, starts=starts, seed=3)
        for name in ("q", "tables", "ends", "starts"):
            setattr(case, name, getattr(case, name)[b : b + 1])
        alone, _ = run(case, checked=False)
        assert alone[0].tobytes() == together[b].tobytes()


@pytest.mark.parametrize(("contexts", "window"), [([256, 9], None), ([900, 870], 128)])
def test_single_partition_needs_no_merge(contexts: list[int], window: int | None) -> None:
    starts = [max(n - window, 0) for n in contexts] if window else None
    for body in ("matrix_decode", "paged_decode"):
        case = case_of(contexts, starts=starts)
        with emulated(checked=False, orders=(0,)) as fake:
            variant = case.variant()._replace(body=body)
            case.run(variant=variant, launch_shape=shape_for(variant, 38), max_visible=window)
        assert [name for name, _ in fake.calls] == [body]


def test_longer_contexts_are_merged() -> None:
    _, fake = run(case_of([257]), checked=False)
    assert [name for name, _ in fake.calls] == ["matrix_decode", "merge_partitions"]


def bytes_of(variant: Variant) -> int:
    """Return the threadgroup memory, in bytes, of a matrix body: queries, scores, weights, diagonals, largest scores
    and sums; values at a block's edge, or dequantised values."""
    shape = shape_for(variant, 38)
    tiles, size = -(-variant.gqa // 8), variant.dtype.size
    widest = max(variant.head_dim, variant.value_dim)
    staged = 64 if variant.pages is None else shape.keys * widest
    simdgroup = 8 * tiles * shape.keys * (4 + size) + 256 * tiles + 64 * tiles + size * staged
    return 8 * tiles * variant.head_dim * size + shape.simdgroups * simdgroup


@pytest.mark.slow
def test_threadgroup_memory_is_what_the_text_declares() -> None:
    for head_dim, gqa, bits in ((64, 5, None), (128, 16, (4, 4)), (256, 8, (8, 8)), (256, 8, None), (128, 8, (8, 4))):
        case = case_of([9], bits, head_dim=head_dim, heads=(gqa, 1))
        _, fake = run(case, checked=False)
        variant = variant_of(case)
        assert fake.stats["tg_bytes"] == bytes_of(variant) <= MAX_THREADGROUP_BYTES


def test_no_geometry_exceeds_the_limit_of_threadgroup_memory() -> None:
    for dim in HEAD_DIMS:
        for gqa in range(LEAST_MATRIX_GQA, MAX_GQA + 1):
            for pages in (None, PageShape.of(dim, (8, 8), 32, mx.float16) if dim % 32 == 0 else None):
                variant = Variant(MATRIX_BODIES[pages is not None], "metal", mx.float16, dim, dim, gqa, 32, pages=pages)
                if unsupported_matrix(variant) is None:
                    assert bytes_of(variant) <= MAX_THREADGROUP_BYTES


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": mx.float32}, "dtype"),
        ({"gqa": LEAST_MATRIX_GQA - 1}, "query heads"),
        ({"head_dim": 512}, "head_dim"),
        ({"gqa": 9, "value_dim": 192}, "head_dim"),
    ],
)
def test_unsupported_geometries_name_the_reason(change: dict[str, Any], reason: str) -> None:
    variant = Variant(MATRIX_BODIES[0], "metal", mx.bfloat16, 128, 128, 8, 32)
    assert unsupported_matrix(variant) is None
    assert reason in (unsupported_matrix(variant._replace(**change)) or "")


def test_matrix_body_comes_first_and_only_on_metal() -> None:
    with emulated("metal"):
        bodies = [v.body for v in kernels.variants_of(mx.bfloat16, 128, 128, 8, 1, 32, False, False)]
    assert bodies == ["matrix_decode", "paged_decode"]
    with emulated("cuda"):
        bodies = [v.body for v in kernels.variants_of(mx.bfloat16, 128, 128, 8, 1, 32, False, False)]
    assert "matrix_decode" not in bodies
