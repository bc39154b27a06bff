"""MLX's variables that this package's own commands set before MLX is there: a limit on macOS, no graphs over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged import command_buffers
from mlx_paged.command_buffers import GRAPHS, LIMIT, VARIABLE, is_own_command

# Says what the variable is at the moment when MLX is first imported, with the platform as given.
PROBE = """
import json, os, sys
sys.platform = {platform!r}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx" or name.startswith("mlx."):
            print(json.dumps(os.environ.get({variable!r})), file=sys.stderr, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


def at_import(tmp_path: Path, arguments: list[str], platform: str, given: str | None = None) -> str | None:
    """The variable's value when a process with these arguments first imports MLX."""
    (tmp_path / "sitecustomize.py").write_text(PROBE.format(platform=platform, variable=VARIABLE))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])}
    env.pop(VARIABLE, None)
    if given is not None:
        env[VARIABLE] = given
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=env, check=True)
    value: str | None = json.loads(run.stderr.splitlines()[-1])
    return value


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """As pip writes them for an entry point."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "mlx_paged.generate"
    file.write_text("import sys\nfrom mlx_paged.generate import main\nsys.exit(main())\n")
    return file


@pytest.mark.parametrize("arguments", [["-m", "mlx_paged", "doctor"], ["-m", "mlx_paged.server"], ["-mmlx_paged"]])
def test_set_before_mlx_is_imported(tmp_path: Path, arguments: list[str]) -> None:
    assert at_import(tmp_path, arguments, "darwin") == str(LIMIT)


def test_set_by_an_installed_script_before_mlx_is_imported(tmp_path: Path, script: Path) -> None:
    assert at_import(tmp_path, [str(script)], "darwin") == str(LIMIT)


def test_a_users_own_setting_wins(tmp_path: Path) -> None:
    assert at_import(tmp_path, ["-m", "mlx_paged", "doctor"], "darwin", given="77") == "77"


def test_not_set_on_linux_nor_in_other_peoples_processes(tmp_path: Path) -> None:
    assert at_import(tmp_path, ["-m", "mlx_paged", "doctor"], "linux") is None
    assert at_import(tmp_path, ["-c", "import mlx_paged"], "darwin") is None


@pytest.mark.parametrize(
    ("arguments", "original", "own"),
    [
        (["-m"], ["python", "-m", "mlx_paged", "server"], True),
        (["-m"], ["python", "-X", "dev", "-m", "mlx_paged.generate"], True),
        (["-m"], ["python", "-m", "pytest", "-m", "mlx_paged"], False),
        (["-m"], ["python", "-m", "mlx_paged_others"], False),
        (["-m"], ["python", "-m", "mlx_lm", "server"], False),
        (["/opt/bin/mlx_paged"], ["python", "/opt/bin/mlx_paged", "chat"], True),
        (["/opt/bin/mlx_paged.server"], ["python", "/opt/bin/mlx_paged.server"], True),
        (["notes.py", "-m", "mlx_paged"], ["python", "notes.py", "-m", "mlx_paged"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_whose_process_it_is(arguments: list[str], original: list[str], own: bool) -> None:
    assert is_own_command(arguments, original) is own


def test_raised_in_this_process_only_where_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["notes.py"])
    command_buffers.raise_limit()
    assert VARIABLE not in os.environ
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/mlx_paged.server"])
    command_buffers.raise_limit()
    assert os.environ.pop(VARIABLE) == str(LIMIT)


def test_no_graphs_over_nccl_in_our_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GRAPHS, raising=False)
    monkeypatch.delenv("NCCL_HOST_IP", raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/mlx_paged.server"])
    command_buffers.launch_directly()  # one process, or another backend
    assert GRAPHS not in os.environ
    monkeypatch.setenv("NCCL_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(sys, "argv", ["notes.py"])
    command_buffers.launch_directly()
    assert GRAPHS not in os.environ
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/mlx_paged.server"])
    monkeypatch.setenv(GRAPHS, "1")
    command_buffers.launch_directly()
    assert os.environ[GRAPHS] == "1"
    monkeypatch.delenv(GRAPHS)
    command_buffers.launch_directly()
    assert os.environ.pop(GRAPHS) == "0"
