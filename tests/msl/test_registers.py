"""Kernels keep their values in registers, without spilling."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.kernels.availability import cores_listed
from mlx_paged.kernels.launch_shape import (
    HEAD_DIMS,
    MAX_TENSOR_HEAD_DIM,
    MOST_GROUPS,
    PREFILL_BODIES,
    LaunchShape,
    Variant,
    constants_of,
    count_partitions,
    groups_of,
    shape_for,
)
from mlx_paged.kernels.ops import variants_of
from tests.support.cases import quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl import registers
from tests.support.msl.harness import emulated

needs_compiler = pytest.mark.skipif(registers.compiler() is None, reason="nvcc is not here")
# Llama 3.2 1B and 3B, Llama 3.1 8B; Qwen 2.5 0.5B; Qwen 2.5 7B; Qwen 3 30B-A3B; gpt-oss; GLM 4.5; Gemma 3; wide heads.
POPULAR = [(64, 4), (128, 3), (128, 4), (64, 7), (128, 7), (128, 8), (64, 8), (128, 12), (256, 2), (512, 4)]
DTYPES = (mx.bfloat16, mx.float32)


BODY, QUANTIZED_BODY = PREFILL = PREFILL_BODIES


def registers_of(
    body: str, head_dim: int, gqa: int, *, bits: tuple[int, int] | None = None, single: bool = False, **options: Any
) -> registers.Registers:
    """Return what an instance of a body needs; ``options``: fields of its variant, or of a portable body's shape."""
    backend = "metal" if body in ("paged_decode", "quantized_decode") else "cuda"
    dtype = options.pop("dtype", mx.bfloat16)
    pages = bits and page_shape(head_dim, bits, 32 if backend == "metal" else 64, dtype)
    variant = Variant(body, backend, dtype, head_dim, head_dim, gqa, 32, pages=pages)
    if backend == "metal":
        shape = shape_for(variant)
        shape = shape._replace(constants=tuple({**dict(shape.constants), **options}.items()))
        constants = constants_of(variant, shape)
        return registers.registers_of(body, (*constants, ("SINGLE", single), ("O", dtype if single else mx.float32)))
    variant = variant._replace(**options)
    return registers.registers_of(body, constants_of(variant, shape_for(variant)), None, "sm_90")


def spill_limit(body: str, head_dim: int) -> int:
    """Return the bytes that may be spilled. Prefill's tiles of 128 rows of wide heads leave no register free, and are
    faster than those of 64 rows, which spill nothing (docs/adr/0023). Four thread groups a core that spill a few bytes
    decode quantised pages faster than fewer without (docs/adr/0026)."""
    if body in PREFILL:
        return {64: 0, 80: 20}.get(head_dim, 16 if head_dim > 128 else 128)
    return (48 if head_dim > 128 else 32) if body == "quantized_decode_tensor" else 0


INSTANCES: list[tuple[str, int, int, dict[str, Any]]] = [
    *(("paged_decode", *each, {}) for each in POPULAR),
    ("quantized_decode", 64, 4, {"bits": (8, 8)}),
    ("quantized_decode", 128, 4, {"bits": (8, 4)}),
    ("quantized_decode", 128, 8, {"bits": (4, 4)}),
    ("quantized_decode", 256, 2, {"bits": (8, 8)}),
    *(("quantized_decode_tensor", dim, gqa, {"bits": (8, 8)}) for dim, gqa in ((64, 4), (128, 4), (256, 2))),
    ("quantized_decode_tensor", 128, 8, {"bits": (4, 4)}),
    (BODY, 64, 4, {}),
    (BODY, 64, 7, {"dtype": mx.float16, "sinks": True}),
    (BODY, 80, 1, {}),
    (BODY, 128, 4, {}),
    (BODY, 256, 2, {"softcap": True}),
    (QUANTIZED_BODY, 64, 4, {"bits": (8, 8)}),
    (QUANTIZED_BODY, 128, 4, {"bits": (4, 4)}),
    (QUANTIZED_BODY, 256, 2, {"bits": (8, 8)}),
]


@needs_compiler
@pytest.mark.parametrize(("body", "head_dim", "gqa", "options"), quick(INSTANCES, ("paged_decode", 64, 4, {})))
def test_instances_of_popular_models_do_not_spill(body: str, head_dim: int, gqa: int, options: dict[str, Any]) -> None:
    found = registers_of(body, head_dim, gqa, **options)
    assert max(found.stored, found.loaded) <= spill_limit(body, head_dim), found


@needs_compiler
@pytest.mark.parametrize(
    ("body", "gqa", "dtype", "single"),
    quick(
        [("latent_decode", gqa, dtype, False) for gqa in (16, 10, 7, 1) for dtype in DTYPES]
        + [("latent_decode_tensor", 64, mx.bfloat16, single) for single in (False, True)],
        ("latent_decode", 7, mx.float32, False),
        ("latent_decode_tensor", 64, mx.bfloat16, True),
    ),
)
def test_latents_do_not_spill(body: str, gqa: int, dtype: mx.Dtype, single: bool) -> None:
    is_tensor = body == "latent_decode_tensor"
    variant = Variant(body, "cuda" if is_tensor else "metal", dtype, 576, 512, gqa, 32)
    out = dtype if single else mx.float32
    constants = (*constants_of(variant, shape_for(variant)), ("SINGLE", single), ("O", out))
    limits = (None, "sm_90a") if is_tensor else ()
    found = registers.registers_of(body, constants, *limits)
    assert (found.stored, found.loaded) == (0, 0), found


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, (8, 8), (4, 4)])
@pytest.mark.parametrize("gqa", range(1, 17))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_plan_spills(head_dim: int, gqa: int, bits: tuple[int, int] | None, dtype: mx.Dtype) -> None:
    if bits is not None and head_dim % 32:
        pytest.skip("groups do not divide it")
    body = "paged_decode" if bits is None else "quantized_decode"
    for single in (False, True) if bits is None else (False,):
        found = registers_of(body, head_dim, gqa, bits=bits, dtype=dtype, single=single)
        assert (found.stored, found.loaded) == (0, 0), found


@needs_compiler
@pytest.mark.slow
def test_layout_that_is_too_large_spills() -> None:
    assert registers_of("paged_decode", 128, 8, LPT=8, U=4).stored > 100


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("block_size", [8, 128])
@pytest.mark.parametrize("gqa", [1, 3, 4, 16])
@pytest.mark.parametrize("head_dim", [dim for dim in HEAD_DIMS if dim <= MAX_TENSOR_HEAD_DIM])
def test_no_prefill_spills(head_dim: int, gqa: int, block_size: int, extras: bool) -> None:
    found = registers_of(BODY, head_dim, gqa, block_size=block_size, softcap=extras, sinks=extras)
    assert max(found.stored, found.loaded) <= spill_limit(BODY, head_dim), found


@pytest.mark.parametrize(("cores", "kv_heads"), [(8, 8), (10, 8), (20, 8), (40, 8), (76, 8), (80, 8), (40, 4), (76, 5)])
def test_short_contexts_give_each_core_work(cores: int, kv_heads: int) -> None:
    variant = Variant("paged_decode", "metal", mx.bfloat16, 64, 64, 2, 32, groups=groups_of(kv_heads, "metal"))
    assert 512 // shape_for(variant, cores).partition * kv_heads >= cores


def test_fewer_kv_heads_have_smaller_partitions_on_metal() -> None:
    """A context of 512 tokens gives a GPU of 16 cores as many thread groups with 2 KV heads as with 8, and half with
    one, whose partitions are the smallest."""

    def shapes(n_kv: int, gqa: int, dim: int) -> list[LaunchShape]:
        variants = variants_of(mx.bfloat16, dim, dim, n_kv * gqa, n_kv, 32, False, False)
        return [shape_for(variant, 16) for variant in variants]

    with emulated():
        (many,), (four,), (two,), (one,) = (shapes(n_kv, 4, 128) for n_kv in (12, 4, 2, 1))
        matrices = shapes(1, 8, 128)[0]
    assert [512 // shape.partition * n for shape, n in zip((many, four, two, one), (8, 4, 2, 1), strict=True)] == [
        *(32, 32, 32, 16)
    ]
    assert [shape.first for shape in (many, four, two, one)] == [256, 256, 64, 64]
    assert (matrices.partition, matrices.first) == (64, 64), "four steps of 16 tokens"
    assert count_partitions(256, one) == 8 and count_partitions(64, one) == 1


def test_partitions_on_cuda_do_not_depend_on_kv_heads() -> None:
    assert groups_of(1, "cuda") == groups_of(64, "cuda") == MOST_GROUPS
    variant = Variant("paged_decode", "cuda", mx.float32, 64, 64, 4, 32)
    assert shape_for(variant).partition == 128 and shape_for(variant).first == 0


def test_partitions_follow_cores_and_unknown_gpus_have_the_measured_ones() -> None:
    variant = Variant("paged_decode", "metal", mx.bfloat16, 64, 64, 2, 32, groups=MOST_GROUPS)
    found = [shape_for(variant, cores).partition for cores in (None, 8, 20, 30, 32, 38, 80)]
    assert found == [128, 128, 128, 64, 64, 32, 32]


def test_core_count_is_read_from_the_listing_of_macos() -> None:
    listed = '  | {\n  |   "gpu-core-count" = 40\n  |   "model" = "Apple M3 Max"\n'
    assert cores_listed(listed) == 40
    assert cores_listed("") is None
