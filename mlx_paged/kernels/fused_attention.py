"""When MLX's attention on Metal is fused: otherwise it makes the scores of all queries and keys of a layer.

As in MLX 0.32.4 (docs/adr/0063). Up to 8 queries it has another kernel; so these are prompts.
"""

from __future__ import annotations

import platform
import re
from functools import lru_cache
from importlib import metadata

import mlx.core as mx

FUSED_DIMS = (64, 80, 128)  # for any number of queries
# The first generation of Apple GPUs with matrix units, and the first macOS whose wheels use them ("NAX" in MLX).
NAX_GENERATION, NAX_RELEASE = 17, 26


def least_fused_queries(head_dim: int, nax: bool) -> int:
    """Return the least number of queries for which MLX's attention is fused; 0 where that depends on nothing: it
    always is, or never."""
    if head_dim == 512 or (head_dim == 256 and nax):
        return 1024
    return 2048 if head_dim == 256 else 0


def wheel_release() -> int | None:
    """Return the release of macOS that MLX's wheel was built for, None elsewhere."""
    try:
        tags = metadata.distribution("mlx-metal").read_text("WHEEL") if platform.mac_ver()[0] else None
    except metadata.PackageNotFoundError:
        tags = None
    found = re.search(r"macosx_(\d+)_", tags or "")
    return int(found[1]) if found else None


@lru_cache(maxsize=1)
def has_nax() -> bool:
    """Return whether MLX uses an Apple GPU's matrix units."""
    found = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture", "")))
    return found is not None and int(found[1]) >= NAX_GENERATION and (wheel_release() or 0) >= NAX_RELEASE
