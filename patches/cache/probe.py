"""Probes: forward passes that are built and dropped, to learn what a model's attention does with its caches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ...attention import gather
from ...cache.composites import leaves, with_leaves
from ...cache.lazy_kv import LazyKV, hand_out
from ...errors import GeometryError
from ...kv.storage.base import Geometry
from ...kv.storage.scoring import QueryHeads, Scoring

PROBE_ROWS = 3


class Probed(NamedTuple):
    """What one layer does.

    Attributes:
        geometry: of its keys and values.
        heads: what attends over them through the attention function that the seam replaces; None if nothing does.
    """

    geometry: Geometry
    heads: QueryHeads | None


class ProbeLayer:
    """Has of a cache's interface what a paged one has, and no more: attention that touches anything else raises."""

    __slots__ = ("__weakref__", "_stock", "geometry", "heads")

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self.geometry: Geometry | None = None
        self.heads: QueryHeads | None = None

    @property
    def offset(self) -> int:
        return int(self._stock.offset)

    @property
    def start_position(self) -> int:  # of chunks; for any other cache an AttributeError
        return int(self._stock.start_position)

    def maybe_trim_front(self) -> None:
        self._stock.maybe_trim_front()

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        mask: mx.array | str | None = self._stock.make_mask(*args, **kwargs)
        return mask

    def size(self) -> int:
        return int(self._stock.size())

    def empty(self) -> bool:
        return bool(self._stock.empty())

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.geometry is not None:
            raise GeometryError("one cache takes two layers' keys")
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise GeometryError(f"shapes {keys.shape} and {values.shape}")
        if 0 in keys.shape + values.shape or not mx.issubdtype(keys.dtype, mx.floating):
            raise GeometryError(f"shapes {keys.shape} and {values.shape}")
        self.geometry = Geometry.of(keys, values)
        self._stock.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = self._stock.keys_and_values()
        hand_out(keys, values, _ProbeFetched(self))
        return keys, values


class _ProbeFetched(LazyKV):
    """Notes that the arrays came back to the attention function. Does not keep the layer, which keeps the arrays."""

    def __init__(self, layer: ProbeLayer) -> None:
        self._probe = weakref.ref(layer)

    def serves(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        return True

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring) -> mx.array:
        probe = self._probe()
        if probe is not None:
            probe.heads = scoring.heads(queries.shape[1])
        return gather.attention(queries, keys, values, scoring)


def probing_pass(model: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    """Build a forward pass, of which nothing is computed, and return its logits. The model stays as it was: some clip a
    weight in each pass and keep the result (Gemma 3n), which would be one that only this thread can compute."""
    before = [(module, dict(module)) for module in model.modules()]
    try:
        logits: mx.array = model(tokens, cache=caches)
        return logits
    finally:
        for module, values in before:
            for name, value in values.items():
                if isinstance(value, mx.array) and module.get(name) is not value:
                    module[name] = value


def probe_layers(model: Any, caches: Sequence[Any], candidates: Sequence[int]) -> dict[int, Probed]:
    """What each of some layers does with its cache, by a pass of two tokens; a layer not in the result does nothing.

    Args:
        caches: mlx-lm's own, empty; used up.
        candidates: indices of those to look at.

    Raises:
        Exception: whatever the model raises when a cache has nothing but what a paged one has.
    """
    probes = leaves(caches)
    for layer in candidates:
        probes[layer] = ProbeLayer(probes[layer])
    probing_pass(model, mx.zeros((1, 2), mx.uint32), with_leaves(caches, probes))
    return {
        layer: Probed(probes[layer].geometry, probes[layer].heads)
        for layer in candidates
        if probes[layer].geometry is not None
    }


def probe_rows(model: Any, caches: Sequence[Any]) -> str | None:
    """Why a decode step of several rows of different lengths in one call is not possible, or None.

    Args:
        caches: mlx-lm's own, empty.
    """
    missing = next((type(cache).__name__ for cache in caches if not hasattr(cache, "merge")), None)
    if missing is not None:
        return f"{missing} has no form for batches"
    try:
        batch = [cache.merge([cache] * PROBE_ROWS) for cache in caches]
        logits = probing_pass(model, mx.zeros((PROBE_ROWS, 1), mx.uint32), batch)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if logits.shape[:2] != (PROBE_ROWS, 1):
        return f"logits of {PROBE_ROWS} rows have shape {logits.shape}"
    return None
