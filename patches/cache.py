"""What replaces names of mlx_lm/models/cache.py: paged prompt caches, and their way to and from mlx-lm's own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..attention.gather import ring_rotation
from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.sequence import SequenceTables
from ..config import PagedConfig
from ..errors import GeometryError, PromptCacheError
from ..kv.pool import BlockPool
from .layout import PagedLayout, can_be_paged, layout_for, name_of, pinned_in, window_of
from .pools import pool_for
from .steps import guard
from .warn import warn_once


class PagedLayerCache(PagedKVCache):
    """PagedKVCache that can turn into mlx-lm's caches, for what is not paged.

    For ``isinstance`` it is a ``KVCache``, or with a window a ``RotatingKVCache``: scripts ask which of the two a layer
    has. It inherits nothing of them, and ``type`` tells it apart. mlx-lm's library asks for neither.
    """

    def __init__(self, sequence: SequenceTables, layer: int) -> None:
        super().__init__(sequence, layer)
        self._stands_for = KVCache if self.window is None else RotatingKVCache

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._stands_for

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    @property
    def max_size(self) -> int:
        """As of a ``RotatingKVCache``. Raises AttributeError without a window."""
        return self._as_rotating("max_size", self.window)

    @property
    def keep(self) -> int:
        """As of a ``RotatingKVCache``. Raises AttributeError without a window."""
        return self._as_rotating("keep", self.pinned)

    def _as_rotating(self, name: str, value: int | None) -> int:
        if self.window is None or value is None:
            raise AttributeError(f"a cache without a window has no {name}", name=name, obj=self)
        return value

    def to_stock(self) -> KVCache | RotatingKVCache:
        """The same tokens in mlx-lm's own cache, bit for bit and in the same order; a copy."""
        window, pinned = self.window, self.pinned
        stock = KVCache() if window is None else RotatingKVCache(max_size=window, keep=pinned)
        if self.empty():
            return stock
        keys, values = self.keys_and_values()
        if window is None:
            stock.state = (keys, values, self.offset)
            return stock
        # A full ring has `window` slots. The token just behind the window may be released already: mlx-lm overwrites
        # its slot before reading it, so zeros do.
        missing = max(0, min(self.offset, window) - keys.shape[2])
        if missing:
            keys, values = (
                mx.concatenate([x[:, :, :pinned], mx.zeros_like(x[:, :, :missing]), x[:, :, pinned:]], axis=2)
                for x in (keys, values)
            )
        rotation = ring_rotation(self.table, window)
        stock.state = (keys, values, self.offset, pinned, window, window - rotation if rotation else keys.shape[2])
        return stock

    def takes(self, batch: int) -> bool:
        """Whether the paged path can take ``batch`` rows. A paged cache holds one sequence: an empty one that meets
        several rows turns into mlx-lm's own cache, in place, and is one from then on."""
        if batch == 1 or not self.empty():
            return True  # a mismatch raises GeometryError when the keys are written
        warn_once("several sequences in one cache are not paged: mlx-lm's own cache is used")
        stock = self.to_stock()
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__
        return False

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """mlx-lm's quantised cache (``kv_bits``), which is not paged."""
        warn_once("quantised KV caches (kv_bits) are not paged yet: these layers go on in mlx-lm's own cache")
        return self.to_stock().to_quantized(group_size=group_size, bits=bits)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PagedBatchKVCache:
        """A batch of forks of these caches."""
        return PagedBatchKVCache.merge(caches)


def mask_rows(value: bool) -> None:
    """Whether batches give masks for their rows' lengths, as mlx-lm's attention needs."""
    PagedLayerCache.masks_rows = value


class SeamLayerCache(PagedLayerCache):
    """Of a model without an adapter: its attention calls ``update_and_fetch`` and then mlx-lm's attention function."""

    masks_rows = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.takes(keys.shape[0]):
            return super().update_and_fetch(keys, values)
        fetched: tuple[mx.array, mx.array] = self.update_and_fetch(keys, values)  # mlx-lm's own by now
        return fetched


class CacheFactory:
    """Makes prompt caches of one model in one pool, whatever is configured later.

    Args:
        stock: makes mlx-lm's own caches.
        model: the model; None if nothing is paged.
        layout: which layers are.
        config: of the pool.
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
        self.pool: BlockPool | None = None
        self._elsewhere: Callable[[mx.Dtype], BlockPool | None] | None = None
        if layout is not None and config is not None and layout.groups:
            self.pool = pool_for(model, layout, config)
            known = weakref.ref(model)

            def elsewhere(dtype: mx.Dtype) -> BlockPool | None:
                model = known()
                return None if model is None else pool_for(model, layout, config, dtype)

            self._elsewhere = elsewhere

    def __call__(self) -> list[Any]:
        """A fresh prompt cache."""
        caches = self._stock()
        if self.pool is None or self._layout is None:
            return caches
        parts = leaves(caches)
        sequence = SequenceTables(self.pool, self._elsewhere)
        kind = PagedLayerCache if self._layout.adapted else SeamLayerCache
        for layer in self._layout.layers:
            parts[layer] = kind(sequence, layer)
        return with_leaves(caches, parts)

    def settle_in(self, pool: BlockPool | None) -> None:
        """Make all caches in this pool from now on: they stay there."""
        self.pool, self._elsewhere = pool, None


def factory_of(model: Any, max_kv_size: int | None) -> CacheFactory:
    """What makes the model's prompt caches, as it is configured now."""
    make = make_prompt_cache  # by name, so that where there is none this module cannot be imported
    if hasattr(make, "factory"):
        factory: CacheFactory = make.factory(model, max_kv_size)
        return factory
    return CacheFactory(functools.partial(make, model, max_kv_size))


def make_prompt_cache_patch(
    original: Callable[..., list[Any]], config: Callable[[], PagedConfig], adapted: Callable[[Any], bool]
) -> Callable[..., list[Any]]:
    """Replacement of ``make_prompt_cache``: paged caches where a layer's stock cache can be paged."""

    def factory(model: Any, max_kv_size: int | None = None) -> CacheFactory:
        caches = original(model, max_kv_size)
        layers = list(getattr(model, "layers", []))
        has_adapters = (
            len(layers) == len(caches)
            and all(can_be_paged(cache) for cache in caches)
            and all(adapted(layer) for layer in layers)
        )
        parts = leaves(caches)
        layout = layout_for(model, parts, original(model, max_kv_size), has_adapters)
        for reason in layout.reasons:
            warn_once(f"not paged in models of type {name_of(model)}: {reason}; mlx-lm's own cache is used")
        if layout.groups:
            guard(model)
        return CacheFactory(functools.partial(original, model, max_kv_size), model, layout, config())

    @functools.wraps(original)
    def replacement(model: Any, max_kv_size: int | None = None) -> list[Any]:
        return factory(model, max_kv_size)()

    replacement.factory = factory  # type: ignore[attr-defined]
    return replacement


def save_prompt_cache_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement of ``save_prompt_cache``: paged caches are saved in mlx-lm's own format."""

    def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
        stock = with_leaves(cache, [c.to_stock() if isinstance(c, PagedLayerCache) else c for c in leaves(cache)])
        # mlx-lm saves a plain cache with its spare room; what is saved here has none, and loads the same.
        original(file_name, stock, metadata or {})

    save_prompt_cache.__doc__ = original.__doc__
    return save_prompt_cache


def adopt_prompt_cache(model: Any, cache: list[Any], factory: CacheFactory | None = None) -> list[Any]:
    """A paged prompt cache of the model with the contents of mlx-lm's own one (as loaded from a file).

    Args:
        model: the model the cache was computed with.
        cache: one cache per layer; paged ones and ones that cannot be paged are returned as they are.
        factory: makes the paged one; None makes it as it is configured now.

    Raises:
        PromptCacheError: number of layers, heads, head dimension or window are not the model's.
        PoolExhaustedError: the tokens do not fit the pool.
    """
    if not cache or any(isinstance(c, PagedLayerCache) for c in leaves(cache)):
        return cache
    bounded = next((c for c in leaves(cache) if type(c) is RotatingKVCache and pinned_in(c)), None)
    if factory is not None and bounded is None:
        fresh = factory()
    else:
        fresh = make_prompt_cache(model, None if bounded is None else bounded.max_size)
    if len(fresh) != len(cache):
        raise PromptCacheError(f"the prompt cache has {len(cache)} layers, the model {len(fresh)}")
    olds, news = leaves(cache), leaves(fresh)
    if len(olds) != len(news):
        raise PromptCacheError(f"the prompt cache has {len(olds)} parts, the model's {len(news)}")
    pairs = [(old, new) for old, new in zip(olds, news, strict=True) if isinstance(new, PagedLayerCache)]
    if any(not can_be_paged(old) or pinned_in(old) != new.pinned for old, new in pairs):
        kinds = ", ".join(sorted({type(c).__name__ for c in cache}))
        warn_once(f"a prompt cache of type {kinds} with these options is not paged yet: mlx-lm's own cache is used")
        return cache
    for old, new in pairs:
        if window_of(old) != new.window:
            raise PromptCacheError(f"layer {new.layer} of the prompt cache has another window than the model's")
        if old.empty():
            continue
        keys, values = _in_order(old)
        expected = new.pool.groups[new.table.group].geometry
        shape = (expected.num_kv_heads, expected.k_head_dim) if expected is not None else kv_shape_of(model)
        if shape is not None and (keys.shape[1], keys.shape[3]) != shape:
            raise PromptCacheError(
                f"the prompt cache holds {keys.shape[1]} KV heads of {keys.shape[3]}, the model has "
                f"{shape[0]} of {shape[1]}: it was made with another model"
            )
        try:
            new.load(keys, values, old.offset)
        except GeometryError as error:
            raise PromptCacheError(f"layer {new.layer} of the prompt cache: {error}") from None
    # From here on the order of keys follows the cache that was loaded, as it would in mlx-lm.
    for old, new in pairs:
        if isinstance(old, RotatingKVCache) and old.offset >= old.max_size:
            next_slot = old._idx if old._idx < old.max_size and old.keys.shape[2] <= old.max_size else old.keep
            new.table.ring_origin = (old.offset - next_slot) % (old.max_size - old.keep)
    paged = {new.layer for _, new in pairs}
    parts = [new if place in paged else old for place, (old, new) in enumerate(zip(olds, news, strict=True))]
    return with_leaves(cache, parts)


def _in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """Keys and values of a stock cache by position."""
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        count = min(cache.offset, keys.shape[2])
        return keys[..., -count:, :], values[..., -count:, :]
    return cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]


def kv_shape_of(model: Any) -> tuple[int, int] | None:
    """(n_kv_heads, head_dim) of the model's first attention layer, or None if it does not say."""
    for layer in getattr(model, "layers", []):
        for _, module in layer.named_modules():
            if hasattr(module, "n_kv_heads") and hasattr(module, "k_proj"):
                head_dim = getattr(module, "head_dim", None) or round(module.scale**-2)
                return module.n_kv_heads, head_dim
    return None
