"""Precompiled headers for MLX on a CPU, which compiles each fused function with ``g++`` and some 60,000 lines of
headers. What is compiled, and how, does not change."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

HEADER = "mlx/backend/cpu/compiled_preamble.h"
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared")  # MLX's: precompiled headers must have the same


def precompile_headers() -> None:
    """If ``g++`` is GCC, put a wrapper before it in the path of this process and of those that it starts."""
    compiler = shutil.which("g++")
    include = Path(mx.__file__).parent / "include"
    if compiler is None or not (include / HEADER).exists() or mx.default_device() != mx.Device(mx.cpu):
        return
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in said:
        return
    key = hashlib.sha256(f"{said}{FLAGS}{include}{mx.__version__}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"mlx_paged-headers-{key}-{os.getuid()}"
    if not (folder / "g++").exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:  # several test processes may do this at once
            own = Path(made) / "own"
            made_header = own / "include" / f"{HEADER}.gch"
            made_header.parent.mkdir(parents=True)
            command = [compiler, *FLAGS[:-1], "-x", "c++-header", f"-I{include}", include / HEADER, "-o", made_header]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return
            script = own / "g++"
            script.write_text(f'#!/bin/sh\nexec "{compiler}" -I"{folder / "include"}" "$@"\n')
            script.chmod(0o755)
            with contextlib.suppress(OSError):  # another process was first
                own.rename(folder)
    if folder.stat().st_uid != os.getuid():  # any user can write to the folder of temporary files
        return
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
