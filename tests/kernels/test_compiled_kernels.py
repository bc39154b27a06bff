"""Kernels compiled by NVRTC: their texts, and the arguments of a launch."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.cuda import cubins as compiled
from mlx_paged.cuda import narrow_matmul
from mlx_paged.cuda.cubins import CubinFolder, Cubins
from mlx_paged.cuda.launch import CompiledKernel, Source, short_name
from mlx_paged.kernels import build, check, draw_rows
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.build import Constants, build_kernel
from mlx_paged.kernels.check import outcome_of, self_check, texts_of
from mlx_paged.kernels.launch_shape import MATRIX_BODIES, PREFILL_BODIES, Variant, constants_of, shape_for
from scripts.support.paged_decode import write_slots
from tests.support.cases import quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.kernels.scratch import launch_alone

TENSOR = Variant("paged_decode_tensor", "cuda", mx.bfloat16, 64, 64, 4, 32)
PLAIN = Variant("paged_decode", "cuda", mx.float32, 64, 80, 3, 16, True, True)
LATENT = Variant("latent_decode", "cuda", mx.float32, 576, 512, 10, 32)
LATENT_TENSOR = Variant("latent_decode_tensor", "cuda", mx.bfloat16, 576, 512, 64, 32)
PAGES = page_shape(64, (8, 4), 32, mx.bfloat16)
QUANTIZED = Variant("quantized_decode", "cuda", mx.bfloat16, 64, 64, 4, 16, True, True, PAGES)
POOL = kernels.pool_texts(mx.bfloat16, 64, 64, 32)["write"][1]


class FakeCompiler:
    version = "13.0"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def compile(self, text: str, architecture: str) -> bytes:
        self.texts.append(text)
        return b"code"


class FakeMLX:
    """Fake launches of MLX, which record their arguments and return zeros."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.loads: list[dict[str, Any]] = []  # launches without arrays

    def precompiled(self, **call: Any) -> list[mx.array]:
        (self.calls if any(x.size for x in call["inputs"]) else self.loads).append(call)
        return [
            mx.zeros(shape, dtype) for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]


@pytest.fixture
def mlx(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMLX]:
    """Simulate CUDA, with a compiler that accepts every text."""
    fake, cubins = FakeMLX(), Cubins(FakeCompiler(), "sm_90", None)
    monkeypatch.setattr(build, "backend", lambda: "cuda")
    monkeypatch.setattr(compiled, "cubins", lambda: cubins)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", fake.precompiled, raising=False)
    build_kernel.cache_clear()
    yield fake
    build_kernel.cache_clear()


PREFILL, QUANTIZED_PREFILL = (
    (variant.body, constants_of(variant, shape_for(variant)))
    for variant in (TENSOR._replace(body=PREFILL_BODIES[0]), QUANTIZED._replace(body=PREFILL_BODIES[1]))
)


def texts() -> list[tuple[str, Constants]]:
    """Return at least one text of each body."""
    products = [
        narrow_matmul.kernel_key(body, mx.bfloat16, narrow_matmul.SMALL, bits)
        for body in narrow_matmul.BODIES
        for bits in (0, 4)
    ]
    quantized = texts_of(QUANTIZED) + texts_of(QUANTIZED._replace(body="quantized_decode_tensor"))
    listed = texts_of(TENSOR) + texts_of(PLAIN) + quantized + [PREFILL, QUANTIZED_PREFILL]
    listed += [*products, draw_rows.kernel_key(mx.bfloat16, "cuda")]
    listed += texts_of(LATENT) + texts_of(LATENT_TENSOR)
    assert {body for body, _ in listed} >= set(BODIES) - set(MATRIX_BODIES)  # Metal only
    return listed


def parameters(source: Source) -> list[str]:
    declared = source.text.split(f" {source.name}(")[1].split(") {")[0]
    return [parameter.split()[-1] for parameter in declared.split(", ")]


@pytest.mark.parametrize(("body", "constants"), texts(), ids=lambda x: x if isinstance(x, str) else "")
def test_launch_passes_the_declared_parameters(mlx: FakeMLX, body: str, constants: Constants) -> None:
    launch_alone(body, constants, build_kernel)
    (call,) = mlx.calls
    source = compiled.source_of(body, constants)
    assert call["name"] == source.name and call["compiled_source"] == short_name(b"code")
    (load,) = mlx.loads
    assert load["name"] == source.name and load["compiled_source"] == b"code"
    assert len(load["inputs"]) == len(call["inputs"]) and load["output_shapes"] == [(0,)] * len(call["output_shapes"])
    assert len(load["scalars"]) == len(call["scalars"]) and load["shared_memory"] == call["shared_memory"]
    assert f"if ({BODIES[body].outputs[0]} == nullptr) return;" in source.text
    inputs, outputs = BODIES[body].inputs, BODIES[body].outputs
    sizes = [f"{inputs[i]}_{axis}" for i, axes in source.axes for axis in axes]
    assert parameters(source) == [*inputs, *outputs, *sizes]
    given = [call["inputs"][i].shape[axis] for i, axes in source.axes for axis in axes]
    assert call["scalars"] == given and call["ensure_row_contiguous"]
    assert call["shared_memory"] == source.shared == dict(constants).get("SHARED", 0)
    assert set(re.findall(r"(\w+)_shape\[", source.text)) >= {inputs[i] for i, _ in source.axes}


HEADERLESS = [
    texts()[0], texts()[3], ("narrow_matmul_gate", None), PREFILL, *texts_of(QUANTIZED), *texts()[-2:],
    draw_rows.kernel_key(mx.float16, "cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "constants"), quick(map(tuple, HEADERLESS), *map(tuple, HEADERLESS[::8])))
def test_texts_compile_without_a_header(tmp_path: Path, body: str, constants: Constants | None) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs CUDA's compiler")
    if constants is None:
        constants = narrow_matmul.kernel_key(body, mx.float16, narrow_matmul.SMALL)[1]
    source = compiled.source_of(body, constants)
    assert "#include" not in source.text
    # NVRTC needs no header; nvcc predefines only some of these names.
    (tmp_path / "kernel.cu").write_text(f"#include <cstdint>\n{source.text}")
    # On the oldest GPU that has these instructions.
    command = [nvcc, "-arch=sm_80", "-std=c++17", "-ptx", "-o", "kernel.ptx", "kernel.cu"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[:2000]
    assert f".entry {source.name}(" in (tmp_path / "kernel.ptx").read_text()


def test_values_of_several_tokens_are_passed_in_memory_order(mlx: FakeMLX) -> None:
    pool, slots = mx.zeros((2, 3, 32, 64), mx.bfloat16), mx.zeros((10,), mx.int32)
    k, v = (mx.zeros((2, 5, 3, 64), mx.bfloat16).swapaxes(1, 2) for _ in "kv")
    write_slots(pool, pool, kernels.new_fence(), k, v, slots)
    assert [x.shape for x in mlx.calls[0]["inputs"][3:5]] == [(2, 3, 5, 64), (2, 5, 3, 64)]
    assert mlx.calls[0]["scalars"] == [3, 5]
    one = mx.zeros((10, 3, 1, 64), mx.bfloat16)
    write_slots(pool, pool, kernels.new_fence(), one, one, slots)
    assert [x.shape for x in mlx.calls[1]["inputs"][3:5]] == [one.shape] * 2


@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 1, 8), (1, 3, 2, 8)])
def test_a_product_reads_rows_of_any_number_of_dimensions(mlx: FakeMLX, shape: tuple[int, ...]) -> None:
    x, w = mx.zeros(shape, mx.float16), mx.zeros((5, 8), mx.float16)
    narrow_matmul.launch(narrow_matmul.PLAIN, x, [w], None, narrow_matmul.SMALL, [(*shape[:-1], 5)])
    assert mlx.calls[0]["scalars"] == [x.size // 8, 5, 8]


def test_a_text_for_other_dtypes_is_not_launched(mlx: FakeMLX) -> None:
    pool, slots = mx.zeros((2, 3, 32, 64), mx.float16), mx.zeros((1,), mx.int32)
    one = mx.zeros((1, 3, 1, 64), mx.float16)
    launch = build.prepare(("write_slots", POOL), (1, 1, 1), 1, [((1,), mx.uint32)])
    with pytest.raises(ValueError, match="must have types"):
        launch([pool, pool, kernels.new_fence(), one, one, slots])
    assert not mlx.calls


@pytest.mark.parametrize("trouble", ["no compiler", "does not compile"])
def test_a_kernel_that_nvrtc_cannot_compile_is_off(mlx: FakeMLX, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    def refuse(*_: object) -> bytes:
        raise compiled.CompileError("no such name")

    monkeypatch.setattr(FakeCompiler, "compile", refuse)
    made = None if trouble == "no compiler" else Cubins(FakeCompiler(), "sm_90", None)
    monkeypatch.setattr(compiled, "cubins", lambda: made)
    reason = outcome_of(lambda: build_kernel("write_slots", POOL)).reason
    assert ("NVRTC" if made is None else "no such name") in reason and not mlx.calls


def test_all_texts_of_a_variant_start_compiling_before_the_check(mlx: FakeMLX, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = FakeCompiler()
    cubins = Cubins(compiler, "sm_90", None)
    monkeypatch.setattr(compiled, "cubins", lambda: cubins)
    begun: list[int] = []
    passes = check.CheckResult(True, 0.0, 0.0, "")
    monkeypatch.setattr(check, "self_check", lambda variant: begun.append(len(cubins._futures)) or passes)
    monkeypatch.setattr(check, "_results", {})
    assert check.checked(TENSOR).ok and begun == [5]
    for body, constants in texts_of(TENSOR):
        assert isinstance(build_kernel(body, constants), CompiledKernel)
    assert len(compiler.texts) == 5, "each is compiled once"


def test_compiled_by_names_the_compiler(mlx: FakeMLX, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compiled.compiler_name() == "NVRTC 13.0, in each process"
    kept = Cubins(FakeCompiler(), "sm_90", CubinFolder(tmp_path / "kernels"))
    monkeypatch.setattr(compiled, "cubins", lambda: kept)
    assert compiled.compiler_name() == "NVRTC 13.0, once per machine"
    monkeypatch.setattr(compiled, "cubins", lambda: None)
    assert compiled.compiler_name() == "none: NVRTC cannot be loaded"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [TENSOR, PLAIN._replace(value_dim=64), QUANTIZED])
def test_nvrtc_code_passes_the_self_check(variant: Variant) -> None:
    if build.backend() != "cuda":
        pytest.skip("needs CUDA")
    result = self_check(variant)
    assert result.ok, result.reason
    assert all(isinstance(build_kernel(*text), CompiledKernel) for text in texts_of(variant))
