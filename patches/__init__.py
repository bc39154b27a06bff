"""Adapters between mlx-lm and the paged engine: the only code that touches mlx-lm's names."""

from .cache import PagedLayerCache, adopt_prompt_cache
from .pools import pool_of
from .registry import PatchReport, apply_patches, is_applied, remove_patches
from .warn import FallThroughWarning

__all__ = [
    "FallThroughWarning",
    "PagedLayerCache",
    "PatchReport",
    "adopt_prompt_cache",
    "apply_patches",
    "is_applied",
    "pool_of",
    "remove_patches",
]
