"""PagedLayout: which layers of a model are paged, and in which groups."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

from ...by_model import ByModel
from ...cache.composites import leaves
from ...errors import GeometryError
from ...kv.group import LayerGroup
from ...kv.storage.base import Geometry
from ...kv.storage.scoring import QueryHeads, Window
from ..models.latent import attends_latents
from .probe import probe_layers, probe_rows


class PagedLayout(NamedTuple):
    """What :func:`layout_for` found out.

    Attributes:
        groups: of the layers to page; a layer is an index into the model's list of caches,
            in which the parts of composite ones count by themselves.
        geometries: of each group, with the queries that attend over it; empty where an adapter will tell.
        adapted: attention goes through adapters, not through the seam.
        reasons: why other layers keep mlx-lm's own caches, one per kind.
    """

    groups: tuple[LayerGroup, ...]
    geometries: tuple[tuple[Geometry, QueryHeads | None], ...]
    adapted: bool
    reasons: tuple[str, ...]

    @property
    def layers(self) -> frozenset[int]:
        """The layers that are paged."""
        return frozenset(layer for group in self.groups for layer in group.layers)


# Models whose attention depends on where in the buffer a key is, or how long it is, which padding changes; unless an
# adapter has taken that away.
PADDING_MATTERS = {
    "mlx_lm.models.afm7": "layers that reuse keys take their position from the length of the longest row",
    "mlx_lm.models.phi3small": "its block-sparse attention counts from the first column, padding included",
    "mlx_lm.models.minimax_m3_vl": "its sparse attention counts from the first column, padding included",
}

_lock = threading.RLock()
# A model's layouts by the kinds of its caches (max_kv_size), the latest one last.
_layouts: ByModel[dict[tuple[Hashable, ...], PagedLayout]] = ByModel()
MAX_LAYOUTS = 8


def layout_for(model: Any, stock: Sequence[Any], spare: Sequence[Any], adapted: bool) -> PagedLayout:
    """The model's layout; made at the first call, by a forward pass that is built and dropped, and kept.

    Args:
        stock: mlx-lm's own caches, one per layer, and the parts of composite ones by themselves.
        spare: as many again, composed as the model expects them, to be used up.
        adapted: every layer has an attention adapter.
    """
    key = (adapted, *[_kind(cache) for cache in stock])
    with _lock:
        layouts = _layouts.get(model)
        if layouts is None:
            layouts = _layouts.put(model, {})
        layout = layouts.pop(key, None) or (_adapter_layout(stock) if adapted else _seam_layout(model, stock, spare))
        layouts[key] = layout
        while len(layouts) > MAX_LAYOUTS:
            del layouts[next(iter(layouts))]
        return layout


def why_one_by_one(model: Any, fresh: Sequence[Any]) -> str | None:
    """Why the rows of a batch must be computed one after the other, or None.

    Args:
        fresh: one of mlx-lm's own caches per layer, empty.
    """
    layout = layout_of(model)
    if layout is not None and layout.adapted:
        return None
    module = type(model).__module__
    if module in PADDING_MATTERS and not takes_rows(model):
        return PADDING_MATTERS[module]
    known = module.startswith("mlx_lm.models.")
    seam = layout is not None and all(heads is not None for _, heads in layout.geometries)
    if not known and not (seam and all(_seam_can_page(cache) for cache in leaves(fresh))):
        return "what a model from elsewhere does with padding is not known"
    return probe_rows(model, fresh)


def takes_rows(model: Any) -> bool:
    """Whether an adapter of the model's body computes rows of different lengths, whatever upstream's code does."""
    return bool(getattr(type(getattr(model, "model", None)).__call__, "takes_rows", False))


def reads_blocks_only(model: Any) -> bool:
    """Whether the model's attention does nothing with keys and values but hand them to an attention function that is
    replaced here: of a model with adapters, or one of mlx-lm's that was seen to do so in a probe. Or it computes with
    latents, and every layer that does so has an adapter."""
    layout = layout_of(model)
    if layout is None or not layout.groups:
        return False
    if layout.adapted:
        return True
    by_itself = sum(len(group.layers) for group in layout.groups if group.latent)
    if by_itself and sum(attends_latents(module) for _, module in model.named_modules()) != by_itself:
        return False
    return type(model).__module__.startswith("mlx_lm.models.")


def layout_of(model: Any) -> PagedLayout | None:
    """The layout made for the model last, or None if there is none yet."""
    layouts = _layouts.get(model)
    return None if layouts is None else next(reversed(layouts.values()), None)


def name_of(model: Any) -> str:
    """The model's type, for messages."""
    return str(getattr(model, "model_type", type(model).__module__))


def forget_layouts() -> None:
    """Look at every model anew."""
    with _lock:
        _layouts.clear()


def can_be_paged(cache: Any) -> bool:
    """Whether a stock cache is one that blocks can stand in for; with chunks, only where an adapter makes the masks."""
    # A cache with no room beyond what it keeps drops new tokens in mlx-lm.
    if type(cache) is RotatingKVCache:
        return bool(0 <= cache.keep < cache.max_size)
    return type(cache) in (KVCache, ChunkedKVCache)


def pinned_in(cache: Any) -> int:
    """Tokens at the start that a cache never drops."""
    return int(getattr(cache, "keep", 0))


def window_of(cache: Any) -> Window | None:
    """What a token sees in a cache that can be paged."""
    if isinstance(cache, ChunkedKVCache):
        return Window(int(cache.chunk_size), int(cache.chunk_size))
    return Window(int(cache.max_size)) if isinstance(cache, RotatingKVCache) else None


def _kind(cache: Any) -> Hashable:
    return (type(cache), window_of(cache), getattr(cache, "keep", None))


def _adapter_layout(stock: Sequence[Any]) -> PagedLayout:
    by_window: dict[tuple[Window | None, int], list[int]] = {}
    for layer, cache in enumerate(stock):
        by_window.setdefault((window_of(cache), pinned_in(cache)), []).append(layer)
    groups = tuple(_group(layers, w, _name(w, pinned), pinned) for (w, pinned), layers in by_window.items())
    return PagedLayout(groups, (), True, ())


def _group(
    layers: Sequence[int], window: Window | None, name: str, pinned: int = 0, latent: bool = False
) -> LayerGroup:
    size, stride = (None, 1) if window is None else window
    return LayerGroup(tuple(layers), size, name, pinned, latent, stride)


def _seam_layout(model: Any, stock: Sequence[Any], spare: Sequence[Any]) -> PagedLayout:
    reasons = _reasons(stock)
    candidates = [layer for layer, cache in enumerate(stock) if _seam_can_page(cache)]
    if not candidates:
        return PagedLayout((), (), False, reasons)
    try:
        probed = probe_layers(model, spare, candidates)
    except Exception as error:
        return PagedLayout((), (), False, (*reasons, _why_not(error)))
    unused = [layer for layer in candidates if layer not in probed]
    if unused:
        reasons = (*reasons, f"{len(unused)} cache(s) that no attention writes to")
    by_kind: dict[tuple[Window | None, int, Geometry], list[int]] = {}
    for layer, found in probed.items():
        by_kind.setdefault((window_of(stock[layer]), pinned_in(stock[layer]), found.geometry), []).append(layer)
    names = [_name(window, pinned) for window, pinned, _ in by_kind]
    groups, geometries = [], []
    for ((window, pinned, geometry), layers), name in zip(by_kind.items(), names, strict=True):
        if names.count(name) > 1:
            name += f", {geometry.num_kv_heads} x {geometry.k_head_dim}/{geometry.v_head_dim}"
        latent = any(probed[layer].heads is None for layer in layers)
        groups.append(_group(layers, window, name, pinned, latent))
        geometries.append((geometry, probed[layers[0]].heads))
    return PagedLayout(tuple(groups), tuple(geometries), False, reasons)


def _reasons(stock: Sequence[Any]) -> tuple[str, ...]:
    kinds: dict[str, None] = {}
    for cache in stock:
        if not _seam_can_page(cache):
            name = type(cache).__name__
            kinds[name + (" with no room beyond the tokens it keeps (max_kv_size)" if pinned_in(cache) else "")] = None
    return tuple(f"cache type {kind}" for kind in kinds)


def _why_not(error: Exception) -> str:
    """Why a model could not be probed."""
    if isinstance(error, AttributeError):
        return f"attention that reaches into its cache ({error.name})"
    if isinstance(error, GeometryError):
        return f"caches that hold something else than keys and values ({error})"
    return f"a model that cannot be tried ({type(error).__name__}: {error})"


def _seam_can_page(cache: Any) -> bool:
    """Without an adapter: chunks are masked by what a model's own code knows of mlx-lm's cache."""
    return can_be_paged(cache) and type(cache) is not ChunkedKVCache


def _name(window: Window | None, pinned: int) -> str:
    if window is None:
        return "global"
    if window.stride > 1:
        return f"chunk {window.size}"
    return f"window {window.size}" + (f" with {pinned} pinned" if pinned else "")
