"""PagedLayout: which layers of a model are paged, and in which groups."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from ...attention import gather
from ...by_model import ByModel
from ...cache.composites import leaves, with_leaves
from ...cache.layer_cache import LazyKV, hand_out
from ...errors import GeometryError, check_device
from ...kv.geometry import AttentionParams, Geometry, QueryHeads, Window
from ...kv.group import LayerGroup
from ..sharded import check_heads

PROBE_ROWS = 3
STOCK_NAMES = ("maybe_trim_front", "offset", "start_position")  # what models may read of a paged cache


class ProbeLayer:
    """A cache with only the interface of a paged one: attention that uses anything else raises.

    Attributes:
        geometry: geometry of the layer's keys and values; None until it has used its cache.
        heads: query heads that attend over them through an adapter, or through the attention function that the seam
            replaces; None if none do.
        adapted: they do through an adapter.
        split_keys: see :class:`LayerGroup`; set by an adapter.
    """

    __slots__ = ("__weakref__", "_stock", "adapted", "geometry", "heads", "split_keys")

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self.geometry: Geometry | None = None
        self.heads: QueryHeads | None = None
        self.adapted = self.split_keys = False

    def __getattr__(self, name: str) -> Any:
        if name in STOCK_NAMES:
            return getattr(self._stock, name)
        raise AttributeError(name=name, obj=self)

    @property
    def window(self) -> int | None:
        window = window_of(self._stock)
        return None if window is None else window.size

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        if isinstance(self._stock, ChunkedKVCache):  # which has no masks: its model makes them
            return None
        mask: mx.array | str | None = self._stock.make_mask(*args, **kwargs)
        return mask

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams) -> mx.array:
        self.update_and_fetch(keys, values)
        self.heads, self.adapted = params.heads(queries.shape[1]), True
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.geometry is not None:
            raise GeometryError("a cache is updated twice in one pass")
        given = f"keys {keys.shape} and values {values.shape}"
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
            raise GeometryError(f"{given} must be [B, heads, n, dim] of one dtype")
        if 0 in keys.shape + values.shape or not mx.issubdtype(keys.dtype, mx.floating):
            raise GeometryError(f"{given} must be floating-point and not empty")
        self.geometry = Geometry.of(keys, values)
        self._stock.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = self._stock.keys_and_values()
        hand_out(keys, values, _ProbeFetched(self))
        return keys, values


class _ProbeFetched(LazyKV):
    """Notes that the arrays reached the attention function. Refers to the layer weakly: the layer keeps the arrays."""

    def __init__(self, layer: ProbeLayer) -> None:
        self._probe = weakref.ref(layer)

    def can_attend(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        return True

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, params: AttentionParams) -> mx.array:
        probe = self._probe()
        if probe is not None:
            probe.heads = params.heads(queries.shape[1])
        return gather.attention(queries, keys, values, params)


def probing_pass(model: Any, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    """Build a forward pass without computing it, and return its logits. Restores the model's arrays: some models clip a
    weight in each pass and keep the result (Gemma 3n), an array that only this thread could compute."""
    before = [(module, dict(module)) for module in model.modules()]
    try:
        logits: mx.array = model(tokens, cache=caches)
        return logits
    finally:
        for module, values in before:
            for name, value in values.items():
                if isinstance(value, mx.array) and module.get(name) is not value:
                    module[name] = value


def probe_layers(model: Any, caches: Sequence[Any], candidates: Sequence[int]) -> dict[int, ProbeLayer]:
    """Return how the candidate layers use their caches, found by a pass of two tokens; a layer that does not use its
    cache is not in the result.

    Args:
        caches: mlx-lm's own, empty; not usable afterwards.
        candidates: indices of the layers to probe.

    Raises:
        Exception: the model's own error, if it needs more of a cache than a paged one has.
    """
    probes = leaves(caches)
    for layer in candidates:
        probes[layer] = ProbeLayer(probes[layer])
    probing_pass(model, mx.zeros((1, 2), mx.uint32), with_leaves(caches, probes))
    return {layer: probes[layer] for layer in candidates if probes[layer].geometry is not None}


def probe_rows(model: Any, caches: Sequence[Any]) -> str | None:
    """Return why one call cannot decode several rows of different lengths, or None if it can.

    Args:
        caches: mlx-lm's own, empty.
    """
    missing = next((type(cache).__name__ for cache in caches if not hasattr(cache, "merge")), None)
    if missing is not None:
        return f"{missing} cannot be batched"
    try:
        batch = [cache.merge([cache] * PROBE_ROWS) for cache in caches]
        logits = probing_pass(model, mx.zeros((PROBE_ROWS, 1), mx.uint32), batch)
    except Exception as error:
        check_device(error)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if logits.shape[:2] != (PROBE_ROWS, 1):
        return f"logits have shape {logits.shape}, not [{PROBE_ROWS}, 1, vocab]"
    return None


class PagedLayout(NamedTuple):
    """What :func:`layout_for` found out.

    Attributes:
        groups: groups of the layers to page; a layer is an index into the model's list of caches, in which each part of
            a composite cache counts as one.
        geometries: geometry of each group and the query heads that attend over it.
        adapted: all layers are paged, and attention goes through adapters, not through the seam.
        reasons: why other layers keep mlx-lm's own caches, one reason per kind. Layers with states have no reason:
            checkpoints do for them what blocks do elsewhere (budget, shared prefixes, files, batches).
        dtype: dtype of the first layer's weights; after the model's ``set_dtype()`` its caches lie in another pool.
    """

    groups: tuple[LayerGroup, ...]
    geometries: tuple[tuple[Geometry, QueryHeads | None], ...]
    adapted: bool
    reasons: tuple[str, ...]
    dtype: mx.Dtype | None = None

    @property
    def layers(self) -> frozenset[int]:
        """Indices of the paged layers."""
        return frozenset(layer for group in self.groups for layer in group.layers)


# Models whose attention depends on a key's place in the buffer or on the buffer's length, both of which padding
# changes.
PADDING_MATTERS = {
    "mlx_lm.models.afm7": "layers that reuse keys take their position from the length of the longest row",
    "mlx_lm.models.phi3small": "its block-sparse attention counts from the first column, padding included",
    "mlx_lm.models.minimax_m3_vl": "its sparse attention counts from the first column, padding included",
}

_lock = threading.RLock()
# A model's layouts by the kinds of its caches, which max_kv_size changes; the most recently used last.
_layouts: ByModel[dict[tuple[Hashable, ...], PagedLayout]] = ByModel("layouts")


def layout_for(model: Any, stock: Sequence[Any], spare: Sequence[Any]) -> PagedLayout:
    """Return the model's layout. The first call finds it by a forward pass that is built and dropped, and keeps it.

    Args:
        stock: mlx-lm's own caches, with composite ones taken apart.
        spare: a second set, composed as the model expects; not usable afterwards.

    Raises:
        ConfigError: the model is sharded over ranks that cannot share its heads.
    """
    dtype = _dtype_of(model)
    key = (dtype, *[_kind(cache) for cache in stock])
    with _lock:
        layouts = _layouts.get(model)
        if layouts is None:
            layouts = _layouts.put(model, {})
        layout = layouts.pop(key, None) or _new_layout(model, stock, spare)
        layouts[key] = layout = layout._replace(dtype=dtype)
        return layout


def _dtype_of(model: Any) -> mx.Dtype | None:
    weights = tree_flatten(model.layers[0].parameters()) if getattr(model, "layers", None) else []
    return next((weight.dtype for _, weight in weights if mx.issubdtype(weight.dtype, mx.floating)), None)


def why_one_by_one(model: Any, fresh: Sequence[Any]) -> str | None:
    """Return why the rows of a batch must be computed one by one, or None.

    Args:
        fresh: mlx-lm's own caches, one per layer, empty.
    """
    layout = layout_of(model)
    if layout is not None and layout.adapted:
        return None
    module = type(model).__module__
    if module in PADDING_MATTERS:
        return PADDING_MATTERS[module]
    known = module.startswith("mlx_lm.models.")
    seam = layout is not None and all(heads is not None for _, heads in layout.geometries)
    if not known and not (seam and all(can_be_paged(cache) for cache in leaves(fresh))):
        return "it is not one of mlx-lm's models, so how it treats padding is not known"
    return probe_rows(model, fresh)


def reads_blocks_only(model: Any) -> bool:
    """Return whether the model's attention only passes keys and values to an attention function that is replaced here.

    True for models with adapters, for mlx-lm's own models that did so in the probe, and for models with latents if
    every such layer has an adapter.
    """
    layout = layout_of(model)
    if layout is None or not layout.groups:
        return False
    if layout.adapted:
        return True
    by_itself = sum(len(group.layers) for group in layout.groups if group.latent)
    if by_itself and sum(latent_caches_of(module) for _, module in model.named_modules()) != by_itself:
        return False
    return type(model).__module__.startswith("mlx_lm.models.")


def latent_caches_of(module: Any) -> int:
    """Return how many caches a module's latent adapter computes with; 0 without such an adapter."""
    return getattr(type(module).__call__, "latent_caches", 0)


def layout_of(model: Any) -> PagedLayout | None:
    """Return the model's most recently used layout, or None if there is none yet."""
    layouts = _layouts.get(model)
    return None if layouts is None else next(reversed(layouts.values()), None)


def name_of(model: Any) -> str:
    """Return the model's type, for messages."""
    return str(getattr(model, "model_type", type(model).__module__))


def forget_layouts() -> None:
    """Forget all layouts, so that every model is probed again."""
    with _lock:
        _layouts.clear()


def can_be_paged(cache: Any) -> bool:
    """Return whether blocks can replace a stock cache; one with chunks only where an adapter makes the masks."""
    return type(cache) in (KVCache, ChunkedKVCache) or (type(cache) is RotatingKVCache and not cache.keep)


def pinned_in(cache: Any) -> int:
    """Return how many tokens at the start a cache never drops."""
    return int(getattr(cache, "keep", 0))


def window_of(cache: Any) -> Window | None:
    """Return the window of a cache that can be paged, or None if tokens see everything before them."""
    if isinstance(cache, ChunkedKVCache):
        return Window(int(cache.chunk_size), int(cache.chunk_size))
    return Window(int(cache.max_size)) if isinstance(cache, RotatingKVCache) else None


def _kind(cache: Any) -> Hashable:
    return (type(cache), window_of(cache), getattr(cache, "keep", None))


def _new_layout(model: Any, stock: Sequence[Any], spare: Sequence[Any]) -> PagedLayout:
    check_heads(model)
    candidates = [layer for layer, cache in enumerate(stock) if can_be_paged(cache)]
    try:
        probed = probe_layers(model, spare, candidates) if candidates else {}
    except Exception as error:
        check_device(error)
        reasons = _reasons([cache for cache in stock if not can_be_paged(cache)])
        return PagedLayout((), (), False, (*reasons, _why_not(error)))
    # Without an adapter, mlx-lm's own code masks chunks by what it knows of mlx-lm's cache.
    for layer, cache in enumerate(stock):
        if isinstance(cache, ChunkedKVCache) and not (layer in probed and probed[layer].adapted):
            candidates.remove(layer)
            probed.pop(layer, None)
    reasons = _reasons([cache for layer, cache in enumerate(stock) if layer not in candidates])
    if unused := len(candidates) - len(probed):
        reasons = (*reasons, f"{unused} cache(s) that no attention layer writes to")
    by_kind: dict[tuple[Window | None, Geometry, bool], list[int]] = {}
    for layer, found in probed.items():
        assert found.geometry is not None
        by_kind.setdefault((window_of(stock[layer]), found.geometry, found.split_keys), []).append(layer)
    names = ["index keys" if split else _name(window) for window, _, split in by_kind]
    groups, geometries = [], []
    for ((window, geometry, split), layers), name in zip(by_kind.items(), names, strict=True):
        if names.count(name) > 1:
            name += f", {geometry.num_kv_heads} x {geometry.k_head_dim}/{geometry.v_head_dim}"
        latent = any(probed[layer].heads is None for layer in layers)
        size, stride = (None, 1) if window is None else window
        groups.append(LayerGroup(tuple(layers), size, name, stride=stride, latent=latent, split_keys=split))
        geometries.append((geometry, probed[layers[0]].heads))
    adapted = 0 < len(probed) == len(stock) and all(found.adapted for found in probed.values())
    return PagedLayout(tuple(groups), tuple(geometries), adapted, reasons)


def _reasons(unpaged: Sequence[Any]) -> tuple[str, ...]:
    kinds: dict[str, None] = {}
    for cache in unpaged:
        if not isinstance(cache, ArraysCache):
            name = type(cache).__name__
            kinds[name + (" that keeps a sequence's first tokens (max_kv_size)" if pinned_in(cache) else "")] = None
    return tuple(f"cache type {kind}" for kind in kinds)


def _why_not(error: Exception) -> str:
    """Return why a model could not be probed."""
    if isinstance(error, AttributeError):
        return f"attention that uses internals of its cache ({error.name})"
    if isinstance(error, GeometryError):
        return f"caches that hold something other than keys and values ({error})"
    return f"a model whose probe failed ({type(error).__name__}: {error})"


def _name(window: Window | None) -> str:
    if window is None:
        return "global"
    return f"{'chunk' if window.stride > 1 else 'window'} {window.size}"
