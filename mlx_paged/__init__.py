"""A paged KV cache for mlx-lm: block pool, block tables, copy-on-write prefixes.

``apply_patches()`` makes mlx-lm's own functions run on it; ``remove_patches()`` undoes that.

Example:
    >>> from mlx_paged import apply_patches, pool_of
    >>> apply_patches()
    >>> from mlx_lm import generate, load
    >>> model, tokenizer = load("path/to/model")
    >>> text = generate(model, tokenizer, prompt="What is the capital of France?")
    >>> print(pool_of(model).stats())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .startup import MissingBackendError  # first: it loads MLX

# isort: split
from .attention.dispatch import Dispatch, dispatch_counts, last_dispatch, reset_dispatch_counts
from .by_model import kept_of
from .cache.batch_cache import PagedBatchKVCache
from .cache.paged_kv_cache import PagedKVCache
from .cache.sequence import SequenceTables
from .config import PagedConfig
from .errors import (
    BlockStateError,
    ConfigError,
    DeviceError,
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
from .warn import NotPagedWarning

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .patches.cache.pools import pool_of, retrace
    from .patches.cache.prompt_cache import adopt_prompt_cache
    from .patches.registry import PatchReport, apply_patches, is_applied, remove_patches
else:
    # Imported at first access: the patches import mlx-lm, which the engine does not need.
    _PATCHES = {
        "PatchReport": "registry",
        "adopt_prompt_cache": "cache.prompt_cache",
        "apply_patches": "registry",
        "is_applied": "registry",
        "pool_of": "cache.pools",
        "remove_patches": "registry",
        "retrace": "cache.pools",
    }

    def __getattr__(name: str) -> Any:
        if name in _PATCHES:
            return getattr(import_module(f".patches.{_PATCHES[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_PATCHES})


__all__ = [
    "BlockPool",
    "BlockStateError",
    "BlockTable",
    "ConfigError",
    "DeviceError",
    "Dispatch",
    "GeometryError",
    "KernelUnavailableError",
    "LayerGroup",
    "MissingBackendError",
    "ModelFolderError",
    "NotPagedWarning",
    "PagedBatchKVCache",
    "PagedCacheError",
    "PagedCacheStats",
    "PagedConfig",
    "PagedKVCache",
    "PatchError",
    "PatchReport",
    "PoolExhaustedError",
    "PromptCacheError",
    "RequestFailedError",
    "RequestTooLargeError",
    "SequenceTables",
    "TrimError",
    "__version__",
    "adopt_prompt_cache",
    "apply_patches",
    "dispatch_counts",
    "is_applied",
    "kept_of",
    "last_dispatch",
    "pool_of",
    "remove_patches",
    "reset_dispatch_counts",
    "retrace",
]
