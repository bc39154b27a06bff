"""mlx-lm's options of a quantised KV cache, and what they mean for pages, which are quantised as they are written."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ...cache.composites import leaves, with_leaves
from ...config import KVBits
from ...errors import ConfigError, PromptCacheError
from .layer_cache import PagedLayerCache
from .prompt_cache import factory_of, is_patched


def settle(models: Sequence[Any], options: dict[str, Any]) -> None:
    """Give a call with ``kv_bits`` a prompt cache of such pages, in place of the options' own.

    Args:
        models: that the prompt cache is of, one after the other.
        options: keyword arguments of mlx-lm's ``generate_step``, which are changed. Layers that are not paged are left
            to mlx-lm, as without pages.

    Raises:
        PromptCacheError: the prompt cache handed in is quantised otherwise.
        ConfigError: it is not paged, and mlx-lm knows no such number of bits.
    """
    asked = KVBits.of(options)
    if asked is None or not is_patched():
        return
    given = options.get("prompt_cache")
    if given is None:
        make = functools.partial(factory_of, max_kv_size=options.get("max_kv_size"), change=asked.configured)
        options["prompt_cache"] = [cache for model in models for cache in make(model)()]
    else:
        _convert(models, given, asked)
    if isinstance(asked.bits, tuple):
        if not any(isinstance(cache, PagedLayerCache) for cache in leaves(options["prompt_cache"])):
            raise ConfigError(f"kv_bits={asked.bits} is for pages, and this prompt cache is mlx-lm's own")
        options["kv_bits"] = None  # which mlx-lm's own layers know nothing of


def _convert(models: Sequence[Any], given: list[Any], asked: KVBits) -> None:
    """Quantise a prompt cache that was handed in, in place, as mlx-lm does."""
    parts = leaves(given)
    paged = [cache for cache in parts if isinstance(cache, PagedLayerCache)]
    present = {cache.pool.page_format for cache in paged}
    if {held and held._replace(rotate=False) for held in present} <= {asked.format}:  # a call says nothing of that
        return
    if present != {None}:
        held = " and ".join(str(each) for each in present)
        wanted = f"{asked.bits} bits in groups of {asked.group_size}"
        raise PromptCacheError(f"the prompt cache holds {held}; {asked.why_not or f'{wanted} were asked for'}")
    bounded = next((cache.window for cache in paged if cache.pinned), None)
    fresh = leaves([cache for model in models for cache in factory_of(model, bounded, asked.configured)()])
    if len(fresh) != len(parts):
        raise PromptCacheError(f"the prompt cache has {len(parts)} parts, the model's {len(fresh)}")
    for place, (old, new) in enumerate(zip(parts, fresh, strict=True)):
        if isinstance(new, PagedLayerCache):
            new.state = old.state
            parts[place] = new
    given[:] = with_leaves(given, parts)
