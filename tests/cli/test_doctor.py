"""``python -m mlx_paged doctor``: what it prints, and when it fails."""

import re
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import Dispatch, PagedConfig
from mlx_paged.cli.doctor import doctor
from mlx_paged.cli.doctor import jobs as doctor_jobs
from mlx_paged.cli.doctor.jobs import POPULAR, ProductJob, Shape, ShapeJob
from mlx_paged.cli.doctor.report import Row
from mlx_paged.kernels.check import SelfCheck
from mlx_paged.kernels.launch_shape import DTYPES, HEAD_DIMS, Variant
from mlx_paged.kernels.prefill import prefill_variants_of
from mlx_paged.kernels.products import narrow_matmul
from tests.support.processes import commands

CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


@CPU_ONLY
def test_without_a_gpu_it_says_so_and_passes() -> None:
    run = commands.run("mlx_paged", "doctor")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert any(line.startswith("mlx ") for line in lines)
    rows = [line for line in lines if " gqa " in line]
    assert len(rows) == len(POPULAR) + len(DTYPES) - 1
    assert all("gather: MLX has no GPU here" in row for row in rows)
    assert re.fullmatch(r"\d+\.\d s in all", lines[-2]) and lines[-1].startswith("no kernel ran (MLX has no GPU here)")


@CPU_ONLY
def test_a_demanded_kernel_without_a_gpu_is_an_error() -> None:
    run = commands.run("mlx_paged", "doctor", "--kernel", "on")
    assert run.returncode == 1
    assert run.stderr.startswith("mlx_paged doctor: kernel=on, but MLX")
    assert "Traceback" not in run.stderr


@pytest.mark.gpu
def test_on_a_gpu_every_variant_passes() -> None:
    run = subprocess.run([sys.executable, "-m", "mlx_paged", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line for line in run.stdout.splitlines() if " gqa " in line]
    assert len(rows) >= len(POPULAR) + len(DTYPES) - 1
    assert all(re.search(r" \d+ us ", row) for row in rows)
    assert all("kernel: one new token per sequence" in row for row in rows)


def test_a_failing_variant_is_named_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Variant("paged_decode", "metal", mx.bfloat16, 80, 80, 1, 32)
    odd = Variant("paged_decode", "metal", mx.bfloat16, 96, 96, 1, 32)

    def check(variant: Variant) -> SelfCheck:
        if variant == bad:
            return SelfCheck(variant, False, float("nan"), 0.5, "RuntimeError: does not compile")
        if variant == odd:
            return SelfCheck(variant, False, 0.25, 0.5, "RMS 2.5e-01 is not below 0.005")
        return SelfCheck(variant, True, 1e-4, 0.5, "")

    def variants(dtype: mx.Dtype, dim: int, value_dim: int, heads: int, kv: int, block: int, *extras: bool) -> tuple:
        return (Variant("paged_decode", "metal", dtype, dim, value_dim, heads // kv, block, *extras),)

    monkeypatch.setattr(doctor, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_jobs, "variants_of", variants)
    monkeypatch.setattr(doctor_jobs, "self_check", check)
    monkeypatch.setattr(doctor_jobs, "launch_seconds", lambda variant: 12e-6)
    monkeypatch.setattr(doctor_jobs, "dense_seconds", lambda variant: 15e-6)
    monkeypatch.setattr("mlx_paged.kernels.availability.device_unsupported_reason", lambda: "MLX has no GPU here")
    with pytest.raises(SystemExit) as ended:
        doctor.main([])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "FAILED" in line]
    assert len(failed) == 2 and lines[-1] == "2 failed"
    by_dim = {"D80": next(x for x in failed if " D80 " in x), "D96": next(x for x in failed if " D96 " in x)}
    assert by_dim["D80"].split()[7:9] == ["no", "nan"] and "does not compile" in by_dim["D80"]
    assert by_dim["D96"].split()[7:9] == ["yes", "2.5e-01"] and "not below" in by_dim["D96"]
    assert all("12 us    15 us" in line for line in lines if " gqa " in line and line not in failed)


def test_the_prefill_kernel_is_run_for_the_shapes_it_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill_variants_of.cache_clear()
    monkeypatch.setattr("mlx_paged.kernels.prefill.backend", lambda: "cuda")
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_jobs, "variants_of", lambda *shape: ())
    monkeypatch.setattr(doctor_jobs, "self_check_prefill", lambda v: SelfCheck(v, v.gqa != 7, 1e-4, 0.5, "it is wrong"))
    monkeypatch.setattr(doctor_jobs, "prefill_seconds", lambda variant: 12e-6)
    config = PagedConfig(kernel=False)
    rows = {}
    for job in doctor.jobs(32, everything=False):
        if isinstance(job, ShapeJob):
            rows[job.shape] = [checked.timed() for checked in job.run(config)]
    prefill_variants_of.cache_clear()
    assert {shape.dtype for shape, found in rows.items() if not found} == {mx.float32}
    for shape, found in rows.items():
        assert [row.passed for row in found] == ([shape.gqa != 7] if shape.dtype != mx.float32 else [])
        assert all("prompts in packs" in str(row) for row in found)


def test_attention_through_the_pool_that_differs_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = doctor_jobs.paged_attention
    monkeypatch.setattr(doctor, "device_unsupported_reason", lambda: "no GPU")
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: "no GPU")
    monkeypatch.setattr(doctor_jobs, "paged_attention", lambda *a, **k: original(*a, **k) + 0.1)
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--kernel", "off"])
    assert ended.value.code == 1
    assert "attention through the pool differs" in capsys.readouterr().out


def test_a_path_that_raises_is_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = doctor_jobs.dispatch_of

    def dispatch_of(shape: Shape, config: PagedConfig) -> Any:
        if shape.head_dim == 80:
            raise RuntimeError("no memory")
        return original(shape, config)

    monkeypatch.setattr(doctor, "device_unsupported_reason", lambda: "no GPU")
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: "no GPU")
    monkeypatch.setattr(doctor_jobs, "dispatch_of", dispatch_of)
    assert doctor.run(32, PagedConfig(kernel="off"), everything=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [" D80 " in line for line in lines if "FAILED: RuntimeError: no memory" in line] == [True]


def test_all_adds_every_ratio_and_block_size() -> None:
    few, many = (doctor.jobs(32, everything=everything) for everything in (False, True))
    few_shapes, all_of_them = ([job.shape for job in listed if isinstance(job, ShapeJob)] for listed in (few, many))
    assert all_of_them[: len(few_shapes)] == few_shapes and len(set(all_of_them)) == len(all_of_them)
    assert {shape.gqa for shape in all_of_them} == set(range(1, 17))
    assert {shape.block_size for shape in all_of_them} == {8, 16, 32, 64, 128}
    assert {shape.head_dim for shape in all_of_them} == set(HEAD_DIMS)
    assert {shape.dtype for shape in all_of_them} == {shape.dtype for shape in few_shapes} == set(DTYPES)
    assert not any(job.every_body for job in few) and all(job.every_body for job in many)


def test_other_kernels_are_run_if_the_first_fails_or_all_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = tuple(Variant(body, "cuda", mx.bfloat16, 64, 64, 4, 32) for body in ("paged_decode_tensor", "paged_decode"))
    working = {both[0]: True}
    monkeypatch.setattr(doctor, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_jobs, "variants_of", lambda *shape: both)
    monkeypatch.setattr(doctor_jobs, "launch_seconds", lambda variant: 1e-6)
    monkeypatch.setattr(doctor_jobs, "dense_seconds", lambda variant: None)
    monkeypatch.setattr(doctor_jobs, "dispatch_of", lambda shape, config: (Dispatch("kernel", "here"), 0.0))
    monkeypatch.setattr(
        doctor_jobs, "self_check", lambda variant: SelfCheck(variant, working.get(variant, True), 0.0, 0.1, "")
    )

    def bodies(*, every_body: bool = False) -> list[str]:
        job = ShapeJob(Shape(mx.bfloat16, 64, 4, 32), every_body)
        return [checked.row.body for checked in job.run(PagedConfig())]

    assert bodies() == ["paged_decode_tensor"]
    assert bodies(every_body=True) == ["paged_decode_tensor", "paged_decode"]
    working[both[0]] = False
    assert bodies() == ["paged_decode_tensor", "paged_decode"]


def test_on_cuda_the_jobs_run_in_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: list[tuple[range, int]] = []

    def rows_of_workers(
        part: range, block_size: int, config: PagedConfig, everything: bool, num: int, stream: Any
    ) -> Any:
        parts.append((part, num))
        return [Row(index != 3, f"job {index}", "-", "-", 0.0, None, None, "") for index in part]

    monkeypatch.setattr(doctor, "AT_A_TIME", 8)
    monkeypatch.setattr(doctor, "rows_of_workers", rows_of_workers)
    monkeypatch.setattr(doctor, "num_workers", lambda free_bytes: 4)
    monkeypatch.setattr(doctor, "backend", lambda: "cuda")
    monkeypatch.setattr(doctor, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor, "jobs", lambda block_size, everything: list(range(10)))
    assert doctor.run(32, PagedConfig(), everything=False) == 1
    assert parts == [(range(8), 4), (range(8, 10), 4)]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines if line.startswith("job")] == [f"job {index}" for index in range(10)]
    assert "compiling       in 4 processes" in lines and lines[-1] == "1 failed"


def test_products_of_few_rows_are_checked_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(body: str, dtype: mx.Dtype, tile: narrow_matmul.Tile, bits: int) -> narrow_matmul.TileCheck:
        ok = (body, dtype, tile, bits) != (narrow_matmul.BIASED, mx.float16, narrow_matmul.LARGE, 0)
        return narrow_matmul.TileCheck(
            body, dtype, tile, bits, ok, 1e-3 if ok else 0.5, 1.0, "" if ok else "RMS is 0.5"
        )

    monkeypatch.setattr(doctor_jobs, "backend", lambda: "cuda")
    monkeypatch.setattr(narrow_matmul, "self_check", check)
    monkeypatch.setattr(narrow_matmul, "launch_seconds", lambda *kernel: 1e-5)
    usual = [job for job in doctor.jobs(32, everything=False) if isinstance(job, ProductJob)]
    assert len(usual) == 3 * 2 * len(narrow_matmul.BODIES) and {job.dtype for job in usual} == {mx.bfloat16}
    listed = [job for job in doctor.jobs(32, everything=True) if isinstance(job, ProductJob)]
    rows = [checked.timed() for job in listed for checked in job.run(PagedConfig())]
    assert len(rows) == 3 * 2 * 2 * len(narrow_matmul.BODIES)
    failed = [row for row in rows if "FAILED: RMS is 0.5" in row.use]
    assert failed == [rows[16]] and [row for row in rows if not row.passed] == failed
    assert "float16 products of up to 32 rows" in rows[16].shape and rows[16].body == narrow_matmul.BIASED
    assert rows[-1].shape.endswith("float16 products of up to 32 rows, 8 bits")
