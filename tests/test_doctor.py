"""``python -m mlx_paged doctor``: what it prints, and when it fails."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_paged import doctor
from mlx_paged.attention import narrow_matmul
from mlx_paged.attention.kernel_check import SelfCheck
from mlx_paged.attention.kernel_plan import DTYPES, HEAD_DIMS, Variant

CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


@CPU_ONLY
def test_without_a_gpu_it_says_so_and_passes() -> None:
    run = subprocess.run([sys.executable, "-m", "mlx_paged", "doctor"], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert any(line.startswith("mlx ") for line in lines)
    rows = [line for line in lines if " gqa " in line]
    assert len(rows) == len(DTYPES) * (len(HEAD_DIMS) + 4)
    assert all("gather: MLX has no GPU here" in row for row in rows)
    assert lines[-1] == "all passed"


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
    assert len(rows) >= len(DTYPES) * (len(HEAD_DIMS) + 4)
    assert all("kernel: one new token per sequence" in row for row in rows)


def test_a_failing_variant_is_named_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Variant("paged_decode", "metal", mx.float16, 80, 80, 4, 32)
    odd = Variant("paged_decode", "metal", mx.float32, 96, 96, 4, 32)

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
    monkeypatch.setattr("mlx_paged.attention.select.device_decline", lambda: "MLX has no GPU here")
    with pytest.raises(SystemExit) as ended:
        doctor.main([])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "FAILED" in line]
    assert len(failed) == 2 and lines[-1] == "2 failed"
    by_dim = {"D80": next(x for x in failed if " D80 " in x), "D96": next(x for x in failed if " D96 " in x)}
    assert by_dim["D80"].split()[7:9] == ["no", "nan"] and "does not compile" in by_dim["D80"]
    assert by_dim["D96"].split()[7:9] == ["yes", "2.5e-01"] and "not below" in by_dim["D96"]


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


def test_all_adds_every_ratio_and_block_size() -> None:
    few, many = set(doctor.shapes(32, everything=False)), list(doctor.shapes(32, everything=True))
    assert few < set(many) and len(set(many)) == len(many) - 3  # gqa 1 at D128 is in both lists
    assert {shape.gqa for shape in many} == set(range(1, 17))
    assert {shape.block_size for shape in many} == {8, 16, 32, 64, 128}


def test_products_of_few_rows_are_checked_on_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(body: str, dtype: mx.Dtype, tile: narrow_matmul.Tile) -> narrow_matmul.TileCheck:
        ok = (body, dtype, tile) != (narrow_matmul.BIASED, mx.float16, narrow_matmul.LARGE)
        return narrow_matmul.TileCheck(body, dtype, tile, ok, 1e-3 if ok else 0.5, 1.0, "" if ok else "RMS is 0.5")

    monkeypatch.setattr(doctor, "backend", lambda: "cuda")
    monkeypatch.setattr(narrow_matmul, "self_check", check)
    assert doctor._run_products() == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2 * len(narrow_matmul.BODIES)
    assert [line for line in lines if "FAILED: RMS is 0.5" in line] == [lines[16]]
    assert "float16 products of up to 32 rows" in lines[16] and narrow_matmul.BIASED in lines[16]
