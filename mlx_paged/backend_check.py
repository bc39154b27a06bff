"""Imports MLX, and says what to install where its backend is missing."""

from __future__ import annotations

import sys
from types import TracebackType

from .mlx_environment import launch_directly, own_compiled_code

_print_others = sys.excepthook


class MissingBackendError(ImportError):
    """MLX is there, but not the backend that it computes with."""


def _print_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Stand in for ``sys.excepthook``: where a command ends with this error, the frames of its imports say nothing."""
    if isinstance(error, MissingBackendError):
        print(f"mlx_paged: {error}", file=sys.stderr)
    else:
        _print_others(kind, error, trace)


launch_directly()  # MLX reads the variables that they set
own_compiled_code()
try:
    import mlx.core  # noqa: F401
except ImportError as missing:
    sys.excepthook = _print_in_one_line
    raise MissingBackendError(
        f'MLX cannot be loaded ({missing}). On Linux its backend is a package of its own: pip install "mlx[cpu]", or '
        '"mlx[cuda13]" for an NVIDIA GPU ("mlx[cuda12]" for older drivers)'
    ) from None

__all__ = ["MissingBackendError"]
