"""``doctor --report``: what is in the file, also when the doctor does not come to its end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_paged import PagedConfig
from mlx_paged.cli.doctor import checks as doctor_checks
from mlx_paged.cli.doctor import doctor
from mlx_paged.cli.doctor import jobs as doctor_jobs
from mlx_paged.cli.doctor import threads as doctor_threads
from mlx_paged.cli.doctor.jobs import POPULAR, Shape, popular_shapes
from mlx_paged.cli.doctor.models import DEMO_FOLDER, demo_folder
from mlx_paged.cli.doctor.process import Outcome, run_program
from mlx_paged.cli.doctor.report import Report, Row
from mlx_paged.errors import ConfigError
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels import trial as kernel_timing
from mlx_paged.kernels.check import SelfCheck
from mlx_paged.kernels.launch_shape import DTYPES, Variant
from scripts import demo_model
from tests.support.processes import commands

CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@CPU_ONLY
def test_on_a_cpu_the_report_is_whole_and_says_what_could_not_run(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report.json"
    env = {
        **os.environ,
        "MLX_PAGED_CACHE": str(tmp_path),
        "MLX_MAX_OPS_PER_BUFFER": "30",
        "MLX_PAGED_API_KEY": "sesame",
    }
    command = [sys.executable, "-m", "mlx_paged", "doctor", "--report", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    data = read(path)
    assert data["finished"] and data["running"] is None and data["failed"] == 0
    told = data["facts"]
    assert told["mlx"] == mx.__version__ and "GiB" in told["memory"] and told["GPU cores"] == "not known"
    assert {"mlx-lm", "system", "device", "architecture", "kernel"} < set(told)
    assert data["variables"] == {"MLX_MAX_OPS_PER_BUFFER": "30"} and "sesame" not in path.read_text()
    assert len(data["kernels"]) == len(POPULAR) + len(DTYPES) - 1
    assert all(row["passed"] and row["rms"] < 5e-3 and row["launch_us"] is None for row in data["kernels"])
    assert "only Metal" in data["threads"]["not run"] and "no command buffers" in data["ordering"]["not run"]
    assert data["speed"]["model"].startswith("a Llama with random weights")
    assert data["speed"]["stock"] > 0 and data["speed"]["paged"] > 0
    assert data["speed"]["path"].startswith("gather") and data["speed"]["same_tokens"] == data["speed"]["tokens"]
    text = "\n".join(data["summary"])
    assert "kernels and paths: 18 of 18 passed" in text and "NOT FINISHED" not in text and "speed: paged: " in text
    *_, place, verdict = run.stdout.splitlines()
    assert place == f"the report is in {path}" and verdict.startswith("no kernel ran (MLX has no GPU here)")
    assert not list(path.parent.glob("*.new"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[Variant], SelfCheck]]]:
    """A doctor that believes to have a Metal GPU, whose self-check is the entry ``check``; no programs are run."""
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


def test_times_and_failures_are_in_the_file_and_no_path_of_the_user(gpu: dict[str, Any], tmp_path: Path) -> None:
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
    assert "17 of 18 passed" in text and "failed: bfloat16 D80" in text and "median 0.75, most 0.75" in text
    assert data["failed"] == 1


def test_a_run_that_is_ended_leaves_what_it_had_and_what_it_was_at(gpu: dict[str, Any], tmp_path: Path) -> None:
    def check(variant: Variant) -> SelfCheck:
        if variant.head_dim == 96:
            raise KeyboardInterrupt  # as good as the driver's end of the process: nothing is written after it
        return SelfCheck(variant, True, 1e-4, 0.5, "")

    gpu["check"] = check
    path = tmp_path / "report.json"
    with pytest.raises(KeyboardInterrupt):
        doctor.run(32, PagedConfig(), everything=False, report_file=path)
    data = read(path)
    assert not data["finished"] and "D96" in data["running"] and len(data["kernels"]) == 4
    assert "NOT FINISHED: it was at bfloat16 D96" in " ".join(data["summary"][-1].split())


def test_failed_checks_fail_the_run(
    gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = (
        ("ordering", "the ordering stress", lambda config: (False, {"1 operation": "tokens differ"})),
        ("speed", "tokens per second", lambda config: (True, {"not run": "no model"})),
    )
    monkeypatch.setattr(doctor_checks, "CHECKS", checks)
    path = tmp_path / "report.json"
    assert doctor.run(32, PagedConfig(), everything=False, report_file=path) == 1
    out = capsys.readouterr().out
    assert "the ordering stress: FAILED" in out and "tokens per second: no model" in out
    assert read(path)["ordering"] == {"1 operation": "tokens differ"}
    assert "ordering: 1 operation: tokens differ" in read(path)["summary"]
    capsys.readouterr()
    assert doctor.run(32, PagedConfig(), everything=False) == 0
    assert "stress" not in capsys.readouterr().out  # the checks are the report's


def test_a_report_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "report.json"
    run = commands.run("mlx_paged", "doctor", "--report", path, timeout=100)
    assert run.returncode == 1 and run.stderr.startswith("mlx_paged doctor: cannot write the report")
    assert run.stdout == "" and "Traceback" not in run.stderr
    with pytest.raises(ConfigError, match="cannot write"):
        Report(path, {})


def test_a_mac_is_told_by_its_chip_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_wheel_for_an_older_macos_is_told(built: int, mac: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wheel:
        version = "0.32.4"

        def read_text(self, name: str) -> str:
            return f"Wheel-Version: 1.0\nTag: py3-none-macosx_{built}_0_arm64\n" if name == "WHEEL" else ""

    monkeypatch.setattr(doctor.platform, "mac_ver", lambda: (mac, ("", "", ""), "arm64"))
    monkeypatch.setattr(doctor.metadata, "distribution", lambda name: Wheel())
    told = doctor.facts()["MLX wheel"]
    assert told.startswith(f"for macOS {built}") and ("matrix units" in told) is warns


def test_elsewhere_nothing_is_told_of_wheels() -> None:
    assert ("MLX wheel" in doctor.facts()) is (sys.platform == "darwin")


def test_a_row_that_json_cannot_hold_is_null() -> None:
    row = Row(False, "a  b", "-", "-", float("inf"), None, 1.5e-6, "use")
    assert row.as_json()["rms"] is None and row.as_json()["dense_us"] == 1.5 and row.as_json()["shape"] == "a b"


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "error"),
    [
        ("print('[1, 2]'); print('hello'); print('3')", [[1, 2], 3], None),
        ("import os; print('1', flush=True); os.abort()", [1], "ended with -6"),
        ("import sys; print('1'); sys.exit('no model')", [1], "ended with 1: no model"),
        ("import time; print('1', flush=True); time.sleep(60)", [1], "did not end within 3 s"),
        ("import os, json; print(json.dumps(os.environ['LIMIT']))", ["7"], None),
    ],
)
def test_a_program_that_crashes_or_hangs_is_an_outcome(
    tmp_path: Path, text: str, expected: list[Any], error: str | None
) -> None:
    (tmp_path / "a_program.py").write_text(text)
    timeout = 3 if "sleep" in text else 60
    outcome = run_program("a_program", variables={"PYTHONPATH": str(tmp_path), "LIMIT": "7"}, timeout=timeout)
    assert outcome.values == expected
    assert (outcome.error is None) if error is None else str(outcome.error).startswith(error)


def test_the_demo_model_is_looked_for_where_the_script_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_limit_is_read_from_the_text_of_mlx_and_from_no_other() -> None:
    assert doctor_threads.allowed_threads(MLX_SAYS) == 896
    assert doctor_threads.allowed_threads("[metal::Device] Unable to build metal library from source") is None


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The launch code believes to be on Metal; MLX's entry refuses groups that are too large with the text ``says``."""
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
    doctor_threads.main(32)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [value["shape"] for value in found] == [str(shape) for shape in popular_shapes(32)]
    assert all(value["allowed"] == 896 and value["needed"] == 128 and "message" not in value for value in found)


def test_another_error_is_told_and_names_no_limit(metal: dict[str, str]) -> None:
    metal["says"] = "Unable to build metal library from source"
    found = doctor_threads.probe(Shape(mx.float16, 64, 8, 32, sinks=True))
    assert found["allowed"] is None and found["message"] == metal["says"]


def test_a_kernel_that_does_not_compile_is_told_and_the_others_go_on(
    metal: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "paged_decode: RuntimeError: it does not compile"
    monkeypatch.setattr(kernels, "failure_of", lambda text, build: bad if dict(text.constants).get("D") == 80 else None)
    with mock.patch.dict(kernels._switched_off, clear=True), pytest.warns(UserWarning, match="does not compile"):
        doctor_threads.main(32)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [value for value in found if value["allowed"] is None] == [
        {"shape": next(str(s) for s in popular_shapes(32) if s.head_dim == 80), "needed": None, "allowed": None}
        | {"message": bad}
    ]


def test_fewer_threads_than_a_kernel_has_is_a_failure(metal: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"shape": "a", "needed": 128, "allowed": 896}, {"shape": "b", "needed": 128, "allowed": None}]
    outcome = Outcome(values, None)
    monkeypatch.setattr(doctor_checks, "run_program", lambda *arguments, **options: outcome)
    passed, found = doctor_checks.threads(PagedConfig())
    assert passed and found["shapes"] == values and "2,048 threads" in found["how"]
    outcome = Outcome([{"shape": "a", "needed": 128, "allowed": 64}], None)
    assert not doctor_checks.threads(PagedConfig())[0]
    outcome = Outcome(values, "ended with -6: crashed")
    passed, found = doctor_checks.threads(PagedConfig())
    assert not passed and found["error"] == "ended with -6: crashed"


def test_the_other_checks_run_with_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(module: str, *arguments: str, **options: Any) -> Outcome:
        asked.append((module, options["variables"]))
        return Outcome([{"stock": 1.0}], None)

    monkeypatch.setattr(doctor_checks, "run_program", run)
    assert doctor_checks.speed(PagedConfig(block_size=16, kernel="off")) == (True, {"stock": 1.0})
    assert asked == [("mlx_paged.cli.doctor.speed", {"MLX_PAGED_KERNEL": "off", "MLX_PAGED_BLOCK_SIZE": "16"})]
    monkeypatch.setattr(doctor_checks, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_checks, "ordering_stress", lambda: {"1": "same", "1000": "tokens differ"})
    assert doctor_checks.ordering(PagedConfig())[0] is False
    assert doctor_checks.ordering(PagedConfig(kernel="off")) == (True, {"not run": "the kernels are off"})


def test_dense_attention_is_timed_where_mlx_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_timing, "TOKENS", 64)
    monkeypatch.setattr(kernel_timing, "LAUNCHES", 2)
    shape = ("paged_decode", "metal", mx.float32, 64, 64, 4, 32)
    for sinks in (False, True):
        seconds = kernel_timing.dense_seconds(Variant(*shape, False, sinks))
        assert seconds is not None and seconds > 0
    assert kernel_timing.dense_seconds(Variant(*shape, True, False)) is None
