"""Replacements for mlx-lm's generators of steps, which hold pools' locks (see kv/lock.py)."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, SupportsIndex

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ...cache.composites import leaves
from ...config import KVBits
from ...device import device_errors
from ...engine.prefill import chunk_cap
from ...errors import PromptCacheError, check_device
from ...kernels.availability import on_metal
from ...kv.lock import HeldLocks
from ..cache.layer_cache import PagedLayerCache
from ..cache.pools import pool_of
from ..cache.prompt_cache import factory_of, use_quantized_pages
from ..patch import replaces


@replaces("mlx_lm.generate:generate_step", "640f5f80cac74587")
def adapt(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return the replacement of ``generate_step``, which holds the locks of pools for a token at a time, in whichever
    thread asks for it."""

    @functools.wraps(original)
    def generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
        given = (*args, kwargs.get("model"), kwargs.get("draft_model"))
        models = [model for model in given if hasattr(model, "layers")]
        use_quantized_pages(models, kwargs)
        if on_metal():
            _shorten_steps(original, models[0], args[0] if args else kwargs["prompt"], kwargs)
        steps = original(*args, **kwargs)
        step, begun_by = HeldLocks(), threading.get_ident()
        try:
            while True:
                with device_errors(), step:
                    try:
                        token = next(steps)
                    except StopIteration:
                        return
                yield token
        finally:
            # mlx-lm's generator is inside an MLX stream context, which raises RuntimeError if another thread leaves it.
            # Everything else in close() has been done by then.
            with suppress(RuntimeError) if threading.get_ident() != begun_by else nullcontext():
                steps.close()  # type: ignore[attr-defined]
            if not sys.is_finalizing() and threading.get_ident() != threading.main_thread().ident:
                # MLX ends the process if the thread ends while a step is still being computed.
                try:
                    mx.synchronize(args[2] if len(args) > 2 else kwargs.get("stream", generation_stream))
                except Exception as error:  # this thread has no such stream, so nothing to wait for
                    check_device(error)

    return generate_step


def _shorten_steps(original: Callable[..., Any], model: Any, prompt: Any, options: dict[str, Any]) -> None:
    """Shorten the steps of a prompt whose last one would take too long on Metal (:class:`.scheduler.ChunkCap`).
    ``options``: keyword arguments of ``original``; changed in place."""
    cap = chunk_cap(pool_of(model))
    if cap is None:
        return
    cached = [cache.offset for cache in leaves(options.get("prompt_cache") or ()) if isinstance(cache, PagedLayerCache)]
    most = options.get("prefill_step_size", inspect.signature(original).parameters["prefill_step_size"].default)
    total = max(1, max(cached, default=0) + len(prompt))
    options["prefill_step_size"] = cap.most_tokens(total - most, most)


class TwoCaches(list[Any]):
    """A list of the caches of a model and its draft model. mlx-lm slices it at the model's number of layers, but a
    model whose layers share keys has fewer caches; those slices of this list are taken where the model's caches end.

    Args:
        caches: caches of both models.
        num_layers: index at which mlx-lm slices.
        num_caches: number of the first model's caches.
    """

    def __init__(self, caches: Sequence[Any], num_layers: int, num_caches: int) -> None:
        super().__init__(caches)
        self._parts = {
            (None, num_layers): slice(None, num_caches),
            (num_layers, None): slice(num_caches, None),
        }

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            index = self._parts.get((index.start, index.stop), index)
        return super().__getitem__(index)


def _is_chunked(cache: Any) -> bool:
    return isinstance(cache, PagedLayerCache) and cache.sees is not None and cache.sees.stride > 1


@replaces("mlx_lm.generate:speculative_generate_step", "c508203c7dac4b66")
def adapt_speculative(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return the replacement of ``speculative_generate_step``, which splits a prompt cache of two models where the
    first one's caches end."""
    original = adapt(original)

    def speculative_generate_step(
        prompt: Any, model: Any, draft_model: Any, *arguments: Any, prompt_cache: Any = None, **options: Any
    ) -> Iterator[Any]:
        asked = KVBits.of(options)
        change = None if asked is None else asked.configured
        options["prompt_cache"] = prompt_cache
        use_quantized_pages([model, draft_model], options)
        prompt_cache = options.pop("prompt_cache")
        if prompt_cache is None and any(map(_is_chunked, drafted := factory_of(draft_model, None, change)())):
            prompt_cache = [*factory_of(model, None, change)(), *drafted]
        if prompt_cache is not None:
            num_layers, num_caches = len(model.layers), len(factory_of(model, None, change)())
            if num_caches != num_layers:
                expected = num_caches + len(factory_of(draft_model, None, change)())
                if len(prompt_cache) != expected:
                    raise PromptCacheError(
                        f"the prompt cache has {len(prompt_cache)} parts, the model and its draft model have {expected}"
                    )
            # Drafts may cross the end of a chunk and then be trimmed back into it, but paged blocks of that chunk are
            # released already. mlx-lm's own cache trims without an error although it has lost tokens by then, which
            # drafts can bear: the model verifies them.
            drafted = prompt_cache[num_caches:]
            if any(map(_is_chunked, drafted)):  # the layers of a sequence are all in the pool or none
                prompt_cache[num_caches:] = [c.to_stock() if isinstance(c, PagedLayerCache) else c for c in drafted]
            if num_caches != num_layers:
                prompt_cache = TwoCaches(prompt_cache, num_layers, num_caches)
        return original(prompt, model, draft_model, *arguments, prompt_cache=prompt_cache, **options)

    speculative_generate_step.__doc__ = original.__doc__
    return speculative_generate_step
