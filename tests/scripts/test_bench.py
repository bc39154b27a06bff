"""scripts/bench.py: each command once on a tiny model, as a user runs it; and what it refuses."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from scripts.bench import COMMANDS
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"
CPU_ONLY = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="there is a GPU")


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return commands.run(SCRIPT, *arguments, timeout=240)


def results_of(out: Path, command: str, *arguments: object) -> tuple[list[dict[str, Any]], str]:
    """The results that a command writes, and what it prints."""
    done = bench(command, *arguments, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((out / f"{command}.json").read_text())
    assert set(written["machine"]["versions"]) == {"mlx", "mlx-lm", "mlx_paged"} and written["arguments"]
    return written["results"], done.stdout


def test_generate_compares_both_sides(tmp_path: Path) -> None:
    options = ("--random", "tiny", "--decode-tokens", 4, "--repeats", 2, "--prefill-step-size", 64)
    results, printed = results_of(tmp_path, "generate", *options, "--contexts", "40,150", "--block-sizes", "16,32")
    assert [(r["context"], r["side"]) for r in results] == [
        (context, side) for context in (40, 150) for side in ("stock", "paged-16", "paged-32")
    ]
    for r in results:
        assert len(r["decode_ms_per_token"]["samples"]) == len(r["prefill_tokens_per_s"]["samples"]) == 2
        if r["block_size"] is not None:
            assert r["same_tokens"] and r["max_logprob_difference"] < 1e-3
            assert sum(r["dispatch"]["decode"].values()) >= 2 * 4  # layers x tokens
    paired = zip(*(r["decode_ms_per_token"]["samples"] for r in results[1::-1]), strict=True)
    assert results[1]["decode_ratio"]["samples"] == pytest.approx([ours / stock for ours, stock in paired])
    assert "Greedy tokens: the same on both sides" in printed
    assert (tmp_path / "generate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", ["--synthetic-context", "--no-prefill"])
def test_generate_without_prefill(tmp_path: Path, mode: str) -> None:
    sizes = ("--contexts", 100, "--block-sizes", 32, "--decode-tokens", 4, "--repeats", 1)
    results, _ = results_of(tmp_path, "generate", "--random", "tiny", mode, *sizes)
    assert [r["prefill_s"] for r in results] == [None, None] and results[1]["same_tokens"]


def test_batch_gives_the_same_tokens_on_both_sides(tmp_path: Path) -> None:
    options = ("--random", "tiny", "--cases", "3xragged64,4xmixed5-40", "--decode-tokens", 12, "--repeats", 2)
    trace = ("--arrivals", 50, "--requests", 4, "--trace-lengths", "16,40")
    results, printed = results_of(tmp_path, "batch", *options, *trace)
    cases = ("3xragged64", "4xmixed5-40", "4 at 50/s")
    assert [(r["case"], r["side"]) for r in results] == [(c, side) for c in cases for side in ("stock", "paged")]
    for r in results:
        assert r["tokens_per_s"] > 0 and r["ttft_s"]["p50"] > 0 and r["peak_bytes"] > 0
        # Lengths that must be new are run once.
        assert len(r["seconds_of_repeats"]) == (1 if "mixed" in r["case"] else 2)
        if r["side"] == "paged":
            assert r["rows_with_same_tokens"] == r["requests"] and r["ratios"]["total"] > 0
    assert "paged against stock" in printed and (tmp_path / "batch.png").stat().st_size > 0


def test_a_sides_error_is_in_its_row(tmp_path: Path) -> None:
    broken = bench("batch", "--model", tmp_path / "none", "--cases", "1x4", "--only", "stock")
    assert broken.returncode == 1 and "exit status" in broken.stdout


def test_prefix_computes_and_stores_each_token_once(tmp_path: Path) -> None:
    sizes = ("--prefix", 192, "--suffix", 16, "--sharers", 4, "--decode-tokens", 4, "--kv-block-size", 16)
    results, printed = results_of(tmp_path, "prefix", "--random", "tiny", *sizes, "--pattern", "burst")
    assert "burst: 4/4 answers the same on all sides" in printed and len(results) == 3
    for r in results:
        computed = {"stock cache": None, "no sharing": 4 * 208, "shared": 192 + 4 * 16}[r["side"]]
        assert computed in (None, r["computed_prompt_tokens"])
        assert r["side"] != "shared" or r["kv_bytes"] < 1.3 * r["unique_kv_bytes"]


def test_lookup_accepts_copies(tmp_path: Path) -> None:
    sizes = ("--batches", 1, "--lookup", 6, "--prompt", 48, "--num-tokens", 24, "--repeats", 1)
    results, _ = results_of(tmp_path, "lookup", "--random", "tiny", *sizes)
    assert [(r["case"], r["side"]) for r in results] == [
        ("copy, 1", "without"), ("copy, 1", "up to 6"), ("prose, 1", "without"), ("prose, 1", "up to 6"),
    ]  # fmt: skip
    plain, copied = results[:2]
    assert plain["drafted"] == 0 and copied["accepted"] > 12 and copied["accepted"] >= 0.9 * copied["drafted"]
    refused = bench("lookup", "--random", "qwen3-small")
    assert refused.returncode == 1 and "of Llama shapes only" in refused.stderr


@pytest.mark.demo_model
def test_grammar_measures_all_sides(demo_model_folder: Path, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", demo_model_folder)
    results, _ = results_of(tmp_path, "grammar", "--model", folder, "--rows", 2, "--tokens", 12, "--repeats", 1)
    assert [r["side"] for r in results] == ["none", "one row", "all rows"]
    assert all(r["tokens_per_s"] > 0 for r in results)


@CPU_ONLY
def test_ranks_say_the_same_tokens(tmp_path: Path) -> None:
    sizes = ("--random", "tiny", "--rows", 2, "--prompt", 20, "--answer", 16, "--rounds", 1)
    results, printed = results_of(tmp_path, "ranks", *sizes)
    assert "greedy f32 tokens of two ranks are one's: yes" in printed
    assert [r["part"] for r in results] == ["two", "one", "tokens-of-two", "tokens-of-one"]
    assert {"stock 1", "paged 2", "rounds 1", "rounds 2"} <= set(results[0]["ranks"][1])


def test_host_counts_python(tmp_path: Path) -> None:
    results, _ = results_of(tmp_path, "host", "--models", "llama", "--rows", "1", "--steps", 8)
    assert [r["model"] for r in results] == ["llama"] and results[0]["stock_us"] > 0


def test_engine_measures_each_case(tmp_path: Path) -> None:
    results, _ = results_of(tmp_path, "engine", "--rows", "1,2", "--nodes", 20, "--waiting", 300)
    assert len(results) == 16 and all(r["ms"] > 0 for r in results)


@pytest.mark.slow
def test_what_a_step_takes_grows_with_what_changes(tmp_path: Path) -> None:
    """Ratios, not times: of 256 rows to 32, of a full prefix tree to a small one, of 10,000 that wait to 256."""
    results, _ = results_of(tmp_path, "engine", "--rows", "32,256", "--nodes", 10_000)
    few, _ = results_of(tmp_path, "engine", "--rows", "32,256", "--nodes", 100)

    def ms(given: list[dict[str, Any]], case: str, **sizes: int) -> float:
        return next(r["ms"] for r in given if r["case"] == case and sizes.items() <= r.items())

    assert ms(results, "decode", rows=256) < 6 * ms(results, "decode", rows=32)
    full = "pool full of prefixes"
    assert ms(results, full, rows=32) < 2 * ms(few, full, rows=32)
    for case in ("256 start", "256 start, prefix cache", "20 join in each step"):
        assert ms(results, case, waiting=10_000) < 2 * ms(results, case, waiting=256), case


@CPU_ONLY
def test_kernel_needs_a_gpu() -> None:
    done = bench("kernel")
    assert done.returncode == 2 and "nothing to measure" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["decode", "latents", "prefill"])
def test_kernel_measures(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("--batches", 1, "--contexts", 1024) if what == "decode" else ()
    results, _ = results_of(tmp_path, "kernel", "--what", what, *few)
    assert results and all(r["paged_s"] > 0 for r in results)


def test_help_lists_the_commands_and_bad_values_are_refused() -> None:
    shown = bench("--help").stdout
    assert all(f"  {name} " in shown for name in COMMANDS)
    for arguments in (("nothing",), ("batch", "--cases", "4xmixed9"), ("generate", "--contexts", "0")):
        assert bench(*arguments).returncode == 2


# Parts of the batch command ----------------------------------------------------------------------------------------


def test_cases() -> None:
    from scripts.benchmarks.batch import Case, parse_case

    assert parse_case("3x17") == Case("3x17", 3, (17, 17, 17))
    ragged = parse_case("8xragged160")
    assert (min(ragged.lengths), max(ragged.lengths), len(ragged.lengths)) == (10, 160, 8)
    assert parse_case("8xragged160") == ragged and parse_case("2xmixed3-3").lengths == (3, 3)
    for text in ("8", "x8", "8x", "0x4", "4x0", "8xraggedx", "4xmixed9"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_case(text)


def test_percentiles() -> None:
    from scripts.benchmarks.batch import percentiles

    assert percentiles(range(1, 101)) == {"p50": 51, "p95": 96, "p99": 100} and percentiles([]) == {}


class FakeGenerator:
    """Every request's first token comes one call after its insertion."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}

    def insert(self, prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        self.left[len(self.left)] = max_tokens[0]
        return [len(self.left) - 1]

    def next(self) -> tuple[list[Any], list[Any]]:
        generated = []
        for uid, left in self.left.items():
            if left:
                self.left[uid] -= 1
                generated.append(SimpleNamespace(uid=uid, token=uid, finish_reason="length" if left == 1 else None))
        return [], generated


def test_a_run_takes_every_token_of_every_request() -> None:
    from scripts.benchmarks.batch import Request, Run

    run = Run(FakeGenerator(), [Request(0.005 * i, [1], 3 + i) for i in range(4)])
    run.go()
    assert {uid: len(tokens) for uid, tokens in run.tokens.items()} == {0: 3, 1: 4, 2: 5, 3: 6}
    assert len(run.first) == 4 and len(run.gaps) == 18 - 4
