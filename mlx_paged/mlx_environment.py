"""What MLX finds in the environment of our own commands: no CUDA graphs over NCCL, and a folder for the code that it
compiles on a CPU. How long its command buffers on Metal are, it decides itself (docs/adr/0040).

Imported before MLX, which reads the variables when it first meets the GPU; so nothing here imports MLX.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

GRAPHS = "MLX_USE_CUDA_GRAPHS"
COMMANDS = ("mlx_paged", "mlx_paged.generate", "mlx_paged.server")


def is_own_command(arguments: Sequence[str], original: Sequence[str]) -> bool:
    """Return whether the process runs a command of this package.

    Args:
        arguments: ``sys.argv`` while packages are imported: with ``python -m`` its first is ``-m`` until the module is
            found.
        original: ``sys.orig_argv``.
    """
    program = arguments[0] if arguments else ""
    if program != "-m":
        return Path(program).name in COMMANDS
    # Options of the interpreter come first, and the first that is or begins with -m names the module.
    for index, argument in enumerate(original[1:], 1):
        if argument.startswith("-m"):
            module = argument[2:] or "".join(original[index + 1 : index + 2])
            return module.partition(".")[0] == "mlx_paged"
    return False


def launch_directly() -> None:
    """In a command of this package over NCCL, set ``MLX_USE_CUDA_GRAPHS=0`` unless the user has set it.

    MLX cannot use a graph with a reduction twice: it makes one anew for each, 65 a decode step of 32 layers, and a
    process gets slower with each that there has been.
    """
    if "NCCL_HOST_IP" in os.environ and is_own_command(sys.argv, sys.orig_argv):
        os.environ.setdefault(GRAPHS, "0")


def own_compiled_code() -> None:
    """In a command of this package on Linux, see that nobody else can write to the folder that MLX loads code from.

    On a CPU, MLX compiles operations into libraries under ``mlx`` in the temporary folder, and loads what it finds
    there whoever wrote it. If that folder is not ours alone, ``TMPDIR`` becomes one in the user's cache for MLX, its
    compiler and other processes that this one starts; Python keeps the temporary folder that it has.
    """
    if sys.platform == "darwin" or not is_own_command(sys.argv, sys.orig_argv):
        return  # macOS has a temporary folder for each user
    if not _is_ours(Path(tempfile.gettempdir()) / "mlx"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_paged" / "compiled"
        os.environ["TMPDIR"] = str(cache) if _is_ours(cache) else tempfile.mkdtemp(prefix="mlx_paged-")


def _is_ours(folder: Path) -> bool:
    """Return whether a folder, made if it is missing, belongs to this user and nobody else can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    writable = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & writable
