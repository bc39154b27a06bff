"""What wraps calls of a model over a pool: they take turns at it (see kv/turn.py), and decode steps run compiled."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from ...cache.batch_cache import PagedBatchKVCache
from ...cache.composites import leaves
from ...cache.packed_cache import PackedKVCache
from ...cache.paged_kv_cache import PagedKVCache
from ...kernels.products.inference import Inference
from ...kv.pool import BlockPool
from ..models import compiled

_guarded: weakref.WeakSet[type] = weakref.WeakSet()
_lock = threading.Lock()
_PAGED = PagedKVCache | PagedBatchKVCache | PackedKVCache


def guard(model: Any) -> None:
    """Make each call of the model over a pool one turn. Otherwise each layer's part of it is one, which is as right,
    but has MLX compute every layer by itself. Decode steps of mlx-lm's own models run compiled where they can."""
    kind = type(model)
    if kind in _guarded:
        return
    with _lock:
        original = kind.__dict__.get("__call__")
        inherited = kind.__call__
        if hasattr(inherited, "guarded"):
            return
        call = compiled.adapt(inherited) if compiled.is_upstreams(inherited) else inherited

        @functools.wraps(inherited)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            pool = _pool_of(kwargs.get("cache") or next((arg for arg in args if isinstance(arg, list)), None))
            if pool is None:
                return call(self, *args, **kwargs)
            # Before the first write, too: what MLX would compile for the first prompt takes seconds.
            is_functional = any(group.geometry is not None and not group.in_place for group in pool.groups)
            with pool.turn, Inference(allowed=not is_functional):
                return call(self, *args, **kwargs)

        __call__.guarded = original  # type: ignore[attr-defined]
        setattr(kind, "__call__", __call__)  # noqa: B010
        _guarded.add(kind)


def unguard() -> None:
    """Put the calls of all models back."""
    with _lock:
        for kind in list(_guarded):
            original = kind.__dict__["__call__"].guarded
            if original is None:
                del kind.__call__
            else:
                setattr(kind, "__call__", original)  # noqa: B010
        _guarded.clear()


def _pool_of(caches: Any) -> BlockPool | None:
    if not isinstance(caches, list):
        return None
    first = caches[0] if caches else None
    if isinstance(first, _PAGED):
        return first.pool
    return next((cache.pool for cache in leaves(caches) if isinstance(cache, _PAGED)), None)
