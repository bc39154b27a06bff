"""Which prompts MLX's attention computes on Metal without storing the scores of all queries and keys of a layer.

The conditions are those of MLX 0.32.4 for causal attention of more than 8 queries in 16 bits (docs/adr/0063).
"""

from __future__ import annotations

import platform
import re
from functools import lru_cache
from importlib import metadata

import mlx.core as mx

FUSED_DIMS = (64, 72, 80, 96, 128)  # head sizes fused for any number of queries
MOST_QUERIES = 2048  # of a sequence in a step (engine/prefill.py)
_LEAST = 1024
_QUERIES, _GROUPS = 32, 1024  # queries of a thread group for heads of 512 on matrix units; least number of groups
# The first generation of Apple GPUs with matrix units, the first macOS whose wheels have kernels for them ("NAX" in
# MLX), and the first macOS that runs these.
NAX_GENERATION, NAX_RELEASE, NAX_SYSTEM = 17, 26, (26, 2)


def least_fused_queries(head_dim: int, value_dim: int, num_q_heads: int, nax: bool) -> int | None:
    """Return the least number of a sequence's queries, of those above 8, for which MLX's attention after a prefix does
    not store all scores; 0: for any number; None: for none up to :data:`MOST_QUERIES`."""
    if head_dim == value_dim == 512:
        least = max(_LEAST, _QUERIES * (-(-_GROUPS // num_q_heads) - 1) + 1) if nax else _LEAST
        return least if least <= MOST_QUERIES else None
    if head_dim == value_dim == 256:
        return _LEAST if nax else None
    return 0 if (head_dim in FUSED_DIMS and head_dim == value_dim) or (head_dim, value_dim) == (96, 64) else None


def wheel_release() -> int | None:
    """Return the release of macOS that MLX's wheel was built for; None on other systems."""
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
    system = tuple(int(part) for part in platform.mac_ver()[0].split(".") if part)
    is_new = found is not None and int(found[1]) >= NAX_GENERATION and system >= NAX_SYSTEM
    return is_new and (wheel_release() or 0) >= NAX_RELEASE
