"""mlx_paged doctor: checks, output, report file, worker processes, and the stress test of launch order."""

import io
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_paged import Dispatch, PagedConfig
from mlx_paged.cli.doctor import checks as doctor_checks
from mlx_paged.cli.doctor import doctor, product_jobs, timing
from mlx_paged.cli.doctor import jobs as doctor_jobs
from mlx_paged.cli.doctor.checks import DEMO_FOLDER, demo_folder, difference, ordering_stress
from mlx_paged.cli.doctor.jobs import (
    POOL_KERNELS,
    POPULAR,
    Shape,
    ShapeJob,
    jobs,
    num_workers,
    popular_shapes,
    rows_of_workers,
    shares_of,
)
from mlx_paged.cli.doctor.report import Outcome, Report, Row, run_program
from mlx_paged.cli.terminal import Bar
from mlx_paged.cuda import narrow_matmul
from mlx_paged.errors import ConfigError
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import SelfCheck
from mlx_paged.kernels.launch_shape import DTYPES, HEAD_DIMS, Variant
from mlx_paged.kernels.prefill import prefill_variants_of
from scripts import demo_model
from tests.support.processes import commands

CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


@CPU_ONLY
def test_without_a_gpu_doctor_passes_and_says_that_no_kernel_ran() -> None:
    run = commands.run("mlx_paged", "doctor")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert any(line.startswith("mlx ") for line in lines)
    rows = [line for line in lines if " gqa " in line]
    assert len(rows) == len(POPULAR) + len(DTYPES) - 1
    assert all("gather: MLX has no GPU here" in row for row in rows)
    assert re.fullmatch(r"\d+\.\d s in all", lines[-2]) and lines[-1].startswith("no kernel ran (MLX has no GPU here)")


@CPU_ONLY
def test_kernel_on_without_a_gpu_is_an_error() -> None:
    run = commands.run("mlx_paged", "doctor", "--kernel", "on")
    assert run.returncode == 1
    assert run.stderr.startswith("mlx_paged doctor: kernel=on, but MLX")
    assert "Traceback" not in run.stderr


@pytest.mark.gpu
def test_every_variant_passes_on_a_gpu() -> None:
    run = subprocess.run([sys.executable, "-m", "mlx_paged", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line for line in run.stdout.splitlines() if " gqa " in line]
    assert all(re.search(r" \d+ us ", row) for row in rows)
    decode = [row for row in rows if "packed prefill" not in row]
    assert len(decode) >= len(POPULAR) + len(DTYPES) - 1
    assert all("kernel: one new token per sequence" in row for row in decode)


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


def test_row_of_a_decode_kernel_shows_the_path_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Variant("paged_decode", "cuda", mx.bfloat16, 64, 64, 4, 32)
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(ShapeJob, "prefill_variants", lambda job: (decode._replace(body="paged_prefill"),))
    monkeypatch.setattr(ShapeJob, "variants", lambda job: (decode,))
    monkeypatch.setattr(doctor_jobs, "self_check", lambda v: SelfCheck(v, True, 1e-4, 0.5, ""))
    job = next(job for job in doctor.jobs(32, everything=False) if isinstance(job, ShapeJob))
    prompts, tokens = (checked.row for checked in job.run(PagedConfig(kernel=False)))
    assert prompts.use == "packed prefill" and tokens.use.startswith("gather: ")


def test_prefill_kernel_runs_for_the_shapes_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill_variants_of.cache_clear()
    monkeypatch.setattr("mlx_paged.kernels.prefill.backend", lambda: "cuda")
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_jobs, "variants_of", lambda *shape: ())
    monkeypatch.setattr(doctor_jobs, "self_check", lambda v: SelfCheck(v, v.gqa != 7, 1e-4, 0.5, "it is wrong"))
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
        assert all("packed prefill" in str(row) for row in found)


def test_wrong_attention_through_the_pool_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = doctor_jobs.attend
    monkeypatch.setattr(doctor, "device_unsupported_reason", lambda: "no GPU")
    monkeypatch.setattr(doctor_jobs, "device_unsupported_reason", lambda: "no GPU")
    monkeypatch.setattr(doctor_jobs, "attend", lambda *a, **k: original(*a, **k) + 0.1)
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--kernel", "off"])
    assert ended.value.code == 1
    assert "attention over the pool differs from dense attention" in capsys.readouterr().out


def test_exception_in_one_job_fails_only_its_line(
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


def test_all_adds_every_gqa_ratio_and_block_size() -> None:
    few, many = (doctor.jobs(32, everything=everything) for everything in (False, True))
    few_shapes, all_of_them = ([job.shape for job in listed if isinstance(job, ShapeJob)] for listed in (few, many))
    assert all_of_them[: len(few_shapes)] == few_shapes and len(set(all_of_them)) == len(all_of_them)
    assert {shape.gqa for shape in all_of_them} == set(range(1, 17))
    assert {shape.block_size for shape in all_of_them} == {8, 16, 32, 64, 128}
    assert {shape.head_dim for shape in all_of_them} == set(HEAD_DIMS)
    assert {shape.dtype for shape in all_of_them} == {shape.dtype for shape in few_shapes} == set(DTYPES)
    assert not any(job.every_body for job in few) and all(job.every_body for job in many)


def test_other_kernels_run_if_the_first_fails_or_with_every_body(
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


def test_jobs_run_in_several_processes_on_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: list[tuple[range, int]] = []

    def rows_of_workers(
        part: range, block_size: int, config: PagedConfig, everything: bool, num: int, stream: Any
    ) -> Any:
        parts.append((part, num))
        return [Row(index != 3, f"job {index}", "-", "-", 0.0, None, None, "") for index in part]

    monkeypatch.setattr(doctor, "JOBS_PER_ROUND", 8)
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
    def check(
        body: str, dtype: mx.Dtype, tile: narrow_matmul.Tile, bits: int, fused: narrow_matmul.FusedRotation
    ) -> narrow_matmul.TileCheck:
        ok = (body, dtype, tile, bits) != (narrow_matmul.BIASED, mx.float16, narrow_matmul.LARGE, 0)
        return narrow_matmul.TileCheck(
            body, dtype, tile, bits, ok, 1e-3 if ok else 0.5, 1.0, "" if ok else "RMS is 0.5"
        )

    monkeypatch.setattr(doctor_jobs, "backend", lambda: "cuda")
    monkeypatch.setattr(narrow_matmul, "self_check", check)
    monkeypatch.setattr(product_jobs, "product_seconds", lambda *kernel: 1e-5)
    usual = [job for job in doctor.jobs(32, everything=False) if isinstance(job, product_jobs.ProductJob)]
    num_kernels = len(narrow_matmul.TILES) * len(narrow_matmul.KERNELS)
    assert len(usual) == 3 * num_kernels and {job.dtype for job in usual} == {mx.bfloat16}
    listed = [job for job in doctor.jobs(32, everything=True) if isinstance(job, product_jobs.ProductJob)]
    rows = [checked.timed() for job in listed for checked in job.run(PagedConfig())]
    assert len(rows) == 3 * 2 * num_kernels
    failed = [row for row in rows if "FAILED: RMS is 0.5" in row.use]
    (wrong,) = failed
    assert [row for row in rows if not row.passed] == failed
    assert "float16 products of up to 32 rows" in wrong.shape and wrong.body == narrow_matmul.BIASED
    assert rows[-1].shape.endswith("float16 products of up to 32 rows, 8 bits")


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@CPU_ONLY
def test_report_on_a_cpu_is_complete_and_names_skipped_checks(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report.json"
    env = {"MLX_PAGED_CACHE": str(tmp_path), "MLX_MAX_OPS_PER_BUFFER": "30", "MLX_PAGED_API_KEY": "sesame"}
    run = commands.run("mlx_paged", "doctor", "--report", path, timeout=280, **env)
    assert run.returncode == 0, run.stdout + run.stderr
    data = read(path)
    assert data["finished"] and data["running"] is None and data["failed"] == 0
    told = data["facts"]
    assert told["mlx"] == mx.__version__ and "GiB" in told["memory"] and told["GPU cores"] == "unknown"
    assert {"mlx-lm", "system", "device", "architecture", "kernel"} < set(told)
    assert data["variables"] == {"MLX_MAX_OPS_PER_BUFFER": "30"} and "sesame" not in path.read_text()
    assert len(data["kernels"]) == len(POPULAR) + len(DTYPES) - 1
    assert all(row["passed"] and row["rms"] < 5e-3 and row["launch_us"] is None for row in data["kernels"])
    assert "only Metal" in data["threads"]["not run"] and "no command buffers" in data["ordering"]["not run"]
    assert data["speed"]["model"].startswith("a Llama with random weights")
    assert data["speed"]["stock"] > 0 and data["speed"]["paged"] > 0
    assert data["speed"]["kept"] == ["layouts", "lock of calls", "pools"]
    assert data["speed"]["path"].startswith("gather") and data["speed"]["same_tokens"] == data["speed"]["tokens"]
    text = "\n".join(data["summary"])
    assert "kernels and paths: 18 of 18 passed" in text and "NOT FINISHED" not in text and "speed: paged: " in text
    *_, place, verdict = run.stdout.splitlines()
    assert place == f"the report is in {path}" and verdict.startswith("no kernel ran (MLX has no GPU here)")
    assert not list(path.parent.glob("*.new"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[Variant], SelfCheck]]]:
    """Make the doctor see a Metal GPU; its self-check is the entry ``check``, and no programs run."""
    entries: dict[str, Any] = {"check": lambda variant: SelfCheck(variant, True, 1e-4, 0.5, "")}

    def variants(dtype: mx.Dtype, dim: int, value_dim: int, heads: int, kv: int, block: int, *extras: bool) -> tuple:
        return (Variant("paged_decode", "metal", dtype, dim, value_dim, heads // kv, block, *extras),)

    for module in (doctor, doctor_jobs):
        monkeypatch.setattr(module, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_jobs, "variants_of", variants)
    monkeypatch.setattr(doctor_jobs, "self_check", lambda variant: entries["check"](variant))
    monkeypatch.setattr(doctor_jobs, "launch_seconds", lambda variant: 12e-6)
    monkeypatch.setattr(doctor_jobs, "dense_seconds", lambda variant: None if variant.softcap else 16e-6)
    monkeypatch.setattr("mlx_paged.kernels.availability.device_unsupported_reason", lambda: "MLX has no GPU here")
    monkeypatch.setattr(doctor_checks, "CHECKS", ())
    yield entries


def test_report_has_times_and_failures_and_hides_the_home_folder(gpu: dict[str, Any], tmp_path: Path) -> None:
    def check(variant: Variant) -> SelfCheck:
        if variant.head_dim == 80:
            reason = f"RuntimeError: cannot open {Path.home()}/notes.metal"
            return SelfCheck(variant, False, float("nan"), 0.5, reason)
        return SelfCheck(variant, True, 1e-4, 0.5, "")

    gpu["check"] = check
    path = tmp_path / "report.json"
    assert doctor.run(32, PagedConfig(), everything=False, report_file=path) == 1
    data = read(path)
    bad = [row for row in data["kernels"] if not row["passed"]]
    assert len(bad) == 1 and bad[0]["rms"] is None and bad[0]["compiled"] == "no" and "D80" in bad[0]["shape"]
    assert "cannot open ~/notes.metal" in bad[0]["use"] and str(Path.home()) not in path.read_text()
    good = [row for row in data["kernels"] if row["passed"]]
    assert {(row["launch_us"], row["dense_us"]) for row in good} == {(12.0, 16.0), (12.0, None)}
    text = "\n".join(data["summary"])
    assert "17 of 18 passed" in text and "failed: bfloat16 D80" in text and "median 0.75, maximum 0.75" in text
    assert data["failed"] == 1


def test_interrupted_run_leaves_a_report_that_names_the_running_job(gpu: dict[str, Any], tmp_path: Path) -> None:
    def check(variant: Variant) -> SelfCheck:
        if variant.head_dim == 96:
            raise KeyboardInterrupt  # like a process that the driver ends: nothing is written after it
        return SelfCheck(variant, True, 1e-4, 0.5, "")

    gpu["check"] = check
    path = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        doctor.run(32, PagedConfig(), everything=False, report_file=path)
    data = read(path)
    assert not data["finished"] and "D96" in data["running"] and len(data["kernels"]) == 4
    assert "NOT FINISHED: stopped at bfloat16 D96" in " ".join(data["summary"][-1].split())


def test_failed_checks_fail_the_run(
    gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = (
        ("ordering", "order of command buffers", lambda config: (False, {"1 operation": "tokens differ"})),
        ("speed", "tokens per second", lambda config: (True, {"not run": "no model"})),
    )
    monkeypatch.setattr(doctor_checks, "CHECKS", checks)
    path = tmp_path / "report.json"
    assert doctor.run(32, PagedConfig(), everything=False, report_file=path) == 1
    out = capsys.readouterr().out
    assert "order of command buffers: FAILED" in out and "tokens per second: no model" in out
    assert read(path)["ordering"] == {"1 operation": "tokens differ"}
    assert "ordering: 1 operation: tokens differ" in read(path)["summary"]
    capsys.readouterr()
    assert doctor.run(32, PagedConfig(), everything=False) == 0
    assert "stress" not in capsys.readouterr().out  # checks run only for a report


def test_unwritable_report_is_refused_before_any_job_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "report.json"
    run = commands.run("mlx_paged", "doctor", "--report", path, timeout=100)
    assert run.returncode == 1 and run.stderr.startswith("mlx_paged doctor: cannot write the report")
    assert run.stdout == "" and "Traceback" not in run.stderr
    with pytest.raises(ConfigError, match="cannot write"):
        Report(path, {})


def test_facts_of_a_mac_name_chip_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {
        "device_name": "Apple M3 Max",
        "architecture": "applegpu_g15s",
        "memory_size": 64 << 30,
        "max_recommended_working_set_size": 48 << 30,
        "max_buffer_length": 36 << 30,
    }
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda *device: info)
    monkeypatch.setattr(doctor, "gpu_cores", lambda: 40)
    monkeypatch.setattr(doctor.platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    told = doctor.facts()
    assert told["device"].endswith("Apple M3 Max") and told["architecture"] == "applegpu_g15s"
    assert told["GPU cores"] == "40" and told["memory"] == "64 GiB, 48 GiB for the GPU, 36 GiB in one array"
    assert told["system"].startswith("macOS 15.1 ")


@pytest.mark.parametrize(("built", "mac", "warns"), [(15, "26.1", True), (26, "26.1", False), (15, "15.7", False)])
def test_wheel_for_an_older_macos_is_reported(
    built: int, mac: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wheel:
        version = "0.32.4"

        def read_text(self, name: str) -> str:
            return f"Wheel-Version: 1.0\nTag: py3-none-macosx_{built}_0_arm64\n" if name == "WHEEL" else ""

    monkeypatch.setattr(doctor.platform, "mac_ver", lambda: (mac, ("", "", ""), "arm64"))
    monkeypatch.setattr(doctor.metadata, "distribution", lambda name: Wheel())
    told = doctor.facts()["MLX wheel"]
    assert told.startswith(f"for macOS {built}") and ("matrix units" in told) is warns


def test_facts_name_the_wheel_only_on_macos() -> None:
    assert ("MLX wheel" in doctor.facts()) is (sys.platform == "darwin")


def test_infinite_rms_is_null_in_json() -> None:
    row = Row(False, "a  b", "-", "-", float("inf"), None, 1.5e-6, "use")
    assert row.as_json()["rms"] is None and row.as_json()["dense_us"] == 1.5 and row.as_json()["shape"] == "a b"


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "error"),
    [
        ("print('[1, 2]'); print('hello'); print('3')", [[1, 2], 3], None),
        ("import os; print('1', flush=True); os.abort()", [1], "exited with status -6"),
        ("import sys; print('1'); sys.exit('no model')", [1], "exited with status 1: no model"),
        ("import time; print('1', flush=True); time.sleep(60)", [1], "timed out after 2 s"),
        ("import os, json; print(json.dumps(os.environ['LIMIT']))", ["7"], None),
    ],
)
def test_program_that_crashes_or_hangs_returns_an_outcome(
    tmp_path: Path, text: str, expected: list[Any], error: str | None
) -> None:
    (tmp_path / "a_program.py").write_text(text)
    timeout = 2 if "sleep" in text else 60
    outcome = run_program("a_program", variables={"PYTHONPATH": str(tmp_path), "LIMIT": "7"}, timeout=timeout)
    assert outcome.values == expected
    assert (outcome.error is None) if error is None else str(outcome.error).startswith(error)


def test_demo_model_is_found_where_the_script_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo_model.MODEL_FOLDER == DEMO_FOLDER
    for name, under in (("MLX_PAGED_CACHE", ""), ("XDG_CACHE_HOME", "mlx_paged"), ("HOME", ".cache/mlx_paged")):
        for other in ("MLX_PAGED_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.setattr(sys, "platform", "linux")
        assert demo_model.default_cache_dir().expanduser() == tmp_path / name / under
        assert demo_folder() is None
        folder = tmp_path / name / under / DEMO_FOLDER
        folder.mkdir(parents=True)
        (folder / demo_model.MANIFEST).write_text("{}")
        assert demo_folder() == folder


# --- registers ------------------------------------------------------------------------------------------------------

MLX_SAYS = "Thread group size (2048) is greater than  the maximum allowed threads per threadgroup (896)."


def test_thread_limit_is_read_only_from_mlxs_message() -> None:
    assert doctor_checks.allowed_threads(MLX_SAYS) == 896
    assert doctor_checks.allowed_threads("[metal::Device] Unable to build metal library from source") is None


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Make the launch code see Metal; thread groups of more than 1,024 are refused with the text ``says``."""
    entries = {"says": MLX_SAYS}

    def metal_kernel(**text: Any) -> Callable[..., list[mx.array]]:
        def launch(*, threadgroup: tuple[int, int, int], output_shapes: Any, output_dtypes: Any, **_: Any) -> Any:
            if threadgroup[0] > 1024:
                raise ValueError(entries["says"])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    def forget() -> None:
        kernels.variants_of.cache_clear()
        kernels.build_kernel.cache_clear()

    monkeypatch.setattr(kernel_build, "backend", lambda: "metal")
    monkeypatch.setattr(kernels, "backend", lambda: "metal")
    monkeypatch.setattr(doctor_checks, "backend", lambda: "metal")
    monkeypatch.setattr(kernels, "gpu_cores", lambda: 10)
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    forget()
    yield entries
    forget()


def test_each_popular_shape_is_launched_with_too_many_threads(
    metal: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    doctor_checks.print_threads(32)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [value["shape"] for value in found] == [str(shape) for shape in popular_shapes(32)]
    assert all(value["allowed"] == 896 and value["needed"] == 128 and "message" not in value for value in found)


def test_other_launch_error_is_reported_without_a_limit(metal: dict[str, str]) -> None:
    metal["says"] = "Unable to build metal library from source"
    found = doctor_checks.probe(Shape(mx.float16, 64, 8, 32, sinks=True))
    assert found["allowed"] is None and found["message"] == metal["says"]


def test_kernel_that_does_not_compile_is_reported_and_others_run(
    metal: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "it does not compile"
    wide = [shape for shape in popular_shapes(32) if shape.head_dim == 80]
    off = {
        variant: bad
        for shape in wide
        for variant in kernels.variants_of(shape.dtype, 80, 80, 2 * shape.gqa, 2, 32, shape.softcap, shape.sinks)
    }
    with mock.patch.dict(kernels._switched_off, off):
        doctor_checks.print_threads(32)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [value for value in found if value["allowed"] is None] == [
        {"shape": next(str(s) for s in popular_shapes(32) if s.head_dim == 80), "needed": None, "allowed": None}
        | {"message": bad}
    ]


def test_fewer_allowed_than_needed_threads_fail_the_check(
    metal: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [{"shape": "a", "needed": 128, "allowed": 896}, {"shape": "b", "needed": 128, "allowed": None}]
    outcome = Outcome(values, None)
    monkeypatch.setattr(doctor_checks, "run_program", lambda *arguments, **options: outcome)
    passed, found = doctor_checks.threads(PagedConfig())
    assert passed and found["shapes"] == values and "2,048 threads" in found["how"]
    outcome = Outcome([{"shape": "a", "needed": 128, "allowed": 64}], None)
    assert not doctor_checks.threads(PagedConfig())[0]
    outcome = Outcome(values, "exited with status -6: crashed")
    passed, found = doctor_checks.threads(PagedConfig())
    assert not passed and found["error"] == "exited with status -6: crashed"


def test_speed_and_ordering_checks_use_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(module: str, *arguments: str, **options: Any) -> Outcome:
        asked.append((module, *arguments, options["variables"]))
        return Outcome([{"stock": 1.0}], None)

    monkeypatch.setattr(doctor_checks, "run_program", run)
    assert doctor_checks.speed(PagedConfig(block_size=16, kernel="off")) == (True, {"stock": 1.0})
    assert asked == [
        ("mlx_paged.cli.doctor.checks", "speed", {"MLX_PAGED_KERNEL": "off", "MLX_PAGED_BLOCK_SIZE": "16"})
    ]
    monkeypatch.setattr(doctor_checks, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_checks, "ordering_stress", lambda: {"1": "same", "1000": "tokens differ"})
    assert doctor_checks.ordering(PagedConfig())[0] is False
    assert doctor_checks.ordering(PagedConfig(kernel="off")) == (True, {"not run": "the kernels are off"})


def test_dense_attention_is_timed_except_with_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_TOKENS", 64)
    monkeypatch.setattr(timing, "LAUNCHES", 2)
    shape = ("paged_decode", "metal", mx.float32, 64, 64, 4, 32)
    for sinks in (False, True):
        seconds = timing.dense_seconds(Variant(*shape, False, sinks))
        assert seconds is not None and seconds > 0
    assert timing.dense_seconds(Variant(*shape, True, False)) is None


STEPS = 200


def warm_program(module: str, *arguments: str, variables: dict[str, str]) -> Outcome:
    """Like run_program(), but the process has its imports already."""
    run = commands.run(module, *arguments, **variables)
    return Outcome([json.loads(line) for line in run.stdout.splitlines()], run.stderr if run.returncode else None)


def tokens_with(seed: int, steps: int, **variables: str) -> dict[str, list[int]]:
    """Return the tokens by request that the ordering stress computes in its own process."""
    with mock.patch.object(doctor_checks, "run_program", warm_program):
        outcome = doctor_checks.tokens_with(seed, steps, **variables)
    assert outcome.error is None, outcome.error
    tokens, paths = outcome.values
    kernels_run = kernel_build.backend() is not None and variables.get("MLX_PAGED_KERNEL") != "off"
    assert bool(paths.get("kernel")) == kernels_run, paths
    assert len({token for listed in tokens.values() for token in listed}) > len(tokens)
    result: dict[str, list[int]] = tokens
    return result


def test_tokens_of_the_stress_equal_those_of_gather() -> None:
    """On a GPU this compares kernels with gathered blocks; elsewhere both runs gather."""
    assert tokens_with(0, 6) == tokens_with(0, 6, MLX_PAGED_KERNEL="off")


def test_stress_program_reads_the_kernel_variable() -> None:
    """Without a GPU, kernel=on is an error if the program reads the variable."""
    if kernel_build.backend() is not None:
        pytest.skip("MLX has a GPU")
    with mock.patch.object(doctor_checks, "run_program", warm_program):
        outcome = doctor_checks.tokens_with(0, 5, MLX_PAGED_KERNEL="on")
    assert outcome.values == [] and outcome.error is not None and "kernel=on" in outcome.error


def test_stress_reports_equal_different_and_missing_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int, steps: int, **variables: str) -> Outcome:
        if "MLX_PAGED_KERNEL" in variables:
            return reference
        return others[variables["MLX_MAX_OPS_PER_BUFFER"]]

    monkeypatch.setattr(doctor_checks, "tokens_with", run)
    paths = {"kernel": 9}
    reference = Outcome([{"0": [1, 2], "1": [3, 4, 5]}, {"gather": 9}], None)
    others: dict[str, Any] = {
        "1": Outcome([{"0": [1, 2], "1": [3, 4, 9]}, paths], None),
        "1000": Outcome([reference.values[0], paths], None),
    }
    assert list(ordering_stress().values()) == [
        "tokens differ in 1 of 2 requests, first in request 1 at token 2",
        "same",
    ]
    others["1000"] = reference
    assert list(ordering_stress().values())[1] == "same, but the kernels did not run"
    others["1000"] = Outcome([], "exited with status -6: crashed")
    assert list(ordering_stress().values())[1] == "exited with status -6: crashed"
    reference = Outcome([], "timed out after 300 s")
    assert ordering_stress() == {"gathered blocks": "timed out after 300 s"}


def test_difference_names_the_first_request_and_token() -> None:
    assert difference({"0": [1, 2]}, {"0": [1, 2]}) is None
    assert "1 of 1 requests, first in request 0 at token 1" in str(difference({"0": [1, 2]}, {"0": [1]}))
    assert "request 0 at token 0" in str(difference({"0": [1, 2]}, {}))


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() is None, reason="MLX sees no GPU")
@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_the_size_of_command_buffers(seed: int) -> None:
    expected = tokens_with(seed, STEPS, MLX_PAGED_KERNEL="off")
    assert sum(map(len, expected.values())) > 200
    for most in ("1", "1000"):
        assert tokens_with(seed, STEPS, MLX_MAX_OPS_PER_BUFFER=most) == expected, f"{most} operations in a buffer"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Deadly:
    """Options that end the first process that reads one of them."""

    def __init__(self, config: PagedConfig, flag: Path) -> None:
        self.given = config, flag

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "given":
            raise AttributeError(name)
        config, flag = self.given
        try:
            flag.touch(exist_ok=False)
        except FileExistsError:
            return getattr(config, name)
        os._exit(7)


@CPU_ONLY
def test_rows_of_workers_are_in_the_order_of_jobs() -> None:
    terminal = Terminal()
    rows = list(rows_of_workers(range(1, 6), 32, PagedConfig(), False, 2, terminal))
    assert [row.shape for row in rows] == [str(job) for job in jobs(32, everything=False)[1:6]]
    assert all(row.passed and "gather" in row.use for row in rows)
    assert "compiling [" in terminal.getvalue() and "] 5/5" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.slow
@CPU_ONLY
def test_jobs_of_a_process_that_dies_fail_and_others_run(tmp_path: Path) -> None:
    config: Any = Deadly(PagedConfig(), tmp_path / "flag")
    rows = list(rows_of_workers(range(3), 32, config, False, 2, io.StringIO()))
    assert [row.shape for row in rows] == [str(job) for job in jobs(32, everything=False)[:3]]
    failed = [row for row in rows if not row.passed]
    assert 0 < len(failed) < 3
    assert {row.use for row in failed} == {"FAILED: its process exited with status 7"}


def test_kernels_are_shared_evenly_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_jobs, "backend", lambda: "cuda")
    listed = dict(enumerate(jobs(32, everything=False)))
    shares = shares_of(listed, 16)
    assert Counter(index for share in shares for index in share) == Counter(list(listed))
    pools = [{listed[index].pool for index in share} - {None} for share in shares]
    kernels = [len(share) + POOL_KERNELS * len(own) for share, own in zip(shares, pools, strict=True)]
    assert len(kernels) <= 16 and max(kernels) <= 7
    assert shares_of({3: listed[3]}, 16) == [[3]]


def test_cores_and_memory_limit_the_number_of_processes() -> None:
    assert 1 <= num_workers(80 << 30) <= min(16, os.cpu_count() or 1)
    assert num_workers(100 << 20) == 1


def test_config_can_be_pickled_for_other_processes() -> None:
    config = PagedConfig(block_size=16, kernel="on")
    assert pickle.loads(pickle.dumps(config)) == config


def test_bar_is_drawn_only_on_a_terminal() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with Bar(stream, "compiling ") as bar:
            bar.draw(1 / 2, "1/2")
    assert f"compiling [{15 * '#'}{15 * '.'}] 1/2" in terminal.getvalue() and file.getvalue() == ""
