"""A start that would fail again: its exit status, and the files for service managers that know it."""

from __future__ import annotations

import configparser
import os
import plistlib
import socket
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import machine
from mlx_paged.cli import generate
from mlx_paged.cli import server as server_command
from mlx_paged.errors import ConfigError, RankError, WeightsTooLargeError
from mlx_paged.server.engine_thread import EXIT_STATUS
from mlx_paged.server.errors import REFUSED_STATUS, start_status
from mlx_paged.server.loaded_models import LoadedModels
from mlx_paged.server.options import ServerConfig
from mlx_paged.server.service import listening

SERVICE = Path(__file__).parents[2] / "docs" / "service"


def under_launchd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "getppid", lambda: 1)


def test_status_says_whether_a_restart_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, mended = [ConfigError("no"), WeightsTooLargeError(2, 1)], [RankError("gone"), OSError("in use")]
    assert [start_status(error) for error in (*refused, *mended)] == [78, 78, 1, 1]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert start_status(refused[0]) == 78, "another system's process 1 knows statuses"
    under_launchd(monkeypatch)
    assert [start_status(error) for error in (*refused, *mended)] == [0, 0, 1, 1]
    monkeypatch.setattr(os, "getppid", lambda: 2)
    assert start_status(refused[0]) == 78, "started from a shell"


def test_usage_errors_end_with_0_under_launchd_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for status in (2, 0):
        with pytest.raises(SystemExit) as ended:
            server_command.main(["--port", "-1"])
        assert ended.value.code == status and "the port must be a whole number" in capsys.readouterr().err
        under_launchd(monkeypatch)


def test_service_files_restart_hangs_and_not_refused_starts() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(SERVICE / "mlx_paged.service")
    service = unit["Service"]
    prevented = set(service["RestartPreventExitStatus"].split())
    assert service["Restart"] == "on-failure" and prevented == {"2", str(REFUSED_STATUS)}
    assert str(EXIT_STATUS) not in prevented
    job = plistlib.loads((SERVICE / "org.mlx_paged.server.plist").read_bytes())
    assert job["KeepAlive"] == {"SuccessfulExit": False} and job["ProcessType"] == "Interactive"


@pytest.mark.demo_model
@pytest.mark.parametrize("usable", [1000, None], ids=["weights do not fit", "no room for the KV cache"])
def test_weights_that_do_not_fit_are_not_read(
    folder: Path, usable: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    monkeypatch.setattr(machine, "usable_memory", lambda: usable or weights + 1000)
    monkeypatch.setattr(mx, "eval", lambda *arrays: pytest.fail("weights are read"))
    mlx_paged.apply_patches()
    models = LoadedModels(server_command.parse(["--model", str(folder)]), ServerConfig())
    said = "the weights take" if usable else "budget of [0-9,]+ bytes is too small"
    with pytest.raises(mlx_paged.PagedCacheError, match=said):
        models.load_default()


@pytest.mark.demo_model
def test_generate_refuses_weights_that_do_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "usable_memory", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["mlx_paged.generate"])
    with pytest.raises(SystemExit) as ended:
        generate.main(["--model", str(folder), "--prompt", "w1"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and line.startswith("mlx_paged generate: the weights take 0.0")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="sockets are of IPv4 or IPv6 here, not of both")
def test_all_addresses_of_ipv6_include_those_of_ipv4() -> None:
    with listening("::", 0) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=60).close()
