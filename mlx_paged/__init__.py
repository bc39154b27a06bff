"""A paged KV cache for mlx-lm: block pool, block tables, copy-on-write prefixes.

``apply_patches()`` makes mlx-lm's own functions run on it; ``remove_patches()`` takes that back.
"""

from __future__ import annotations

from typing import Any

from .attention.dispatch import Dispatch, dispatch_counts, last_dispatch, reset_dispatch_counts
from .batch_cache import PagedBatchKVCache
from .cache import PagedKVCache, SequenceTables
from .config import PagedConfig
from .errors import (
    BlockStateError,
    ConfigError,
    GeometryError,
    KernelUnavailableError,
    ModelFolderError,
    PagedCacheError,
    PatchError,
    PoolExhaustedError,
    PromptCacheError,
    RequestFailedError,
    RequestTooLargeError,
    TrimError,
)
from .kv.block_table import BlockTable
from .kv.group import LayerGroup
from .kv.pool import BlockPool
from .kv.stats import PagedCacheStats

__version__ = "0.1.0"

_PATCHES = ("FallThroughWarning", "adopt_prompt_cache", "apply_patches", "pool_of", "remove_patches")


def __getattr__(name: str) -> Any:
    # The patches import mlx-lm; the engine does without.
    if name in _PATCHES:
        from . import patches

        return getattr(patches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BlockPool",
    "BlockStateError",
    "BlockTable",
    "ConfigError",
    "Dispatch",
    "GeometryError",
    "KernelUnavailableError",
    "LayerGroup",
    "ModelFolderError",
    "PagedBatchKVCache",
    "PagedCacheError",
    "PagedCacheStats",
    "PagedConfig",
    "PagedKVCache",
    "PatchError",
    "PoolExhaustedError",
    "PromptCacheError",
    "RequestFailedError",
    "RequestTooLargeError",
    "SequenceTables",
    "TrimError",
    "__version__",
    "dispatch_counts",
    "last_dispatch",
    "reset_dispatch_counts",
    *_PATCHES,
]
