"""One block pool per model, made from the caches its layers ask for."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..attention.select import storage_choice
from ..config import PagedConfig
from ..kv.group import LayerGroup
from ..kv.pool import BlockPool

_lock = threading.RLock()
# By id, because modules are dicts and cannot be hashed; an entry goes when its model does.
_pools: dict[int, tuple[weakref.ref[Any], PagedConfig, tuple[LayerGroup, ...], BlockPool]] = {}


def layer_groups(stock: list[Any]) -> tuple[LayerGroup, ...]:
    """Groups of the layers whose stock cache can be paged: plain ones together, rotating ones by window."""
    by_window: dict[int | None, list[int]] = {}
    for layer, cache in enumerate(stock):
        if type(cache) is KVCache:
            by_window.setdefault(None, []).append(layer)
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            by_window.setdefault(cache.max_size, []).append(layer)
    return tuple(
        LayerGroup(tuple(layers), window, "global" if window is None else f"window {window}")
        for window, layers in by_window.items()
    )


def pool_for(model: Any, stock: list[Any], config: PagedConfig) -> BlockPool:
    """The model's pool; a new one if there is none yet for these groups and this configuration."""
    groups = layer_groups(stock)
    with _lock:
        entry = _pools.get(id(model))
        if entry is not None and entry[0]() is model and entry[1:3] == (config, groups):
            return entry[3]
        pool = BlockPool(
            groups,
            block_size=config.block_size,
            memory_budget=max(1, config.memory_budget()),
            choose_storage=storage_choice(config.use_native_paged_kernel),
        )
        key = id(model)
        _pools[key] = (weakref.ref(model, lambda _: _pools.pop(key, None)), config, groups, pool)
        return pool


def pool_of(model: Any) -> BlockPool | None:
    """The block pool of a model, or None if it has none (yet)."""
    entry = _pools.get(id(model))
    return entry[3] if entry is not None and entry[0]() is model else None


def forget_pools() -> None:
    """Let the registry drop its pools; caches in use keep theirs alive."""
    with _lock:
        _pools.clear()
