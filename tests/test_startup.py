"""The variable that is set before MLX is imported: no CUDA graphs over NCCL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.startup import GRAPHS

# Prints MLX's variables at the first import of MLX, on the given platform.
PROBE = """
import json, os, sys
sys.platform = {platform!r}
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx" or name.startswith("mlx."):
            found = {{key: value for key, value in os.environ.items() if key.startswith("MLX_")}}
            print(json.dumps(found), file=sys.stderr, flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""


def at_import(tmp_path: Path, arguments: list[str], platform: str = sys.platform, **given: str) -> dict[str, str]:
    """Return MLX's variables at the first import of MLX in a process with these arguments and variables."""
    (tmp_path / "sitecustomize.py").write_text(PROBE.format(platform=platform))
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, env={**env, **given}, check=True
    )
    found: dict[str, str] = json.loads(run.stderr.splitlines()[-1])
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a script as pip does for an entry point."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "mlx_paged.generate"
    file.write_text("import sys\nfrom mlx_paged.generate import main\nsys.exit(main())\n")
    return file


NCCL = {"NCCL_HOST_IP": "127.0.0.1"}


@pytest.mark.parametrize("arguments", [["-m", "mlx_paged", "doctor"], ["-m", "mlx_paged.server"], ["-mmlx_paged"]])
def test_graphs_are_disabled_before_mlx_is_imported(tmp_path: Path, arguments: list[str]) -> None:
    assert at_import(tmp_path, arguments, **NCCL) == {GRAPHS: "0"}


def test_installed_script_disables_graphs_before_mlx_is_imported(tmp_path: Path, script: Path) -> None:
    assert at_import(tmp_path, [str(script)], **NCCL) == {GRAPHS: "0"}


def test_graphs_are_kept_without_nccl(tmp_path: Path) -> None:
    assert at_import(tmp_path, ["-m", "mlx_paged", "doctor"]) == {}


def test_users_setting_of_graphs_is_kept(tmp_path: Path) -> None:
    assert at_import(tmp_path, ["-m", "mlx_paged", "doctor"], **NCCL, MLX_USE_CUDA_GRAPHS="1") == {GRAPHS: "1"}


def test_size_of_command_buffers_is_left_unchanged_on_macos(tmp_path: Path) -> None:
    """Longer command buffers may hold the GPU until macOS ends the process."""
    assert at_import(tmp_path, ["-m", "mlx_paged.server"], "darwin") == {}
    asked = {"MLX_MAX_MB_PER_BUFFER": "77"}
    assert at_import(tmp_path, ["-m", "mlx_paged.server"], "darwin", **asked) == asked
