"""Which layers of a model are paged, which can be batched, and what a cache handed in must look like."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..engine.decode_batch import DecodeBatch
from ..engine.request import sequence_of
from ..engine.row_by_row import RowByRowBatch
from ..errors import GeometryError, PromptCacheError
from ..kv.storage.base import QueryHeads
from .cache import CacheFactory, PagedLayerCache, adopt_prompt_cache, factory_of
from .layout import name_of, pinned_in, why_one_by_one
from .probe import probe_layers
from .upstream import UPSTREAM
from .warn import warn_once


class ProbeCache(PagedLayerCache):
    """Notes the geometry of the keys and values an attention layer makes, and writes nothing."""

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        heads = QueryHeads(queries.shape[1], options.get("softcap") is not None, options.get("sinks") is not None)
        try:
            self.pool.set_geometry(self.layer, keys, values, batch=1, heads=heads)
        except GeometryError:
            if not self.sequence.move(keys.dtype):
                raise
            self.pool.set_geometry(self.layer, keys, values, batch=1, heads=heads)
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)


def probe_geometry(model: Any, fresh: Sequence[Any]) -> None:
    """Let the pool of ``fresh`` caches know the size of its blocks, which the budget is counted in, before the first
    prompt: a forward pass is built and dropped, nothing of it is computed. Where the model's keys are of another dtype
    than they were, the caches move to another pool."""
    sequence = sequence_of(fresh)
    if sequence is None:
        return
    if all(group.geometry is not None for group in sequence.pool.groups):
        parts = leaves(fresh)
        paged = [place for place, cache in enumerate(parts) if isinstance(cache, PagedKVCache)]
        stock = [c.to_stock() if isinstance(c, PagedLayerCache) else copy.deepcopy(c) for c in parts]
        found = probe_layers(model, with_leaves(fresh, stock), paged[:1])
        geometry = sequence.pool.layer(parts[paged[0]].layer).group.geometry
        if geometry is not None and found and found[paged[0]].geometry.dtype != geometry.dtype:
            sequence.move(found[paged[0]].geometry.dtype)
        if all(group.geometry is not None for group in sequence.pool.groups):
            return
    probes = [ProbeCache(sequence, c.layer) if isinstance(c, PagedKVCache) else c for c in fresh]
    model(mx.zeros((1, 2), mx.uint32), cache=probes)


def is_batched_here(fresh: Sequence[Any]) -> bool:
    """Whether the batch runs in this package's engine: always but for plain caches alone, which stay with mlx-lm. Its
    padded prefill corrupts states in models that do not mask it, and its batches forget which tokens are kept."""
    return not all(type(cache) is KVCache for cache in fresh)


def decode_batch(model: Any, fresh: Sequence[Any]) -> DecodeBatch:
    """A batch for rows of the model: in one call where its attention allows it, else one row after the other."""
    kept = next((cache for cache in leaves(fresh) if not isinstance(cache, PagedKVCache) and pinned_in(cache)), None)
    if kept is not None:
        why: str | None = f"{type(kept).__name__} forgets in a batch which tokens it keeps (max_kv_size)"
    else:
        stock = [c.to_stock() if isinstance(c, PagedLayerCache) else c for c in leaves(fresh)]
        why = why_one_by_one(model, with_leaves(fresh, stock))
    if why is None:
        return DecodeBatch(model, UPSTREAM)
    warn_once(f"rows of a batch are computed one by one in models of type {name_of(model)}: {why}")
    return RowByRowBatch(model, UPSTREAM)


def check_given(model: Any, given: list[Any], fresh: Sequence[Any], factory: CacheFactory) -> list[Any]:
    """A cache handed in with a request, as one of the engine's: mlx-lm's own is copied into the pool.

    Raises:
        PromptCacheError: it has not one cache of the right kind for each layer, or belongs to another model.
        PoolExhaustedError: there is no room for it.
    """
    if len(given) != len(fresh):
        raise PromptCacheError(f"the prompt cache has {len(given)} layers, the model {len(fresh)}")
    caches = adopt_prompt_cache(model, given, factory)
    sequence = sequence_of(fresh)
    place = 0
    for layer, (whole, fitting) in enumerate(zip(caches, fresh, strict=True)):
        where = f"layer {layer} ({layer_path(model, layer)}) of the prompt cache"
        if isinstance(whole, CacheList) != isinstance(fitting, CacheList):
            raise PromptCacheError(f"{where} is a {type(whole).__name__}, the model's is a {type(fitting).__name__}")
        for cache, expected in zip(leaves([whole]), leaves([fitting]), strict=True):
            if isinstance(expected, PagedKVCache):
                if not isinstance(cache, PagedKVCache):
                    raise PromptCacheError(f"{where} is a {type(cache).__name__}, which cannot be paged")
                if sequence is None or cache.pool is not sequence.pool or cache.layer != place:
                    raise PromptCacheError(f"{where} belongs to another model, or was made under other options")
                if cache.sequence is not sequence_of(caches):
                    raise PromptCacheError(f"{where} is of another sequence than the layers before it")
            elif type(cache) is not type(expected):
                kinds = f"{type(cache).__name__}, the model's is a {type(expected).__name__}"
                raise PromptCacheError(f"{where} is a {kinds}")
            place += 1
    return caches


def layer_path(model: Any, layer: int) -> str:
    """Name of a layer in the model, such as ``model.layers.3``."""
    layers = list(getattr(model, "layers", []))
    if layer < len(layers):
        for name, module in model.named_modules():
            if module is layers[layer]:
                return str(name)
    return f"layers.{layer}"


def fresh_caches(model: Any, max_kv_size: int | None) -> list[Any]:
    """An empty prompt cache of the model, as it is configured now."""
    return factory_of(model, max_kv_size)()
