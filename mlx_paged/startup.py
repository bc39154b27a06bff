"""What runs before MLX is loaded: a variable for NCCL, and a clear error if MLX's backend is missing.

Imported first, and imports MLX only at its end: MLX reads the variable when it first uses the GPU. The length of MLX's
command buffers on Metal is left to MLX (docs/adr/0080).
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

GRAPHS = "MLX_USE_CUDA_GRAPHS"


class MissingBackendError(ImportError):
    """MLX, or the backend that it computes with, cannot be loaded."""


_print_others = sys.excepthook


def _print_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace ``sys.excepthook``: print a MissingBackendError in one line, without the frames of the imports."""
    if isinstance(error, MissingBackendError):
        print(f"mlx_paged: {error}", file=sys.stderr)
    else:
        _print_others(kind, error, trace)


if "NCCL_HOST_IP" in os.environ:
    # MLX cannot reuse a CUDA graph that contains a reduction: it makes a new one for each reduction, 65 per decode step
    # of 32 layers, and each graph that was ever made slows the process down.
    os.environ.setdefault(GRAPHS, "0")
try:
    import mlx.core  # noqa: F401
except ImportError as missing:
    sys.excepthook = _print_in_one_line
    raise MissingBackendError(
        f'MLX cannot be loaded ({missing}). On Linux its backend is a separate package: pip install "mlx[cpu]", or '
        '"mlx[cuda13]" for an NVIDIA GPU ("mlx[cuda12]" for older drivers)'
    ) from None
