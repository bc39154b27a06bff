"""What runs before MLX is loaded: handling of Ctrl-C and environment variables in our own commands, and for every
program a clear error if MLX's backend is missing.

Imported first, and imports MLX only at its end: MLX reads the variables when it first uses the GPU. The length of MLX's
command buffers on Metal is left to MLX (docs/adr/0040).
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

GRAPHS = "MLX_USE_CUDA_GRAPHS"
COMMANDS = ("mlx_paged", "mlx_paged.generate", "mlx_paged.server")
INTERRUPTED = 130


class MissingBackendError(ImportError):
    """MLX, or the backend that it computes with, cannot be loaded."""


def is_own_command(arguments: Sequence[str], original: Sequence[str]) -> bool:
    """Return whether the process runs a command of this package.

    Args:
        arguments: ``sys.argv`` while packages are imported: with ``python -m`` its first is ``-m`` until the module is
            found.
        original: ``sys.orig_argv``.
    """
    program = arguments[0] if arguments else ""
    if program != "-m":
        return Path(program).name.removesuffix(".exe") in COMMANDS
    # Options of the interpreter come first; the first one that begins with -m names the module.
    for index, argument in enumerate(original[1:], 1):
        if argument.startswith("-m"):
            module = argument[2:] or "".join(original[index + 1 : index + 2])
            return module.partition(".")[0] == "mlx_paged"
    return False


# Ctrl-C while a command of ours still imports ------------------------------------------------------------------------


def _end(number: int, frame: Any) -> None:
    os._exit(INTERRUPTED)


def end_at_interrupt() -> None:
    """End the process at SIGINT, with status 130 and without a traceback, if it is one of our commands and nothing else
    handles the signal."""
    is_main = threading.current_thread() is threading.main_thread()
    is_unhandled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_main and is_unhandled and is_own_command(sys.argv, sys.orig_argv):
        signal.signal(signal.SIGINT, _end)


def raise_at_interrupt() -> None:
    """Let SIGINT raise KeyboardInterrupt again, once the imports are done."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# The environment -----------------------------------------------------------------------------------------------------


def disable_cuda_graphs() -> None:
    """Set ``MLX_USE_CUDA_GRAPHS=0`` in a command of this package over NCCL, unless the user has set it.

    MLX cannot reuse a CUDA graph that contains a reduction: it makes a new one for each reduction, 65 per decode step
    of 32 layers, and each graph that was ever made slows the process down.
    """
    if "NCCL_HOST_IP" in os.environ and is_own_command(sys.argv, sys.orig_argv):
        os.environ.setdefault(GRAPHS, "0")


def secure_code_folder() -> None:
    """Make sure, in a command of this package on Linux, that only this user can write to the folder of MLX's code.

    On a CPU, MLX compiles operations into libraries under ``mlx`` in the temporary folder, and loads whatever it finds
    there. If others own that folder or can write to it, ``TMPDIR`` is set to a folder in the user's cache, for MLX, its
    compiler and other child processes; Python keeps its temporary folder.
    """
    if sys.platform == "darwin" or not is_own_command(sys.argv, sys.orig_argv):
        return  # macOS has a temporary folder for each user
    if not _is_ours(Path(tempfile.gettempdir()) / "mlx"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_paged" / "compiled"
        os.environ["TMPDIR"] = str(cache) if _is_ours(cache) else tempfile.mkdtemp(prefix="mlx_paged-")


def _is_ours(folder: Path) -> bool:
    """Create a folder if it is missing, and return whether this user owns it and nobody else can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    writable = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & writable


# MLX -----------------------------------------------------------------------------------------------------------------

_print_others = sys.excepthook


def _print_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace ``sys.excepthook``: print a MissingBackendError in one line, without the frames of the imports."""
    if isinstance(error, MissingBackendError):
        print(f"mlx_paged: {error}", file=sys.stderr)
    else:
        _print_others(kind, error, trace)


end_at_interrupt()
disable_cuda_graphs()
secure_code_folder()
try:
    import mlx.core  # noqa: F401
except ImportError as missing:
    sys.excepthook = _print_in_one_line
    raise MissingBackendError(
        f'MLX cannot be loaded ({missing}). On Linux its backend is a separate package: pip install "mlx[cpu]", or '
        '"mlx[cuda13]" for an NVIDIA GPU ("mlx[cuda12]" for older drivers)'
    ) from None
