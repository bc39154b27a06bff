"""Composite caches (mlx-lm's CacheList) and their parts: a part can be paged where the whole cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches, composite ones replaced by their parts."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def with_leaves(caches: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Caches composed as these are, of other parts."""
    return _compose(caches, iter(parts))


def _compose(caches: Sequence[Any], parts: Iterator[Any]) -> list[Any]:
    return [
        CacheList(*_compose(cache.caches, parts)) if isinstance(cache, CacheList) else next(parts) for cache in caches
    ]
