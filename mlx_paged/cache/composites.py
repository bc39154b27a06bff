"""Composite caches (mlx-lm's ``CacheList``) and their parts: a part can be paged where the whole cannot.

A composite is recognised by its attribute ``caches``, and made from other parts by its constructor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def is_composite(cache: Any) -> bool:
    """Return whether a cache is made of several, as a CacheList is."""
    return isinstance(getattr(cache, "caches", None), list | tuple)


def leaves(caches: Sequence[Any]) -> list[Any]:
    """Return the caches, composite ones replaced by their parts."""
    found: list[Any] = []
    for cache in caches:
        if is_composite(cache):
            found += leaves(cache.caches)
        else:
            found.append(cache)
    return found


def with_leaves(caches: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Return caches with the structure of these and other leaves."""
    return _compose(caches, iter(parts))


def _compose(caches: Sequence[Any], parts: Iterator[Any]) -> list[Any]:
    return [type(cache)(*_compose(cache.caches, parts)) if is_composite(cache) else next(parts) for cache in caches]
