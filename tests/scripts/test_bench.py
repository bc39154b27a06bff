"""scripts/bench.py, run as a user runs it, on a tiny model; and what it must refuse."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(SCRIPT, *arguments, timeout=120)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("bench_under_test", SCRIPT)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def check_spread(values: dict[str, Any], samples: int) -> None:
    assert len(values["samples"]) == samples
    assert 0 < values["min"] <= values["median"] <= values["max"]


def test_prefill_decode_and_append(tmp_path: Path) -> None:
    result = bench(
        *("--random", "tiny", "--contexts", "40,150", "--block-sizes", "16,32", "--decode-tokens", "4"),
        *("--repeats", "2", "--prefill-step-size", "64", "--append", "--append-pools", "8MB,40MB"),
        *("--out", str(tmp_path / "out")),
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert set(report["machine"]["versions"]) == {"mlx", "mlx-lm", "mlx_paged"}
    assert report["machine"]["cpu"] and report["machine"]["cores"] >= 1
    assert report["settings"]["model"] == "tiny" and report["settings"]["decode_tokens"] == 4
    if report["machine"]["device"] == "cpu":
        assert report["settings"]["cpu_cache_limit_bytes"] >= 512 << 20
        assert "freed buffers" in result.stdout

    rows = report["generation"]
    assert [(r["context"], r["side"]) for r in rows] == [
        (context, side) for context in (40, 150) for side in ("stock", "paged-16", "paged-32")
    ]
    for row in rows:
        check_spread(row["decode_ms_per_token"], 2)
        check_spread(row["prefill_tokens_per_s"], 2)
        assert row["peak_bytes"] > 0
        if row["block_size"] is None:
            assert row["dispatch"] is None and row["decode_ratio"] is None
            continue
        check_spread(row["decode_ratio"], 2)
        check_spread(row["prefill_ratio"], 2)
        assert row["same_tokens"] is True and row["first_different_token"] is None
        assert row["max_logprob_difference"] < 1e-3
        assert row["dispatch"]["last"]["path"] != "prefill"
        assert sum(row["dispatch"]["decode"].values()) >= 2 * 4  # layers x tokens
        # The first chunk of 64 has no prefix; more chunks have one.
        assert any(path.startswith("prefill:") for path in row["dispatch"]["first_token"])
    paired = rows[1]["decode_ratio"]["samples"]
    times = zip(rows[1]["decode_ms_per_token"]["samples"], rows[0]["decode_ms_per_token"]["samples"], strict=True)
    assert paired == pytest.approx([a / b for a, b in times])
    assert "Greedy tokens: the same on both sides" in result.stdout
    assert rows[1]["dispatch"]["last"]["path"] in result.stdout

    appends = report["append"]
    assert [(r["block_size"], r["batch"], r["pool_bytes"]) for r in appends] == [
        (size, batch, pool) for size in (16, 32) for batch in (1, 8) for pool in (8_000_000, 40_000_000)
    ]
    for row in appends:
        check_spread(row["microseconds"], 2)
        assert row["pool_bytes_reserved"] == pytest.approx(row["pool_bytes"], rel=0.02)

    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib is not installed" in result.stdout


@pytest.mark.parametrize("mode", ["--synthetic-context", "--no-prefill"])
def test_decode_only(script: ModuleType, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--random", "tiny", "--contexts", "70", "--block-sizes", "8", "--decode-tokens", "3", "--repeats", "1"]
    assert script.main([*arguments, mode, "--no-plot", "--out", str(tmp_path)]) == 0
    stock, paged = json.loads((tmp_path / "bench.json").read_text())["generation"]
    assert stock["prefill_tokens_per_s"] is None and paged["prefill_ratio"] is None
    assert paged["same_tokens"] and paged["max_logprob_difference"] < 1e-3
    assert paged["dispatch"]["last"]["path"] != "prefill"
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]
    assert "Greedy tokens: the same" in capsys.readouterr().out


def test_both_sides_start_from_the_same_window(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with sliding windows that are full: the stock caches are rotating ones."""
    preset = script.PRESETS["gemma3-small"]
    small = preset.args | {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 128, "intermediate_size": 64}
    small |= {"sliding_window": 32, "sliding_window_pattern": 3}
    monkeypatch.setitem(script.PRESETS, "gemma3-small", preset._replace(args=small))
    model = script.random_model("gemma3-small", "float32")
    for mode in ("--synthetic-context", "--no-prefill"):
        args = script.parse_arguments(["--random", "gemma3-small", mode, "--repeats", "1", "--block-sizes", "16"])
        _, paged = script.Generation(model, args).measure(100)
        assert paged["same_tokens"] and paged["max_logprob_difference"] < 1e-3


def test_a_run_that_is_not_paged_fails(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--random", "tiny", "--contexts", "20", "--block-sizes", "16", "--decode-tokens", "2"]
    arguments += ["--repeats", "1", "--no-plot", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(script.mlx_paged, "apply_patches", lambda *_, **__: None)
        assert script.main(arguments) == 1
    assert "paged path did not run" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(script.mlx_paged, "dispatch_counts", dict)
        assert script.main(arguments) == 1
    assert "paged path did not run" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # the other way round: stock that is not stock
        patch.setattr(script.mlx_paged, "remove_patches", lambda: None)
        assert script.main(arguments) == 1
    assert "the stock side was given paged caches" in capsys.readouterr().err
    script.mlx_paged.remove_patches()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "llama-9000b"], "invalid choice: 'llama-9000b'"),
        ([], "nothing to measure"),
        (["--random", "tiny", "--model", "x"], "not allowed with"),
        (["--random", "tiny", "--contexts", "64,none"], "whole number above 0"),
        (["--random", "tiny", "--repeats", "0"], "whole number above 0"),
        (["--random", "tiny", "--block-sizes", "24"], "power of two"),
        (["--append", "--append-pools", "64QB"], "memory size must look like"),
        (["--append", "--append-pools", "auto"], "a pool needs a size"),
    ],
)
def test_bad_arguments(
    script: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_preset_as_a_command() -> None:
    result = bench("--random", "llama-9000b")
    assert result.returncode == 2
    assert "llama-9000b" in result.stderr and "llama-135m" in result.stderr


def test_refusals_with_a_message(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 1
    assert "no such model folder" in capsys.readouterr().err
    assert script.main(["--append", "--append-pools", "1000TB", "--out", str(tmp_path)]) == 1
    assert "do not fit" in capsys.readouterr().err
    assert script.main(["--append", "--append-pools", "10K", "--out", str(tmp_path)]) == 1
    assert "too small" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("preset", "billions"),
    [("llama-1b", 1.24), ("llama-8b", 8.03), ("qwen3-4b", 4.02), ("gemma3-4b", 3.88), ("qwen3-moe", 5.8)],
)
def test_presets_have_the_size_of_their_models(preset: str, billions: float, script: ModuleType) -> None:
    model = sys.modules["support.bench_common"].preset_model(preset)
    assert sum(array.size for _, array in tree_flatten(model.parameters())) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_a_random_model_are_quantised(bits: int, script: ModuleType) -> None:
    model = script.random_model("tiny", None, bits, 32)
    layers = [module for _, module in model.named_modules() if isinstance(module, nn.QuantizedLinear)]
    assert len(layers) == 2 * 7 and {(layer.bits, layer.group_size) for layer in layers} == {(bits, 32)}
    assert isinstance(model.model.embed_tokens, nn.QuantizedEmbedding)
    plain = script.random_model("tiny", None).layers[0].mlp.up_proj.weight
    layer = model.layers[0].mlp.up_proj
    got = mx.dequantize(layer.weight, layer.scales, layer.biases, 32, bits)
    assert mx.abs(got - plain).max().item() < 0.15 * mx.abs(plain).max().item()


def test_a_model_without_weights_to_quantise_is_refused(script: ModuleType) -> None:
    with pytest.raises(script.BenchError, match="groups of 64"):
        sys.modules["support.bench_common"].quantized(nn.Linear(40, 8), 4, 64)
    model = nn.Sequential(nn.Linear(40, 8))
    assert sys.modules["support.bench_common"].quantized(model, None, 64) is model


def test_both_sides_run_with_quantised_weights(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--random", "tiny", "--bits", "4", "--contexts", "20", "--block-sizes", "16", "--decode-tokens", "2"]
    assert script.main([*arguments, "--repeats", "1", "--no-plot", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    assert (report["settings"]["bits"], report["settings"]["group_size"]) == (4, 64)
    assert "Greedy tokens: the same" in capsys.readouterr().out
