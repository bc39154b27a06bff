"""Attention to the tokens that an indexer chooses (DeepSeek V3.2, GLM DSA), over pages of latents and of index keys.

Beside latents each layer keeps an index key for every token. By these keys an indexer scores all tokens that a query
sees, and attention uses the ``index_topk`` best ones. mlx-lm keeps index keys in a second cache of each layer. Here it
is paged too: its pages hold the two halves of a key as key and value.

In a context of at most ``index_topk`` tokens nothing has to be chosen, and the kernel over latents is used where there
is one. A longer context is gathered and goes through mlx-lm's own code, on any device.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...attention.dispatch import Dispatch, record
from ...cache.batch import OWN_MASK, NotPackableError
from ...cache.batch_cache import PagedBatchKVCache
from ...cache.paged_kv_cache import PagedKVCache
from ..cache.layer_cache import PagedLayerCache
from ..cache.layout import ProbeLayer
from ..patch import replaces
from .attention import AttentionCall
from .latent import attend_in_kernel, finish, marked

CHOSEN = Dispatch("gather", "attention to the tokens that an indexer chooses")


class GatheredCache:
    """A paged cache for mlx-lm's code, with the attributes that it reads: the arrays that were fetched last.

    Attributes:
        keys, values: what the latest :meth:`update_and_fetch` returned. Setting them changes no page.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> Any:
        """Position of the next token."""
        return self._cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens and return all keys and values that they see."""
        self.keys, self.values = fetched = self._cache.update_and_fetch(keys, values)
        return fetched


class IndexKeys(GatheredCache):
    """A :class:`GatheredCache` for index keys ``[B, 1, n, dim]``, whose halves are stored as a page's keys and values.

    Args:
        cache: the paged cache.
        is_read: False if nothing has to be chosen: keys are only written, and the returned arrays are empty.
    """

    def __init__(self, cache: Any, is_read: bool = True) -> None:
        super().__init__(cache)
        self._is_read = is_read
        if isinstance(cache, ProbeLayer):
            cache.split_keys = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next tokens' index keys and return all that they see, twice. ``values`` are ignored."""
        halves = mx.split(keys, [keys.shape[-1] // 2], axis=-1)
        if self._is_read:
            fetched = mx.concatenate(list(super().update_and_fetch(*halves)), axis=-1)
        else:
            self._cache.update(*halves)
            fetched = keys[:, :, :0]
        self.keys = self.values = fetched
        return fetched, fetched


@replaces("mlx_lm.models.deepseek_v32:DeepseekV32Attention.__call__", "b29a1627f43386fb")
def adapt(original: AttentionCall) -> AttentionCall:
    """Return the adapter of DeepSeek V3.2's attention, which GLM DSA uses too."""

    def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
        if cache is None:
            return original(self, x, mask, cache)
        latents, index = cache[0], cache[1]
        for part in (latents, index):
            if isinstance(part, PagedLayerCache):
                part.convert_if_batched(x.shape[0])
        if _is_stock(latents) or _is_stock(index):
            return original(self, x, mask, (_for_upstream(latents, GatheredCache), _for_upstream(index, IndexKeys)))
        chooses = _longest(latents, x.shape[1]) > self.indexer.index_topk
        if not chooses:
            out = attend_in_kernel(self, x, None, mask, latents, finish)
            if out is not None:
                # Nothing is chosen, so the indexer's queries are never computed: zeros do as their input.
                queries = mx.zeros((*x.shape[:2], self.q_lora_rank), x.dtype)
                self.indexer(x, queries, None, cache=IndexKeys(index, is_read=False))
                return out
        if chooses:
            record(CHOSEN)
        if not (isinstance(latents, PagedBatchKVCache) and latents.batch.is_pack):
            return original(self, x, mask, (GatheredCache(latents), IndexKeys(index)))
        if mask is not None:
            raise NotPackableError(OWN_MASK)
        outputs = []
        for part, keys in zip(latents.apart(), index.apart(), strict=True):
            own = x[part.tokens].swapaxes(0, 1)
            outputs.append(original(self, own, part.mask, (GatheredCache(part), IndexKeys(keys))).swapaxes(0, 1))
        return mx.concatenate(outputs)

    return marked(__call__, caches=2)


def _is_stock(cache: Any) -> bool:
    return not isinstance(cache, PagedKVCache | PagedBatchKVCache | ProbeLayer)


def _for_upstream(cache: Any, kind: type[GatheredCache]) -> Any:
    """Return the cache as mlx-lm's code can use it: its own unchanged, a paged one wrapped in ``kind``."""
    return cache if _is_stock(cache) else kind(cache)


def _longest(cache: Any, num_tokens: int) -> int:
    """Return the length of the longest sequence, including its new tokens."""
    if isinstance(cache, PagedBatchKVCache):
        return max(table.length for table in cache.batch.tables)
    return int(cache.offset) + num_tokens
