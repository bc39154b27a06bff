"""One block pool per model, made by its paging plan."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ..attention.select import storage_choice
from ..config import PagedConfig
from ..kv.pool import BlockPool
from .plan import PagingPlan, first_keys

_lock = threading.RLock()
# By id, because modules are dicts and cannot be hashed; an entry goes when its model does.
_pools: dict[int, tuple[weakref.ref[Any], PagedConfig, PagingPlan, BlockPool]] = {}


def pool_for(model: Any, plan: PagingPlan, config: PagedConfig) -> BlockPool:
    """The model's pool; a new one if there is none yet for these groups and this configuration.

    Raises:
        KernelUnavailableError: the configuration demands a kernel and there is none for the model's attention.
    """
    with _lock:
        entry = _pools.get(id(model))
        if entry is not None and entry[0]() is model and entry[1:3] == (config, plan):
            return entry[3]
        pool = BlockPool(
            plan.groups,
            block_size=config.block_size,
            memory_budget=max(1, config.memory_budget()),
            choose_storage=storage_choice(config.use_native_paged_kernel),
        )
        for group, (geometry, heads) in zip(plan.groups, plan.geometries, strict=False):
            pool.set_geometry(group.layers[0], *first_keys(geometry), batch=1, heads=heads)
        key = id(model)
        _pools[key] = (weakref.ref(model, lambda _: _pools.pop(key, None)), config, plan, pool)
        return pool


def pool_of(model: Any) -> BlockPool | None:
    """The block pool of a model, or None if it has none (yet)."""
    entry = _pools.get(id(model))
    return entry[3] if entry is not None and entry[0]() is model else None


def forget_pools() -> None:
    """Let the registry drop its pools; caches in use keep theirs alive."""
    with _lock:
        _pools.clear()
