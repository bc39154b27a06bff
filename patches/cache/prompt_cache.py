"""Replacements for names of mlx_lm/models/cache.py: paged prompt caches, converted from and to mlx-lm's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from ...cache.composites import leaves, with_leaves
from ...cache.paged_kv_cache import PagedKVCache
from ...cache.sequence import SequenceTables
from ...config import KVBits, PagedConfig
from ...engine.request import sequence_of
from ...errors import BlocksUnavailableError, ConfigError, GeometryError, PromptCacheError
from ...kv.pool import BlockPool
from ...warn import warn_once
from ..models.model_calls import guard
from ..patch import replaces
from .layer_cache import PagedLayerCache
from .layout import PagedLayout, can_be_paged, layout_for, name_of, window_of
from .pools import pool_for


class CacheFactory:
    """Makes prompt caches of one model in one pool. Later changes of the configuration do not affect it.

    Args:
        stock: makes mlx-lm's own caches.
        model: the model; None if nothing is paged.
        layout: which layers are paged.
        config: configuration of the pool.

    Attributes:
        config: the configuration that its caches are made with.
    """

    def __init__(
        self,
        stock: Callable[[], list[Any]],
        model: Any = None,
        layout: PagedLayout | None = None,
        config: PagedConfig | None = None,
    ) -> None:
        self._stock = stock
        self._layout = layout
        self.config = PagedConfig() if config is None else config
        self.pool: BlockPool | None = None
        if layout is not None and config is not None and layout.groups:
            try:
                self.pool = pool_for(model, layout, config)
            except BlocksUnavailableError as error:
                warn_once(f"not paged in models of type {name_of(model)}: {error}; mlx-lm's own cache is used")

    def __call__(self) -> list[Any]:
        """Return a fresh prompt cache."""
        caches = self._stock()
        if self.pool is None or self._layout is None:
            return caches
        parts = leaves(caches)
        sequence = SequenceTables(self.pool)
        for layer in self._layout.layers:
            parts[layer] = PagedLayerCache(sequence, layer)
        return with_leaves(caches, parts)


def is_patched() -> bool:
    """Return whether ``make_prompt_cache`` is patched at present."""
    return hasattr(make_prompt_cache, "factory")


def factory_of(
    model: Any, max_kv_size: int | None, change: Callable[[PagedConfig], PagedConfig] | None = None
) -> CacheFactory:
    """Return the factory of the model's prompt caches, for the present configuration or what ``change`` makes of it."""
    make = make_prompt_cache  # imported by name: without it this module fails to import, and is skipped
    if hasattr(make, "factory"):
        factory: CacheFactory = make.factory(model, max_kv_size, change)
        return factory
    return CacheFactory(functools.partial(make, model, max_kv_size))


@replaces("mlx_lm.models.cache:make_prompt_cache", "bffc8beb07ff5037")
def make_prompt_cache_patch(
    original: Callable[..., list[Any]],
    config: Callable[[], PagedConfig],
    prepare: Callable[[], None] = lambda: None,
) -> Callable[..., list[Any]]:
    """Return the replacement of ``make_prompt_cache``, which pages each layer whose stock cache can be paged.

    Args:
        original: mlx-lm's function.
        config: returns the present configuration.
        prepare: called before a model's caches are inspected.
    """

    def factory(
        model: Any, max_kv_size: int | None = None, change: Callable[[PagedConfig], PagedConfig] | None = None
    ) -> CacheFactory:
        prepare()
        layout = layout_for(model, leaves(original(model, max_kv_size)), original(model, max_kv_size))
        for reason in layout.reasons:
            warn_once(f"not paged in models of type {name_of(model)}: {reason}; mlx-lm's own cache is used")
        if layout.groups:
            guard(model)
        configured = config() if change is None else change(config())
        return CacheFactory(functools.partial(original, model, max_kv_size), model, layout, configured)

    @functools.wraps(original)
    def replacement(model: Any, max_kv_size: int | None = None) -> list[Any]:
        return factory(model, max_kv_size)()

    replacement.factory = factory  # type: ignore[attr-defined]
    return replacement


@replaces("mlx_lm.models.cache:save_prompt_cache", "5b558636d4e25be6")
def save_prompt_cache_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Replace ``save_prompt_cache`` by one that saves paged caches in mlx-lm's own format."""

    def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
        if any(isinstance(c, PagedLayerCache) and not c.has_stock_form for c in leaves(cache)):
            warn_once(
                "layers whose quantised pages have a window, are rotated, or use different bits for keys and values "
                "are saved dequantised: mlx-lm has no such cache"
            )
        stock = with_leaves(cache, [c.to_stock() if isinstance(c, PagedLayerCache) else c for c in leaves(cache)])
        # mlx-lm saves a plain cache with its spare capacity; these have none, and load the same way.
        original(file_name, stock, metadata or {})

    save_prompt_cache.__doc__ = original.__doc__
    return save_prompt_cache


def use_quantized_pages(models: Sequence[Any], options: dict[str, Any]) -> None:
    """Give a call with ``kv_bits`` a prompt cache with quantised pages: convert the caller's, or make one.

    Args:
        models: the models whose caches the prompt cache holds, in order.
        options: keyword arguments of mlx-lm's ``generate_step``; changed in place. Layers that are not paged are left
            to mlx-lm to quantise.

    Raises:
        PromptCacheError: the given prompt cache is quantised in another way.
        ConfigError: keys and values have different bits and no layer is paged, which mlx-lm does not support.
    """
    asked = KVBits.of(options)
    if asked is None or not is_patched():
        return
    given = options.get("prompt_cache")
    if given is None:
        make = functools.partial(factory_of, max_kv_size=options.get("max_kv_size"), change=asked.configured)
        options["prompt_cache"] = [cache for model in models for cache in make(model)()]
    else:
        _convert(models, given, asked)
    if isinstance(asked.bits, tuple):
        if not any(isinstance(cache, PagedLayerCache) for cache in leaves(options["prompt_cache"])):
            raise ConfigError(f"kv_bits={asked.bits} requires a paged prompt cache; this one is mlx-lm's own")
        options["kv_bits"] = None  # mlx-lm's own layers do not support a tuple


def _convert(models: Sequence[Any], given: list[Any], asked: KVBits) -> None:
    """Quantise the caller's prompt cache in place, as mlx-lm does."""
    parts = leaves(given)
    paged = [cache for cache in parts if isinstance(cache, PagedLayerCache)]
    present = {cache.pool.page_format for cache in paged}
    if {held and held.nameable for held in present} <= {asked.format}:
        return
    if present != {None}:
        held = " and ".join(str(each) for each in present)
        wanted = f"the call asks for {asked.bits} bits in groups of {asked.group_size}"
        raise PromptCacheError(f"the prompt cache has {held}; {asked.why_not or wanted}")
    fresh = leaves([cache for model in models for cache in factory_of(model, None, asked.configured)()])
    if len(fresh) != len(parts):
        raise PromptCacheError(f"the prompt cache has {len(parts)} parts, the model's has {len(fresh)}")
    for place, (old, new) in enumerate(zip(parts, fresh, strict=True)):
        if isinstance(new, PagedLayerCache):
            new.state = old.state
            parts[place] = new
    given[:] = with_leaves(given, parts)


def adopt_prompt_cache(model: Any, cache: list[Any], factory: CacheFactory | None = None) -> list[Any]:
    """Return a paged prompt cache with the contents of mlx-lm's own one, such as one loaded from a file.

    Args:
        model: the model the cache was computed with.
        cache: one cache per layer; returned unchanged if one is paged already or cannot be paged.
        factory: makes the paged cache; None uses the present configuration.

    Raises:
        PromptCacheError: the number of layers, heads, head dimension or window differ from the model's, or the cache is
            quantised and the pages are not, or differently.
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
        raise PromptCacheError(f"the prompt cache has {len(olds)} parts, the model's has {len(news)}")
    pairs = [(old, new) for old, new in zip(olds, news, strict=True) if isinstance(new, PagedLayerCache)]
    if any(not _can_be_paged(old) for old, _ in pairs):
        kinds = ", ".join(sorted({type(c).__name__ for c in cache}))
        warn_once(f"prompt caches of type {kinds} with these options cannot be paged: mlx-lm's own cache is used")
        return cache
    for old, new in pairs:
        if window_of(old) != new.sees:
            windows = f"{window_of(old)}, the model's has {new.sees}"
            raise PromptCacheError(f"layer {new.layer} of the prompt cache has the window {windows}")
        if old.empty():
            continue
        if isinstance(old, QuantizedKVCache):
            try:
                new.load_quantized(old)
            except GeometryError as error:
                raise PromptCacheError(f"layer {new.layer} of the prompt cache: {error}") from None
            continue
        keys, values = _in_order(old)
        geometry = new.group.geometry
        assert geometry is not None
        heads, dim = geometry.num_kv_heads, geometry.k_head_dim + geometry.v_head_dim * new.split_keys
        if (keys.shape[1], keys.shape[3]) != (heads, dim):
            raise PromptCacheError(
                f"the prompt cache has {keys.shape[1]} KV heads of dimension {keys.shape[3]}, the model has "
                f"{heads} of {dim}: it was made with another model"
            )
        try:
            new.load(keys, values, old.offset)
        except GeometryError as error:
            raise PromptCacheError(f"layer {new.layer} of the prompt cache: {error}") from None
    paged = {new.layer for _, new in pairs}
    parts = [new if place in paged else old for place, (old, new) in enumerate(zip(olds, news, strict=True))]
    return with_leaves(cache, parts)


def check_given(model: Any, given: list[Any], fresh: Sequence[Any], factory: CacheFactory) -> list[Any]:
    """Return the prompt cache given with a request, paged if it can be: mlx-lm's own is copied into the pool.

    Raises:
        PromptCacheError: it lacks a cache of the right kind for some layer, or belongs to another model.
        PoolExhaustedError: there is no room for it.
    """
    if len(given) != len(fresh):
        raise PromptCacheError(f"the prompt cache has {len(given)} layers, the model {len(fresh)}")
    caches = adopt_prompt_cache(model, given, factory)
    sequence, own = sequence_of(fresh), sequence_of(caches)
    place = 0
    for layer, (whole, fitting) in enumerate(zip(caches, fresh, strict=True)):
        where = f"layer {layer} of the prompt cache"
        if isinstance(whole, CacheList) != isinstance(fitting, CacheList):
            raise PromptCacheError(f"{where} is a {type(whole).__name__}, the model's is a {type(fitting).__name__}")
        for cache, expected in zip(leaves([whole]), leaves([fitting]), strict=True):
            if type(cache) is not type(expected):
                kinds = f"{type(cache).__name__}, the model's is a {type(expected).__name__}"
                raise PromptCacheError(f"{where} is a {kinds}")
            is_ours = not isinstance(cache, PagedKVCache) or (cache.sequence is own and cache.layer == place)
            if not is_ours or (own is not None and sequence is not None and own.pool is not sequence.pool):
                raise PromptCacheError(f"{where} belongs to another model or sequence, or was made under other options")
            place += 1
    return caches


def _can_be_paged(cache: Any) -> bool:
    if type(cache) is QuantizedKVCache:
        return KVBits(cache.bits, cache.group_size).format is not None
    return can_be_paged(cache)


def _in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """Return the keys and values of a stock cache in order of position."""
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        count = min(cache.offset, keys.shape[2])
        return keys[..., -count:, :], values[..., -count:, :]
    keys, values = cache.keys_and_values()
    return keys, values
