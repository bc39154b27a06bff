"""Caches that are handed in: mlx-lm's own ones copied into the pool, and what they must look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, QuantizedKVCache, RotatingKVCache

from ...cache.composites import leaves, with_leaves
from ...cache.paged_kv_cache import PagedKVCache
from ...config import KVBits, PagedConfig
from ...engine.request import sequence_of
from ...errors import GeometryError, PromptCacheError
from ...warn import warn_once
from .layer_cache import PagedLayerCache
from .layout import can_be_paged, window_of
from .prompt_cache import CacheFactory, factory_of


def adopt_prompt_cache(model: Any, cache: list[Any], factory: CacheFactory | None = None) -> list[Any]:
    """Return a paged prompt cache of the model with the contents of mlx-lm's own one (as loaded from a file).

    Args:
        model: the model the cache was computed with.
        cache: one cache per layer; paged ones and ones that cannot be paged are returned as they are.
        factory: makes the paged one; None makes it as it is configured now.

    Raises:
        PromptCacheError: number of layers, heads, head dimension or window are not the model's, or it is quantised and
            the pages are not, or otherwise.
        PoolExhaustedError: the tokens do not fit the pool.
    """
    if not cache or any(isinstance(c, PagedLayerCache) for c in leaves(cache)):
        return cache
    quantized = next((c for c in leaves(cache) if type(c) is QuantizedKVCache), None)
    if factory is None:
        held = None if quantized is None else KVBits(quantized.bits, quantized.group_size)

        def as_held(config: PagedConfig) -> PagedConfig:
            return config if held is None or config.kv_bits is not None else held.configured(config)

        factory = factory_of(model, None, as_held)
    fresh = factory()
    if len(fresh) != len(cache):
        raise PromptCacheError(f"the prompt cache has {len(cache)} layers, the model {len(fresh)}")
    olds, news = leaves(cache), leaves(fresh)
    if len(olds) != len(news):
        raise PromptCacheError(f"the prompt cache has {len(olds)} parts, the model's {len(news)}")
    pairs = [(old, new) for old, new in zip(olds, news, strict=True) if isinstance(new, PagedLayerCache)]
    if any(not _can_be_paged(old) for old, _ in pairs):
        kinds = ", ".join(sorted({type(c).__name__ for c in cache}))
        warn_once(f"a prompt cache of type {kinds} with these options is not paged yet: mlx-lm's own cache is used")
        return cache
    for old, new in pairs:
        if window_of(old) != new.sees:
            raise PromptCacheError(f"layer {new.layer} of the prompt cache has another window than the model's")
        if old.empty():
            continue
        if isinstance(old, QuantizedKVCache):
            try:
                new.load_quantized(old)
            except GeometryError as error:
                raise PromptCacheError(f"layer {new.layer} of the prompt cache: {error}") from None
            continue
        keys, values = _in_order(old)
        expected = new.pool.groups[new.table.group].geometry
        shape = kv_shape_of(model)
        if expected is not None:
            shape = expected.num_kv_heads, expected.k_head_dim + expected.v_head_dim * new.split_keys
        if shape is not None and (keys.shape[1], keys.shape[3]) != shape:
            raise PromptCacheError(
                f"the prompt cache holds {keys.shape[1]} KV heads of {keys.shape[3]}, the model has "
                f"{shape[0]} of {shape[1]}: it was made with another model"
            )
        try:
            new.load(keys, values, old.offset)
        except GeometryError as error:
            raise PromptCacheError(f"layer {new.layer} of the prompt cache: {error}") from None
    paged = {new.layer for _, new in pairs}
    parts = [new if place in paged else old for place, (old, new) in enumerate(zip(olds, news, strict=True))]
    return with_leaves(cache, parts)


def check_given(model: Any, given: list[Any], fresh: Sequence[Any], factory: CacheFactory) -> list[Any]:
    """Return a cache handed in with a request, as one of the engine's: mlx-lm's own is copied into the pool.

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


def _can_be_paged(cache: Any) -> bool:
    if type(cache) is QuantizedKVCache:
        return KVBits(cache.bits, cache.group_size).format is not None
    return can_be_paged(cache)


def _in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """Keys and values of a stock cache by position."""
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        count = min(cache.offset, keys.shape[2])
        return keys[..., -count:, :], values[..., -count:, :]
    keys, values = cache.keys_and_values()
    return keys, values


def kv_shape_of(model: Any) -> tuple[int, int] | None:
    """(n_kv_heads, head_dim) of the model's first attention layer, or None if it does not say."""
    for layer in getattr(model, "layers", []):
        for _, module in layer.named_modules():
            if hasattr(module, "n_kv_heads") and hasattr(module, "k_proj"):
                head_dim = getattr(module, "head_dim", None) or round(module.scale**-2)
                return module.n_kv_heads, head_dim
    return None
