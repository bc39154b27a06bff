"""MLX on a CPU compiles each fused function with ``g++``, which reads some 60,000 lines of headers each time: here it
finds them precompiled. What is compiled, and how, stays as it is."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

HEADER = "mlx/backend/cpu/compiled_preamble.h"
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared")  # MLX's: GCC takes headers that had the same only


def precompile_headers() -> None:
    """Put a ``g++`` before the other in the path of this process and of those that it starts, where that is GCC."""
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
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:  # several test processes may be at it
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
    if folder.stat().st_uid != os.getuid():  # the folder of temporary files is everybody's
        return
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
