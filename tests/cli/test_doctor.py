"""mlx_paged doctor: checks of kernels, the demo model, and the report."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import Dispatch, PagedConfig
from mlx_paged.cli import doctor, doctor_kernels
from mlx_paged.cli.doctor import DEMO_FOLDER, Report, demo_folder, demo_place
from mlx_paged.cli.doctor_kernels import POPULAR, Shape, rows
from mlx_paged.cuda import narrow_matmul
from mlx_paged.errors import ConfigError
from mlx_paged.kernels.check import CheckResult
from mlx_paged.kernels.launch_shape import DTYPES, Variant
from scripts.demo_model import ensure_demo_model
from tests.support.processes import commands

CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


@CPU_ONLY
def test_report_has_the_words_of_the_terminal_and_no_secrets(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report.txt"
    env = {"MLX_PAGED_CACHE": str(tmp_path), "MLX_MAX_OPS_PER_BUFFER": "30", "MLX_PAGED_API_KEY": "sesame"}
    env["HOME"] = str(tmp_path)
    run = commands.run("mlx_paged", "doctor", "--report", path, timeout=280, **env)
    assert run.returncode == 0, run.stderr
    *lines, place = run.stdout.splitlines()
    assert place == f"the report is in {path}"
    assert path.read_text().splitlines() == [line.replace(str(tmp_path), "~") for line in lines]
    assert "sesame" not in path.read_text() and "MLX_MAX_OPS_PER_BUFFER30" in run.stdout
    assert any(re.match(r"mlx  +\d", line) for line in lines) and "GiB" in run.stdout
    found = [line for line in lines if " gqa " in line]
    assert len(found) == len(POPULAR) + len(DTYPES) - 1
    assert all("gather: MLX has no GPU here" in row for row in found)
    assert "demo model      not run: scripts/demo_model.py fetches it" in lines
    assert re.fullmatch(r"\d+\.\d s in all", lines[-2]) and lines[-1].startswith("no kernel ran (MLX has no GPU here)")


@CPU_ONLY
@pytest.mark.demo_model
def test_demo_model_gives_stocks_tokens(demo_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "demo_folder", lambda: demo_model_folder)
    passed, (what, stock, paged) = doctor.try_demo_model(PagedConfig())
    assert passed and what.endswith("8 tokens of prompt, 6 generated") and "tokens/s" in stock
    assert "the first 6 tokens are stock's (gather: " in paged


@pytest.mark.parametrize("broken", ["model", "folder"])
def test_demo_model_that_fails_fails_the_run(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}" if broken == "model" else "")
    monkeypatch.setattr(doctor, "demo_folder", lambda: tmp_path)
    passed, (line,) = doctor.try_demo_model(PagedConfig())
    assert not passed and line.startswith("demo model      FAILED: ")


@CPU_ONLY
def test_kernel_on_without_a_gpu_is_an_error() -> None:
    run = commands.run("mlx_paged", "doctor", "--kernel", "on")
    assert run.returncode == 1
    assert run.stderr.startswith("mlx_paged doctor: kernel=on, but MLX")
    assert "Traceback" not in run.stderr


def test_demo_model_is_found_where_the_script_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, under in (("MLX_PAGED_CACHE", ""), ("XDG_CACHE_HOME", "mlx_paged"), ("HOME", ".cache/mlx_paged")):
        for other in ("MLX_PAGED_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.setattr(sys, "platform", "linux")
        folder = tmp_path / name / under / DEMO_FOLDER
        assert demo_place() == folder and demo_folder() is None
        folder.mkdir(parents=True)
        assert demo_folder() == ensure_demo_model() == folder


# Kernels ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that kernels can run; none is timed."""
    for module in (doctor, doctor_kernels):
        monkeypatch.setattr(module, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(doctor_kernels, "dispatch_of", lambda shape, config: (Dispatch("kernel", "here"), 0.0))
    monkeypatch.setattr(doctor_kernels, "launch_seconds", lambda variant: 12e-6)
    monkeypatch.setattr(doctor_kernels, "dense_seconds", lambda variant: 15e-6)


def test_a_failing_kernel_is_named_and_fails_the_run(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {80: (float("nan"), "RuntimeError: does not compile"), 96: (0.25, "RMS 2.5e-01 is not below 0.005")}

    def check(variant: Variant) -> CheckResult:
        rms, reason = faults.get(variant.head_dim, (1e-4, ""))
        return CheckResult(not reason, rms, 0.5, reason)

    def variants(
        dtype: mx.Dtype, dim: int, value_dim: int, heads: int, kv: int, block: int, *extras: bool, use: str = "decode"
    ) -> tuple[Variant, ...]:
        found = Variant("paged_decode", "metal", dtype, dim, value_dim, heads // kv, block, *extras)
        return (found,) if use == "decode" else ()

    monkeypatch.setattr(doctor_kernels, "variants_of", variants)
    monkeypatch.setattr(doctor_kernels, "self_check", check)
    monkeypatch.setattr(doctor, "demo_folder", lambda: None)
    assert doctor.run(PagedConfig()) == 2
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "FAILED" in line]
    assert len(failed) == 2 and lines[-1] == "2 failed"
    assert re.search(r" D80 .* nan .*does not compile", failed[0]) and re.search(r" D96 .* 2.5e-01 .*", failed[1])
    assert all("12 us    15 us" in line for line in lines if " gqa " in line and line not in failed)


def test_prompts_and_products_have_rows_on_cuda(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_product(*kernel: Any) -> CheckResult:
        ok = kernel[1:4] != (mx.bfloat16, narrow_matmul.LARGE, 8)
        return CheckResult(ok, 1e-3, 1.0, "" if ok else "RMS is 0.5")

    prefill = Variant("paged_prefill", "cuda", mx.bfloat16, 64, 64, 4, 32)
    monkeypatch.setattr(doctor_kernels, "popular_shapes", lambda block_size: [Shape(mx.bfloat16, 64, 4, 32)])
    monkeypatch.setattr(doctor_kernels, "variants_of", lambda *shape, use="": (prefill,) if use == "prefill" else ())
    monkeypatch.setattr(doctor_kernels, "self_check", lambda v: CheckResult(True, 0.0, 0.1, ""))
    monkeypatch.setattr(doctor_kernels, "backend", lambda: "cuda")
    monkeypatch.setattr(narrow_matmul, "self_check", check_product)
    first, *found = rows(32, PagedConfig())
    assert first.use == "packed prefill" and first.seconds is None
    assert len(found) == 3 * len(narrow_matmul.TILES) * len(narrow_matmul.BODIES)
    failed = {row.shape for row in found if not row.passed}
    assert failed == {f"products of up to {narrow_matmul.LARGE} rows, 8 bits"}


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_wrong_attention_through_the_pool_fails_its_line(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = doctor_kernels.attend

    def attend(q: mx.array, *rest: Any, **options: Any) -> mx.array:
        if q.shape[-1] != 80:
            return original(q, *rest, **options)
        if fault == "raises":
            raise RuntimeError("no memory")
        return original(q, *rest, **options) + 0.1

    monkeypatch.setattr(doctor_kernels, "device_unsupported_reason", lambda: "no GPU")
    monkeypatch.setattr(doctor_kernels, "attend", attend)
    (failed,) = [row for row in rows(32, PagedConfig(kernel=False)) if not row.passed]
    assert " D80 " in str(failed)
    assert ("attention over the pool differs" if fault == "wrong" else "FAILED: RuntimeError: no memory") in failed.use


@pytest.mark.gpu
def test_every_variant_passes_on_a_gpu() -> None:
    run = subprocess.run([sys.executable, "-m", "mlx_paged", "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line for line in run.stdout.splitlines() if " gqa " in line]
    decode = [row for row in rows if "packed prefill" not in row]
    assert all(re.search(r" \d+ us ", row) for row in decode)
    assert len(decode) >= len(POPULAR) + len(DTYPES) - 1
    assert all("kernel: one new token per sequence" in row for row in decode)


def test_dense_attention_is_timed_except_with_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_kernels, "_TOKENS", 64)
    monkeypatch.setattr(doctor_kernels, "LAUNCHES", 2)
    shape = ("paged_decode", "metal", mx.float32, 64, 64, 4, 32)
    for sinks in (False, True):
        seconds = doctor_kernels.dense_seconds(Variant(*shape, False, sinks))
        assert seconds is not None and seconds > 0
    assert doctor_kernels.dense_seconds(Variant(*shape, True, False)) is None


# Facts and report ---------------------------------------------------------------------------------------------------


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


def test_unwritable_report_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the report"):
        Report(tmp_path / "file" / "report.txt")
