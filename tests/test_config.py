"""PagedConfig: each option given as an argument, a variable or a flag, and the values that are refused."""

import argparse
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import setup_arg_parser

from mlx_paged import config as config_module
from mlx_paged.cli.generate import extend_parser
from mlx_paged.config import KVBits, PagedConfig, parse_memory
from mlx_paged.errors import ConfigError, KernelUnavailableError, PagedCacheError

SIZES = {
    "1": 1, "1000000": 10**6, "7B": 7, "3k": 3000, "3KB": 3000, "3KiB": 3072, "800M": 800 * 10**6, "800mb": 800 * 10**6,
    "512MiB": 512 << 20, "512mi": 512 << 20, "2GB": 2 * 10**9, "2 GB": 2 * 10**9, " 2G ": 2 * 10**9, "1.5GiB": 3 << 29,
    "0.25TB": 25 * 10**10, "1TiB": 1 << 40, "auto": None, " AUTO ": None,
}  # fmt: skip
NO_SIZES = ("GB", "two GB", "-2GB", "2XB", "2GBB", "1.GB", ".5GB", "1e9", "2G 3M", "1,000", "1I")
NOT_POSITIVE = ("0", "0GB", "0.0", "0.4")
# By field: accepted texts and their values, refused texts by message, accepted values of other types, refused values.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, ...]], list[tuple[Any, Any]], tuple[Any, ...]]] = {
    "block_size": (
        {"8": 8, "16": 16, " 64 ": 64, "128": 128, "auto": None},
        {
            "block size must be auto, 8, 16, 32, 64 or 128, not": (
                "0",
                "4",
                "12",
                "256",
                "big",
                "16.0",
                "0x10",
                "16 tokens",
            ),
        },
        [(32, 32)],
        (0, -8, 4, 33, ""),
    ),
    "kv_cache_memory": (
        SIZES,
        {"memory size must look like": NO_SIZES, "memory size must be positive": NOT_POSITIVE},
        [(4096, 4096), (None, None)],
        (0, -1, ""),
    ),
    "kernel": (
        {"auto": None, "on": True, "off": False, " On ": True, "OFF": False},
        {"auto, on or off": ("yes", "1", "true", "2")},
        [(None, None), (True, True), (False, False)],
        ("",),
    ),
    "kv_bits": (
        {"8": 8, "4": 4, "8,4": (8, 4), "8,8": 8, " 8 , 8 ": 8},
        {"must be 8, 4 or 8,4": ("4,8", "9", "x", "8,4,4", "eight")},
        [(8, 8), ([8, 8], 8), ((8, 4), (8, 4)), (None, None)],
        (3, (4, 8), "", [], [None], 8.5),
    ),
    "kv_group_size": ({"32": 32, "64": 64, "128": 128}, {"kv_group_size": ("16", "48")}, [(32, 32)], (48, "")),
    "kv_rotate": (
        {"on": True, " Off ": False, "1": True, "0": False},
        {"kv_rotate must be on, off": ("maybe", "2")},
        [(True, True), (False, False)],
        ("",),
    ),
    "prompt_lookup": (
        {"0": 0, "5": 5, "64": 64},
        {"whole number from 0 to 64": ("many", "65", "1.5", "-0")},
        [(7, 7)],
        (-1, 65, True, 2.0, ""),
    ),
    "state_interval": (
        {"0": 0, "32": 32, "4096": 4096, "auto": None},
        {"must be auto, or 0, or a whole number of at least 32": ("31", "x", "-32")},
        [(64, 64), (None, None)],
        (1, True, 64.0),
    ),
    "prefill_latency": (
        {"1": 1, "250": 250},
        {"at least 1": ("0", "-5", "x", "1.5")},
        [(100, 100)],
        (0, True, 2.0, ""),
    ),
}
CASES = [(name, text, value) for name, (values, *_) in OPTIONS.items() for text, value in values.items()]
WRONG = [(name, text, why) for name, (_, said, *_) in OPTIONS.items() for why, texts in said.items() for text in texts]


def option(name: str) -> Any:
    return next(each for each in PagedConfig.options() if each.name == name)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="none")
    PagedConfig.add_arguments(parser)
    return parser.parse_args(words)


def test_every_option_is_in_this_table_and_in_the_reference() -> None:
    assert [each.name for each in fields(PagedConfig)] == list(OPTIONS)
    rows = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().splitlines()
    known = [row for row in rows if any(row.startswith(f"| `{each.flag}") for each in PagedConfig.options())]
    assert len(known) == len(PagedConfig.options())
    for each, row in zip(PagedConfig.options(), known, strict=True):
        value = "" if each.metavar is None else f" {each.metavar}"
        assert row.startswith(f"| `{each.flag}{value}` | `{each.variable}` | {each.default_text} | {each.text}")


@pytest.mark.parametrize(("name", "text", "value"), CASES)
def test_argument_variable_and_flag_give_the_same_value(name: str, text: str, value: Any) -> None:
    wanted = PagedConfig(**{name: value})
    assert PagedConfig(**{name: text}) == wanted and getattr(wanted, name) == value
    assert hash(PagedConfig(**{name: text})) == hash(wanted)
    assert PagedConfig.from_env({option(name).variable: text}) == wanted
    if name != "kv_rotate":
        assert PagedConfig().with_arguments(parse(f"{option(name).flag}={text}")) == wanted


@pytest.mark.parametrize(("name", "text", "why"), WRONG)
def test_bad_text_is_refused_as_argument_variable_and_flag(
    name: str, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=why):
        PagedConfig(**{name: text})
    with pytest.raises(ConfigError, match=f"environment variable.* {option(name).variable}: .*{why}"):
        PagedConfig.from_env({option(name).variable: text})
    if name != "kv_rotate":
        with pytest.raises(SystemExit) as caught:
            parse(f"{option(name).flag}={text}")
        error = " ".join(capsys.readouterr().err.split())
        assert caught.value.code == 2 and why in error and f"argument {option(name).flag}" in error
        assert "Traceback" not in error


@pytest.mark.parametrize("name", OPTIONS)
def test_values_that_are_not_text_are_accepted_or_refused(name: str) -> None:
    *_, given, refused = OPTIONS[name]
    for value, kept in given:
        assert getattr(PagedConfig(**{name: value}), name) == kept
    for value in refused:
        with pytest.raises(ConfigError):
            PagedConfig(**{name: value})
    assert parse_memory(None) is None


@pytest.mark.parametrize(("reason", "size"), [("MLX has no GPU here", 8), (None, 32)])
def test_blocks_are_smaller_without_a_gpu(reason: str | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "device_unsupported_reason", lambda: reason)
    assert PagedConfig().tokens_per_block == size and PagedConfig(block_size=16).tokens_per_block == 16


def test_config_is_frozen_and_its_errors_are_value_errors() -> None:
    with pytest.raises(FrozenInstanceError):
        PagedConfig().block_size = 8  # type: ignore[misc]
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, PagedCacheError)


def test_empty_and_unknown_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"MLX_PAGED_BLOCK_SIZE": "64", "MLX_PAGED_KERNEL": "on", "MLX_PAGED_OTHER": "ignored"}
    assert PagedConfig.from_env(env) == PagedConfig(64, kernel=True)
    assert PagedConfig.from_env({}) == PagedConfig.from_env({"MLX_PAGED_BLOCK_SIZE": ""}) == PagedConfig()
    monkeypatch.setenv("MLX_PAGED_BLOCK_SIZE", "8")
    assert PagedConfig.from_env() == PagedConfig(8)


def test_flags_override_only_their_own_options() -> None:
    base = PagedConfig(64, 10**9, False, prompt_lookup=7, kv_rotate=True)
    assert base.with_arguments(parse()) == base
    changed = base.with_arguments(parse("--kernel", "on", "--kv-block-size=8", "--prompt-lookup", "0"))
    assert changed == PagedConfig(8, 10**9, True, kv_rotate=True)
    assert base.with_arguments(parse("--kv-cache-memory", "auto")).kv_cache_memory is None
    assert not base.with_arguments(parse("--no-kv-rotate")).kv_rotate
    assert PagedConfig().with_arguments(parse("--kv-rotate")).kv_rotate


def test_kv_bits_of_mlx_lm_are_accepted_and_variables_set_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*argv: str) -> argparse.Namespace:
        return extend_parser(setup_arg_parser()).parse_args(argv)

    assert (parsed().kv_bits, parsed().kv_group_size, parsed().quantized_kv_start) == (None, 64, 5000)
    assert parsed("--kv-bits", "3").kv_bits == 3  # only mlx-lm's own caches have 3 bits
    monkeypatch.setenv("MLX_PAGED_KV_BITS", "4")
    monkeypatch.setenv("MLX_PAGED_KV_GROUP_SIZE", "32")
    assert parsed().kv_bits is None and parsed().kv_group_size == 32  # the default of the flag
    config = PagedConfig.from_env().with_arguments(parsed("--kv-block-size", "8"))
    assert (config.kv_bits, config.kv_group_size, config.block_size) == (4, 32, 8)


def test_kv_bits_of_a_call_override_the_configuration() -> None:
    config = PagedConfig(kv_bits=4, block_size=8)
    assert KVBits.of({"kv_bits": None, "kv_group_size": 32}) is None
    for options in ({"kv_bits": 8}, {"kv_bits": 8, "quantized_kv_start": 0}):
        assert KVBits.of(options).configured(config) == PagedConfig(kv_bits=8, block_size=8)
    other = KVBits(8, 64, 100)
    assert other.format is None and "quantized_kv_start must be 0 or 5000" in str(other.why_not)
    assert other.configured(config).kv_bits is None
    assert "got 16" in str(KVBits(8, 16).why_not) and "got 3" in str(KVBits(3).why_not)


def test_kv_rotate_requires_kv_bits() -> None:
    assert PagedConfig(kv_bits=4, kv_rotate=True) != PagedConfig(kv_bits=4)
    assert PagedConfig(kv_bits=4, kv_rotate=True).page_format.rotate
    PagedConfig(kv_bits=4, kv_rotate=True).check_rotation()
    with pytest.raises(ConfigError, match="kv_rotate requires kv_bits"):
        PagedConfig(kv_rotate=True).check_rotation()


# Kernel ------------------------------------------------------------------------------------------------


def test_kernel_on_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    for choice in (None, False):
        PagedConfig(kernel=choice).check_kernel()
    with pytest.raises(KernelUnavailableError, match=r"kernel=on, but MLX.* use auto or off"):
        PagedConfig(kernel=True).check_kernel()
