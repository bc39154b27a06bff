"""Variables that our own commands set before MLX is imported: no CUDA graphs over NCCL, a safe TMPDIR."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged import startup
from mlx_paged.startup import GRAPHS, is_own_command

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


def test_users_setting_of_graphs_is_kept(tmp_path: Path) -> None:
    assert at_import(tmp_path, ["-m", "mlx_paged", "doctor"], **NCCL, MLX_USE_CUDA_GRAPHS="1") == {GRAPHS: "1"}


def test_size_of_command_buffers_is_left_unchanged_on_macos(tmp_path: Path) -> None:
    """Longer command buffers may hold the GPU until macOS ends the process."""
    assert at_import(tmp_path, ["-m", "mlx_paged.server"], "darwin") == {}
    asked = {"MLX_MAX_MB_PER_BUFFER": "77"}
    assert at_import(tmp_path, ["-m", "mlx_paged.server"], "darwin", **asked) == asked


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
def test_is_own_command_recognises_our_commands(arguments: list[str], original: list[str], own: bool) -> None:
    assert is_own_command(arguments, original) is own


def test_graphs_are_disabled_only_for_nccl_in_our_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GRAPHS, raising=False)
    monkeypatch.delenv("NCCL_HOST_IP", raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/mlx_paged.server"])
    startup.disable_cuda_graphs()  # one process, or another backend
    assert GRAPHS not in os.environ
    monkeypatch.setenv("NCCL_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(sys, "argv", ["notes.py"])
    startup.disable_cuda_graphs()
    assert GRAPHS not in os.environ
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/mlx_paged.server"])
    monkeypatch.setenv(GRAPHS, "1")
    startup.disable_cuda_graphs()
    assert os.environ[GRAPHS] == "1"
    monkeypatch.delenv(GRAPHS)
    startup.disable_cuda_graphs()
    assert os.environ.pop(GRAPHS) == "0"


# The folder of compiled code ---------------------------------------------------------------------------------------


@pytest.fixture
def own_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make this process one of our commands on Linux, with its own temporary and cache folders."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(startup, "is_own_command", lambda *_: True)
    monkeypatch.setattr(startup.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TMPDIR", raising=False)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_own_folder_of_compiled_code_is_used(own_command: Path) -> None:
    for _ in range(2):  # created, then found
        startup.secure_code_folder()
        assert "TMPDIR" not in os.environ
    assert (own_command / "tmp" / "mlx").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["others can write", "a link", "somebody else's"])
def test_unsafe_folder_of_compiled_code_is_not_used(
    own_command: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_command / "tmp" / "mlx"
    if how == "a link":
        (own_command / "theirs").mkdir(mode=0o700)
        folder.symlink_to(own_command / "theirs")
    else:
        folder.mkdir()
        folder.chmod(0o777 if how == "others can write" else 0o755)
    if how == "somebody else's":
        theirs, real = folder.lstat().st_ino, Path.lstat

        def lstat(path: Path) -> os.stat_result:
            found = real(path)
            return os.stat_result((*found[:4], 12345, *found[5:])) if found.st_ino == theirs else found

        monkeypatch.setattr(Path, "lstat", lstat)
    startup.secure_code_folder()
    assert os.environ["TMPDIR"] == str(own_command / "cache" / "mlx_paged" / "compiled")
    assert Path(os.environ["TMPDIR"]).stat().st_mode & 0o777 == 0o700


def test_new_folder_is_made_if_the_cache_is_unsafe(own_command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_is_ours", lambda folder: False)
    made = own_command / "made"
    monkeypatch.setattr(startup.tempfile, "mkdtemp", lambda prefix: str(made))
    startup.secure_code_folder()
    assert os.environ["TMPDIR"] == str(made)


def test_users_script_keeps_its_temporary_folder(own_command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "is_own_command", lambda *_: False)
    (own_command / "tmp" / "mlx").mkdir()
    (own_command / "tmp" / "mlx").chmod(0o777)
    startup.secure_code_folder()
    assert "TMPDIR" not in os.environ
