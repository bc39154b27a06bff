"""Adapters between mlx-lm and the paged engine: the only code that touches mlx-lm's names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..warn import NotPagedWarning

if TYPE_CHECKING:
    from .cache.layer_cache import PagedLayerCache
    from .cache.pools import pool_of, retrace
    from .cache.prompt_cache import adopt_prompt_cache
    from .registry import PatchReport, apply_patches, is_applied, remove_patches

# Imported lazily: a version of mlx-lm may lack a name that one of them needs, and apply_patches() must work without it.
# The registry is also a command, and Python warns about a module that is imported before it is run with -m.
_MODULES = {
    "PagedLayerCache": "cache.layer_cache",
    "PatchReport": "registry",
    "adopt_prompt_cache": "cache.prompt_cache",
    "apply_patches": "registry",
    "is_applied": "registry",
    "pool_of": "cache.pools",
    "remove_patches": "registry",
    "retrace": "cache.pools",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "NotPagedWarning",
    "PagedLayerCache",
    "PatchReport",
    "adopt_prompt_cache",
    "apply_patches",
    "is_applied",
    "pool_of",
    "remove_patches",
    "retrace",
]
