"""One block pool per model and paging layout."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.models import cache as stock_cache

from ...by_model import ByModel
from ...config import PagedConfig
from ...engine.compiled_step import compiled_steps
from ...kv.blocks import blocks_choice
from ...kv.geometry import first_keys
from ...kv.pool import BlockPool
from ...machine import kv_budget
from ..sharded import agreed_budget
from .layout import PagedLayout

_lock = threading.RLock()


class _Pools:
    """Pools of one model.

    Attributes:
        latest: the pool of the latest prompt cache, and the configuration and layout it was made for.
        in_use: this and earlier pools, as long as they are referenced: with and without max_kv_size a model has two.
    """

    def __init__(self) -> None:
        self.latest: tuple[PagedConfig, PagedLayout, BlockPool] | None = None
        self.in_use: weakref.WeakValueDictionary[tuple[PagedConfig, PagedLayout], BlockPool] = (
            weakref.WeakValueDictionary()
        )


_pools: ByModel[_Pools] = ByModel("pools")
_state_pools: ByModel[tuple[PagedConfig, BlockPool]] = ByModel("pool of states")  # of models without any paged layer
_weights: ByModel[int] = ByModel("weights")  # bytes for which the model's automatic budget leaves room


def count_weights(*models: Any) -> None:
    """Let the automatic budgets of these models' next pools leave room for the weights of all of them, read or not, and
    of no other model. Without this call they leave room for all models of the process that have a prompt cache."""
    num_bytes = _num_bytes(models)
    for model in models:
        _weights.put(model, num_bytes)


def _num_bytes(models: Sequence[Any]) -> int:
    """Return the bytes of models' weights; an array counts once, though one model may be a part of another."""
    arrays = {id(array): array.nbytes for model in models for _, array in tree_flatten(model.parameters())}
    return sum(arrays.values())


def _budget(model: Any, config: PagedConfig) -> int:
    """Return the budget of a model's pool in bytes. Raises WeightsTooLargeError if the weights leave none."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    counted = _weights.get(model)
    if counted is None:
        counted = _num_bytes([model, *_pools.models()])
    return max(1, kv_budget(counted))


def pool_for(model: Any, layout: PagedLayout, config: PagedConfig) -> BlockPool:
    """Return the model's pool for this layout and configuration, made if there is none yet.

    Raises:
        KernelUnavailableError: the configuration demands a kernel and there is none for the model's attention.
    """
    with _lock:
        pools = _pools.get(model)
        if pools is None:
            pools = _pools.put(model, _Pools())
        if pools.latest is not None and pools.latest[2].is_lost:
            pools = _pools.put(model, _Pools())
        if pools.latest is not None and pools.latest[:2] == (config, layout):
            return pools.latest[2]
        pool = pools.in_use.get((config, layout)) or _new_pool(model, layout, config)
        pools.in_use[config, layout] = pool
        pools.latest = (config, layout, pool)
        return pool


def _new_pool(model: Any, layout: PagedLayout, config: PagedConfig) -> BlockPool:
    pool = BlockPool(
        layout.groups,
        block_size=config.tokens_per_block,
        memory_budget=agreed_budget(model, _budget(model, config), vars(config)),
        choose_blocks=blocks_choice(config.kernel),
        page_format=config.page_format,
    )
    known = zip(layout.groups, layout.geometries, strict=True)
    # Smallest first: the budget is checked against the groups known so far, and the others are assumed to be like them.
    for group, (geometry, heads) in sorted(known, key=lambda pair: pair[1][0].bytes_per_token()):
        pool.set_geometry(group.layers[0], *first_keys(geometry), batch=1, heads=heads)
    return pool


def known_pool(model: Any) -> BlockPool | None:
    """Return the block pool of the model's latest prompt cache, or None if there is none yet, or the device has failed
    since. Never makes one."""
    pools = _pools.get(model)
    return None if pools is None or pools.latest is None or pools.latest[2].is_lost else pools.latest[2]


def retrace(model: Any) -> None:
    """Have the model's decode steps traced again.

    On a GPU, decode steps run compiled. A replaced weight, layer or module is noticed by itself; a plain attribute that
    a layer has read (a factor, a flag, a function) is not.

    Example:
        >>> model.layers[0].self_attn.scale = 0.1
        >>> mlx_paged.retrace(model)

    Args:
        model: as loaded by mlx-lm.
    """
    pools = _pools.get(model)
    for pool in () if pools is None else list(pools.in_use.values()):
        step = compiled_steps.get(pool)
        if step is not None:
            step.retrace()


def pool_of(model: Any) -> BlockPool | None:
    """Return the block pool of a model: that of its latest prompt cache, or if it has had none, of its next one.

    Example:
        >>> model, tokenizer = mlx_lm.load("path/to/model")
        >>> pool_of(model).stats().free_blocks

    Args:
        model: as loaded by mlx-lm.

    Returns:
        The pool, or None if nothing of the model is paged: the patches are not applied, or blocks cannot replace the
        cache of any layer (a warning has said why).

    Raises:
        KernelUnavailableError: the configuration demands a kernel and there is none for the model's attention.
    """
    pool = known_pool(model)
    if pool is None and hasattr(model, "layers"):
        stock_cache.make_prompt_cache(model)  # the patch makes the pool
        pool = known_pool(model)
    return pool


def prefix_pool_of(model: Any) -> BlockPool:
    """Return the pool whose budget a model's prefixes count in: that of its blocks, or, if its layers keep only states,
    one without blocks for their checkpoints."""
    pool = pool_of(model)
    if pool is not None:
        return pool
    with _lock:
        factory = getattr(stock_cache.make_prompt_cache, "factory", None)
        config = PagedConfig() if factory is None else factory(model).config
        kept = _state_pools.get(model)
        if kept is None or kept[0] != config or kept[1].is_lost:
            kept = _state_pools.put(
                model,
                (config, BlockPool((), block_size=config.tokens_per_block, memory_budget=_budget(model, config))),
            )
        return kept[1]


def forget_pools() -> None:
    """Drop the registry's references to all pools; caches in use keep theirs alive."""
    with _lock:
        _pools.clear()
        _state_pools.clear()
