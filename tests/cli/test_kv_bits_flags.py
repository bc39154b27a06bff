"""--kv-bits and --kv-group-size of mlx_paged.generate."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from mlx_lm.generate import setup_arg_parser

from mlx_paged import ConfigError
from mlx_paged.cli.generate import extend_parser
from mlx_paged.config import KVBits, PagedConfig
from tests.cli.test_command_line import PROMPT, generate, save_model, text_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def parsed(*argv: str) -> argparse.Namespace:
    return extend_parser(setup_arg_parser()).parse_args(argv)


def test_flags_are_those_of_mlx_lm_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parsed().kv_bits, parsed().kv_group_size, parsed().quantized_kv_start) == (None, 64, 5000)
    assert parsed("--kv-bits", "8").kv_bits == 8 and parsed("--kv-bits", "8,4").kv_bits == (8, 4)
    assert parsed("--kv-bits", "3").kv_bits == 3  # of mlx-lm's own caches
    monkeypatch.setenv("MLX_PAGED_KV_BITS", "4")
    monkeypatch.setenv("MLX_PAGED_KV_GROUP_SIZE", "32")
    assert parsed().kv_bits is None and PagedConfig.from_env().kv_bits == 4  # also for those who give no flag
    assert parsed().kv_group_size == 32 and parsed("--kv-group-size", "128").kv_group_size == 128
    config = PagedConfig.from_env().with_arguments(parsed("--kv-block-size", "8"))
    assert (config.kv_bits, config.kv_group_size, config.block_size) == (4, 32, 8)


@pytest.mark.parametrize(
    "flags", [("--kv-bits", "4,8"), ("--kv-bits", "x"), ("--kv-bits", "9"), ("--kv-group-size", "16")]
)
def test_bad_values_are_usage_errors(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*flags)
    said = " ".join(capsys.readouterr().err.split())
    assert flags[0] in said
    if flags[0] == "--kv-bits":
        assert "must be 8, 4 or 8,4 (keys, values), or one of 2, 3, 5, 6" in said and repr(flags[1]) in said


def test_bits_that_pages_do_not_have_are_said_at_once(folder: Path) -> None:
    run = generate(folder, "--prompt", PROMPT, "--kv-bits", 3)
    assert run.returncode == 0 and "go on in mlx-lm's own cache" in run.stderr, run.stderr
    assert run.stderr.count("Warning") == 1


def test_the_help_says_when_quantising_begins() -> None:
    shown = " ".join(extend_parser(setup_arg_parser()).format_help().split())
    assert "0 and the default quantise every token in pages when it is written" in shown


@pytest.mark.parametrize("value", [8, "8", [8, 8], "8,8", " 8 , 8 "])
def test_the_same_bits_are_one_number(value: object) -> None:
    assert PagedConfig(kv_bits=value).kv_bits == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [3, "4,8", (4, 8), "8,4,4", "", [], [None], 8.5, "eight"])
def test_other_bits_are_no_configuration(value: object) -> None:
    with pytest.raises(ConfigError, match="kv_bits must be 8, 4 or 8,4"):
        PagedConfig(kv_bits=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_group_size"):
        PagedConfig(kv_group_size=48)


def test_what_a_calls_options_mean() -> None:
    config = PagedConfig(kv_bits=4, block_size=8)
    assert KVBits.of({"kv_bits": None, "kv_group_size": 32}) is None
    for options in ({"kv_bits": 8}, {"kv_bits": 8, "quantized_kv_start": 0}):
        assert KVBits.of(options).configured(config) == PagedConfig(kv_bits=8, block_size=8)
    other = KVBits(8, 64, 100)
    assert other.format is None and "quantized_kv_start=100" in str(other.why_not)
    assert other.configured(config).kv_bits is None
    assert "not of 16" in str(KVBits(8, 16).why_not) and "not 3" in str(KVBits(3).why_not)


def test_generate_quantises_in_pages_alone_from_a_file_and_in_a_batch(folder: Path, tmp_path: Path) -> None:
    flags = ("--kv-bits", "8", "--kv-group-size", "32")
    alone = generate(folder, "--prompt", PROMPT, *flags, "--cache-stats")
    assert "quantised in 3 layer(s)" in alone.stderr and "Warning" not in alone.stderr
    from_env = generate(folder, "--prompt", PROMPT, MLX_PAGED_KV_BITS="8", MLX_PAGED_KV_GROUP_SIZE="32")
    assert text_of(from_env) == text_of(alone)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    batch = generate(folder, "--prompts-file", prompts, *flags, "--cache-stats")
    assert json.loads(batch.stdout)["text"].strip() == text_of(alone)
    assert "quantised in 3 layer(s)" in batch.stderr

    pair = generate(folder, "--prompt", PROMPT, "--kv-bits", "8,4", "--kv-group-size", "32", "--cache-stats")
    assert text_of(pair) and "quantised in 3 layer(s)" in pair.stderr
    refused = generate(folder, "--prompt", PROMPT, "--kv-bits", "8,4", "--no-paged")
    assert refused.returncode == 1 and "--no-paged does without them" in refused.stderr
    late = ("--prompt", PROMPT, *flags, "--quantized-kv-start", "20")
    own = generate(folder, *late)
    assert text_of(own) == text_of(generate(folder, *late, module="mlx_lm"))
    assert own.stderr.count("NotPagedWarning") == 1 and "from the first token on" in own.stderr
