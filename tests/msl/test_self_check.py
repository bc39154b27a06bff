# ruff: noqa: E501
"""The self-check itself, over kernels on the emulator: it passes for each number of cores, and finds planted
defects."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.check import CheckResult, self_check
from mlx_paged.kernels.launch_shape import MATRIX_BODIES, SHARED_BODIES, LaunchShape, Variant
from mlx_paged.kernels.quantized import QuantizedRows
from tests.support.cases import quick, slow
from tests.support.kernels.quantized_pages import page_shape, quantized
from tests.support.kernels.scratch import MIN_DEVICE_ELEMENTS
from tests.support.msl.harness import Emulated, emulated, to_float

VARIANTS = {
    "dense": Variant("paged_decode", "metal", mx.bfloat16, 64, 64, 4, 16),
    "extras": Variant("paged_decode", "metal", mx.float16, 64, 64, 4, 32, softcap=True, sinks=True),
    "quantised": Variant(
        "quantized_decode", "metal", mx.float32, 64, 64, 4, 16, pages=page_shape(64, (8, 4), 32, mx.float32)
    ),
    "matrices": Variant("matrix_decode", "metal", mx.bfloat16, 64, 64, 5, 16, sinks=True),
    "matrices over codes": Variant(
        "quantized_matrix_decode", "metal", mx.float16, 64, 64, 8, 32, pages=page_shape(64, (4, 4), 64, mx.float16)
    ),
    "latents": Variant("latent_decode", "metal", mx.bfloat16, 192, 128, 2, 16),
    "common blocks": Variant(SHARED_BODIES[0], "cuda", mx.float16, 64, 64, 4, 32),
    "common blocks, wide": Variant(SHARED_BODIES[0], "cuda", mx.float16, 128, 128, 4, 32, sinks=True),
    "common blocks, one head": Variant(SHARED_BODIES[0], "cuda", mx.float16, 64, 64, 1, 32, softcap=True),
    "common blocks of pages": Variant(
        SHARED_BODIES[1], "cuda", mx.float16, 64, 64, 4, 32, pages=page_shape(64, (8, 4), 64, mx.float16)
    ),
}
DENSE, MATRICES, CODES = VARIANTS["dense"], VARIANTS["matrices"], VARIANTS["matrices over codes"]
CORES = (8, 10, 16, 20, 30, 32, 38, 40, 60, 64, 76, 80)
LARGE = 38  # cores of a GPU whose partitions are shorter than the step that windows begin at


@contextmanager
def gpu(cores: int, edit: Any = None, backend: str = "metal") -> Iterator[Emulated]:
    """Simulate a GPU of ``cores`` cores that quantises to MLX's bits."""
    with (
        emulated(backend, checked=False, orders=(0,), edit=edit, in_place=True) as fake,
        mock.patch.object(kernels, "gpu_cores", lambda: cores),
        mock.patch.object(QuantizedRows, "quantize", lambda form, x: mx.array(quantized(to_float(x), form))),
    ):
        yield fake


def outcome(variant: Variant, cores: int, edit: Any = None) -> CheckResult:
    with gpu(cores, edit, variant.backend):
        return self_check(variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cores"),
    [(name, n) for name, own in VARIANTS.items() for n in CORES[: 1 if own.backend == "cuda" else None]],
)
def test_self_check_passes(name: str, cores: int) -> None:
    result = outcome(VARIANTS[name], cores)
    assert result.ok, result.reason


@pytest.mark.parametrize(("name", "cores"), [("matrices", 8), *slow(("dense", 8), ("matrices over codes", LARGE))])
def test_self_check_passes_with_partitions_for_one_kv_head(name: str, cores: int) -> None:
    result = outcome(VARIANTS[name]._replace(groups=1), cores)
    assert result.ok, result.reason


LATENT, COMMON = VARIANTS["latents"], VARIANTS["common blocks, one head"]
CODES = CODES._replace(pages=page_shape(64, (4, 4), 32, mx.float16))  # more groups in a row
EMPTY = ("PART < 64 ? PART : 64", "64")
LINE = ("(heads * q_len) * q_len + line % q_len;", "(heads * q_len) * q_len;")
DEFECTS: dict[str, tuple[Variant, str, str, str]] = {  # variant, body, old, new
    "a first partition without a visible token": (DENSE, "merge_partitions", *EMPTY),
    "every query is a row's first": (DENSE, "paged_decode", "* G * q_len + row % q_len;", "* G * q_len;"),
    "a query's position in the merge": (DENSE, "merge_partitions", *LINE),
    "a single partition's denominator": (DENSE, "paged_decode", ", 0.0f) / denominator;", ", 0.0f);"),
    "a window's first token": (DENSE, "paged_decode", "static_cast<int>(starts[row]), 0)", "static_cast<int>(starts[row]) - 1, 0)"),
    "a window's last partition": (DENSE, "merge_partitions", "partitions.size - 1) / partitions.size : 0", "partitions.size - 1) / partitions.size - (begin > 0) : 0"),
    "keys of another head": (MATRICES, MATRICES.body, "kv_head) * (BS * D)", "0) * (BS * D)"),
    "keys not transposed": (MATRICES, MATRICES.body, "ulong2(0), true)", "ulong2(0), false)"),
    "a token too many": (MATRICES, MATRICES.body, "own = hi - 1", "own = hi"),
    "a token before the window": (MATRICES, MATRICES.body, "from = lo;", "from = lo - 1;"),
    "values beyond the window": (MATRICES, MATRICES.body, "token >= lo && token + 8 <= hi", "true"),
    "sums never rescaled": (MATRICES, MATRICES.body, "if (simd_any(grows))", "if (false)"),
    "weights of another simdgroup": (MATRICES, MATRICES.body, "join(top, total, tg_m[s * LINES + head]", "join(top, total, tg_m[head]"),
    "sum of one simdgroup": (MATRICES, MATRICES.body, "tg_m[s * LINES + head], tg_l[s * LINES", "tg_m[s * LINES + head], tg_l[0 * LINES"),
    "a simdgroup without tokens": (MATRICES, MATRICES.body, "step += SG) {", "step += 2 * SG) {"),
    "matrices: every query is a row's first": (MATRICES, MATRICES.body, "* G * q_len + query_row % q_len", "* G * q_len"),
    "matrices: a single partition's denominator": (MATRICES, MATRICES.body, ", 0.0f) / denominator", ", 0.0f)"),
    "the newest token is not stored": (MATRICES, MATRICES.body, "if (fresh >= lo && fresh < hi)", "if (false)"),
    "values of the keys' pages": (CODES, CODES.body, "stage_codes<T, VBITS, DV, GS, BS>(v_pages", "stage_codes<T, VBITS, DV, GS, BS>(k_pages"),
    "one scale for all groups": (CODES, CODES.body, "factors[at * 8 / GS]", "factors[0]"),
    "another token's codes": (CODES, CODES.body, "page, position % BS", "page, 0"),
    "common blocks: rows mistaken": (COMMON, COMMON.body, "own_item[2 + column / G])", "own_item[2 + metal::min(column / G, 1)])"),
    "latents: every query is a row's first": (LATENT, "latent_decode", "* G * q_len + row % q_len;", "* G * q_len;"),
    "latents: a query's position in the merge": (LATENT, "merge_partitions", *LINE),
}  # fmt: skip
QUICK = (
    "a query's position in the merge",
    "the newest token is not stored",
    "latents: every query is a row's first",
)


@pytest.mark.parametrize("name", quick(DEFECTS, *QUICK))
def test_planted_defects_are_found(name: str) -> None:
    variant, body, *edit = DEFECTS[name]
    both = ("paged_decode", "merge_partitions") if tuple(edit) == EMPTY else (body,)
    result = outcome(variant, LARGE, {each: [tuple(edit)] for each in both})
    assert not result.ok and result.reason


@pytest.mark.slow
def test_reads_of_unwritten_memory_are_found() -> None:
    """Unwritten memory is 0 here, which is harmless in a partition without visible tokens. Only the check's initial
    value shows the read."""
    edit, prepare = {"paged_decode": [EMPTY], "merge_partitions": [EMPTY]}, kernels.prepare_decode
    with mock.patch.object(LaunchShape, "alignment", 64):
        result = outcome(DENSE, LARGE, edit)
        assert not result.ok and "not finite" in result.reason
        with mock.patch.object(kernels, "prepare_decode", lambda *args, init_value, **given: prepare(*args, **given)):
            assert outcome(DENSE, LARGE, edit).ok


COUNTED = {
    **dict.fromkeys(("paged_decode", "quantized_decode", *MATRIX_BODIES, "merge_partitions"), "ends"),
    **dict.fromkeys(("write_slots", "quantized_write", "write_rows"), "slots"),
    **dict.fromkeys(("gather_blocks", "quantized_gather", "gather_rows"), "blocks"),
}
STORING = ("write_slots", "quantized_write", "write_rows")
Seen = tuple[str, Any]


def texts_of_check(variant: Variant, broken: Seen | None = None) -> tuple[CheckResult, list[Seen]]:
    """Return the self-check and the texts that it launches: body and SINGLE. The text ``broken`` stores nothing, or its
    results are wrong by 1."""
    seen: list[Seen] = []
    with gpu(LARGE) as fake:

        def build(body: str, constants: Any) -> Any:
            kernel = fake(body, constants)

            def launch(*, inputs: list[mx.array], **options: Any) -> Any:
                assert inputs[BODIES[body].inputs.index(COUNTED[body])].size >= MIN_DEVICE_ELEMENTS
                text = body, dict(constants).get("SINGLE")
                seen.append(text)
                if text != broken:
                    return kernel(inputs=inputs, **options)
                if body in STORING:
                    inputs = [x + 0 for x in inputs]
                out, *others = kernel(inputs=inputs, **options)
                return [out + 1, *others]

            return launch

        with mock.patch.object(kernel_build, "build_kernel", build):
            return self_check(variant), list(dict.fromkeys(seen))


def every_text(body: str, *moved: str) -> list[Seen]:
    return [(body, False), (body, True), *((other, None) for other in ("merge_partitions", *moved))]


TEXTS = {
    "dense": every_text("paged_decode", "write_slots", "gather_blocks"),
    "quantised": every_text("quantized_decode", "quantized_write", "quantized_gather"),
    "matrices": every_text("matrix_decode", "write_slots", "gather_blocks"),
}


@pytest.mark.parametrize(
    ("name", "text"), quick([(name, text) for name in TEXTS for text in TEXTS[name]],
    ("dense", ("paged_decode", False)), ("dense", ("write_slots", None)))
)  # fmt: skip
def test_values_of_every_text_are_compared(name: str, text: Seen) -> None:
    result, seen = texts_of_check(VARIANTS[name], text)
    assert text in seen and not result.ok, text
