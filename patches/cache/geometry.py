"""Which layers of a model are paged, which can be batched, and what a cache handed in must look like."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ...cache.composites import leaves, with_leaves
from ...cache.paged_kv_cache import PagedKVCache
from ...engine.request import sequence_of
from ...errors import GeometryError
from ...kv.storage.scoring import Scoring
from .layer_cache import PagedLayerCache
from .layout import probe_layers, probing_pass


class ProbeCache(PagedLayerCache):
    """Notes the geometry of the keys and values an attention layer makes, and writes nothing."""

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring) -> mx.array:
        heads = scoring.heads(queries.shape[1])
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
    probing_pass(model, mx.zeros((1, 2), mx.uint32), probes)
