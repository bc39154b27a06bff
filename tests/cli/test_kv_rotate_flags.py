"""--kv-rotate of mlx_paged.generate and mlx_paged.server."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_paged import ConfigError
from mlx_paged.config import PagedConfig
from tests.cli.test_command_line import PROMPT, command, generate, save_model, text_of
from tests.cli.test_kv_bits_flags import parsed

BITS = ("--kv-bits", "4", "--kv-group-size", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def test_the_flag_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotates(*argv: str) -> bool:
        return PagedConfig.from_env().with_arguments(parsed(*argv)).kv_rotate

    assert not rotates() and rotates("--kv-rotate") and not rotates("--no-kv-rotate")
    monkeypatch.setenv("MLX_PAGED_KV_ROTATE", "on")
    assert rotates() and rotates("--kv-rotate") and not rotates("--no-kv-rotate")
    monkeypatch.setenv("MLX_PAGED_KV_ROTATE", "maybe")
    with pytest.raises(ConfigError, match=r"MLX_PAGED_.*on or off, not 'maybe'"):
        PagedConfig.from_env()


def test_what_is_a_switch() -> None:
    assert [PagedConfig(kv_rotate=value).kv_rotate for value in (True, False, "on", " Off ", "1", "0")] == [
        True, False, True, False, True, False,
    ]  # fmt: skip
    assert PagedConfig(kv_bits=4, kv_rotate=True) != PagedConfig(kv_bits=4)
    assert PagedConfig(kv_bits=4, kv_rotate=True).page_format.rotate
    PagedConfig(kv_bits=4, kv_rotate=True).check_rotation()
    with pytest.raises(ConfigError, match="goes with kv_bits"):
        PagedConfig(kv_rotate=True).check_rotation()


def test_generate_rotates_and_says_what_it_cannot(folder: Path) -> None:
    rotated = generate(folder, "--prompt", PROMPT, *BITS, "--kv-rotate", "--cache-stats")
    assert text_of(rotated) and "quantised in 3 layer(s)" in rotated.stderr and "Warning" not in rotated.stderr
    from_env = generate(folder, "--prompt", PROMPT, *BITS, MLX_PAGED_KV_ROTATE="1")
    assert text_of(from_env) == text_of(rotated)
    for flags, why in (
        (("--kv-rotate",), "kv_rotate is for quantised pages"),
        (("--kv-rotate", "--kv-bits", "3"), "kv_rotate is for quantised pages"),
        (("--kv-rotate", *BITS, "--no-paged"), "--no-paged does without them"),
    ):
        refused = generate(folder, "--prompt", PROMPT, *flags)
        assert refused.returncode == 1 and why in refused.stderr and "Traceback" not in refused.stderr


def test_the_server_refuses_it_without_bits(folder: Path) -> None:
    refused = command("server", "--model", folder, "--port", 0, "--kv-rotate")
    assert refused.returncode != 0 and "kv_rotate is for quantised pages" in refused.stderr
    assert "Traceback" not in refused.stderr
