"""Paged caches of a model's layers, which stand in for mlx-lm's caches and can be converted to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from ...cache.paged_kv_cache import PagedKVCache
from ...cache.sequence import SequenceTables
from ...config import STOCK_QUANTISES
from ...errors import PromptCacheError
from ...kv.geometry import Geometry, PageFormat, first_keys
from ...kv.lock import locked
from ...warn import warn_once


class PagedLayerCache(PagedKVCache):
    """A PagedKVCache that can be converted to mlx-lm's caches, for operations that are not paged.

    ``isinstance`` says that it is a ``KVCache``, or with a window a ``RotatingKVCache`` or ``ChunkedKVCache``, because
    scripts check that. It inherits nothing from them, and ``type`` tells it apart. mlx-lm itself makes no such checks.
    """

    def __init__(self, sequence: SequenceTables, layer: int) -> None:
        super().__init__(sequence, layer)
        self._stands_for = KVCache
        if self.window is not None:
            self._stands_for = RotatingKVCache if self.group.spec.ring else ChunkedKVCache

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._stands_for

    @__class__.setter
    def __class__(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    @property
    def max_size(self) -> int:
        """Size of the sliding window, as in ``RotatingKVCache``. Raises AttributeError without one."""
        return self._stock_attribute(RotatingKVCache, "max_size", self.window)

    @property
    def keep(self) -> int:
        """Number of pinned tokens, as in ``RotatingKVCache``: 0. Raises AttributeError without a sliding window."""
        return self._stock_attribute(RotatingKVCache, "keep", 0)

    @property
    def chunk_size(self) -> int:
        """Size of a chunk, as in ``ChunkedKVCache``. Raises AttributeError without chunks."""
        return self._stock_attribute(ChunkedKVCache, "chunk_size", self.window)

    @property
    def start_position(self) -> int:
        """Position of the first token that the next one sees, as in ``ChunkedKVCache``. Raises AttributeError without
        chunks."""
        return self._stock_attribute(ChunkedKVCache, "start_position", self.group.spec.first_kept(self.offset))

    def maybe_trim_front(self) -> None:
        """Do nothing: tokens that the next one does not see are released when it is written."""

    def _stock_attribute(self, kind: type, name: str, value: int | None) -> int:
        if self._stands_for is not kind or value is None:
            kind = self._stands_for
            raise AttributeError(f"{kind.__name__} caches have no attribute {name}", name=name, obj=self)
        return value

    @property
    def has_stock_form(self) -> bool:
        """Return whether mlx-lm has a cache that holds the same bytes. It has none for quantised pages that have a
        window, are rotated, or use different bits for keys and values."""
        held = self.group.geometry
        if held is None or held.format is None:
            return True
        return self.window is None and held.format.stock_bits is not None

    def to_stock(self) -> KVCache | RotatingKVCache | ChunkedKVCache | QuantizedKVCache:
        """Return a copy in mlx-lm's own cache, in order of position and bit for bit; dequantised unless
        :attr:`has_stock_form`."""
        if self.group.is_quantized and self.has_stock_form and not self.empty():
            return self._to_stock_quantized()
        ring = self.group.spec.ring
        if self.window is None:
            stock = KVCache()
        else:
            stock = RotatingKVCache(max_size=ring) if ring else ChunkedKVCache(self.window)
        if self.empty():
            return stock
        keys, values = self.keys_and_values()
        if self.split_keys:
            keys = mx.concatenate([keys, values], axis=-1)
            values = mx.zeros_like(keys)  # mlx-lm's indexers cache zeros as values
        if ring is None:
            chunks = () if self.window is None else (self.window, self.offset - keys.shape[2])
            stock.state = (keys, values, self.offset, *chunks)
            return stock
        # A full ring has `window` slots. The oldest token may already be released; mlx-lm overwrites its slot before
        # it reads it, so zeros can take its place.
        missing = max(0, min(self.offset, ring) - keys.shape[2])
        if missing:
            keys, values = (mx.concatenate([mx.zeros_like(x[:, :, :missing]), x], axis=2) for x in (keys, values))
        stock.state = (keys, values, self.offset, 0, ring, keys.shape[2])
        return stock

    @locked
    def _to_stock_quantized(self) -> QuantizedKVCache:
        geometry = self.group.geometry
        assert geometry is not None and geometry.rows is not None and geometry.format is not None
        bits, group_size = geometry.format.stock_bits, geometry.format.group_size
        stored = zip(geometry.rows, self.pool.gather_visible(self.table, self.layer, stored=True), strict=True)
        keys, values = (tuple(map(mx.contiguous, form.split(rows))) for form, rows in stored)
        stock = QuantizedKVCache(group_size, bits)
        stock.state = (keys, values, self.offset, group_size, bits)
        return stock

    @property
    def split_keys(self) -> bool:
        """Return whether pages hold halves of a key (see :class:`LayerGroup`), which mlx-lm's cache holds whole."""
        return self.group.spec.split_keys

    def load(self, keys: mx.array, values: mx.array, offset: int, *, stored: bool = False) -> None:
        """Like :meth:`PagedKVCache.load`; splits whole keys and ignores ``values`` where pages hold half keys."""
        geometry = self.group.geometry
        if self.split_keys and geometry is not None and keys.shape[3] == geometry.k_head_dim + geometry.v_head_dim:
            keys, values = mx.split(keys, [geometry.k_head_dim], axis=-1)
        super().load(keys, values, offset, stored=stored)

    @locked
    def load_quantized(self, stock: QuantizedKVCache) -> None:
        """Fill an empty cache from mlx-lm's quantised one, byte for byte; see also :meth:`load`.

        Raises:
            PromptCacheError: bits or group size differ from the pages'.
        """
        (codes, scales, _), (v_codes, *_) = stock.keys, stock.values
        k_dim, v_dim = (x.shape[3] * 32 // stock.bits for x in (codes, v_codes))
        self.pool.set_geometry(self.layer, *first_keys(Geometry(codes.shape[1], k_dim, v_dim, scales.dtype)), batch=1)
        geometry = self.group.geometry
        assert geometry is not None
        if geometry.rows is None or geometry.format != PageFormat.of(stock.bits, stock.group_size):
            own = "are not quantised" if geometry.format is None else f"have {geometry.format}"
            raise PromptCacheError(
                f"layer {self.layer} of the prompt cache has {stock.bits} bits in groups of {stock.group_size}; "
                f"the pages {own}"
            )
        stored = zip(geometry.rows, (stock.keys, stock.values), strict=True)
        keys, values = (form.join(*(part[..., : stock.offset, :] for part in parts)) for form, parts in stored)
        self.load(keys, values, stock.offset, stored=True)

    def convert_if_batched(self, batch: int) -> bool:
        """Convert an empty cache to mlx-lm's own one, in place and permanently, if it is given several rows: a paged
        cache holds one sequence. Returns whether it was converted."""
        if batch == 1 or not self.empty():
            return False  # a mismatch raises GeometryError when the keys are written
        warn_once("a cache of several sequences is not paged: mlx-lm's own cache is used")
        stock = self.to_stock()
        self.__class__ = type(stock)
        self.__dict__ = stock.__dict__
        return True

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Return mlx-lm's quantised cache, which is not paged; or this cache, if its pages already have these bits and
        this group size. A cache with chunks, which mlx-lm cannot quantise, becomes mlx-lm's own.

        Raises:
            PromptCacheError: the pages are quantised with other bits or another group size.
        """
        held = self.pool.page_format
        if held is not None:
            if (bits, bits, group_size) == held[:3]:
                return self
            raise PromptCacheError(
                f"the pages have {held} and cannot be converted to {bits} bits in groups of {group_size}"
            )
        warn_once(STOCK_QUANTISES)
        stock = self.to_stock()
        return stock if isinstance(stock, ChunkedKVCache) else stock.to_quantized(group_size=group_size, bits=bits)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the layer's new keys and values. Returns all of them, gathered only if something reads them."""
        if keys.shape[0] == 1 or not self.convert_if_batched(keys.shape[0]):
            return super().update_and_fetch(keys, values)
        fetched: tuple[mx.array, mx.array] = self.update_and_fetch(keys, values)  # self is mlx-lm's own cache now
        return fetched

    @classmethod
    def merge(cls, caches: Sequence[PagedLayerCache]) -> Any:
        """Return mlx-lm's own batch of copies of these caches, which is not paged. Only mlx-lm's batch generator calls
        it, where that could not be replaced; mlx-lm's server checks for this name to see if requests can be batched.

        Raises:
            PromptCacheError: mlx-lm has no batches of such caches: they are quantised or have chunks.
        """
        stock = [cache.to_stock() for cache in caches]
        if not hasattr(stock[0], "merge"):
            raise PromptCacheError(f"mlx-lm's batch generator does not support {type(stock[0]).__name__}")
        warn_once("batches of mlx-lm's own batch generator are not paged: mlx-lm's own caches are used")
        return stock[0].merge(stock)
