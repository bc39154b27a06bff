"""The paged caches of a model's layers, which stand for mlx-lm's and can turn into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ...attention.gather import ring_rotation
from ...cache.batch_cache import PagedBatchKVCache
from ...cache.paged_kv_cache import PagedKVCache
from ...cache.sequence import SequenceTables
from ...warn import warn_once


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
