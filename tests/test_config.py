"""PagedConfig: parsing, environment, flags, and what is refused."""

from __future__ import annotations

import argparse
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import config as config_module
from mlx_paged.config import PagedConfig, free_memory, parse_block_size, parse_kernel, parse_memory
from mlx_paged.errors import ConfigError, KernelUnavailableError, PagedCacheError


@pytest.mark.parametrize("value", [8, 16, 32, 64, 128, "8", " 64 "])
def test_block_sizes(value: str | int) -> None:
    assert parse_block_size(value) == int(value)


@pytest.mark.parametrize("value", [0, -8, 1, 4, 7, 12, 33, 129, 256, "0", "4", "100"])
def test_block_sizes_out_of_range(value: str | int) -> None:
    with pytest.raises(ConfigError, match=f"power of two from 8 to 128, not {int(value)}"):
        parse_block_size(value)


@pytest.mark.parametrize("value", ["", "big", "16.0", "0x10", "16 tokens"])
def test_block_sizes_that_are_no_numbers(value: str) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        parse_block_size(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1000000", 10**6),
        (4096, 4096),
        ("7B", 7),
        ("3k", 3000),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("800M", 800 * 10**6),
        ("800mb", 800 * 10**6),
        ("512MiB", 512 << 20),
        ("512mi", 512 << 20),
        ("2GB", 2 * 10**9),
        ("2 GB", 2 * 10**9),
        (" 2G ", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("0.25TB", 25 * 10**10),
        ("1TiB", 1 << 40),
        ("auto", None),
        (" AUTO ", None),
        (None, None),
    ],
)
def test_memory_sizes(text: str | int | None, expected: int | None) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "two GB", "-2GB", "2XB", "2GBB", "1.GB", ".5GB", "1e9", "2G 3M", "1,000", "1I"]
)
def test_memory_sizes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="memory size must look like"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.0", "0.4", 0, -1])
def test_memory_sizes_that_are_not_positive(text: str | int) -> None:
    with pytest.raises(ConfigError, match="memory size must be positive"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", None),
        ("on", True),
        ("off", False),
        (" On ", True),
        ("OFF", False),
        (None, None),
        (True, True),
        (False, False),
    ],
)
def test_kernel_choices(text: str | bool | None, expected: bool | None) -> None:
    assert parse_kernel(text) is expected


@pytest.mark.parametrize("text", ["", "yes", "1", "true"])
def test_kernel_choices_that_do_not_exist(text: str) -> None:
    with pytest.raises(ConfigError, match="auto, on or off"):
        parse_kernel(text)


# The configuration ------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    config = PagedConfig()
    assert (config.block_size, config.kv_cache_memory, config.kernel) == (32, None, None)


def test_values_are_parsed_when_made() -> None:
    config = PagedConfig(block_size="16", kv_cache_memory="2GB", kernel="off")
    assert config == PagedConfig(16, 2 * 10**9, False)
    assert hash(config) == hash(PagedConfig(16, 2 * 10**9, False))
    with pytest.raises(FrozenInstanceError):
        config.block_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4},
        {"block_size": "x"},
        {"kv_cache_memory": 0},
        {"kv_cache_memory": "lots"},
        {"kernel": "maybe"},
    ],
)
def test_unusable_values_are_refused_when_made(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PagedConfig(**options)


def test_config_errors_can_be_caught_as_value_errors() -> None:
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, PagedCacheError)


# Environment ------------------------------------------------------------------------------------------------------


def test_from_env() -> None:
    env = {
        "MLX_PAGED_BLOCK_SIZE": "64",
        "MLX_PAGED_KV_CACHE_MEMORY": "512MiB",
        "MLX_PAGED_KERNEL": "on",
        "MLX_PAGED_OTHER": "ignored",
    }
    with pytest.warns(UserWarning, match="nothing reads the environment variable MLX_PAGED_OTHER"):
        assert PagedConfig.from_env(env) == PagedConfig(64, 512 << 20, True)


def test_from_env_without_or_with_empty_variables_is_the_default() -> None:
    assert PagedConfig.from_env({}) == PagedConfig()
    assert PagedConfig.from_env({"MLX_PAGED_BLOCK_SIZE": "", "MLX_PAGED_KERNEL": ""}) == PagedConfig()


def test_from_env_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PAGED_BLOCK_SIZE", "8")
    monkeypatch.setenv("MLX_PAGED_KV_CACHE_MEMORY", "auto")
    monkeypatch.delenv("MLX_PAGED_KERNEL", raising=False)
    assert PagedConfig.from_env() == PagedConfig(8)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MLX_PAGED_BLOCK_SIZE", "5"), ("MLX_PAGED_KV_CACHE_MEMORY", "much"), ("MLX_PAGED_KERNEL", "2")],
)
def test_from_env_says_that_a_variable_is_wrong(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"in an MLX_PAGED_\* variable: .*" + value):
        PagedConfig.from_env({name: value})


# Command line -----------------------------------------------------------------------------------------------------


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="none")
    PagedConfig.add_arguments(parser)
    return parser.parse_args(words)


def test_flags_override_only_what_they_name() -> None:
    base = PagedConfig(64, 10**9, False)
    assert base.with_arguments(parse()) == base
    assert base.with_arguments(parse("--kv-block-size", "16")) == PagedConfig(16, 10**9, False)
    assert base.with_arguments(parse("--kv-cache-memory", "2GiB")) == PagedConfig(64, 2 << 30, False)
    assert base.with_arguments(parse("--kv-cache-memory", "auto")) == PagedConfig(64, None, False)
    assert base.with_arguments(parse("--kernel", "on", "--kv-block-size=8")) == PagedConfig(8, 10**9, True)
    assert base.with_arguments(parse("--kernel", "auto")) == PagedConfig(64, 10**9, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-block-size", "12"), "power of two from 8 to 128, not 12"),
        (("--kv-block-size", "many"), "whole number"),
        (("--kv-cache-memory", "2XB"), "memory size must look like"),
        (("--kv-cache-memory", "0"), "must be positive"),
        (("--kernel", "fast"), "auto, on or off"),
    ],
)
def test_wrong_flags_end_with_a_usage_message(
    words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and f"argument {words[0]}" in error and "Traceback" not in error


def test_the_reference_has_the_row_of_every_option() -> None:
    table = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().splitlines()
    assert len(PagedConfig.options()) == 8
    assert [option.reference for option in PagedConfig.options()] == [
        line for line in table if any(line.startswith(f"| `{option.flag}") for option in PagedConfig.options())
    ]


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    out = capsys.readouterr().out
    assert "paged KV cache" in out
    for flag in ("--kv-block-size TOKENS", "--kv-cache-memory SIZE", "--kernel {auto,on,off}"):
        assert flag in out


# Memory and kernel ------------------------------------------------------------------------------------------------


def test_memory_budget_is_the_size_given_or_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "free_memory", lambda: 1000)
    assert PagedConfig(kv_cache_memory=12345).memory_budget() == 12345
    assert PagedConfig().memory_budget() == 800


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"max_recommended_working_set_size": 10_000, "free_memory": 1}, 7_000),
        ({"max_recommended_working_set_size": 2_000}, 0),
        ({"free_memory": 5_000, "total_memory": 9_000}, 5_000),
        ({"total_memory": 9_000}, 6_000),
    ],
)
def test_free_memory_of_a_gpu(info: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 3_000)
    assert free_memory() == expected


def test_free_memory_of_this_machine_is_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert 1 << 20 < free_memory() < 1 << 50


def test_free_memory_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(config_module.Path, "exists", lambda path: False)
    monkeypatch.setattr(config_module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert free_memory() == 4096 * 500


@pytest.mark.parametrize("choice", [None, False])
def test_a_kernel_that_is_not_demanded_may_be_missing(choice: bool | None) -> None:
    PagedConfig(kernel=choice).check_kernel()


def test_a_kernel_demanded_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    with pytest.raises(KernelUnavailableError, match=r"kernel=on, but MLX.* use auto or off"):
        PagedConfig(kernel=True).check_kernel()
