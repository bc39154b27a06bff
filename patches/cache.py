"""What replaces names of mlx_lm/models/cache.py: paged prompt caches, and their way to and from mlx-lm's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..attention.gather import ring_rotation
from ..batch_cache import PagedBatchKVCache
from ..cache import PagedKVCache, SequenceTables
from ..config import PagedConfig
from ..errors import GeometryError, PromptCacheError
from .pools import pool_for
from .warn import warn_once


class PagedLayerCache(PagedKVCache):
    """PagedKVCache that can turn into mlx-lm's caches, for what is not paged."""

    def to_stock(self) -> KVCache | RotatingKVCache:
        """The same tokens in mlx-lm's own cache, bit for bit and in the same order; a copy."""
        window = self.window
        stock = KVCache() if window is None else RotatingKVCache(max_size=window)
        if self.empty():
            return stock
        keys, values = self.keys_and_values()
        if window is None:
            stock.state = (keys, values, self.offset)
            return stock
        # A full ring has `window` slots. The token just behind the window may be released already: mlx-lm overwrites
        # its slot before reading it, so zeros do.
        missing = max(0, min(self.offset, window) - keys.shape[2])
        keys, values = (mx.pad(x, [(0, 0), (0, 0), (missing, 0), (0, 0)]) for x in (keys, values))
        rotation = ring_rotation(self.table, window)
        stock.state = (keys, values, self.offset, 0, window, window - rotation if rotation else keys.shape[2])
        return stock

    def takes(self, batch: int) -> bool:
        """Whether the paged path can take ``batch`` rows. A paged cache holds one sequence: an empty one that meets
        several rows turns into mlx-lm's own cache, in place, and is one from then on."""
        if batch == 1 or not self.empty():
            return True  # a mismatch raises GeometryError when the keys are written
        warn_once("several sequences in one cache are not paged: mlx-lm's own cache is used")
        stock = self.to_stock()
        self.__class__ = type(stock)  # type: ignore[assignment]
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


def make_prompt_cache_patch(
    original: Callable[..., list[Any]], config: Callable[[], PagedConfig], adapted: Callable[[Any], bool]
) -> Callable[..., list[Any]]:
    """Replacement of ``make_prompt_cache``: paged caches where a layer's stock cache can be paged."""

    def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
        stock = original(model, max_kv_size)
        if max_kv_size is not None:
            warn_once("max_kv_size is not paged yet: mlx-lm's own cache is used")
            return stock
        layers = list(getattr(model, "layers", []))
        kinds = {type(c).__name__ for c in stock if type(c) not in (KVCache, RotatingKVCache)}
        if kinds:
            warn_once(f"cache type(s) {', '.join(sorted(kinds))} are not paged yet: mlx-lm's own cache is used")
            return stock
        if len(layers) != len(stock) or not all(adapted(layer) for layer in layers):
            name = getattr(model, "model_type", type(model).__module__)
            warn_once(f"model type {name} has no paged attention adapter: mlx-lm's own cache is used")
            return stock
        sequence = SequenceTables(pool_for(model, stock, config()))
        return [PagedLayerCache(sequence, layer) for layer in range(len(stock))]

    make_prompt_cache.__doc__ = original.__doc__
    return make_prompt_cache


def save_prompt_cache_patch(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement of ``save_prompt_cache``: paged caches are saved in mlx-lm's own format."""

    def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
        stock = [c.to_stock() if isinstance(c, PagedLayerCache) else c for c in cache]
        # mlx-lm saves a plain cache with its spare room; what is saved here has none, and loads the same.
        original(file_name, stock, metadata or {})

    save_prompt_cache.__doc__ = original.__doc__
    return save_prompt_cache


def adopt_prompt_cache(model: Any, cache: list[Any]) -> list[Any]:
    """A paged prompt cache of the model with the contents of mlx-lm's own one (as loaded from a file).

    Args:
        model: the model the cache was computed with.
        cache: one cache per layer; paged ones and ones that cannot be paged are returned as they are.

    Raises:
        PromptCacheError: number of layers, heads, head dimension or window are not the model's.
        PoolExhaustedError: the tokens do not fit the pool.
    """
    if not cache or any(isinstance(c, PagedLayerCache) for c in cache):
        return cache
    fresh = stock_cache.make_prompt_cache(model)
    if len(fresh) != len(cache):
        raise PromptCacheError(f"the prompt cache has {len(cache)} layers, the model {len(fresh)}")
    if not all(isinstance(c, PagedLayerCache) for c in fresh):
        return cache
    if any(type(c) not in (KVCache, RotatingKVCache) or getattr(c, "keep", 0) for c in cache):
        kinds = ", ".join(sorted({type(c).__name__ for c in cache}))
        warn_once(f"a prompt cache of type {kinds} with these options is not paged yet: mlx-lm's own cache is used")
        return cache
    expected = kv_shape_of(model)
    for layer, (old, new) in enumerate(zip(cache, fresh, strict=True)):
        if (old.max_size if isinstance(old, RotatingKVCache) else None) != new.window:
            raise PromptCacheError(f"layer {layer} of the prompt cache has another window than the model's")
        if old.empty():
            continue
        if expected is not None and (old.keys.shape[1], old.keys.shape[3]) != expected:
            raise PromptCacheError(
                f"the prompt cache holds {old.keys.shape[1]} KV heads of {old.keys.shape[3]}, the model has "
                f"{expected[0]} of {expected[1]}: it was made with another model"
            )
        keys, values = _in_order(old)
        try:
            new.load(keys, values, old.offset)
        except GeometryError as error:
            raise PromptCacheError(f"layer {layer} of the prompt cache: {error}") from None
    # From here on the order of keys follows the cache that was loaded, as it would in mlx-lm.
    for old, new in zip(cache, fresh, strict=True):
        if isinstance(old, RotatingKVCache) and old.offset >= old.max_size:
            next_slot = old._idx if old._idx < old.max_size and old.keys.shape[2] <= old.max_size else 0
            new.table.ring_origin = (old.offset - next_slot) % old.max_size
    return fresh


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
