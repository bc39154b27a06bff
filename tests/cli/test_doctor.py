"""``python -m mlx_paged doctor``: what it prints, and when it fails."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import pytest

from mlx_paged import Dispatch, PagedConfig
from mlx_paged.cli.doctor import doctor
from mlx_paged.cli.doctor.doctor import ProductJob, ShapeJob
from mlx_paged.cli.doctor.row import Row
from mlx_paged.cli.doctor.shapes import POPULAR, Shape
from mlx_paged.kernels import availability, narrow_matmul
from mlx_paged.kernels import check as kernel_check
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels import trial as kernel_trial
from mlx_paged.kernels.check import SelfCheck
from mlx_paged.kernels.launch_shape import DTYPES, HEAD_DIMS, Variant
from mlx_paged.kernels.trial import Text
from tests.support.broken_texts import Launched

CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


@CPU_ONLY
def test_without_a_gpu_it_says_so_and_passes() -> None:
    run = subprocess.run([sys.executable, "-m", "mlx_paged", "doctor"], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert any(line.startswith("mlx ") for line in lines)
    rows = [line for line in lines if " gqa " in line]
    assert len(rows) == len(POPULAR) + len(DTYPES) - 1
    assert all("gather: MLX has no GPU here" in row for row in rows)
    assert re.fullmatch(r"\d+\.\d s in all", lines[-2]) and lines[-1] == "all passed"


@CPU_ONLY
def test_a_demanded_kernel_without_a_gpu_is_an_error() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "mlx_paged", "doctor", "--kernel", "on"], capture_output=True, text=True, check=False
    )
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

    monkeypatch.setattr(doctor, "device_decline", lambda: None)
    monkeypatch.setattr(doctor, "variants_of", variants)
    monkeypatch.setattr(doctor, "self_check", check)
    monkeypatch.setattr(doctor, "launch_seconds", lambda variant: 12e-6)
    monkeypatch.setattr(doctor, "dense_seconds", lambda variant: 15e-6)
    monkeypatch.setattr("mlx_paged.kernels.availability.device_decline", lambda: "MLX has no GPU here")
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


def test_attention_through_the_pool_that_differs_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = doctor.paged_attention
    monkeypatch.setattr(doctor, "device_decline", lambda: "no GPU")
    monkeypatch.setattr(doctor, "paged_attention", lambda *a, **k: original(*a, **k) + 0.1)
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--kernel", "off"])
    assert ended.value.code == 1
    assert "attention through the pool differs" in capsys.readouterr().out


def test_a_path_that_raises_is_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = doctor.dispatch_of

    def dispatch_of(shape: Shape, config: PagedConfig) -> Any:
        if shape.head_dim == 80:
            raise RuntimeError("no memory")
        return original(shape, config)

    monkeypatch.setattr(doctor, "device_decline", lambda: "no GPU")
    monkeypatch.setattr(doctor, "dispatch_of", dispatch_of)
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


def test_only_the_kernel_that_attention_takes_is_run_unless_it_fails_or_all_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = tuple(Variant(body, "cuda", mx.bfloat16, 64, 64, 4, 32) for body in ("paged_decode_tensor", "paged_decode"))
    working = {both[0]: True}
    monkeypatch.setattr(doctor, "device_decline", lambda: None)
    monkeypatch.setattr(doctor, "variants_of", lambda *shape: both)
    monkeypatch.setattr(doctor, "launch_seconds", lambda variant: 1e-6)
    monkeypatch.setattr(doctor, "dense_seconds", lambda variant: None)
    monkeypatch.setattr(doctor, "dispatch_of", lambda shape, config: (Dispatch("kernel", "here"), 0.0))
    monkeypatch.setattr(
        doctor, "self_check", lambda variant: SelfCheck(variant, working.get(variant, True), 0.0, 0.1, "")
    )

    def bodies(*, every_body: bool = False) -> list[str]:
        job = ShapeJob(Shape(mx.bfloat16, 64, 4, 32), every_body)
        return [row.body for row in job.rows(PagedConfig())]

    assert bodies() == ["paged_decode_tensor"]
    assert bodies(every_body=True) == ["paged_decode_tensor", "paged_decode"]
    working[both[0]] = False
    assert bodies() == ["paged_decode_tensor", "paged_decode"]


def test_on_cuda_everything_is_compiled_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    class Pool:
        def __init__(self, processes: int) -> None:
            assert processes == 4

        def submit(self, function: Any, *args: Any) -> Future[None]:
            if function is doctor.run_job:
                events.append(f"run {args[2]} elsewhere")
            else:
                assert function is doctor.compile_text
                events.append(f"compile {doctor.texts_to_compile(*args[:3])[args[3]].body}")
            done: Future[None] = Future()
            done.set_exception(RuntimeError("this process died")) if len(events) == 3 else done.set_result(None)
            return done

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            events.append("end")

    class Job(NamedTuple):
        index: int

        def texts(self) -> Iterator[Text]:
            yield Text(f"text {self.index}", ())
            yield Text(f"text {self.index % 3}, shared", ())

        def rows(self, config: PagedConfig) -> Iterator[Row]:
            events.append(f"run {self.index}")
            yield Row(True, f"job {self.index}", "-", "-", 0.0, None, None, "")

    monkeypatch.setattr(doctor, "AT_A_TIME", 8)
    monkeypatch.setattr(doctor, "CompilePool", Pool)
    monkeypatch.setattr(doctor, "num_processes", lambda count: 4)
    monkeypatch.setattr(doctor, "backend", lambda: "cuda")
    monkeypatch.setattr(doctor, "device_decline", lambda: None)
    monkeypatch.setattr(doctor, "jobs", lambda block_size, everything: [Job(index) for index in range(10)])
    assert doctor.run(32, PagedConfig(), everything=False) == 0
    first, rest = events[:18], events[18:]
    texts = ["1", "1, shared", "2", "2, shared", "3", "4", "5", "6", "7"]
    assert first[:10] == ["run 0 elsewhere", *(f"compile text {text}" for text in texts)]
    assert first[10:] == [f"run {index}" for index in range(8)]
    assert rest == [*(f"compile text {text}" for text in ("8", "2, shared", "9")), "run 8", "run 9", "end"]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines if line.startswith("job")] == [f"job {index}" for index in range(10)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """As on CUDA, with stand-ins for the kernels that give zeros, which are right."""
    stand_in = Launched(lambda text: False)
    for module in (kernels, narrow_matmul, doctor):
        monkeypatch.setattr(module, "build_kernel", stand_in)
        monkeypatch.setattr(module, "backend", lambda: "cuda")
    for module in (doctor, availability):
        monkeypatch.setattr(module, "device_decline", lambda: None)
    for module in (kernel_check, doctor):
        monkeypatch.setattr(module, "MAX_RMS", float("inf"))
    monkeypatch.setattr(doctor, "dense_seconds", lambda variant: None)
    monkeypatch.setattr(mx, "array_equal", lambda *_, **__: mx.array(True))
    kernels.variants_of.cache_clear()
    doctor.texts_to_compile.cache_clear()
    with (
        mock.patch.dict(kernels._switched_off, clear=True),
        mock.patch.dict(kernel_trial._outcomes, clear=True),
        mock.patch.dict(kernel_check._results, clear=True),
    ):
        yield stand_in
    kernels.variants_of.cache_clear()
    doctor.texts_to_compile.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "every_body", "block_size"),
    [(mx.bfloat16, False, 32), (mx.bfloat16, True, 8), (mx.float32, False, 8), (mx.float32, False, 128)],
)
def test_the_texts_of_a_job_are_those_that_it_launches(
    launched: Launched, dtype: mx.Dtype, every_body: bool, block_size: int
) -> None:
    """What MLX names a compiled CUDA kernel follows from body and constants alone."""
    job = ShapeJob(Shape(dtype, 64, 4, block_size), every_body)
    listed = [*job.texts()]
    rows = list(job.rows(PagedConfig(block_size=block_size)))
    assert all(row.passed for row in rows), rows
    assert len(rows) == (2 if every_body and dtype == mx.bfloat16 else 1)
    assert {text._replace(few=()) for text in launched.texts} == set(listed)


def test_the_text_of_a_product_is_the_one_that_it_launches(launched: Launched) -> None:
    for product in (job for job in doctor.jobs(32, everything=False) if isinstance(job, ProductJob)):
        list(product.rows(PagedConfig()))
        assert {text._replace(few=()) for text in launched.texts} == set(product.texts())
        launched.texts.clear()


def test_texts_are_compiled_once_each_the_longest_first_and_not_those_of_the_job_that_runs(launched: Launched) -> None:
    texts = doctor.texts_to_compile(32, False, 0)
    assert len(set(texts)) == len(texts)
    whole = {text for job in doctor.jobs(32, everything=False) for text in job.texts()}
    first = set(doctor.jobs(32, everything=False)[0].texts())
    assert set(texts) == whole - first and first
    bodies = list(dict.fromkeys(text.body for text in texts))
    assert bodies[:2] == ["paged_decode_tensor", "paged_decode"] and "narrow_matmul" in bodies
    assert set(bodies[-4:]) == {"merge_partitions", "write_slots", "gather_blocks", "copy_blocks"}
    for index in range(len(texts)):
        doctor.compile_text(32, False, 0, index)
    assert {text._replace(few=()) for text in launched.texts} == set(texts)
    assert len(launched.texts) == len(texts)


def test_products_of_few_rows_are_checked_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(body: str, dtype: mx.Dtype, tile: narrow_matmul.Tile) -> narrow_matmul.TileCheck:
        ok = (body, dtype, tile) != (narrow_matmul.BIASED, mx.float16, narrow_matmul.LARGE)
        return narrow_matmul.TileCheck(body, dtype, tile, ok, 1e-3 if ok else 0.5, 1.0, "" if ok else "RMS is 0.5")

    monkeypatch.setattr(doctor, "backend", lambda: "cuda")
    monkeypatch.setattr(narrow_matmul, "self_check", check)
    monkeypatch.setattr(narrow_matmul, "launch_seconds", lambda *kernel: 1e-5)
    usual = [job for job in doctor.jobs(32, everything=False) if isinstance(job, ProductJob)]
    assert len(usual) == 2 * len(narrow_matmul.BODIES) and {job.dtype for job in usual} == {mx.bfloat16}
    listed = [job for job in doctor.jobs(32, everything=True) if isinstance(job, ProductJob)]
    rows = [row for job in listed for row in job.rows(PagedConfig())]
    assert len(rows) == 2 * 2 * len(narrow_matmul.BODIES)
    failed = [row for row in rows if "FAILED: RMS is 0.5" in row.use]
    assert failed == [rows[16]] and [row for row in rows if not row.passed] == failed
    assert "float16 products of up to 32 rows" in rows[16].shape and rows[16].body == narrow_matmul.BIASED
